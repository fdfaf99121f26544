"""`opd compare`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

if TYPE_CHECKING:
    from opd.eval.result import EvalResult
    from opd.eval.verdict import ComparedResults


def compare(
    a: Annotated[Path, typer.Argument(metavar="A", help="result.json of the baseline, or its folder.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="result.json that should be better, or its folder.")],
    metric: Annotated[
        Literal["correct", "contains"], typer.Option(help="Right in the box, or the answer anywhere in the text.")
    ] = "correct",
    allow_different_settings: Annotated[
        bool, typer.Option("--allow-different-settings", help="Compare although prompt, sampling or grading differ.")
    ] = False,
    json_output: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Is B better than A? Paired by problem, with interval, p-value and the smallest detectable difference."""
    from opd.eval.result import load_result
    from opd.eval.verdict import compare_results

    results = load_result(a), load_result(b)
    compared = compare_results(*results, metric=metric, allow_different_settings=allow_different_settings)
    if json_output:
        import json

        print(json.dumps(compared.to_json(), ensure_ascii=False, allow_nan=False))
        return
    _print(compared, *results)


def _print(compared: ComparedResults, a: EvalResult, b: EvalResult) -> None:
    from rich.console import Console
    from rich.table import Table

    from opd.eval.verdict import METRIC_NAMES

    numbers = compared.comparison
    table = Table(title=METRIC_NAMES[compared.metric], title_justify="left", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_column()
    clusters = "" if numbers.num_clusters == numbers.num_problems else f", {numbers.num_clusters} independent"
    table.add_row("problems in common", f"{numbers.num_problems}", f"x {_samples(compared)} samples{clusters}")
    table.add_row("A", _percent(numbers.avg_a), a.checkpoint_path)
    table.add_row("B", _percent(numbers.avg_b), b.checkpoint_path)
    table.add_row("B - A", _percent(numbers.difference, "+.1f"), "points")
    table.add_row("standard error", _percent(numbers.se), "paired, by problem")
    table.add_row("95% interval", f"{_percent(numbers.low, '+.1f')} to {_percent(numbers.high, '+.1f')}")
    table.add_row("p", f"{numbers.p_value:.3g}", "sign flips, all counted" if numbers.p_exact else "10,000 sign flips")
    table.add_row("smallest detectable", _percent(numbers.minimum_detectable), "at 80% power")
    console = Console()
    console.print(table)
    for warning in compared.warnings:
        console.print(f"warning: {warning}", style="yellow", markup=False)
    console.print(compared.verdict, markup=False, highlight=False)


def _samples(compared: ComparedResults) -> str:
    numbers = compared.comparison
    same = numbers.num_samples_a == numbers.num_samples_b
    return f"{numbers.num_samples_a}" if same else f"{numbers.num_samples_a} (A) and {numbers.num_samples_b} (B)"


def _percent(share: float, form: str = ".1f") -> str:
    return "-" if share != share else format(100 * share, form)
