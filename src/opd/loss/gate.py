"""Entropy gates: which rows are supervised, as far as the distributions themselves decide.

A row whose gate is shut has value, gradient and metrics 0, and `supervised` says so.

Tensor suffixes: N supervised tokens, v a tile of the vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from opd.config.loss import EntropyGate, MaskConfig
from opd.loss.chunked import Terms
from opd.types import TokenLoss


def is_open(mask: MaskConfig, metrics: Mapping[str, Tensor]) -> Bool[Tensor, " N"] | None:
    """Where all gates are open, by the metrics `entropy_student` and `entropy_teacher`; None when there is no gate.

    An entropy that is NaN leaves its gate open: a fault in a row is to be seen, not masked.
    """
    gates = {"entropy_student": mask.student_entropy, "entropy_teacher": mask.teacher_entropy}
    outside = [_outside(gate, metrics[name]) for name, gate in gates.items() if gate is not None]
    return ~torch.stack(outside).any(0) if outside else None


def gated(terms: Terms, mask: MaskConfig) -> Terms:
    """The terms of a chunk with the gates of the mask applied."""
    open_N = is_open(mask, terms.metrics)
    if open_N is None:
        return terms
    write, measure = terms.gradient, terms.gradient_metrics
    assert write is not None, "a gradient that is written already cannot be held back"
    # Where, not times: 0 times NaN would be NaN.
    return Terms(
        torch.where(open_N, terms.values_N, 0.0),
        lambda tile: write(tile).masked_fill_(~open_N[:, None], 0),
        {**_zeroed(terms.metrics, open_N), "supervised": open_N.to(terms.values_N.dtype)},
        None if measure is None else lambda: _zeroed(measure(), open_N),
    )


def gated_tokens(loss: TokenLoss, mask: MaskConfig) -> TokenLoss:
    """A loss with the gates of the mask applied."""
    open_N = is_open(mask, loss.metrics)
    if open_N is None:
        return loss
    metrics = {**_zeroed(loss.metrics, open_N), "supervised": open_N.to(loss.values.dtype)}
    return TokenLoss(torch.where(open_N, loss.values, 0.0), metrics)


def _zeroed(metrics: Mapping[str, Tensor], open_N: Tensor) -> dict[str, Tensor]:
    return {name: torch.where(open_N, metric, 0.0) for name, metric in metrics.items()}


def _outside(gate: EntropyGate, entropy: Float[Tensor, " N"]) -> Bool[Tensor, " N"]:
    return (entropy < gate.min) | (entropy > (math.inf if gate.max is None else gate.max))
