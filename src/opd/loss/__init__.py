"""Losses on student and teacher scores: unreduced, in nats per supervised token.

    loss = build({"name": "reverse_kl", "clip": {"name": "weight", "max": 2.0}})
    tokens = loss.linear(student_hidden_ND, Head.from_model(model), Full(teacher_hidden_ND, teacher_head))
    tokens.values      # [N] nats, differentiable
    tokens.metrics     # [N] each, detached

p is the teacher's distribution and q the student's, everywhere. To add a divergence: a function and a line in
`DIVERGENCES` of `divergence.py`, and its config in `opd.config.loss`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pydantic import TypeAdapter, ValidationError

from opd.config.faults import raise_all
from opd.config.loss import LossConfig, MixConfig
from opd.config.loss_rules import contradictions
from opd.errors import OpdError
from opd.loss.base import Loss, RolloutTokens
from opd.loss.distance import DivergenceLoss
from opd.loss.divergence import DIVERGENCES
from opd.loss.head import Head, LowRank
from opd.loss.mix import MixLoss
from opd.loss.sampled import CrossEntropy, SampledReverseKL, token_logp
from opd.types import Full, Sampled, TokenLoss, TopK

__all__ = [
    "Full",
    "Head",
    "Loss",
    "LowRank",
    "RolloutTokens",
    "Sampled",
    "TokenLoss",
    "TopK",
    "build",
    "token_logp",
]


def _mix(config: MixConfig, chunk_bytes: int | None) -> Loss:
    return MixLoss(config, [LOSSES[part.loss.name](part.loss, chunk_bytes) for part in config.parts], chunk_bytes)


# name in a recipe -> (config, chunk_bytes) -> Loss
LOSSES: dict[str, Callable[[Any, int | None], Loss]] = {
    **dict.fromkeys(DIVERGENCES, DivergenceLoss),
    "sampled_reverse_kl": SampledReverseKL,
    "sft": CrossEntropy,
    "mix": _mix,
}


def build(config: Mapping[str, Any] | LossConfig, *, chunk_bytes: int | None = None) -> Loss:
    """The loss that a config describes.

    A loss computes the rows it is given: entropy gates act in it, while the other masks choose its rows beforehand
    (`opd.loss.mask.supervised`) and `reduction` says how its values are averaged (`opd.loss.reduce`).

    Args:
        config: a loss config, or the mapping that a recipe holds under ``loss``.
        chunk_bytes: memory of the logits that exist at a time, both models together. None chooses by device.

    Raises:
        OpdError: an unknown name or key, a value out of range (NaN included), or options that contradict each other.
    """
    try:
        checked: LossConfig = TypeAdapter[LossConfig](LossConfig).validate_python(config)
    except ValidationError as error:
        problems = "; ".join(f"loss.{'.'.join(map(str, e['loc'][1:]))}: {e['msg']}" for e in error.errors())
        raise OpdError(
            "The loss config is not valid.", why=problems, fix=f"see docs/losses.md; names are {', '.join(LOSSES)}"
        ) from None
    if chunk_bytes is not None and chunk_bytes < 1:
        raise OpdError(
            f"chunk_bytes is {chunk_bytes}.",
            why="a chunk holds the logits of at least one row",
            fix="pass None, or bytes",
        )
    raise_all("The loss config", list(contradictions(checked)))
    return LOSSES[checked.name](checked, chunk_bytes)
