"""YAML as a recipe needs it: values as they look, every fault with file and line.

Differences from PyYAML's SafeLoader (YAML 1.1), each of which has changed somebody's run without a word:

- `1e-5` is a number, not text; `010` is ten, not eight; `1:30` is text, not ninety
- only `true` and `false` are booleans: `no`, `off`, `yes` and `on` are text
- dates are text
- a key that appears twice is an error, not "the last one wins"
- tags (`!!python/...`) and merge keys (`<<`) are errors; layers are what `extends:` is for
"""

from __future__ import annotations

import math
import re
from pathlib import Path

import yaml

from opd.config.tree import Node, Origin, Scalar, bad_key, bad_text
from opd.errors import OpdError

# Anchors and aliases may share values, but not multiply them without end.
MAX_VALUES = 100_000

_TAG = "tag:yaml.org,2002:"
_NULL = re.compile(r"~|null|Null|NULL|")
_BOOL = re.compile(r"true|True|TRUE|false|False|FALSE")
_INT = re.compile(r"[-+]?[0-9]+(?:_[0-9]+)*")
_FLOAT = re.compile(
    r"[-+]?(?:\.[0-9]+|[0-9]+(?:_[0-9]+)*(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"
)


class StrictLoader(yaml.SafeLoader):
    """A SafeLoader with the scalar rules of this module; it composes nodes and never constructs objects from tags."""

    yaml_implicit_resolvers = {}  # noqa: RUF012  (PyYAML's own class attribute: none of its YAML 1.1 rules here)


for _name, _pattern in (("null", _NULL), ("bool", _BOOL), ("int", _INT), ("float", _FLOAT)):
    StrictLoader.add_implicit_resolver(_TAG + _name, re.compile(rf"(?:{_pattern.pattern})\Z"), None)


def parse(text: str, layer: str, folder: Path, *, with_lines: bool = True) -> Node:
    """Read one YAML document.

    Args:
        text: the document.
        layer: the name that errors and provenance use, e.g. ``recipes/demo.yaml``.
        folder: what relative paths in the document are relative to.
        with_lines: whether origins carry line numbers.

    Raises:
        OpdError: with layer and line, for anything that is not YAML as described above.
    """
    try:
        loader = StrictLoader(text)
        try:
            root = loader.get_single_node()
        finally:
            loader.dispose()
        return _Reader(layer, folder, with_lines).node(root) if root else Node(None, Origin(layer, folder))
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        why = " ".join(part for part in (error.context, error.problem) if part)
        raise _error(layer, line, why, "correct the YAML; text that holds `: `, ` #` or `{{` needs quotes") from error
    except yaml.YAMLError as error:  # a character that YAML does not allow
        position = getattr(error, "position", 0)
        character = text[position : position + 1]
        why = f"the character {character!a} is not allowed in YAML"
        raise _error(layer, text.count("\n", 0, position) + 1, why, "remove the character") from error
    except RecursionError as error:
        raise _error(layer, 1, "the values are nested too deeply", "write fewer levels") from error


def dropped_by_comment(text: str) -> str | None:
    """What a one-line YAML value loses to a ` #` comment, or None."""
    loader = StrictLoader(text)
    try:
        root = loader.get_single_node()
        end = root.end_mark.index if root else 0
    finally:
        loader.dispose()
    rest = text[end:].strip()
    return rest if rest.startswith("#") else None


def _error(layer: str, line: int, why: str, fix: str) -> OpdError:
    return OpdError(f"cannot read {layer}, line {line}", why=why, fix=fix)


class _Reader:
    """Turns PyYAML's nodes into ours."""

    def __init__(self, layer: str, folder: Path, with_lines: bool) -> None:
        self.layer = layer
        self.folder = folder
        self.with_lines = with_lines
        self.open_ids: set[int] = set()
        self.num_values = 0

    def fail(self, node: yaml.Node, why: str, fix: str) -> OpdError:
        return _error(self.layer, node.start_mark.line + 1, why, fix)

    def node(self, node: yaml.Node) -> Node:
        line = node.start_mark.line + 1 if self.with_lines else None
        origin = Origin(self.layer, self.folder, line)
        self.num_values += 1
        if self.num_values > MAX_VALUES:
            raise self.fail(node, f"aliases expand to more than {MAX_VALUES:,} values", "use fewer aliases")
        if isinstance(node, yaml.ScalarNode):
            return Node(self.scalar(node), origin)
        if id(node) in self.open_ids:
            raise self.fail(node, "an alias holds itself", "remove the alias")
        self.open_ids.add(id(node))
        try:
            if isinstance(node, yaml.MappingNode) and node.tag == _TAG + "map":
                return Node(self.mapping(node), origin)
            if isinstance(node, yaml.SequenceNode) and node.tag == _TAG + "seq":
                return Node([self.node(child) for child in node.value], origin)
        finally:
            self.open_ids.discard(id(node))
        raise self.fail(node, f"the tag {node.tag} is not allowed", "remove the tag")

    def mapping(self, node: yaml.MappingNode) -> dict[str, Node]:
        children: dict[str, Node] = {}
        lines: dict[str, int] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise self.fail(
                    key_node,
                    "a key is a mapping or a list",
                    "text that begins with `{` or `[` needs quotes, such as '\"{{ problem }}\"'",
                )
            key = self.scalar(key_node)
            if key == "<<" and key_node.style is None:  # in quotes it is a key like any other
                raise self.fail(key_node, "merge keys (`<<`) are not read", "use `extends:` or repeat the values")
            problem = bad_key(key)
            if problem or not isinstance(key, str):
                raise self.fail(key_node, f"bad key {key!r}: {problem}", "rename the key or put it in quotes")
            line = key_node.start_mark.line + 1
            if key in children:
                raise self.fail(key_node, f"the key `{key}` is already set in line {lines[key]}", "keep one of the two")
            lines[key] = line
            children[key] = self.node(value_node)
        return children

    def scalar(self, node: yaml.ScalarNode) -> Scalar:
        text: str = node.value
        kind = node.tag.removeprefix(_TAG)
        problem = bad_text(text)
        if problem:
            raise self.fail(node, f"bad text: {problem}", "remove the character")
        if kind == "str":
            return text
        if kind == "null" and _NULL.fullmatch(text):
            return None
        if kind == "bool" and _BOOL.fullmatch(text):
            return text.lower() == "true"
        if kind == "int" and _INT.fullmatch(text):
            return self.integer(node, text)
        if kind == "float" and _FLOAT.fullmatch(text):
            return _float(text)
        raise self.fail(node, f"{text!r} with the tag {node.tag} is not allowed", "remove the tag")

    def integer(self, node: yaml.ScalarNode, text: str) -> int:
        try:
            return int(text)
        except ValueError as error:  # Python refuses to read integers of thousands of digits
            raise self.fail(node, "the number has too many digits", "write a smaller number") from error


def _float(text: str) -> float:
    lowered = text.lower()
    if lowered.endswith("nan"):
        return math.nan
    if lowered.endswith("inf"):
        return -math.inf if lowered.startswith("-") else math.inf
    return float(text)
