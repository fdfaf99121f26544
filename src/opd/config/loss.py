"""Config of every loss, clip and mask; the code of each is in `opd.loss`, the formulas in docs/losses.md."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

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


# ---- where tokens count, and over which outcomes ---------------------------------------------------------------------


class EntropyGate(Config):
    """Only positions whose entropy, in nats at the loss's temperature, lies in [min, max]."""

    min: float = Field(default=0.0, ge=0)
    max: float | None = Field(default=None, ge=0)


class MaskConfig(Config):
    """Which completion tokens are supervised; a token counts only when nothing here leaves it out.

    `first: n` and `last: n` keep the n tokens at either end (both: the union). `skip_boundary` leaves out the first
    token after the prompt, `skip_special_tokens` every special token but the stop token that ends the completion, and
    `skip_whitespace` tokens that are nothing but white space. The entropy gates look at the distributions themselves.
    """

    first: int | None = Field(default=None, ge=1)
    last: int | None = Field(default=None, ge=1)
    skip_boundary: bool = False
    skip_special_tokens: bool = False
    skip_whitespace: bool = False
    teacher_entropy: EntropyGate | None = None
    student_entropy: EntropyGate | None = None


class FullSupport(Config):
    """Every token of the vocabulary."""

    name: Literal["full"] = "full"


class TopKSupport(Config):
    """The `k` likeliest tokens of one side, or of either (`union`).

    `tail: bucket` keeps the remaining mass of each side as one more outcome; `renormalize` scales what is kept to one.
    """

    name: Literal["top_k"]
    k: int = Field(ge=1)
    of: Literal["teacher", "student", "union"] = "teacher"
    tail: Literal["renormalize", "bucket"] = "bucket"

    @model_validator(mode="after")
    def _says_something(self) -> TopKSupport:
        if self.k == 1 and self.tail == "renormalize" and self.of != "union":
            raise ValueError(
                "k = 1 with tail: renormalize puts all of both sides' mass on one token, so the loss is identically "
                "zero; use tail: bucket, or a larger k"
            )
        return self


SupportConfig = Annotated[FullSupport | TopKSupport, Field(discriminator="name")]


class BaseLossConfig(Config):
    """What all losses share.

    `reduction: token` averages over the supervised tokens of the global batch; `sequence` over its completions, each of
    which is the mean over its own supervised tokens.
    """

    mask: MaskConfig = MaskConfig()
    reduction: Literal["token", "sequence"] = "token"


# ---- divergences: need the teacher's distribution --------------------------------------------------------------------


class DivergenceConfig(BaseLossConfig):
    """What the divergences share.

    `temperature` divides the logits of both sides, whatever the rollout was sampled at.
    `scale_by_temperature_squared` multiplies the clipped value by its square (Hinton et al., arXiv 1503.02531).
    """

    temperature: float = Field(default=1.0, gt=0)
    scale_by_temperature_squared: bool = False
    clip: ClipConfig = NoClip()
    support: SupportConfig = FullSupport()


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


class SkewKLConfig(DivergenceConfig):
    """KL(teacher‖alpha * teacher + (1 - alpha) * student), the skew KL of DistiLLM (arXiv 2402.03898).

    alpha lies inside (0, 1): 0 would be `forward_kl`, which has its own name, and 1 is zero.
    """

    name: Literal["skew_kl"]
    alpha: float = Field(default=0.1, gt=0, lt=1)


class SkewReverseKLConfig(DivergenceConfig):
    """KL(student‖(1 - alpha) * teacher + alpha * student), the skew reverse KL of DistiLLM (arXiv 2402.03898).

    alpha lies inside (0, 1): 0 would be `reverse_kl`, which has its own name, and 1 is zero.
    """

    name: Literal["skew_reverse_kl"]
    alpha: float = Field(default=0.1, gt=0, lt=1)


class AdaptiveKLConfig(DivergenceConfig):
    """Forward and reverse KL, weighted by where the two sides differ: AKL (arXiv 2404.02657).

    The teacher's likeliest tokens whose mass reaches `head_mass` are the head, the others the tail. Forward KL weighs
    as much as the distance |p - q| over the head, reverse KL as much as that over the tail.
    """

    name: Literal["adaptive_kl"]
    head_mass: float = Field(default=0.5, gt=0, lt=1)


class EntropyAwareConfig(DivergenceConfig):
    """Reverse KL, plus forward KL where the teacher's entropy is above `threshold` nats: EOPD (arXiv 2603.07079)."""

    name: Literal["entropy_aware"]
    threshold: float = Field(default=0.8, ge=0)
    forward_weight: float = Field(default=1.0, gt=0)


class TVDConfig(DivergenceConfig):
    """Total variation distance, half the sum of |teacher - student| (f-distill, arXiv 2307.15190)."""

    name: Literal["tvd"]


AnyDivergenceConfig = (
    ForwardKLConfig
    | ReverseKLConfig
    | JSDConfig
    | SkewKLConfig
    | SkewReverseKLConfig
    | AdaptiveKLConfig
    | EntropyAwareConfig
    | TVDConfig
)


# ---- sampled tokens: need the teacher's log-probability of the sampled token alone -----------------------------------


class ImportanceConfig(Config):
    """Multiply by exp(log q - behavior_logp), detached, truncated at `clip`."""

    clip: float = Field(gt=0)


class SampledReverseKLConfig(BaseLossConfig):
    """-A_t log q(y_t) with A_t = log p(y_t) - log q(y_t) detached: the sampled-token reverse KL of Thinking Machines.

    `discount` adds the later tokens of the same sequence: A_t + discount * A_(t+1) + discount^2 * A_(t+2) ...
    `group_baseline` subtracts the mean of the same over the other completions of the same problem. `max_advantage` then
    bounds the size of the result. `importance` corrects for a sampler that was not the student.
    """

    name: Literal["sampled_reverse_kl"]
    temperature: float = Field(default=1.0, gt=0)
    importance: ImportanceConfig | None = None
    discount: float = Field(default=0.0, ge=0, le=1)
    group_baseline: bool = False
    max_advantage: float | None = Field(default=None, gt=0)


class SFTConfig(BaseLossConfig):
    """Cross-entropy -log q(y_t) of given tokens; in a recipe, a part of a mix, on the problems' own solutions."""

    name: Literal["sft"]


# ---- mixes -----------------------------------------------------------------------------------------------------------

PartConfig = Annotated[AnyDivergenceConfig | SampledReverseKLConfig | SFTConfig, Field(discriminator="name")]


class MixPart(Config):
    """One loss of a mix, and what it is multiplied with."""

    loss: PartConfig
    weight: float = Field(gt=0)


class MixConfig(BaseLossConfig):
    """The weighted sum of several losses on the same tokens. Mask and reduction are the mix's own.

    `sft` in a recipe is about other tokens: the problem's own solution as the answer to the student's prompt, once a
    step for each problem, with a mean of its own. The mask looks at sampled completions alone; every token of a
    solution counts.
    """

    name: Literal["mix"]
    parts: tuple[MixPart, ...] = Field(min_length=1)


LossConfig = Annotated[
    AnyDivergenceConfig | SampledReverseKLConfig | SFTConfig | MixConfig, Field(discriminator="name")
]
