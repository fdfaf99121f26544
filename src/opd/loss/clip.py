"""Clips: how a token's divergence, or its entries, are bounded, and what that leaves of the gradient.

A clip of rows says what becomes of D = Σ_v d_v and which factor its gradient keeps. `per_entry` bounds each d_v before
the sum instead.

Tensor suffixes: N supervised tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from opd.config.loss import ClipConfig, NoClip, PerEntryClip, PerTokenClip, WeightClip

Column = Float[Tensor, "N 1"]


def none(value: Column, _clip: NoClip | PerEntryClip) -> tuple[Column, Column]:
    """D as it is."""
    return value, torch.ones_like(value)


def per_token(value: Column, clip: PerTokenClip) -> tuple[Column, Column]:
    """min(D, max): no gradient where D is above it."""
    return value.clamp(max=clip.max), (value <= clip.max).to(value.dtype)


def weight(value: Column, clip: WeightClip) -> tuple[Column, Column]:
    """D · min(1, max/D) with the factor detached: the gradient keeps its direction."""
    factor = torch.where(value > clip.max, clip.max / value, 1.0)
    return value * factor, factor


# clip.name in a recipe -> ([N, 1] unclipped or entry by entry clipped, config) -> value, and factor of the gradient
CLIPS: dict[str, Callable[[Column, Any], tuple[Column, Column]]] = {
    "none": none,
    "per_token": per_token,
    "weight": weight,
    "per_entry": none,
}


def entry_bound(clip: ClipConfig) -> float:
    """What each d_v is bounded by: Σ_v min(d_v, max), "pointwise clipping" of OPSD (arXiv 2601.18734).

    Gradient flows only through entries below it. The result can be negative, and where the teacher's favourite token is
    clipped its logit is pushed down: what is left of the slope no longer favours it, and the softmax takes mass from it
    for the others.
    """
    return clip.max if isinstance(clip, PerEntryClip) else math.inf


def row_bound(clip: ClipConfig) -> float:
    """What D is bounded by."""
    return clip.max if isinstance(clip, PerTokenClip | WeightClip) else math.inf
