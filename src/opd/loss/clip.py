"""Clips: how a token's divergence, or its entries, are bounded, and what that leaves of the gradient.

Tensor suffixes: N supervised tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from opd.config.loss import NoClip, PerEntryClip, PerTokenClip, WeightClip


@dataclass(frozen=True)
class Entries:
    """A divergence entry by entry, d_v and ∂d_v/∂log q_v, and a third buffer; all [N, V], all may be overwritten."""

    values_NV: Tensor
    slope_NV: Tensor
    scratch_NV: Tensor


@dataclass(frozen=True)
class Clipped:
    """A divergence after its clip.

    Args:
        values_N: [N] nats, what is minimised.
        grad_NV: [N, V] its gradient with respect to the student's logits.
        unclipped_N: [N] nats, the divergence itself.
        metrics: what the clip did, [N] each; empty when there is none.
    """

    values_N: Tensor
    grad_NV: Tensor
    unclipped_N: Tensor
    metrics: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])


# slope_NV -> gradient with respect to logits, in the same buffer.
Gradient = Callable[[Tensor], Tensor]


def none(entries: Entries, gradient: Gradient, _clip: NoClip) -> Clipped:
    """D as it is."""
    values_N = entries.values_NV.sum(-1)
    return Clipped(values_N, gradient(entries.slope_NV), values_N)


def per_token(entries: Entries, gradient: Gradient, clip: PerTokenClip) -> Clipped:
    """min(D, max): no gradient where D is above it."""
    unclipped_N = entries.values_NV.sum(-1)
    over_N = unclipped_N > clip.max
    return _scaled(
        unclipped_N.clamp(max=clip.max), (~over_N).to(unclipped_N.dtype), unclipped_N, over_N, entries, gradient
    )


def weight(entries: Entries, gradient: Gradient, clip: WeightClip) -> Clipped:
    """D · min(1, max/D) with the factor detached: the gradient keeps its direction."""
    unclipped_N = entries.values_NV.sum(-1)
    over_N = unclipped_N > clip.max
    factor_N = torch.where(over_N, clip.max / unclipped_N, 1.0)
    return _scaled(unclipped_N * factor_N, factor_N, unclipped_N, over_N, entries, gradient)


def per_entry(entries: Entries, gradient: Gradient, clip: PerEntryClip) -> Clipped:
    """Σ_v min(d_v, max), gradient only through entries below it: "pointwise clipping" of OPSD (arXiv 2601.18734).

    The result can be negative, and where the teacher's favourite token is clipped its logit is pushed down: what is
    left of the slope no longer favours it, and the softmax takes mass from it for the others.
    """
    unclipped_N = entries.values_NV.sum(-1)
    norm_N = torch.linalg.vector_norm(gradient(entries.scratch_NV.copy_(entries.slope_NV)), dim=-1)
    over_NV = entries.values_NV > clip.max
    values_N = entries.values_NV.clamp_(max=clip.max).sum(-1)
    grad_NV = gradient(entries.slope_NV.masked_fill_(over_NV, 0))
    left_N = torch.linalg.vector_norm(grad_NV, dim=-1)
    return Clipped(values_N, grad_NV, unclipped_N, _metrics(over_NV.any(-1), norm_N, left_N))


def _scaled(
    values_N: Tensor, factor_N: Tensor, unclipped_N: Tensor, over_N: Tensor, entries: Entries, gradient: Gradient
) -> Clipped:
    """A clip that only scales each row's gradient."""
    grad_NV = gradient(entries.slope_NV)
    norm_N = torch.linalg.vector_norm(grad_NV, dim=-1)
    return Clipped(values_N, grad_NV.mul_(factor_N[:, None]), unclipped_N, _metrics(over_N, norm_N, norm_N * factor_N))


def _metrics(over_N: Bool[Tensor, " N"], norm_N: Float[Tensor, " N"], left_N: Float[Tensor, " N"]) -> dict[str, Tensor]:
    # Nothing was removed from a gradient of zero.
    removed_N = torch.where(norm_N > 0, 1 - left_N / norm_N, 0.0)
    return {"clipped": over_N.to(norm_N.dtype), "grad_norm_unclipped": norm_N, "grad_removed_frac": removed_N}


# clip.name in a recipe -> (entries, gradient, config) -> Clipped
CLIPS: dict[str, Callable[[Entries, Gradient, Any], Clipped]] = {
    "none": none,
    "per_token": per_token,
    "weight": weight,
    "per_entry": per_entry,
}
