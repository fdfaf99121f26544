"""`opd demo`: the main job, end to end, on a real model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def demo(
    full: Annotated[
        bool, typer.Option("--full", help="Also the teacher's own score and the placebo teachers.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Seed of the run; the README shows three.")] = 0,
    recipe: Annotated[Path, typer.Option(help="A recipe with an eval section.")] = Path("recipes/demo.yaml"),
    folder: Annotated[Path | None, typer.Option(help="Default: runs/demo, or runs/demo-seed-N.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, to stay off an available GPU.")] = None,
) -> None:
    """Doctor, score, train, score again: watch a real model learn from itself, and read the verdict."""
    from opd.bench.experiment import experiment

    place = folder or Path("runs/demo" if seed == 0 else f"runs/demo-seed-{seed}")
    moved = _set_aside(place)
    if moved is not None:
        print(f"{place} held an earlier run; it is now {moved}.")
    command = " ".join(["opd demo", *(["--full"] if full else []), f"--seed {seed}", f"--recipe {recipe}"])
    verdict = experiment(recipe, (f"seed={seed}", f"folder={place}"), full=full, device=device, command=command)
    print_table(verdict)
    print(f"report:  {place / 'report.html'}\nadapter: {place / 'final'}\njson:    {place / 'verdict.json'}")
    print(verdict.line())


def print_table(verdict: object) -> None:
    """Both scores, before and after, with the controls where they were run."""
    from rich.console import Console
    from rich.table import Table

    from opd.bench.experiment import Change, Verdict

    assert isinstance(verdict, Verdict)
    table = Table(
        title=f"held out: {verdict.num_problems} problems x {verdict.num_samples} samples", title_justify="left"
    )
    for name in ("", "right in the box", "95% interval", "answer anywhere", "95% interval"):
        table.add_column(name, justify="right" if name else "left")

    def row(name: str, correct: Change, contains: Change) -> None:
        cells = [(f"{c.before:.1f}% -> {c.after:.1f}%", f"{c.low:+.1f} to {c.high:+.1f}") for c in (correct, contains)]
        table.add_row(name, *cells[0], *cells[1])

    row("student, this teacher", verdict.correct, verdict.contains)
    for name, changes in verdict.controls.items():
        row(f"control: {name}", changes["correct"], changes["contains"])
    for name, scores in verdict.untrained_pct.items():
        table.add_row(f"untrained, {name} prompt", f"{scores['correct']:.1f}%", "", f"{scores['contains']:.1f}%", "")
    table.add_row("always the commonest answer", f"{verdict.majority_answer_pct:.1f}%", "", "", "")
    Console().print(table)


def _set_aside(folder: Path) -> Path | None:
    """An earlier run keeps its files under a numbered name; the demo never deletes."""
    if not folder.exists():
        return None
    number = 1
    while (moved := folder.with_name(f"{folder.name}.{number}")).exists():
        number += 1
    return folder.rename(moved)
