"""The JSON schema of recipe files, for completion and checks in editors."""

from __future__ import annotations

from typing import Any, cast

from opd.config.schema import Recipe


def recipe_schema() -> dict[str, Any]:
    """The JSON schema of one recipe file.

    A file may be one layer of several, so `extends` is allowed and nothing is required; what is missing in the end is
    said when the recipe is loaded. Save it and name it in a recipe's first line:
    ``# yaml-language-server: $schema=recipe.schema.json``.
    """
    schema = cast("dict[str, Any]", _as_layer(Recipe.model_json_schema()))
    files = [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]
    extends = {
        "anyOf": files,
        "title": "Extends",
        "description": "Recipe files that this one is laid over, first to last.",
    }
    schema["properties"] = {"extends": extends, **schema["properties"]}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def _as_layer(schema: Any, *, names: bool = False) -> Any:
    """Without `required`, and with `anyOf` for `oneOf`: half a loss may fit several.

    Args:
        schema: a schema, or a part of one.
        names: whether the keys at this level are the recipe's (`properties`) rather than JSON schema's.
    """
    if isinstance(schema, list):
        return [_as_layer(item) for item in cast("list[Any]", schema)]
    if not isinstance(schema, dict):
        return schema
    result: dict[str, Any] = {}
    for key, value in cast("dict[str, Any]", schema).items():
        if names:
            result[key] = _as_layer(value)
        elif key == "oneOf":
            result["anyOf"] = _as_layer(value)
        elif key in ("default", "const", "enum"):
            result[key] = value
        elif key not in ("required", "discriminator"):
            result[key] = _as_layer(value, names=key in ("properties", "$defs"))
    return result
