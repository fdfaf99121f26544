"""From pydantic's errors to sentences that name the key, the value, the layer and what was expected."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from opd.config.faults import Fault
from opd.config.shape import ROOT, Slot, names_of
from opd.config.suggest import nearest, nearest_key
from opd.config.tree import KeyPath, Node

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

EXPECTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text",
    "path_type": "a path",
    "tuple_type": "a list",
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
    "dict_type": "a mapping",
    "finite_number": "a finite number",
    "string_too_short": "text that is not empty",
}


def faults_of(errors: Sequence[ErrorDetails], tree: Node) -> list[Fault]:
    """One fault for each place that pydantic complains of, in the order of the recipe.

    Args:
        errors: of one `ValidationError`.
        tree: the merged layers that were validated.
    """
    places: dict[KeyPath, tuple[Slot, list[ErrorDetails]]] = {}
    for error in errors:
        path, slot = _place(error["loc"], tree)
        places.setdefault(path, (slot, []))[1].append(error)
    # A union complains of the whole ("not 'all-linear'") and of the item that spoils the other member: keep the item.
    inner = [path for path in places if not any(other[: len(path)] == path and other != path for other in places)]
    return [_fault(path, *places[path], tree) for path in inner]


def _place(loc: tuple[int | str, ...], tree: Node) -> tuple[KeyPath, Slot]:
    """The dotted path and slot of pydantic's location, which also holds the tags of unions."""
    slot = ROOT
    path: KeyPath = ()
    rest = list(loc)
    while rest:
        if slot.configs:
            config = slot.config_named(rest.pop(0)) if slot.is_union else slot.configs[0]
            if not rest:
                break
            key = str(rest.pop(0))
            slot, path = slot.key(config, key), (*path, key)
        elif isinstance(rest[0], int):
            slot, path = slot.item(), (*path, str(rest.pop(0)))
        else:
            part = str(rest.pop(0))
            if tree.find((*path, part)) is not None:
                slot, path = Slot(Any), (*path, part)
    return path, slot


def _fault(path: KeyPath, slot: Slot, errors: list[ErrorDetails], tree: Node) -> Fault:
    error = errors[0]
    kind = error["type"]
    dotted = ".".join(path) or "the recipe"
    if kind == "extra_forbidden":
        return _unknown_key(path, tree)
    if kind == "missing":
        why = "it has no default and no layer sets it"
        if path[:-1]:
            why += f"; `{'.'.join(path[:-1])}` is in {tree.nearest(path[:-1]).origin}"
        return Fault(f"`{dotted}` is missing", why, f"add it to the recipe, or {dotted}=... to the command")
    if kind == "union_tag_not_found":
        names = [name for config in slot.configs for name in names_of(config)]
        why = f"`name` says which of {', '.join(names)} is meant ({tree.nearest(path).origin})"
        return Fault(f"`{dotted}.name` is missing", why, f"add {dotted}.name={names[0]} or another of them")
    if kind == "union_tag_invalid":
        path = (*path, "name")
        return _bad_value(path, _choice([name for config in slot.configs for name in names_of(config)]), tree)
    expected = list(dict.fromkeys(_expected(one) for one in errors))
    if slot.nullable:
        expected.append("null")
    return _bad_value(path, " or ".join(expected), tree)


def _choice(names: Sequence[str]) -> str:
    return f"one of {', '.join(names)}"


def _expected(error: ErrorDetails) -> str:
    if error["type"] == "literal_error":
        # pydantic writes 'a', 'b' or 'c'
        return f"one of {error.get('ctx', {}).get('expected', '')}"
    message = error["msg"].replace("Input should be", "").strip()
    return EXPECTED.get(error["type"], message)


def _bad_value(path: KeyPath, expected: str, tree: Node) -> Fault:
    node = tree.nearest(path)
    dotted = ".".join(path)
    value = node.plain()
    what = f"`{dotted}` is {_short(value)}"
    why = f"expected {expected}; set in {node.origin}"
    if "text" in expected and isinstance(value, int | float):
        return Fault(what, why, f'put it in quotes: {dotted}: "{value}"')
    if "text" in expected and isinstance(value, Mapping):
        return Fault(what, why, f"YAML read a mapping: put the text in quotes, e.g. {dotted}='\"Answer: {{{{ x }}}}\"'")
    meant = nearest(value, _words(expected)) if isinstance(value, str) else None
    return Fault(what, why, f"did you mean {dotted}={meant}?" if meant else f"set `{dotted}` to {expected}")


def _words(expected: str) -> list[str]:
    """The choices in `one of 'a', 'b' or 'c'`."""
    if not expected.startswith("one of"):
        return []
    text = expected.removeprefix("one of ").replace(" or ", ", ").replace("'", "")
    return [word.strip() for word in text.split(",")]


def _short(value: object) -> str:
    text = repr(value) if isinstance(value, str) else str(value)
    text = {"None": "null", "True": "true", "False": "false"}.get(text, text)
    return text if len(text) <= 60 else text[:57] + "..."


def _unknown_key(path: KeyPath, tree: Node) -> Fault:
    parent, key = path[:-1], path[-1]
    dotted = ".".join(path)
    origin = tree.nearest(path).origin
    slot, mapping = _slot_at(parent, tree)
    config = slot.config_for(mapping)
    siblings = tuple(config.model_fields) if config else ()
    name = slot.name_in(mapping)
    owners = [other for member in slot.configs if key in member.model_fields for other in names_of(member)]
    if slot.is_union and owners:
        chosen = ".".join((*parent, "name"))
        why = f"`{chosen}` is {name}, which has no `{key}` ({' and '.join(owners)} would); set in {origin}"
        return Fault(f"`{dotted}` is not used", why, f"remove `{dotted}`, or choose {chosen}={owners[0]}")
    why = f"{'`' + '.'.join(parent) + '`' if parent else 'a recipe'} has no key `{key}`; set in {origin}"
    meant = nearest_key(".".join(parent), key, siblings)
    fix = f"did you mean `{meant}`?" if meant else f"remove it; the keys here are {', '.join(siblings)}"
    return Fault(f"unknown key `{dotted}`", why, fix)


def _slot_at(path: KeyPath, tree: Node) -> tuple[Slot, Mapping[str, Node]]:
    """The slot of a mapping in the tree, and the mapping."""
    slot, node = ROOT, tree
    for key in path:
        slot = slot.key(slot.config_for(node.value), key) if isinstance(node.value, dict) else slot.item()
        node = cast("Node", node.find((key,)))
    return slot, node.value if isinstance(node.value, dict) else {}
