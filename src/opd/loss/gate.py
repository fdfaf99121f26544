"""Entropy gates: which rows are supervised, as far as the distributions themselves decide.

Tensor suffixes: N supervised tokens.
"""

from __future__ import annotations

import math

from jaxtyping import Bool, Float
from torch import Tensor

from opd.config.loss import EntropyGate, MaskConfig


def is_open(
    mask: MaskConfig, student: Float[Tensor, "*N"] | None, teacher: Float[Tensor, "*N"] | None
) -> Bool[Tensor, "*N"] | None:
    """Where all gates are open, from entropies in nats of the same shape; None when there is no gate.

    An entropy that is NaN leaves its gate open: a fault in a row is to be seen, not masked.
    """
    is_open = None
    for gate, entropy in ((mask.student_entropy, student), (mask.teacher_entropy, teacher)):
        if gate is None:
            continue
        assert entropy is not None, "checked when the loss was built"
        inside = ~_outside(gate, entropy)
        is_open = inside if is_open is None else is_open & inside
    return is_open


def _outside(gate: EntropyGate, entropy: Tensor) -> Tensor:
    return (entropy < gate.min) | (entropy > (math.inf if gate.max is None else gate.max))
