"""Several mistakes, one error: nobody should have to fix a recipe one line a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from opd.errors import OpdError


@dataclass(frozen=True)
class Fault:
    """One mistake in a recipe: what is wrong, why, and what to write instead."""

    what: str
    why: str
    fix: str


def raise_all(subject: str, faults: Sequence[Fault]) -> None:
    """Raise one OpdError that holds every fault, or do nothing when there is none.

    Args:
        subject: what was read, e.g. ``recipes/demo.yaml``.
        faults: in the order to show them.

    Raises:
        OpdError: when there is at least one fault.
    """
    if not faults:
        return
    if len(faults) == 1:
        (fault,) = faults
        raise OpdError(f"{subject}: {fault.what}", why=fault.why, fix=fault.fix)
    why = "".join(f"\n    {i}. {fault.what}: {fault.why}" for i, fault in enumerate(faults, 1))
    fix = "".join(f"\n    {i}. {fault.fix}" for i, fault in enumerate(faults, 1))
    raise OpdError(f"{subject} has {len(faults)} errors", why=why, fix=fix)
