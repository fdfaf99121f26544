"""What a loss minimises, as a formula; and what each loss needs of a teacher. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from opd.config.loss import (
    ClipConfig,
    ForwardKLConfig,
    JSDConfig,
    LossConfig,
    NoClip,
    PerEntryClip,
    PerTokenClip,
    ReverseKLConfig,
    SampledReverseKLConfig,
)

Scores = Literal["Sampled", "TopK", "Full"]

NEEDS: Mapping[str, frozenset[Scores]] = {
    "forward_kl": frozenset({"Full"}),
    "reverse_kl": frozenset({"Full"}),
    "jsd": frozenset({"Full"}),
    "sampled_reverse_kl": frozenset({"Sampled"}),
}
"""loss.name -> the kinds of teacher scores it can work from; any one of them is enough."""

PROVIDES: Mapping[str, frozenset[Scores]] = {
    "self": frozenset({"Full", "Sampled"}),
    "model": frozenset({"Full", "Sampled"}),
}
"""teacher.name -> the kinds of teacher scores it can give."""


def formula(loss: LossConfig) -> str:
    """The objective in one line: p teacher, q student, y_t the sampled token, sg = no gradient; nats per token.

    The value is averaged over the supervised tokens of the global batch. Gradients flow through q alone.
    """
    temperature = f"{loss.temperature:g}"
    where = f"p = softmax(z_teacher/{temperature}), q = softmax(z_student/{temperature})"
    if isinstance(loss, SampledReverseKLConfig):
        return f"{_sampled(loss)}, {where}"
    term = {"forward_kl": "KL(p‖q)", "reverse_kl": "KL(q‖p)", "jsd": _jsd(loss)}[loss.name]
    entry = {
        "forward_kl": "p_v·log(p_v/q_v)",
        "reverse_kl": "q_v·log(q_v/p_v)",
        "jsd": "the v-th entry of " + _jsd(loss),
    }[loss.name]
    value = _clipped(loss.clip, term, entry)
    if loss.scale_by_temperature_squared and loss.temperature != 1:
        value = f"{temperature}²·[{value}]"
    mixture = ", m = w·p + (1-w)·q" if isinstance(loss, JSDConfig) else ""
    return f"{value}{mixture}, {where}"


def _jsd(loss: ForwardKLConfig | ReverseKLConfig | JSDConfig) -> str:
    if not isinstance(loss, JSDConfig):
        return ""
    return f"w·KL(p‖m) + (1-w)·KL(q‖m) with w = {loss.teacher_weight:g}"


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
    if loss.max_advantage is not None:
        advantage = f"clamp({advantage}, ±{loss.max_advantage:g})"
    ratio = ""
    if loss.importance is not None:
        ratio = f"·sg(min(exp(log q(y_t) - behavior_logp_t), {loss.importance.clip:g}))"
    return f"-A_t{ratio}·log q(y_t), A_t = sg({advantage})"
