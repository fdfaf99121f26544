"""What a loss minimises, as a formula; what it needs of a teacher and of given solutions. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from opd.config.loss import (
    AdaptiveKLConfig,
    AnyDivergenceConfig,
    ClipConfig,
    DivergenceConfig,
    EntropyAwareConfig,
    EntropyGate,
    JSDConfig,
    LossConfig,
    MaskConfig,
    MixConfig,
    NoClip,
    PartConfig,
    PerEntryClip,
    PerTokenClip,
    SampledReverseKLConfig,
    SFTConfig,
    SkewKLConfig,
    SkewReverseKLConfig,
    TopKSupport,
)

Scores = Literal["Sampled", "TopK", "Full"]

PROVIDES: Mapping[str, frozenset[Scores]] = {
    "self": frozenset({"Full", "Sampled"}),
    "model": frozenset({"Full", "Sampled"}),
}
"""teacher.name -> the kinds of teacher scores it can give."""


def needs(loss: LossConfig) -> frozenset[Scores]:
    """The kinds of teacher scores that a loss can work from; any one of them is enough."""
    if isinstance(loss, MixConfig):
        parts = [needs(part.loss) for part in loss.parts]
        return frozenset[Scores]({"Sampled", "TopK", "Full"}).intersection(*parts)
    if isinstance(loss, SampledReverseKLConfig):
        return frozenset({"Sampled", "Full"})
    if isinstance(loss, SFTConfig):
        return frozenset({"Sampled", "TopK", "Full"})
    if isinstance(loss.support, TopKSupport) and loss.support.of == "teacher":
        return frozenset({"TopK", "Full"})
    return frozenset({"Full"})


def on_policy(loss: LossConfig) -> LossConfig | None:
    """What a recipe's loss says of sampled completions: a mix without `sft`, which is about given solutions.

    None when nothing is left.
    """
    if isinstance(loss, SFTConfig):
        return None
    if not isinstance(loss, MixConfig) or not solution_weight(loss):
        return loss
    parts = tuple(part for part in loss.parts if not isinstance(part.loss, SFTConfig))
    return loss.model_copy(update={"parts": parts}) if parts else None


def solution_weight(loss: LossConfig) -> float:
    """What the cross-entropy on the problems' own solutions is multiplied with; 0 in a loss without it."""
    if not isinstance(loss, MixConfig):
        return 0.0
    return sum(part.weight for part in loss.parts if isinstance(part.loss, SFTConfig))


def losses_of(loss: LossConfig) -> list[PartConfig]:
    """The losses that a loss is the sum of: the parts of a mix, or itself."""
    return [part.loss for part in loss.parts] if isinstance(loss, MixConfig) else [loss]


def temperatures(loss: LossConfig) -> str:
    """What divides the logits of both sides in a loss; of a mix, part by part."""
    return ", ".join("1" if isinstance(part, SFTConfig) else f"{part.temperature:g}" for part in losses_of(loss))


def formula(loss: LossConfig) -> str:
    """The objective in one line: p teacher, q student, y_t the sampled token, sg = no gradient; nats per token.

    The value is averaged over the supervised tokens of the global batch, or over its completions. Gradients flow
    through q alone.
    """
    if isinstance(loss, MixConfig):
        text = " + ".join(f"{part.weight:g}·[{_part(part.loss)}]" for part in loss.parts)
    else:
        text = _part(loss)
    mean = ", mean over each completion, then over completions" if loss.reduction == "sequence" else ""
    return f"{text}{_mask(loss.mask)}{mean}"


def objective(loss: LossConfig) -> str:
    """What a recipe minimises: the formula, with `sft` as what it is there, a term on the problems' own solutions."""
    sampled, weight = on_policy(loss), solution_weight(loss)
    if sampled is None or not weight:
        return formula(loss)
    return f"{formula(sampled)}; plus {weight:g}·[-log q(s_t)], s the problem's own solution, q = softmax(z_student)"


def _part(loss: PartConfig) -> str:
    if isinstance(loss, SFTConfig):
        return "-log q(y_t), q = softmax(z_student)"
    temperature = f"{loss.temperature:g}"
    where = f"p = softmax(z_teacher/{temperature}), q = softmax(z_student/{temperature})"
    if isinstance(loss, SampledReverseKLConfig):
        return f"{_sampled(loss)}, {where}"
    term, entry = _divergence(loss)
    value = _clipped(loss.clip, term, entry)
    if loss.scale_by_temperature_squared and loss.temperature != 1:
        value = f"{temperature}²·[{value}]"
    return f"{value}{_mixture(loss)}, {where}{_support(loss)}"


