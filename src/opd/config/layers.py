"""How layers join.

Later ones win key by key, lists replace lists, and another choice of `name` in a union drops the earlier one's keys.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from opd.config import strict_yaml
from opd.config.faults import Fault, raise_all
from opd.config.schema import FileSource
from opd.config.shape import ROOT, Slot
from opd.config.tree import DEFAULT, OVERRIDE, KeyPath, Node, Origin
from opd.errors import OpdError


def merge_all(layers: Iterable[Node], faults: list[Fault]) -> Node:
    """Join layers, earliest first; list indexes of overrides that miss go to `faults`."""
    merged = Node({}, Origin(DEFAULT, Path.cwd()))
    for layer in layers:
        merged = merge(merged, layer, ROOT, (), faults)
    return merged


def merge(base: Node, over: Node, slot: Slot, path: KeyPath, faults: list[Fault]) -> Node:
    """One value over another."""
    if not isinstance(over.value, dict):
        return over
    if isinstance(base.value, list) and over.origin.layer == OVERRIDE:
        return _merge_items(base.value, over, slot, path, faults)
    if not isinstance(base.value, dict):
        return over
    # The keys of one choice mean nothing, or something else, to another.
    if slot.is_union and "name" in over.value and slot.name_in(base.value) not in (None, slot.name_in(over.value)):
        return over
    children = dict(base.value)
    config = slot.config_for({**base.value, **over.value})
    for key, child in over.value.items():
        known = children.get(key)
        deeper = (*path, key)
        children[key] = child if known is None else merge(known, child, slot.key(config, key), deeper, faults)
    return Node(children, base.origin if base.value else over.origin)


def _merge_items(items: list[Node], over: Node, slot: Slot, path: KeyPath, faults: list[Fault]) -> Node:
    """`prompt.student.0.content=...`: an override's keys into a list are indexes from 0."""
    assert isinstance(over.value, dict)
    merged = list(items)
    for key, child in over.value.items():
        if key.isdecimal() and int(key) < len(items):
            merged[int(key)] = merge(merged[int(key)], child, slot.item(), (*path, key), faults)
            continue
        dotted = ".".join(path)
        have = f"it has {len(items)} items, counted from 0" if items else "it is empty"
        fix = f"use an index of the list, or set the whole of `{dotted}=[...]`"
        faults.append(Fault(f"no item `{key}` in `{dotted}` (override)", f"`{dotted}` is a list; {have}", fix))
    return Node(merged, over.origin)


def finish(node: Node, slot: Slot, faults: list[Fault]) -> Node:
    """Write out what the layers imply.

    A union in which no layer chose a `name` keeps the default's name, so that `loss.temperature=2` needs no
    `loss.name`. The path of a data file becomes absolute, relative to the layer that set it.
    """
    if isinstance(node.value, list):
        return Node([finish(item, slot.item(), faults) for item in node.value], node.origin)
    if not isinstance(node.value, dict):
        return node
    children = dict(node.value)
    name = slot.name_in(children)
    if slot.is_union and "name" not in children and isinstance(name, str):
        children = {"name": Node(name, Origin(DEFAULT, node.origin.folder)), **children}
    config = slot.config_for(children)
    children = {key: finish(child, slot.key(config, key), faults) for key, child in children.items()}
    if config is FileSource and "path" in children:
        children["path"] = _absolute(children["path"], faults)
    return Node(children, node.origin)


def _absolute(node: Node, faults: list[Fault]) -> Node:
    if not isinstance(node.value, str) or not node.value:
        return node
    try:
        path = node.origin.folder / Path(node.value).expanduser()
    except RuntimeError as error:  # ~somebody
        why = f"{error} ({node.origin})"
        faults.append(Fault(f"cannot find the home folder in {node.value!r}", why, "write the path in full"))
        return node
    return Node(str(path), node.origin)


def from_overrides(overrides: Sequence[str]) -> Node:
    """One layer of `key.sub=value` texts; values are YAML.

    Raises:
        OpdError: that names every malformed, repeated or overlapping override.
    """
    origin = Origin(OVERRIDE, Path.cwd())
    faults: list[Fault] = []
    values: dict[KeyPath, Node] = {}
    for text in overrides:
        key, equals, value = text.partition("=")
        path = tuple(key.strip().split("."))
        problem = _malformed(path, equals, value)
        if problem:
            faults.append(
                Fault(f"malformed override {text!r}", problem, "write key.sub=value, e.g. train.num_steps=20")
            )
            continue
        overlap = next((old for old in values if old[: len(path)] == path or path[: len(old)] == old), None)
        if overlap is not None:
            name = ".".join(overlap)
            why = "the key is set twice" if overlap == path else f"`{name}` is set by another override"
            faults.append(Fault(f"override {text!r} overlaps `{name}`", why, "keep one of the two"))
            continue
        try:
            values[path] = _override_value(value, text)
        except OpdError as error:
            faults.append(Fault(f"cannot read override {text!r}", error.why, error.fix))
    raise_all("overrides", faults)
    root: dict[str, Node] = {}
    for path, node in values.items():
        inner = root
        for key in path[:-1]:
            inner = inner.setdefault(key, Node({}, origin)).value
            assert isinstance(inner, dict)
        inner[path[-1]] = node
    return Node(root, origin)


def _malformed(path: KeyPath, equals: str, value: str) -> str | None:
    if not equals:
        return "there is no `=`"
    if not all(path):
        return "a part of the key is empty"
    if not value.strip():
        return "there is no value; `null` unsets and '\"\"' is empty text"
    return None


def _override_value(value: str, text: str) -> Node:
    node = strict_yaml.parse(value, OVERRIDE, Path.cwd(), with_lines=False)
    dropped = strict_yaml.dropped_by_comment(value)
    if dropped is not None:
        why = f"` #` begins a comment, so {dropped!r} would be lost"
        raise OpdError("a comment in an override", why=why, fix=f"quote the value: '{text.partition('=')[0]}=\"...\"'")
    return node
