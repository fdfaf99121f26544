"""`resolved.yaml`: every value of a run, with its source in a comment. It loads back to an equal recipe."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import yaml

from opd.config.schema import Recipe
from opd.files import write_aside

HEADER = "# Every value of one recipe and the layer that set it. This file is a whole recipe itself.\n"

# Text that no YAML reader, 1.1 or 1.2, takes for anything else stands without quotes.
_BARE = re.compile(r"[A-Za-z_](?:[A-Za-z0-9_./:-]*[A-Za-z0-9_])?")
_RESERVED = {"null", "true", "false", "yes", "no", "on", "off", "y", "n"}


def leaves(recipe: Recipe) -> Iterator[str]:
    """The dotted keys of every value that resolved.yaml writes; a list of plain values is one value."""
    yield from _leaves(recipe.model_dump(mode="json"), "")


def resolved_yaml(recipe: Recipe, provenance: Mapping[str, str]) -> str:
    """The text of resolved.yaml.

    Args:
        recipe: the resolved recipe.
        provenance: the layer of every dotted key in `leaves(recipe)`.
    """
    lines = _lines(recipe.model_dump(mode="json"), "", provenance)
    return HEADER + "".join(line + "\n" for line in lines)


def write_resolved(path: Path, recipe: Recipe, provenance: Mapping[str, str]) -> None:
    """Write resolved.yaml aside and rename it, so that a reader never sees half of it."""
    write_aside(path, resolved_yaml(recipe, provenance))


def _is_leaf(value: object) -> bool:
    """Mappings and lists of mappings are opened; everything else is one value."""
    if isinstance(value, list):
        items = cast("list[object]", value)
        return not any(isinstance(item, dict | list) for item in items)
    return not value or not isinstance(value, dict)


def _children(value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, list):
        return [(str(i), item) for i, item in enumerate(cast("list[Any]", value))]
    # `name` says what the keys after it mean; in configs with a base class pydantic lists it last.
    return sorted(value.items(), key=lambda item: item[0] != "name")


def _leaves(value: Any, dotted: str) -> Iterator[str]:
    if _is_leaf(value):
        yield dotted
        return
    for key, child in _children(value):
        yield from _leaves(child, f"{dotted}.{key}" if dotted else key)


def _lines(value: Any, dotted: str, provenance: Mapping[str, str]) -> Iterator[str]:
    """The lines of an opened mapping or list, without indentation of its own."""
    is_list = isinstance(value, list)
    for key, child in _children(value):
        below = f"{dotted}.{key}" if dotted else key
        if _is_leaf(child):
            lead = "- " if is_list else f"{_scalar(key)}: "
            yield f"{lead}{_leaf(child)}  # {_comment(provenance[below])}"
            continue
        inner = list(_lines(child, below, provenance))
        if is_list:
            yield f"- {inner[0]}"
            yield from (f"  {line}" for line in inner[1:])
        else:
            yield f"{_scalar(key)}:"
            yield from (f"  {line}" for line in inner)


def _leaf(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(_scalar(item) for item in cast('list[Any]', value))}]"
    return "{}" if isinstance(value, dict) else _scalar(value)


def _scalar(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        text = repr(value)  # the shortest text that reads back as the same float
        mantissa, exponent, power = text.partition("e")
        # YAML 1.1 readers take 1e-05 for text and 1.0e-05 for a number.
        return f"{mantissa}.0e{power}" if exponent and "." not in mantissa else text
    if isinstance(value, int):
        return str(value)
    if _BARE.fullmatch(value) and value.lower() not in _RESERVED:
        return value
    return yaml.safe_dump(value, default_style='"', width=float("inf"), allow_unicode=True).rstrip("\n")


def _comment(layer: str) -> str:
    """A layer's name as it may stand in a comment: file names can hold anything but `/` and NUL."""
    return layer if layer.isprintable() else ascii(layer)
