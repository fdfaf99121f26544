"""`opd demo`: the main job, end to end, on a real model."""

from __future__ import annotations

from collections.abc import Mapping
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
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    from opd.bench.experiment import Change, Verdict

    assert isinstance(verdict, Verdict)
    title = f"held out: {verdict.num_problems} problems x {verdict.num_samples} samples"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    for name in ("", "in box", "gain (95%)", "anywhere", "gain (95%)"):
        table.add_column(name, justify="right" if name else "left", no_wrap=True)

    def changed(name: str, changes: Mapping[str, Change]) -> None:
        cells = [
            (f"{c.after:.1f}%", f"{c.low:+.1f} to {c.high:+.1f}") for c in (changes["correct"], changes["contains"])
        ]
        table.add_row(name, *cells[0], *cells[1])

    def scored(name: str, correct: float, contains: float | None = None) -> None:
        table.add_row(name, f"{correct:.1f}%", "", "" if contains is None else f"{contains:.1f}%", "")

    scored("student before", verdict.correct.before, verdict.contains.before)
    changed("student after", {"correct": verdict.correct, "contains": verdict.contains})
    for name, changes in verdict.controls.items():
        changed(f"  {name}", changes)
    for name, scores in verdict.untrained_pct.items():
        scored(f"untrained {name}", scores["correct"], scores["contains"])
    scored("one answer to all", verdict.majority_answer_pct)
    Console().print(table)


def _set_aside(folder: Path) -> Path | None:
    """An earlier run keeps its files under a numbered name; the demo never deletes."""
    if not folder.exists():
        return None
    number = 1
    while (moved := folder.with_name(f"{folder.name}.{number}")).exists():
        number += 1
    return folder.rename(moved)
