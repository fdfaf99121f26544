"""`opd config`: what recipes may hold, and what one of them holds."""

from __future__ import annotations

from typing import Annotated

import typer

app = typer.Typer(
    help="Look at recipes: their JSON schema, and every value of one with its source.", no_args_is_help=True
)


@app.command("schema")
def schema() -> None:
    """Print the JSON schema of recipe files, for editors.

    Save it beside your recipes and begin each with `# yaml-language-server: $schema=recipe.schema.json`.
    """
    import json

    from opd.config.json_schema import recipe_schema

    typer.echo(json.dumps(recipe_schema(), indent=2, ensure_ascii=False))


@app.command("show")
def show(
    recipe: Annotated[str, typer.Argument(help="A YAML recipe, or the name of a packaged one.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key.sub=value, applied last.")] = None,
) -> None:
    """Print every value of a recipe and the layer that set it. The output is a whole recipe itself."""
    from opd.config.load import load_recipe

    typer.echo(load_recipe(recipe, overrides or ()).to_yaml(), nl=False)
