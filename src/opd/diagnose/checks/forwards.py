"""Checks that two ways to compute the same distribution agree.

Padded and alone, sampler and learner, kernel and model, teacher before and after the student moves.
Tensor suffixes: B sequences, T tokens, N completion tokens of all samples, V vocabulary, D hidden size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from opd import forward
from opd.diagnose.diagnosis import CheckResult, Status, shown
from opd.diagnose.probe import MIN_SIGNAL, Probe, alone, kl, log_probs
from opd.loss import token_logp
from opd.types import Full, Rollout

# A disturbance above this share of what is to be learned is worth a warning.
_WORRYING_SHARE = 0.05


def geometry(probe: Probe) -> CheckResult:
    """Padding moves no distribution: alone, padded on the right (learner), padded on the left (sampler).

    A pad gap of 200 tokens between prompt and completion shifts Qwen3-1.7B by KL 0.06; left padding leaves 0.0004.
    """
    head = probe.student.head
    alone_NV = log_probs(probe.student_alone_ND, head)
    right_N = kl(alone_NV, log_probs(probe.student_padded_ND, head))
    left_N = kl(alone_NV, log_probs(_left_padded(probe), head))
    signal = kl(log_probs(probe.scores.hidden_ND, probe.scores.head), alone_NV).mean().item()
    largest = torch.cat([right_N, left_N]).max().item()
    mean = max(right_N.mean().item(), left_N.mean().item())
    # Without a signal there is no share of it: that is another check's finding.
    share = mean / signal if signal > MIN_SIGNAL else 0.0
    detail = (
        f"largest KL in nats, alone against padded right {shown(right_N.max().item())} and left "
        f"{shown(left_N.max().item())}; mean {shown(mean)}, {share:.1%} of the teacher-student KL {shown(signal)}"
    )
    limits = probe.tolerances
    status: Status = "pass" if limits.admit_kl(right_N) and limits.admit_kl(left_N) else "fail"
    advice = ""
    if status == "fail":
        advice = (
            "Positions are not contiguous from prompt to completion, or attention sees padding: try another "
            "student.attention, and report the model's architecture."
        )
    elif share > _WORRYING_SHARE:
        status, advice = (
            "warn",
            "Rounding is a visible share of the signal: compute in float32 (student.dtype=float32).",
        )
    return CheckResult("geometry", (2,), largest, limits.kl, status, detail, advice)


def teacher_rows(probe: Probe) -> CheckResult:
    """The teacher's scores are those of its own prompt and of these tokens, row by row.

    Compared with one unpadded forward for each sequence. Scores that are off by one position, of another prompt or of
    other weights differ by whole nats.
    """
    hidden_ND = probe.teacher_alone()
    if hidden_ND is None:
        return CheckResult(
            "teacher scores its rows",
            (2, 15),
            "not computed",
            None,
            "warn",
            f"{type(probe.parts.teacher).__name__} does not run in this process, so its scores have no local twin",
            "Compare it once with the same model loaded locally (teacher.name=model).",
        )
    kl_N = kl(log_probs(hidden_ND, probe.scores.head), log_probs(probe.scores.hidden_ND, probe.scores.head))
    detail = "largest KL in nats between the teacher's scores and one unpadded forward for each sequence"
    limits = probe.tolerances
    status: Status = "pass" if limits.admit_kl(kl_N) else "fail"
    advice = ""
    if status == "fail":
        advice = "Teacher.score reads other positions, another prompt or other weights than it should."
    return CheckResult("teacher scores its rows", (2, 15), kl_N.max().item(), limits.kl, status, detail, advice)


@torch.no_grad()
def head_kernel(probe: Probe) -> CheckResult:
    """Hidden states times head give the model's own logits: scale, softcap, bias and padded rows included."""
    device = probe.student.device
    rollout = probe.rollouts[0]
    prompt = rollout.pair.student_ids[-32:]  # any tokens will do, and the model's own logits exist for all of them
    with forward.eval_mode(probe.student.model), probe.student_dtype():
        hidden_ND = alone(forward.body_of(probe.student.model), prompt, rollout.completion.ids, device)
        ids_BT = torch.tensor([[*prompt, *rollout.completion.ids]], device=device)
        own_NV: Tensor = probe.student.model(input_ids=ids_BT, use_cache=False).logits[0, len(prompt) - 1 : -1]
    kernel_NV = log_probs(hidden_ND, probe.student.head)
    own_NV = own_NV[:, : probe.student.head.num_tokens]
    kl_N = kl(own_NV.float().log_softmax(-1), kernel_NV)
    limits = probe.tolerances
    status: Status = "pass" if limits.admit_kl(kl_N) else "fail"
    advice = ""
    if status == "fail":
        advice = "The output layer does more than one product: this architecture is not supported yet."
    detail = "largest KL in nats between the model's logits and hidden states x head"
    return CheckResult("head kernel = model", (), kl_N.max().item(), limits.kl, status, detail, advice)


