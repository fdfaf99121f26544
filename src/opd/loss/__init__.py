"""Losses on student and teacher scores: unreduced, in nats per supervised token.

    loss = build({"name": "reverse_kl", "clip": {"name": "weight", "max": 2.0}})
    tokens = loss.linear(student_hidden_ND, Head.from_model(model), Full(teacher_hidden_ND, teacher_head))
    tokens.values      # [N] nats, differentiable
    tokens.metrics     # [N] each, detached

p is the teacher's distribution and q the student's, everywhere. To add a divergence: a function in `divergence.py`, its
config in `opd.config.loss`, and a line in `LOSSES`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from pydantic import TypeAdapter, ValidationError

from opd.config.loss import LossConfig
from opd.errors import OpdError
from opd.loss.base import Loss, RolloutTokens
from opd.loss.divergence import DivergenceLoss, forward_kl, jsd_loss, reverse_kl
from opd.loss.head import Head
from opd.loss.sampled import SampledReverseKL, token_logp
from opd.types import Full, Sampled, TokenLoss, TopK

__all__ = ["Full", "Head", "Loss", "RolloutTokens", "Sampled", "TokenLoss", "TopK", "build", "token_logp"]

# name in a recipe -> (config, chunk_bytes) -> Loss
LOSSES: dict[str, Callable[[Any, int | None], Loss]] = {
    "forward_kl": partial(DivergenceLoss, forward_kl),
    "reverse_kl": partial(DivergenceLoss, reverse_kl),
    "jsd": jsd_loss,
    "sampled_reverse_kl": SampledReverseKL,
}


def build(config: Mapping[str, Any] | LossConfig, *, chunk_bytes: int | None = None) -> Loss:
    """The loss that a config describes.

    Args:
        config: a loss config, or the mapping that a recipe holds under ``loss``.
        chunk_bytes: memory of one buffer of logits [rows, V]; five exist at a time. None chooses by device.

    Raises:
        OpdError: an unknown name or key, or a value out of range (NaN included).
    """
    try:
        checked: LossConfig = TypeAdapter[LossConfig](LossConfig).validate_python(config)
    except ValidationError as error:
        problems = "; ".join(f"loss.{'.'.join(map(str, e['loc'][1:]))}: {e['msg']}" for e in error.errors())
        raise OpdError(
            "The loss config is not valid.", why=problems, fix=f"see docs/losses.md; names are {', '.join(LOSSES)}"
        ) from None
    return LOSSES[checked.name](checked, chunk_bytes)
