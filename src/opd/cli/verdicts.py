"""`opd verdicts`: finished experiments side by side, as a Markdown table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from opd.errors import OpdError


def verdicts(runs: Annotated[list[Path], typer.Argument(help="Folders that hold a verdict.json.")]) -> None:
    """Print the verdicts of several runs (seeds, recipes) with their controls."""
    found = [(run, _read(run)) for run in runs]
    print("| run | seed | in the box: before → after | points, 95% interval | anywhere in the text | training |")
    print("|---|---|---|---|---|---|")
    for run, verdict in found:
        _row(run.name, verdict["seed"], verdict, verdict["contains"], f"{verdict['train_seconds']:.0f} s")
        for name, control in verdict["controls"].items():
            _row(f"control: {name}", verdict["seed"], control["correct"], control["contains"], "")
        for name, scores in verdict["untrained_pct"].items():
            print(f"| untrained, {name} prompt | | {scores['correct']:.1f}% | | {scores['contains']:.1f}% | |")
    majority = found[0][1]["majority_answer_pct"]
    print(f"| always the commonest answer | | {majority:.1f}% | | | |")


def _row(name: str, seed: int, correct: dict[str, Any], contains: dict[str, Any], seconds: str) -> None:
    print(
        f"| {name} | {seed} | {correct['before']:.1f}% → {correct['after']:.1f}% "
        f"| {correct['difference']:+.1f} ({correct['low']:+.1f} to {correct['high']:+.1f}) "
        f"| {contains['before']:.1f}% → {contains['after']:.1f}% | {seconds} |"
    )


def _read(run: Path) -> dict[str, Any]:
    path = run / "verdict.json"
    try:
        return json.loads(path.read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise OpdError(
            f"{run} holds no verdict.", why=f"{path}: {error}", fix="Run `opd demo` first; it writes verdict.json."
        ) from error
