"""What a micro-batch is made of: which rows are read, which tokens they predict, what the teacher said of them.

N supervised tokens of the micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from opd.loss import Full, RolloutTokens
from opd.types import Alignment, PromptPair, Rollout, TeacherScores


@dataclass(frozen=True)
class Solution:
    """A problem's own solution as a completion of the student's prompt, its stop token included."""

    pair: PromptPair
    ids: tuple[int, ...]


def select(scores: TeacherScores, rows_N: Tensor) -> TeacherScores:
    """The teacher's scores at some rows."""
    if isinstance(scores, Full):
        return Full(scores.hidden_ND[rows_N], scores.head)
    return type(scores)(*(getattr(scores, name)[rows_N] for name in scores.__dataclass_fields__))


def supervised_rows(group: Sequence[int], rollouts: Sequence[Rollout], alignments: Sequence[Alignment]) -> list[int]:
    """Rows, among all completion tokens of the group, that are supervised."""
    rows: list[int] = []
    start = 0
    for index in group:
        rows.extend(start + position for position in alignments[index].student_positions)
        start += len(rollouts[index].completion.ids)
    return rows


def scored_rows(group: Sequence[int], rollouts: Sequence[Rollout], alignments: Sequence[Alignment]) -> list[int]:
    """Rows of the same tokens among the teacher's scores, which hold all completion tokens of all rollouts."""
    starts = torch.tensor([0, *(len(rollout.completion.ids) for rollout in rollouts)]).cumsum(0).tolist()
    return [starts[index] + position for index in group for position in alignments[index].teacher_positions]


def realised_tokens(
    group: Sequence[int],
    rollouts: Sequence[Rollout],
    alignments: Sequence[Alignment],
    device: torch.device,
    baselines: Sequence[Tensor] | None = None,
) -> RolloutTokens:
    """The sampled tokens at the supervised positions of the group.

    Args:
        group: places in `rollouts`.
        rollouts: all of this rank.
        alignments: of all of them.
        device: where the loss is computed.
        baselines: for each rollout, the baseline of each of its supervised tokens; None without baselines.
    """
    ids: list[int] = []
    behavior: list[float] = []
    sequence: list[int] = []
    for index in group:
        completion = rollouts[index].completion
        for position in alignments[index].student_positions:
            ids.append(completion.ids[position])
            behavior.append(completion.behavior_logp[position])
            sequence.append(index)
    return RolloutTokens(
        ids_N=rows_on(ids, device),
        behavior_logp_N=torch.tensor(behavior, device=device),
        sequence_N=rows_on(sequence, device),
        baseline_N=None if baselines is None else torch.cat([baselines[index] for index in group]),
    )


def rows_on(values: Sequence[int], device: torch.device) -> Tensor:
    """[N] int64 on a device."""
    return torch.tensor(values, dtype=torch.int64, device=device)
