"""The baseline of each token: what the problem's other completions achieved, over the batch of all ranks.

M supervised tokens of all ranks, N of this one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from opd.config.loss import LossConfig, MixConfig, SampledReverseKLConfig
from opd.loss import Full, Sampled, token_logp
from opd.loss.sampled import discounted, group_baseline
from opd.training.batch import realised_tokens, rows_on, scored_rows, select
from opd.training.distributed import Ranks
from opd.types import Alignment, Rollout, TeacherScores


def baseline_config(loss: LossConfig) -> SampledReverseKLConfig | None:
    """The part of a loss that subtracts a baseline, if there is one; several mean the same advantage (a rule)."""
    parts = [part.loss for part in loss.parts] if isinstance(loss, MixConfig) else [loss]
    with_baseline = (part for part in parts if isinstance(part, SampledReverseKLConfig) and part.group_baseline)
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

    A problem's completions may be on several ranks, so the advantages are gathered. They are made of what the sampler
    said of the student, log p(y) - (behavior_logp + kept_logp): before the first forward pass nothing else is known,
    and up to rounding and a sampling temperature of its own that is what the loss subtracts the baseline from.
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

    own = advantage_N.split([len(alignment.student_positions) for alignment in alignments])
    by_rank = ranks.gather(
        [(rollout.pair.problem.id, part.tolist()) for rollout, part in zip(rollouts, own, strict=True)]
    )
    gathered = [item for items in by_rank for item in items]
    lengths = [len(advantages) for _, advantages in gathered]
    problems = {problem: number for number, problem in enumerate(sorted({problem for problem, _ in gathered}))}
    baseline_M = group_baseline(
        torch.tensor([value for _, advantages in gathered for value in advantages], dtype=torch.float64),
        torch.arange(len(gathered)).repeat_interleave(torch.tensor(lengths)),
        torch.tensor([problems[problem] for problem, _ in gathered]).repeat_interleave(torch.tensor(lengths)),
    )
    first = sum(len(items) for items in by_rank[: ranks.index])
    return [part.to(log_p_N) for part in baseline_M.split(lengths)[first : first + len(rollouts)]]


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
