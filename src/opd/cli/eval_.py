"""`opd eval`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

if TYPE_CHECKING:
    from opd.config.schema import Recipe
    from opd.eval.result import EvalResult, Score


def evaluate(
    recipe: Annotated[Path | None, typer.Argument(help="A YAML recipe with an eval section.")] = None,
    overrides: Annotated[list[str] | None, typer.Argument(help="key.sub=value, applied last.")] = None,
    adapter: Annotated[Path | None, typer.Option(help="Folder of an adapter to put on the student.")] = None,
    view: Annotated[
        Literal["student", "teacher"], typer.Option(help="Whose prompt is shown; the teacher's score is the ceiling.")
    ] = "student",
    out: Annotated[Path | None, typer.Option(help="Folder for samples and result.")] = None,
    picked_by: Annotated[
        str | None, typer.Option(help="The benchmark by which this checkpoint was picked among several.")
    ] = None,
    regrade: Annotated[Path | None, typer.Option(help="Only grade this folder's samples again; no recipe.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, to stay off an available GPU.")] = None,
) -> None:
    """Measure a model on held-out problems: average, intervals, pass@k, format and truncation rates."""
    if regrade is not None:
        if recipe is not None or adapter is not None or out is not None or picked_by is not None:
            raise typer.BadParameter("--regrade takes a folder and nothing else")
        from opd.eval.score import regrade as run_regrade

        _print(run_regrade(regrade), regrade)
        return
    if recipe is None:
        raise typer.BadParameter("give a recipe, or a folder with --regrade")

    from opd.config.check import check
    from opd.config.load import load_recipe

    settings = load_recipe(recipe, overrides or ()).recipe
    check(settings)
    folder = out or _default_folder(settings, view, adapter)
    _print(_run(settings, folder, view=view, adapter=adapter, picked_by=picked_by, device=device), folder)


def _run(
    recipe: Recipe,
    folder: Path,
    *,
    view: Literal["student", "teacher"],
    adapter: Path | None,
    picked_by: str | None,
    device: str | None,
) -> EvalResult:
    from opd.config.schema import ModelConfig, ModelTeacherConfig
    from opd.errors import OpdError

    if recipe.eval is None:
        raise OpdError(
            f"the recipe {recipe.name} has nothing to evaluate",
            why="it has no `eval:` section",
            fix="add one, e.g. eval.data.name=task eval.data.task=products eval.data.split=heldout",
        )
    from opd.eval.runner import evaluate as run

    # The ceiling is the score of whoever teaches: the student itself, or the teacher's own model.
    source = recipe.teacher if view == "teacher" and isinstance(recipe.teacher, ModelTeacherConfig) else recipe.student
    return run(
        ModelConfig(**{name: getattr(source, name) for name in ModelConfig.model_fields}),
        recipe.eval,
        folder=folder,
        adapter=adapter,
        view=view,
        prompt=recipe.prompt,
        context=recipe.context,
        demonstrations=recipe.data.train,
        prompt_seed=recipe.seed,
        picked_by=picked_by,
        device=device,
    )


def _default_folder(recipe: Recipe, view: str, adapter: Path | None) -> Path:
    weights = "base" if adapter is None else adapter.resolve().name
    return (recipe.folder or Path("runs") / recipe.name) / "eval" / f"{view}-{weights}"


def _print(result: EvalResult, folder: Path) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(
        title=f"{result.benchmark}: {result.num_problems} problems x {result.num_samples} samples, "
        f"{result.checkpoint_kind} {result.checkpoint_path}, {result.frozen_settings['view']}'s prompt",
        title_justify="left",
    )
    for name in ("", "%", "95% interval", "± new samples", "± new problems"):
        table.add_column(name, justify="left" if not name else "right")
    _add_score(table, f"right, in the box ({result.metric})", result.score)
    _add_score(table, "answer in the text", result.contains)
    for k, value in result.score.pass_at_pct.items():
        if k > 1:
            table.add_row(f"pass@{k}", f"{value:.1f}")
    if result.num_samples > 1:
        table.add_row(f"maj@{result.num_samples}", f"{result.maj_at_n_pct:.1f}")
    table.add_row("has a boxed answer", f"{result.format_rate_pct:.1f}")
    table.add_row("boxed, but unreadable", f"{result.unparsed_rate_pct:.1f}")
    table.add_row("cut off at the limit", f"{result.truncation_rate_pct:.1f}")
    table.add_row(f"always answering {result.majority_answer!r}", f"{result.majority_answer_pct:.1f}")
    console = Console()
    console.print(table)
    for reason, count in result.num_dropped.items():
        console.print(f"{count} problems dropped: {reason}", markup=False)
    console.print(f"{result.mean_tokens:.0f} tokens a sample; samples and result are in {folder}", markup=False)


def _add_score(table: object, name: str, score: Score) -> None:
    from rich.table import Table

    assert isinstance(table, Table)
    interval = "-" if score.low_pct is None else f"{score.low_pct:.1f} to {score.high_pct:.1f}"
    errors = ("-" if se is None else f"{se:.1f}" for se in (score.sampling_se_pct, score.problem_se_pct))
    table.add_row(name, f"{score.average_pct:.1f}", interval, *errors)