def _divergence(loss: AnyDivergenceConfig) -> tuple[str, str]:
    """The divergence, and its v-th entry."""
    texts = {
        "forward_kl": ("KL(p‖q)", "p_v·log(p_v/q_v)"),
        "reverse_kl": ("KL(q‖p)", "q_v·log(q_v/p_v)"),
        "skew_kl": ("KL(p‖m)", "p_v·log(p_v/m_v)"),
        "skew_reverse_kl": ("KL(q‖m)", "q_v·log(q_v/m_v)"),
        "tvd": ("½·Σ_v|p_v - q_v|", "½·|p_v - q_v|"),
    }
    if loss.name in texts:
        return texts[loss.name]
    if isinstance(loss, JSDConfig):
        term = f"w·KL(p‖m) + (1-w)·KL(q‖m) with w = {loss.teacher_weight:g}"
    elif isinstance(loss, AdaptiveKLConfig):
        term = f"a·KL(p‖q) + (1-a)·KL(q‖p), a = sg(Σ_head|p-q| / Σ|p-q|), head = top {loss.head_mass:g} of p"
    else:
        assert isinstance(loss, EntropyAwareConfig)
        term = f"KL(q‖p) + {loss.forward_weight:g}·1[H(p) > {loss.threshold:g}]·KL(p‖q)"
    return term, f"the v-th entry of {term}"


def _mixture(loss: DivergenceConfig) -> str:
    if isinstance(loss, JSDConfig):
        return ", m = w·p + (1-w)·q"
    if isinstance(loss, SkewKLConfig):
        return f", m = {loss.alpha:g}·p + {1 - loss.alpha:g}·q"
    if isinstance(loss, SkewReverseKLConfig):
        return f", m = {1 - loss.alpha:g}·p + {loss.alpha:g}·q"
    return ""


def _support(loss: DivergenceConfig) -> str:
    support = loss.support
    if not isinstance(support, TopKSupport):
        return ""
    sides = "teacher's and the student's" if support.of == "union" else f"{support.of}'s"
    tail = "the rest as one outcome" if support.tail == "bucket" else "renormalised"
    return f", over the {sides} {support.k} likeliest tokens, {tail}"


def _clipped(clip: ClipConfig, term: str, entry: str) -> str:
    if isinstance(clip, NoClip):
        return term
    if isinstance(clip, PerTokenClip):
        return f"min(D, {clip.max:g}), D = {term}"
    if isinstance(clip, PerEntryClip):
        return f"Σ_v min(d_v, {clip.max:g}), d_v = {entry}"
    return f"D·min(1, {clip.max:g}/sg(D)), D = {term}"


def _sampled(loss: SampledReverseKLConfig) -> str:
    later = "y_t+k" if loss.discount else "y_t"
    advantage = f"log p({later}) - log q({later})"
    if loss.discount:
        advantage = f"Σ_k {loss.discount:g}^k·({advantage})"
    if loss.group_baseline:
        advantage = f"{advantage} - mean of the same over the problem's other completions"
    if loss.max_advantage is not None:
        advantage = f"clamp({advantage}, ±{loss.max_advantage:g})"
    ratio = ""
    if loss.importance is not None:
        ratio = f"·sg(min(exp(log q(y_t) - behavior_logp_t), {loss.importance.clip:g}))"
    return f"-A_t{ratio}·log q(y_t), A_t = sg({advantage})"


def _mask(mask: MaskConfig) -> str:
    ends = [f"{name} {count}" for name, count in (("first", mask.first), ("last", mask.last)) if count is not None]
    skipped = {
        "the token after the prompt": mask.skip_boundary,
        "special tokens": mask.skip_special_tokens,
        "white space": mask.skip_whitespace,
    }
    gates = {"H(p)": mask.teacher_entropy, "H(q)": mask.student_entropy}
    parts = [f"the {' and the '.join(ends)} tokens"] if ends else []
    parts += [f"without {what}" for what, skip in skipped.items() if skip]
    parts += [_gate(what, gate) for what, gate in gates.items() if gate is not None]
    return f", where tokens count: {', '.join(parts)}" if parts else ""


def _gate(what: str, gate: EntropyGate) -> str:
    return f"{gate.min:g} <= {what}" if gate.max is None else f"{gate.min:g} <= {what} <= {gate.max:g}"
