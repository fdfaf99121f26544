"""The baseline of each token: what the problem's other completions achieved, over the batch of all ranks.

N supervised tokens and S completions of this rank, M completions of all ranks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from opd.config.formula import losses_of
from opd.config.loss import LossConfig, SampledReverseKLConfig
from opd.loss import Full, Sampled, token_logp
from opd.loss.sampled import discounted, leave_one_out
from opd.training.batch import realised_tokens, rows_on, scored_rows, select
from opd.training.distributed import Ranks
from opd.types import Alignment, Rollout, TeacherScores


def baseline_config(loss: LossConfig) -> SampledReverseKLConfig | None:
    """The part of a loss that subtracts a baseline, if there is one; several mean the same advantage (a rule)."""
    with_baseline = (
        part for part in losses_of(loss) if isinstance(part, SampledReverseKLConfig) and part.group_baseline
    )
    return next(with_baseline, None)


@torch.no_grad()
def baselines(
    config: SampledReverseKLConfig,
    rollouts: Sequence[Rollout],
    alignments: Sequence[Alignment],
    scores: TeacherScores,
    ranks: Ranks,
) -> list[Tensor]:
    """For each rollout of this rank, nats to subtract from the advantage of each of its supervised tokens.

    A problem's completions may be on several ranks, so each one's sum is gathered. The advantages are made of what the
    sampler said of the student, log p(y) - (behavior_logp + kept_logp): before the first forward pass nothing else is
    known, and up to rounding and a sampling temperature of its own that is what the loss subtracts the baseline from.
    """
    device = ranks.device
    everything = range(len(rollouts))
    tokens = realised_tokens(everything, rollouts, alignments, device)
    teacher = select(scores, rows_on(scored_rows(everything, rollouts, alignments), device))
    log_p_N = _teacher_logp(teacher, tokens.ids_N, config.temperature)
    advantage_N = log_p_N - _sampler_logp(rollouts, alignments, log_p_N)
    if config.discount > 0:
        assert tokens.sequence_N is not None
        advantage_N = discounted(advantage_N, tokens.sequence_N, config.discount)

    lengths = [len(alignment.student_positions) for alignment in alignments]
    own_S2 = torch.tensor(
        [[part.double().sum().item(), len(part)] for part in advantage_N.split(lengths)],
        dtype=torch.float64,
        device=device,
    )
    problem_S = torch.tensor([_number(rollout.pair.problem.id) for rollout in rollouts], device=device)
    same_SM = problem_S[:, None] == ranks.gather(problem_S)
    # Where, not a product: 0 times a NaN of another problem would be NaN.
    group_S2 = torch.where(same_SM[..., None], ranks.gather(own_S2), 0.0).sum(1)
    baseline_S = leave_one_out(group_S2, own_S2).to(log_p_N)
    return [value.expand(length) for value, length in zip(baseline_S, lengths, strict=True)]


def _number(problem_id: str) -> int:
    """The same number for the same problem on every rank."""
    return int.from_bytes(hashlib.sha256(problem_id.encode()).digest()[:8], "big") >> 1


def _teacher_logp(teacher: TeacherScores, ids_N: Tensor, temperature: float) -> Tensor:
    if isinstance(teacher, Sampled):
        return teacher.logp_N
    assert isinstance(teacher, Full), "checked before any model was loaded"
    return token_logp(teacher.hidden_ND, teacher.head, ids_N, temperature)


def _sampler_logp(rollouts: Sequence[Rollout], alignments: Sequence[Alignment], like: Tensor) -> Tensor:
    """[N] nats: the untruncated log-probability of each supervised token at the sampling temperature."""
    values = [
        rollout.completion.behavior_logp[position] + rollout.completion.kept_logp[position]
        for rollout, alignment in zip(rollouts, alignments, strict=True)
        for position in alignment.student_positions
    ]
    return torch.tensor(values, dtype=like.dtype, device=like.device)
