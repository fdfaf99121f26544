"""TokenLoss -> one optimizer step.

The gradient is that of (sum of token losses) / (supervised tokens of the global batch), whatever the split into
micro-batches and ranks. N supervised tokens, D hidden.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from opd.config.schema import TrainConfig
from opd.errors import OpdError
from opd.forward import compute_dtype, micro_batches, pad_right
from opd.loss import Full, Loss, RolloutTokens
from opd.loss.reduce import global_mean, metric_means, metric_sums
from opd.training.distributed import Ranks
from opd.training.schedule import learning_rate
from opd.training.student import Student
from opd.types import Alignment, Rollout, TeacherScores


@dataclass(frozen=True)
class Update:
    """What one optimizer step did, over all ranks; `loss` in nats per supervised token, NaN when there was none."""

    loss: float
    metrics: Mapping[str, float]
    num_supervised_tokens: int
    grad_norm: float
    learning_rate: float
    skipped: bool


class Learner:
    """The student's trained parameters, their optimizer and the loss."""

    def __init__(self, student: Student, loss: Loss, config: TrainConfig, ranks: Ranks) -> None:
        self._student = student
        self._loss = loss
        self._config = config
        self._ranks = ranks
        self._module = ranks.prepare(student.module)
        self.parameters = student.trained()
        self.optimizer = torch.optim.AdamW(
            list(self.parameters.values()),
            lr=config.learning_rate,
            betas=config.betas,
            eps=config.eps,
            weight_decay=config.weight_decay,
        )

    def update(
        self, step: int, rollouts: Sequence[Rollout], alignments: Sequence[Alignment], scores: TeacherScores
    ) -> Update:
        """One optimizer step on the rollouts of this rank.

        Args:
            step: from 1; sets the learning rate and the dropout masks.
            rollouts: this rank's samples.
            alignments: which completion tokens of each are supervised.
            scores: the teacher's, one row a completion token, rollout by rollout.
        """
        rate = learning_rate(self._config, step)
        local = sum(len(alignment.student_positions) for alignment in alignments)
        num_tokens = int(self._ranks.sum([local])[0])
        if num_tokens == 0:
            return Update(math.nan, {}, 0, math.nan, rate, skipped=True)
        sums, suspects = self._backward(rollouts, alignments, scores, num_tokens)
        names = sorted(sums)
        totals = dict(zip(names, self._ranks.sum([sums[name] for name in names]), strict=True))
        means = metric_means(totals, num_tokens)
        grad_norm = self._step(rate, means["loss"], suspects or [rollout.pair.problem.id for rollout in rollouts])
        skipped = not (math.isfinite(grad_norm) and math.isfinite(means["loss"]))
        return Update(means.pop("loss"), means, num_tokens, grad_norm, rate, skipped)

    def _backward(
        self, rollouts: Sequence[Rollout], alignments: Sequence[Alignment], scores: TeacherScores, num_tokens: int
    ) -> tuple[dict[str, float], list[str]]:
        """Gradients of all micro-batches.

        Returns sums over this rank's supervised tokens by metric name, and the problems whose loss was not finite.
        """
        lengths = [len(rollout.pair.student_ids) + len(rollout.completion.ids) - 1 for rollout in rollouts]
        groups = micro_batches(lengths, self._config.micro_batch_tokens)
        starts = torch.tensor([0, *(len(rollout.completion.ids) for rollout in rollouts)]).cumsum(0).tolist()
        sums: dict[str, float] = defaultdict(float)
        suspects: list[str] = []
        self._student.model.train()
        for number, group in enumerate(groups):
            rows = supervised_rows(group, rollouts, alignments)
            scored = [starts[i] + position for i in group for position in alignments[i].teacher_positions]
            with self._ranks.accumulate(self._module, last=number + 1 == len(groups)):
                hidden_ND = self._hidden([rollouts[i] for i in group], rows)
                realised = realised_tokens(group, rollouts, alignments, self._student.device)
                teacher = select(scores, _rows(scored, self._student.device))
                loss = self._loss.linear(hidden_ND, self._student.head, teacher, realised)
                share = global_mean(loss.values, num_tokens)
                assert share is not None
                # DDP averages gradients over ranks; the share is already divided by the tokens of the global batch.
                (share * self._ranks.num_ranks).backward()
            values_N = loss.values.detach()
            owners = [i for i in group for _ in alignments[i].student_positions]
            for row in (~values_N.isfinite()).nonzero().flatten().tolist():
                suspects.append(rollouts[owners[row]].pair.problem.id)
            for name, total in metric_sums({"loss": values_N, **loss.metrics}).items():
                sums[name] += total
        return sums, suspects

    def _hidden(self, rollouts: Sequence[Rollout], rows: list[int]) -> Tensor:
        student = self._student
        ids_BT, rows_N = pad_right(
            [rollout.pair.student_ids for rollout in rollouts],
            [rollout.completion.ids for rollout in rollouts],
            student.loaded.pad_id,
            student.device,
        )
        with compute_dtype(student.device, student.dtype):
            return self._module(ids_BT, rows_N[_rows(rows, student.device)])

    def _step(self, rate: float, loss: float, suspects: Sequence[str]) -> float:
        parameters = list(self.parameters.values())
        max_norm = self._config.max_grad_norm if self._config.max_grad_norm is not None else math.inf
        grad_norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm).item()
        if math.isfinite(grad_norm) and math.isfinite(loss):
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            self.optimizer.step()
        elif self._config.on_nonfinite == "stop":
            raise OpdError(
                f"The update is not finite: loss {loss}, gradient norm {grad_norm}.",
                why="Problems to look at: " + ", ".join(sorted(set(suspects))),
                fix="Lower train.learning_rate, student.dtype=float32, or train.on_nonfinite=skip.",
            )
        self.optimizer.zero_grad(set_to_none=True)
        return grad_norm


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


def realised_tokens(
    group: Sequence[int], rollouts: Sequence[Rollout], alignments: Sequence[Alignment], device: torch.device
) -> RolloutTokens:
    """The sampled tokens at the supervised positions of the group."""
    ids: list[int] = []
    behavior: list[float] = []
    sequence: list[int] = []
    for index in group:
        completion = rollouts[index].completion
        for position in alignments[index].student_positions:
            ids.append(completion.ids[position])
            behavior.append(completion.behavior_logp[position])
            sequence.append(index)
    return RolloutTokens(_rows(ids, device), torch.tensor(behavior, device=device), _rows(sequence, device))


def _rows(values: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=device)
