"""`opd.train`: from a recipe to a finished run."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from opd.config.check import dry_run_summary
from opd.config.load import LoadedRecipe, load_recipe
from opd.errors import OpdError
from opd.training.assemble import assemble
from opd.training.distributed import Ranks
from opd.training.loop import RunResult, fit


def train(
    recipe: str | Path | Mapping[str, Any],
    overrides: Sequence[str] = (),
    *,
    resume: bool = False,
    skip_doctor: bool = False,
    device: str | None = None,
    command: str | None = None,
) -> RunResult:
    """Train a student by on-policy distillation.

    Args:
        recipe: path of a YAML recipe, or the same as a mapping.
        overrides: `key.sub=value`, applied last.
        resume: go on from the newest whole checkpoint of the run's folder.
        skip_doctor: leave out the checks that run before the first step.
        device: "cpu" to stay off an available GPU; default: what accelerate picks.
        command: how to repeat this run, for the model card; default: this process's command line.

    Returns:
        RunResult with folder, metrics of the last step, the final adapter's folder and the resolved recipe.

    Raises:
        OpdError: for everything a recipe, its data or its models can get wrong, before training where possible.
    """
    loaded = load_recipe(recipe, overrides)
    folder, ranks = begin(loaded, resume=resume, device=device)
    parts = assemble(loaded.recipe, ranks.device)
    if not skip_doctor:
        from opd.diagnose.doctor import examine, refuse_if_failed

        refuse_if_failed(examine(parts, folder=folder if ranks.is_main else None))
    return fit(parts, loaded, folder, ranks, resume=resume, command=command)


def begin(loaded: LoadedRecipe, *, resume: bool, device: str | None) -> tuple[Path, Ranks]:
    """Check the recipe, say what will run (the formula, both temperatures, warnings), and open folder and devices."""
    summary = dry_run_summary(loaded)  # checks the recipe, before the folder is made
    folder = run_folder(loaded, resume=resume)
    if loaded.recipe.train.num_threads is not None:
        torch.set_num_threads(loaded.recipe.train.num_threads)
    ranks = Ranks(loaded.recipe.log, folder, device=device)
    num_completions = loaded.recipe.train.num_problems_per_step * loaded.recipe.rollout.num_samples
    if num_completions < ranks.num_ranks:
        raise OpdError(
            f"{ranks.num_ranks} processes share {num_completions} completions a step.",
            why="A process without a completion has no gradient to exchange, and the others would wait for it.",
            fix=f"Raise train.num_problems_per_step to {ranks.num_ranks} or more, or start fewer processes.",
        )
    if ranks.is_main:
        Console().print(summary, soft_wrap=True)
    return folder, ranks


def run_folder(loaded: LoadedRecipe, *, resume: bool) -> Path:
    """The run's folder, made if missing. A folder that already holds a run is only entered to resume it."""
    folder = loaded.recipe.folder or Path("runs") / loaded.recipe.name
    if not resume and (folder / "steps.jsonl").exists():
        raise OpdError(
            f"{folder} already holds a run.",
            why="Training into it would mix two runs.",
            fix=f"Choose another folder (folder=runs/{loaded.recipe.name}-2), or go on with --resume.",
        )
    why = "It may not be written to."
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        why = str(error)
    if not (folder.is_dir() and os.access(folder, os.W_OK)):
        raise OpdError(
            f"The run's folder {folder} cannot be used.",
            why=why,
            fix="Choose another one: folder=PATH on this command.",
        )
    return folder
