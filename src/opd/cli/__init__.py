"""The command line: one small file a command group, parsing only. Heavy imports happen inside the commands."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from opd.cli import compare, config, demo, doctor, eval_, models, report, train, verdicts
from opd.errors import OpdError

app = typer.Typer(
    name="opd",
    help="On-policy distillation of language models: the student samples, a teacher scores every token.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
app.command("train")(train.train)
app.command("doctor")(doctor.doctor)
app.command("eval")(eval_.evaluate)
app.command("compare")(compare.compare)
app.command("report")(report.report)
app.command("demo")(demo.demo)
app.command("verdicts")(verdicts.verdicts)
app.add_typer(config.app, name="config")
app.add_typer(models.app, name="models")


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"opd {version('opd')}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    """On-policy distillation of language models: the student samples, a teacher scores every token."""


def main() -> None:
    """Entry point of `opd`: an OpdError is printed as what, why and fix on stderr and ends with exit code 1."""
    try:
        app()
    except OpdError as error:
        from rich.console import Console
        from rich.text import Text

        console = Console(stderr=True)
        # Never wrapped: a path or a `key=value` to paste stays whole.
        console.print(Text(f"error: {error.what}", style="bold red"), soft_wrap=True)
        console.print(Text(f"  why: {error.why}"), soft_wrap=True)
        console.print(Text(f"  fix: {error.fix}"), soft_wrap=True)
        sys.exit(1)
