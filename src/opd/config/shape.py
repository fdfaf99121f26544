"""Questions to the schema: which config stands at a place, which keys it has, which names a union offers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from opd.config.base import Config
from opd.config.schema import Recipe
from opd.config.tree import Node


@dataclass(frozen=True)
class Slot:
    """What the schema says of one place in a recipe.

    Args:
        annotation: the type that the place holds.
        default: the value that stands there when no layer sets it; None when there is none.
    """

    annotation: Any
    default: object = None

    @property
    def configs(self) -> tuple[type[Config], ...]:
        """The config classes that may stand here; more than one is a union told apart by `name`."""
        return tuple(part for part in _parts(self.annotation) if isinstance(part, type) and issubclass(part, Config))

    @property
    def is_union(self) -> bool:
        """Whether several configs compete for this place."""
        return len(self.configs) > 1

    @property
    def nullable(self) -> bool:
        """Whether null may stand here."""
        return NoneType in _parts(self.annotation)

    def name_in(self, mapping: Mapping[str, Node]) -> object:
        """The choice that a mapping makes in this union: its `name`, else the default's, else None."""
        return mapping["name"].value if "name" in mapping else getattr(self.default, "name", None)

    def config_for(self, mapping: Mapping[str, Node]) -> type[Config] | None:
        """The config class that a mapping is meant for; None when that cannot be told."""
        return self.config_named(self.name_in(mapping)) if self.is_union else next(iter(self.configs), None)

    def config_named(self, name: object) -> type[Config] | None:
        """The config class of this union that goes by a name."""
        return next((config for config in self.configs if name in names_of(config)), None)

    def key(self, config: type[Config] | None, key: str) -> Slot:
        """The place of a key in one of the configs; a place that holds anything when the schema has no such key."""
        if config is None or key not in config.model_fields:
            return Slot(Any)
        field = config.model_fields[key]
        return Slot(field.annotation, None if field.is_required() else field.default)

    def item(self) -> Slot:
        """The place of one item of the list that stands here."""
        for part in _parts(self.annotation):
            if get_origin(part) in (tuple, list):
                return Slot(get_args(part)[0])
        return Slot(Any)


ROOT = Slot(Recipe)


def names_of(config: type[Config]) -> tuple[str, ...]:
    """The values of `name` that a config goes by; empty when it has no `name` of fixed choices."""
    field = config.model_fields.get("name")
    return get_args(field.annotation) if field is not None and get_origin(field.annotation) is not None else ()


def all_keys(slot: Slot = ROOT, prefix: str = "") -> Iterator[str]:
    """Every dotted key of the schema, of all union members, parents before children."""
    seen: set[str] = set()
    for config in slot.configs:
        for key in config.model_fields:
            dotted = f"{prefix}{key}"
            if dotted not in seen:
                seen.add(dotted)
                yield dotted
            for deeper in all_keys(slot.key(config, key), f"{dotted}."):
                if deeper not in seen:
                    seen.add(deeper)
                    yield deeper


def _parts(annotation: Any) -> tuple[Any, ...]:
    """The members of a (nested, annotated) union; the annotation itself when it is none."""
    if get_origin(annotation) is Annotated:
        return _parts(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return tuple(part for member in get_args(annotation) for part in _parts(member))
    return (annotation,)
