"""Checks on the loss: nothing to learn from oneself, something to learn from the teacher."""

from __future__ import annotations

import torch
from torch import Tensor

from opd.align import identity
from opd.config.formula import objective, temperatures
from opd.config.loss import DivergenceConfig, SampledReverseKLConfig
from opd.config.loss_rules import parts_of
from opd.diagnose.diagnosis import CheckResult, Status, shown
from opd.diagnose.probe import MIN_SIGNAL, Probe, kl, log_probs
from opd.loss import Full
from opd.training.batch import realised_tokens

# The least share by which the update must change when the teacher's scores do.
_MIN_CHANGE = 1e-2


def zero_loss(probe: Probe) -> CheckResult:
    """A teacher that is the student gives no loss and no gradient, by the configured loss and the learner's path."""
    own = probe.student_padded_ND
    head = probe.student.head
    values_N, gradient_ND = _loss(probe, Full(own, head), own)
    # The same rows shifted by one: the size of a gradient that is not zero.
    _, yardstick_ND = _loss(probe, Full(own.roll(1, 0), head), own)
    largest = values_N.abs().max().item()
    share = (gradient_ND.norm() / yardstick_ND.norm().clamp(min=1e-12)).item()
    figure = max(largest, share) if largest == largest and share == share else float("nan")
    detail = (
        f"largest |loss| {shown(largest)} nats, gradient {shown(share)} of that against scores of other rows; "
        f"{probe.parts.loss.formula}"
    )
    passed = figure <= 1e-4
    advice = "" if passed else "The loss pulls the student away from itself: do not train with it."
    return CheckResult("zero loss from itself", (9,), figure, 1e-4, "pass" if passed else "fail", detail, advice)


def teacher_signal(probe: Probe) -> CheckResult:
    """The teacher's scores differ from the student's, and the update depends on them.

    The gradient with the teacher's scores is compared with those from the student's own scores and from the teacher's
    rows in another order: a trainer that loses the scores on the way gives the same update for all three.
    """
    student_ND, scores, head = probe.student_scored(), probe.scores, probe.student.head
    signal_N = kl(log_probs(scores.hidden_ND, scores.head), log_probs(student_ND, head))
    signal = signal_N.mean().item()
    _, true_ND = _loss(probe, scores, student_ND)
    _, own_ND = _loss(probe, Full(student_ND, head), student_ND)
    _, shifted_ND = _loss(probe, Full(scores.hidden_ND.roll(1, 0), scores.head), student_ND)
    changes = [_change(true_ND, other_ND) for other_ND in (own_ND, shifted_ND)]
    detail = (
        f"mean KL(teacher‖student) in nats, at least; the update changes by {changes[0]:.0%} with the student's own "
        f"scores in the teacher's place, by {changes[1]:.0%} with the teacher's rows shifted"
    )
    status: Status = "pass"
    advice = ""
    if not signal > MIN_SIGNAL:
        status = "fail"
        advice = (
            "The teacher says what the student says: show it a context (context.name), or choose another teacher. "
            "Do the two prompts differ?"
        )
    elif not (changes[0] > _MIN_CHANGE and changes[1] > _MIN_CHANGE):
        status = "fail"
        advice = (
            "The update does not depend on the teacher's scores: look at loss.clip (is all of it clipped away?) and at "
            "the entropy gates of loss.mask (do they leave any token?)."
        )
    return CheckResult("teacher signal", (16,), signal, MIN_SIGNAL, status, detail, advice)


def loss_settings(probe: Probe) -> CheckResult:
    """Choices that are allowed and known to surprise: the per-entry clip, greedy or truncated rollouts."""
    recipe = probe.parts.recipe
    rollout, loss = recipe.rollout, recipe.loss
    advice: list[str] = []
    parts = [part for _, part in parts_of(recipe)]
    clips = [part.clip.name for part in parts if isinstance(part, DivergenceConfig)]
    if "per_entry" in clips:
        advice.append(
            "loss.clip per_entry can make a divergence negative and push the teacher's favourite token down; it is "
            "kept to reproduce published runs. loss.clip.name=weight bounds the size and keeps the direction."
        )
    if rollout.temperature == 0:
        advice.append("Greedy rollouts visit one path: rollout.temperature=1 shows the student its own mistakes.")
    truncated = rollout.top_p < 1 or rollout.top_k is not None or rollout.min_p > 0
    if truncated and any(isinstance(part, SampledReverseKLConfig) and part.importance is not None for part in parts):
        advice.append("Importance ratios are biased by the mass that top-p, top-k and min-p cut: sample untruncated.")
    clips_shown = f", clip {', '.join(clips)}" if clips else ""
    sampled = f"sampling temperature {rollout.temperature:g}, loss temperature {temperatures(loss)}"
    return CheckResult(
        "loss and sampling",
        (11, 12),
        f"{loss.name}{clips_shown}",
        None,
        "warn" if advice else "pass",
        f"{sampled}; minimises {objective(loss)}",
        " ".join(advice),
    )


def _loss(probe: Probe, teacher: Full, student_ND: Tensor) -> tuple[Tensor, Tensor]:
    """Values [N] and the gradient [N, D] of their sum with respect to the student's hidden states.

    All sampled tokens take part, also those that a mask leaves out: few as they are, it might leave none.
    `autograd.grad` rather than `backward`: nothing is added to the gradient of a trained head.
    """
    hidden_ND = student_ND.detach().clone().requires_grad_()
    alignments = [identity(rollout) for rollout in probe.rollouts]
    # One completion a problem has no others to be compared with: a baseline is zero, as in training.
    baselines = [torch.zeros(len(rollout.completion.ids), device=probe.student.device) for rollout in probe.rollouts]
    tokens = realised_tokens(range(len(probe.rollouts)), probe.rollouts, alignments, probe.student.device, baselines)
    with torch.enable_grad():
        loss = probe.parts.loss.linear(hidden_ND, probe.student.head, teacher, tokens)
        (gradient_ND,) = torch.autograd.grad(loss.values.sum(), hidden_ND)
    return loss.values.detach(), gradient_ND.float()


def _change(a_ND: Tensor, b_ND: Tensor) -> float:
    """|a - b| as a share of the larger of |a| and |b|; 0 when both are zero."""
    size = max(a_ND.norm().item(), b_ND.norm().item())
    return (a_ND - b_ND).norm().item() / size if size > 0 else 0.0