def sampler_matches_learner(probe: Probe) -> CheckResult:
    """The sampler's log-probabilities of its own samples are the learner's, at the start and after the weights moved.

    The second half is the canary of weight sync: at the start an adapter changes nothing, so a sampler that ignores it
    would pass.
    """
    limits = probe.tolerances
    start_N = (_sampler_logp(probe.rollouts) - probe.learner_logp(probe.rollouts, probe.student_padded_ND)).abs()
    with probe.student.using(probe.moved_weights):
        rollouts = probe.sample()
        moved_logp_N = probe.learner_logp(rollouts, probe.learner_hidden(rollouts))
    moved_N = (_sampler_logp(rollouts) - moved_logp_N).abs()
    # The same tokens under the student's own weights: what a sampler that missed the move would have reported.
    canary_N = (moved_logp_N - probe.learner_logp(rollouts, probe.learner_hidden(rollouts))).abs()

    difference_N = torch.cat([start_N, moved_N])
    detail = (
        f"largest difference in nats on sampled tokens, at the start {shown(start_N.max().item())}, with moved "
        f"weights {shown(moved_N.max().item())}; mean {shown(difference_N.mean().item())}, at most "
        f"{shown(limits.mean_logp)}; a sampler that missed the move would be off by {shown(canary_N.mean().item())}"
    )
    status: Status = "pass"
    advice = ""
    if not (limits.admit_logp(start_N) and limits.admit_logp(moved_N)):
        status = "fail"
        advice = (
            "The sampler does not sample from the weights that learn: look at rollout.merge_adapter, dropout and the "
            "temperature."
        )
    elif limits.admit_logp(canary_N):
        status, advice = "warn", "The weights moved too little to prove that the sampler follows them."
    largest = difference_N.max().item()
    return CheckResult("sampler = learner", (18,), largest, limits.logp, status, detail, advice)


def teacher_fixed(probe: Probe) -> CheckResult:
    """A fixed teacher says the same to the bit when the student's weights move; a live one does not."""
    teacher = probe.parts.recipe.teacher
    kind = teacher.weights.name if teacher.name == "self" else "model"
    before_N = _teacher_logp(probe, probe.scores)
    with probe.student.using(probe.moved_weights):
        inside_N = _teacher_logp(probe, probe.score(probe.rollouts))
    equal = torch.equal(before_N, inside_N)
    moved = (before_N - inside_N).abs().max().item()
    detail = f"`{kind}` teacher, largest change in nats of its log-probabilities of the samples when the student moves"
    if kind == "live":
        status: Status = "fail" if equal else "pass"
        advice = "A live teacher must follow the student, and does not." if equal else ""
        return CheckResult("teacher follows", (13,), moved, None, status, detail + "; it is meant to move", advice)
    if kind == "ema":
        detail += "; it moves once a step, by its average alone"
    advice = "" if equal else "The teacher shares weights that train: is the adapter off while it scores?"
    return CheckResult("teacher fixed", (13, 14), moved, 0.0, "pass" if equal else "fail", detail, advice)


@torch.no_grad()
def _left_padded(probe: Probe) -> Tensor:
    """Hidden states [N, D] with padding on the left, a mask and explicit positions, as in the sampler's prefill."""
    student = probe.student
    sequences = [(*r.pair.student_ids, *r.completion.ids) for r in probe.rollouts]
    length = max(map(len, sequences)) + 64
    ids_BT = torch.full((len(sequences), length), student.loaded.pad_id)
    mask_BT = torch.zeros_like(ids_BT)
    for row, sequence in enumerate(sequences):
        ids_BT[row, length - len(sequence) :] = torch.tensor(sequence)
        mask_BT[row, length - len(sequence) :] = 1
    positions_BT = (mask_BT.cumsum(1) - 1).clamp(min=0)
    with forward.eval_mode(student.model), probe.student_dtype():
        hidden_BTD: Tensor = forward.body_of(student.model)(
            input_ids=ids_BT.to(student.device),
            attention_mask=mask_BT.to(student.device),
            position_ids=positions_BT.to(student.device),
            use_cache=False,
        ).last_hidden_state
    return torch.cat([row[-len(r.completion.ids) - 1 : -1] for row, r in zip(hidden_BTD, probe.rollouts, strict=True)])


def _sampler_logp(rollouts: list[Rollout]) -> Tensor:
    """behavior_logp + kept_logp [N]: the untruncated log-probability at the sampling temperature, by the sampler."""
    pairs = [pair for r in rollouts for pair in zip(r.completion.behavior_logp, r.completion.kept_logp, strict=True)]
    return torch.tensor([behavior + kept for behavior, kept in pairs])


@torch.no_grad()
def _teacher_logp(probe: Probe, scores: Full) -> Tensor:
    """The teacher's log-probability [N] of each sampled token."""
    return token_logp(scores.hidden_ND, scores.head, probe.ids_N.to(scores.hidden_ND.device)).clone()
