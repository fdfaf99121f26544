"""Config of every loss, clip and mask; the code of each is in `opd.loss`, the formulas in docs/losses.md."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from opd.config.base import Config

# ---- clips: all bounds are in nats of the divergence itself, before any factor of temperature ------------------------


class NoClip(Config):
    """Leave every value as it is."""

    name: Literal["none"] = "none"


class PerTokenClip(Config):
    """min(D_t, max): tokens above `max` nats give no gradient."""

    name: Literal["per_token"]
    max: float = Field(gt=0)


class WeightClip(Config):
    """D_t times min(1, max / D_t) with the factor detached: direction kept, size bounded."""

    name: Literal["weight"]
    max: float = Field(gt=0)


class PerEntryClip(Config):
    """Sum over v of min(d_v, max), the clip of OPSD (arXiv 2601.18734): can be negative, and can push the wrong way."""

    name: Literal["per_entry"]
    max: float = Field(gt=0)


ClipConfig = Annotated[NoClip | PerTokenClip | WeightClip | PerEntryClip, Field(discriminator="name")]


# ---- divergences: need the teacher's whole distribution -------------------------------------------------------------


class DivergenceConfig(Config):
    """What the divergences share.

    `temperature` divides the logits of both sides, whatever the rollout was sampled at.
    `scale_by_temperature_squared` multiplies the clipped value by its square (Hinton et al., arXiv 1503.02531).
    """

    temperature: float = Field(default=1.0, gt=0)
    scale_by_temperature_squared: bool = False
    clip: ClipConfig = NoClip()


class ForwardKLConfig(DivergenceConfig):
    """KL(teacher‖student)."""

    name: Literal["forward_kl"]


class ReverseKLConfig(DivergenceConfig):
    """KL(student‖teacher)."""

    name: Literal["reverse_kl"]


class JSDConfig(DivergenceConfig):
    """Generalised Jensen-Shannon divergence of GKD (arXiv 2306.13649); `teacher_weight` is its beta, inside (0, 1)."""

    name: Literal["jsd"]
    teacher_weight: float = 0.5


# ---- sampled tokens: need the teacher's log-probability of the sampled token alone -----------------------------------


class ImportanceConfig(Config):
    """Multiply by exp(log q - behavior_logp), detached, truncated at `clip`."""

    clip: float = Field(gt=0)


class SampledReverseKLConfig(Config):
    """-A_t log q(y_t) with A_t = log p(y_t) - log q(y_t) detached: the sampled-token reverse KL of Thinking Machines.

    `discount` adds the later tokens of the same sequence: A_t + discount * A_(t+1) + discount^2 * A_(t+2) ...
    `max_advantage` then bounds the size of the result. `importance` corrects for a sampler that was not the student.
    """

    name: Literal["sampled_reverse_kl"]
    temperature: float = Field(default=1.0, gt=0)
    importance: ImportanceConfig | None = None
    discount: float = Field(default=0.0, ge=0, le=1)
    max_advantage: float | None = Field(default=None, gt=0)


LossConfig = Annotated[
    ForwardKLConfig | ReverseKLConfig | JSDConfig | SampledReverseKLConfig, Field(discriminator="name")
]
