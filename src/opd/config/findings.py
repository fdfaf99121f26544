"""What a rule says of a recipe: an error (`Fault`) or a warning."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from opd.config.faults import Fault
from opd.config.schema import Recipe


@dataclass(frozen=True)
class Warning_:  # noqa: N801  (`Warning` is Python's)
    """Something that runs but probably does not do what was hoped: what, why, and what to do about it."""

    what: str
    why: str
    fix: str

    def __str__(self) -> str:
        return f"{self.what}: {self.why}. {self.fix}"


Rule = Callable[[Recipe], Iterator[Fault | Warning_]]
