"""A recipe before validation: plain values, each of which remembers the layer and the line that set it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from opd.config.base import Config
from opd.config.faults import Fault

DEFAULT = "default"
OVERRIDE = "override"

Scalar = bool | int | float | str | None
KeyPath = tuple[str, ...]


@dataclass(frozen=True)
class Origin:
    """Where a value was set.

    Args:
        layer: ``recipes/demo.yaml``, ``override``, ``default``.
        folder: what a relative path in this layer is relative to.
        line: counted from 1, or None when the layer has no lines.
    """

    layer: str
    folder: Path
    line: int | None = None

    def __str__(self) -> str:
        return self.layer if self.line is None else f"{self.layer}, line {self.line}"


@dataclass(frozen=True)
class Node:
    """A value and its origin; mappings and lists hold nodes."""

    value: Scalar | dict[str, Node] | list[Node]
    origin: Origin

    def plain(self) -> Any:
        """The value without origins."""
        if isinstance(self.value, dict):
            return {key: child.plain() for key, child in self.value.items()}
        if isinstance(self.value, list):
            return [child.plain() for child in self.value]
        return self.value

    def find(self, path: KeyPath) -> Node | None:
        """The node at a path, or None."""
        if not path:
            return self
        head, *rest = path
        if isinstance(self.value, dict) and head in self.value:
            return self.value[head].find(tuple(rest))
        if isinstance(self.value, list) and head.isdecimal() and int(head) < len(self.value):
            return self.value[int(head)].find(tuple(rest))
        return None

    def nearest(self, path: KeyPath) -> Node:
        """The node at a path, or its closest ancestor that exists."""
        while True:
            node = self.find(path)
            if node is not None:
                return node
            path = path[:-1]


def bad_key(key: object) -> str | None:
    """Why a key cannot be used, or None: keys are text without dots, so that every dotted name means one place."""
    if not isinstance(key, str):
        return f"keys are text, not {type(key).__name__}"
    if not key:
        return "a key is empty"
    if "." in key:
        return "a key holds no dot: nest the mappings (`train: {num_steps: 5}`); only overrides are written with dots"
    return None


def bad_text(text: str) -> str | None:
    """Why a text cannot be used, or None: NUL and lone surrogates do not pass through JSON, paths and tokenizers."""
    if "\0" in text:
        return "it holds a NUL character"
    if any("\ud800" <= char <= "\udfff" for char in text):
        return "it holds a lone surrogate, which is not Unicode text"
    return None


def from_python(value: object, origin: Origin, faults: list[Fault], path: KeyPath = ()) -> Node:
    """Nodes of a recipe given as Python values; what YAML could not say either goes to `faults`."""
    where = ".".join(path) or "the recipe"
    if isinstance(value, Config):
        value = value.model_dump(mode="json")
    if isinstance(value, Mapping):
        children: dict[str, Node] = {}
        for key, child in cast("Mapping[object, object]", value).items():
            problem = bad_key(key)
            if problem:
                faults.append(Fault(f"bad key {key!r} in {where}", problem, "rename the key"))
            else:
                children[str(key)] = from_python(child, origin, faults, (*path, str(key)))
        return Node(children, origin)
    if isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray):
        items = cast("Sequence[object]", value)
        return Node([from_python(item, origin, faults, (*path, str(i))) for i, item in enumerate(items)], origin)
    if isinstance(value, Path):
        value = str(value)
    if isinstance(value, str):
        problem = bad_text(value)
        if problem:
            faults.append(Fault(f"bad text in {where}", problem, "remove the character"))
        return Node(None if problem else value, origin)
    if value is None or isinstance(value, bool | int | float):
        return Node(value, origin)
    why = f"a value of type {type(value).__name__} cannot be written to resolved.yaml"
    faults.append(Fault(f"bad value in {where}", why, "use text, numbers, true/false, None, lists and mappings"))
    return Node(None, origin)
