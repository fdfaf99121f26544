"""`opd train`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def train(
    recipe: Annotated[Path, typer.Argument(help="A YAML recipe.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key.sub=value, applied last.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest whole checkpoint.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check the recipe, print the plan, load nothing.")] = False,
    skip_doctor: Annotated[bool, typer.Option("--skip-doctor", help="Leave out the checks before training.")] = False,
    device: Annotated[str | None, typer.Option(help="cpu, to stay off an available GPU.")] = None,
) -> None:
    """Train a student by on-policy distillation."""
    if dry_run:
        from rich.console import Console

        from opd.config.check import dry_run_summary
        from opd.config.load import load_recipe

        Console().print(dry_run_summary(load_recipe(recipe, overrides or ())), soft_wrap=True)
        return
    from opd.training.run import train as run

    result = run(recipe, overrides or (), resume=resume, skip_doctor=skip_doctor, device=device)
    if result.interrupted:
        raise typer.Exit(130)
    if result.final is not None:  # of several processes one alone writes, and talks
        print(f"Trained for {result.metrics['num_steps']} steps in {result.metrics['train_s']:.0f} s: {result.final}")
