"""`opd doctor`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def doctor(
    recipe: Annotated[Path, typer.Argument(help="A YAML recipe.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key.sub=value, applied last.")] = None,
    num_samples: Annotated[int, typer.Option(min=2, max=64, help="Prompts to sample from.")] = 4,
    out: Annotated[Path | None, typer.Option(help="Folder for doctor.json.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, to stay off an available GPU.")] = None,
) -> None:
    """Check a recipe on its own models before training: templates, positions, log-probabilities, loss, teacher."""
    import torch
    from rich.console import Console

    from opd.config.check import check
    from opd.config.load import load_recipe
    from opd.diagnose.doctor import examine
    from opd.models import known_device, pick_device
    from opd.training.assemble import assemble

    settings = load_recipe(recipe, overrides or ()).recipe
    check(settings)
    if settings.train.num_threads is not None:
        torch.set_num_threads(settings.train.num_threads)
    parts = assemble(settings, pick_device() if device is None else known_device(device))
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
    diagnosis = examine(parts, folder=out, num_samples=num_samples)
    Console().print(diagnosis.table())
    if diagnosis.having("fail"):
        raise typer.Exit(1)
