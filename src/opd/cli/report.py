"""`opd report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    run: Annotated[Path, typer.Argument(help="The folder of a run.")],
    out: Annotated[Path | None, typer.Option(help="The page; default: report.html in the run's folder.")] = None,
) -> None:
    """Write one offline page of a run: verdict, curves, held-out scores, samples, checks, recipe."""
    from opd.diagnose.report import write_report

    typer.echo(str(write_report(run, out)))
