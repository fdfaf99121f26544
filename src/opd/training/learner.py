"""TokenLoss -> one optimizer step.

The gradient is that of one mean over the global batch, whatever the split into micro-batches and ranks: over supervised
tokens, or over completions of each one's mean over its own. Solutions (`sft` of a mix) are a second mean beside it.

An entropy gate decides within the loss, so how many tokens are supervised is known only when all micro-batches are
done. Gradients are linear: they are accumulated for the number that the masks leave, and rescaled once.

N supervised tokens, D hidden.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from opd.config.formula import solution_weight
from opd.config.schema import Recipe
from opd.errors import OpdError
from opd.forward import compute_dtype, micro_batches, pad_right
from opd.loss import Loss, token_logp
from opd.loss.reduce import global_mean, global_sequence_mean, metric_means, metric_sums, tokens_per_sequence
from opd.training.baseline import baseline_config, baselines
from opd.training.batch import Solution, realised_tokens, rows_on, scored_rows, select, supervised_rows
from opd.training.distributed import Ranks
from opd.training.schedule import learning_rate
from opd.training.student import Student
from opd.types import Alignment, Rollout, TeacherScores


@dataclass(frozen=True)
class Update:
    """What one optimizer step did, over all ranks.

    Args:
        loss: what was minimised, in nats; NaN when no token was supervised.
        metrics: means per supervised token. `supervised` is the share of the masks' tokens that entropy gates left,
            `sft` the mean over the tokens of solutions.
        num_supervised_tokens: sampled tokens that counted.
        num_given_tokens: tokens of solutions that counted.
        grad_norm: before clipping.
        learning_rate: of this step.
        skipped: whether the weights stayed as they were.
    """

    loss: float
    metrics: Mapping[str, float]
    num_supervised_tokens: int
    num_given_tokens: int
    grad_norm: float
    learning_rate: float
    skipped: bool


@dataclass(frozen=True)
class _Count:
    """What a mean is over, in the global batch: supervised tokens, and sequences with at least one."""

    tokens: int
    sequences: int

    def of(self, reduction: Literal["token", "sequence"]) -> int:
        return self.tokens if reduction == "token" else self.sequences


@dataclass
class _Sums:
    """Sums over this rank's rows by name, and the problems whose loss was not finite."""

    totals: dict[str, float] = field(default_factory=lambda: defaultdict[str, float](float))
    suspects: list[str] = field(default_factory=list[str])

    def add(self, metrics: Mapping[str, Tensor]) -> None:
        for name, total in metric_sums(metrics).items():
            self.totals[name] += total

    def suspect(self, values_N: Tensor, problems: Sequence[str]) -> None:
        rows: list[int] = (~values_N.isfinite()).nonzero().flatten().tolist()
        self.suspects += [problems[row] for row in rows]


class Learner:
    """The student's trained parameters, their optimizer and the loss.

    Args:
        student: who learns.
        loss: of sampled completions.
        recipe: its `train` and `loss` sections.
        ranks: devices and processes.
    """

    def __init__(self, student: Student, loss: Loss, recipe: Recipe, ranks: Ranks) -> None:
        self._student = student
        self._loss = loss
        self._config = config = recipe.train
        self._reduction: Literal["token", "sequence"] = recipe.loss.reduction
        self._solution_weight = solution_weight(recipe.loss)
        self._baseline = baseline_config(recipe.loss)
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
        self,
        step: int,
        rollouts: Sequence[Rollout],
        alignments: Sequence[Alignment],
        scores: TeacherScores,
        solutions: Sequence[Solution] = (),
    ) -> Update:
        """One optimizer step on the rollouts of this rank.

        Args:
            step: from 1; sets the learning rate and the dropout masks.
            rollouts: this rank's samples.
            alignments: which completion tokens of each are supervised.
            scores: the teacher's, one row a completion token, rollout by rollout.
            solutions: this rank's share of the step's solutions, where the loss has a part for them.
        """
        rate = learning_rate(self._config, step)
        masked_in = self._count([len(alignment.student_positions) for alignment in alignments])
        if masked_in.tokens == 0:
            return _nothing_supervised(rate, {})
        self._student.model.train()
        sums = self._learn_samples(rollouts, alignments, scores, masked_in)
        totals = self._over_ranks(sums)
        counted = self._after_gates(totals, masked_in)
        if counted.tokens == 0:
            self.optimizer.zero_grad(set_to_none=True)
            return _nothing_supervised(rate, {"supervised": 0.0})
        loss = totals.pop("loss") / counted.of(self._reduction)
        means = metric_means(totals, counted.tokens)
        if "supervised" in means:
            means["supervised"] = counted.tokens / masked_in.tokens
        given = _Count(0, 0)
        if self._solution_weight:
            given = self._count([len(solution.ids) for solution in solutions])
            learned = self._learn_solutions(solutions, given, rollouts[0])
            sums.suspects += learned.suspects
            totals = self._over_ranks(learned)
            loss += self._solution_weight * totals["loss"] / given.of(self._reduction)
            means["sft"] = totals["sft"] / given.tokens
            means["unclipped"] += self._solution_weight * means["sft"]
        grad_norm = self._step(rate, loss, sums.suspects or [rollout.pair.problem.id for rollout in rollouts])
        skipped = not (math.isfinite(grad_norm) and math.isfinite(loss))
        return Update(loss, means, counted.tokens, given.tokens, grad_norm, rate, skipped)

    # ---- gradients -------------------------------------------------------------------------------------------------

    def _learn_samples(
        self, rollouts: Sequence[Rollout], alignments: Sequence[Alignment], scores: TeacherScores, count: _Count
    ) -> _Sums:
        """Gradients of all micro-batches of samples, of the mean over `count`."""
        device = self._student.device
        subtracted = None
        if self._baseline is not None:
            subtracted = baselines(self._baseline, rollouts, alignments, scores, self._ranks)
        lengths = [len(rollout.pair.student_ids) + len(rollout.completion.ids) - 1 for rollout in rollouts]
        groups = micro_batches(lengths, self._config.micro_batch_tokens)
        sums = _Sums()
        for number, group in enumerate(groups):
            rows = supervised_rows(group, rollouts, alignments)
            # Solutions come after, and then their last micro-batch exchanges the gradients of both.
            last = number + 1 == len(groups) and not self._solution_weight
            with self._ranks.accumulate(self._module, last=last):
                pairs = [(rollouts[i].pair.student_ids, rollouts[i].completion.ids) for i in group]
                hidden_ND = self._hidden(pairs, rows)
                realised = realised_tokens(group, rollouts, alignments, device, subtracted)
                teacher = select(scores, rows_on(scored_rows(group, rollouts, alignments), device))
                loss = self._loss.linear(hidden_ND, self._student.head, teacher, realised)
                assert realised.sequence_N is not None
                supervised_N = loss.metrics.get("supervised")
                share, terms_N = self._share(loss.values, realised.sequence_N, supervised_N, count)
                share.backward()
            sums.suspect(
                loss.values, [rollouts[i].pair.problem.id for i in group for _ in alignments[i].student_positions]
            )
            sums.add({"loss": terms_N, **loss.metrics})
            if supervised_N is not None:
                sums.totals["num_sequences"] += realised.sequence_N[supervised_N > 0].unique().numel()
        return sums

    def _learn_solutions(self, solutions: Sequence[Solution], count: _Count, stand_in: Rollout) -> _Sums:
        """Gradients of the mean cross-entropy on solutions, added to those of samples.

        A rank without a solution takes part in the exchange of gradients all the same, with no row of `stand_in`.
        """
        shown = solutions or [Solution(stand_in.pair, stand_in.completion.ids)]
        device = self._student.device
        lengths = [len(solution.pair.student_ids) + len(solution.ids) - 1 for solution in shown]
        groups = micro_batches(lengths, self._config.micro_batch_tokens)
        sums = _Sums()
        for number, group in enumerate(groups):
            owners = [i for i in group for _ in shown[i].ids] if solutions else []
            ids = [token for i in group for token in shown[i].ids] if solutions else []
            with self._ranks.accumulate(self._module, last=number + 1 == len(groups)):
                hidden_ND = self._hidden([(shown[i].pair.student_ids, shown[i].ids) for i in group], range(len(ids)))
                values_N = -token_logp(hidden_ND, self._student.head, rows_on(ids, device))
                share, terms_N = self._share(values_N, rows_on(owners, device), None, count)
                (self._solution_weight * share).backward()
            sums.suspect(values_N, [shown[i].pair.problem.id for i in owners])
            sums.add({"loss": terms_N, "sft": values_N.detach()})
        return sums

    def _share(
        self, values_N: Tensor, sequence_N: Tensor, supervised_N: Tensor | None, count: _Count
    ) -> tuple[Tensor, Tensor]:
        """This micro-batch's share of the mean, to call `backward` on; and [N] terms: their sum over `count` is it.

        DDP averages gradients over ranks, and the mean is over the global batch already: `num_ranks` undoes that.
        """
        num_ranks = self._ranks.num_ranks
        if self._reduction == "token":
            share, terms_N = global_mean(values_N, count.tokens, num_ranks=num_ranks), values_N
        else:
            sizes_N = tokens_per_sequence(sequence_N, supervised_N)
            share = global_sequence_mean(values_N, sizes_N, count.sequences, num_ranks=num_ranks)
            terms_N = values_N / sizes_N
        assert share is not None
        return share, terms_N.detach()

    def _hidden(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]], rows: Sequence[int]) -> Tensor:
        """[N, D] hidden states at some rows of all completion tokens of (prompt, completion) pairs."""
        student = self._student
        ids_BT, rows_N = pad_right(
            [prompt for prompt, _ in pairs],
            [completion for _, completion in pairs],
            student.loaded.pad_id,
            student.device,
        )
        with compute_dtype(student.device, student.dtype):
            return self._module(ids_BT, rows_N[rows_on(rows, student.device)])

    # ---- over ranks ------------------------------------------------------------------------------------------------

    def _count(self, num_tokens: Sequence[int]) -> _Count:
        """Of the global batch, from the number of supervised tokens of each sequence of this rank."""
        tokens, sequences = self._ranks.sum([sum(num_tokens), sum(number > 0 for number in num_tokens)])
        return _Count(int(tokens), int(sequences))

    def _after_gates(self, totals: dict[str, float], masked_in: _Count) -> _Count:
        """What the entropy gates left, with gradients rescaled to the mean over it; `masked_in` without a gate."""
        if "supervised" not in totals:
            return masked_in
        counted = _Count(round(totals["supervised"]), round(totals.pop("num_sequences")))
        if counted.tokens and counted != masked_in:
            factor = masked_in.of(self._reduction) / counted.of(self._reduction)
            for parameter in self.parameters.values():
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)
        return counted

    def _over_ranks(self, sums: _Sums) -> dict[str, float]:
        names = sorted(sums.totals)
        return dict(zip(names, self._ranks.sum([sums.totals[name] for name in names]), strict=True))

    # ---- the step --------------------------------------------------------------------------------------------------

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


def _nothing_supervised(rate: float, metrics: Mapping[str, float]) -> Update:
    """A step without a token to learn from: there is no mean, and the weights stay as they are."""
    return Update(math.nan, metrics, 0, 0, math.nan, rate, skipped=True)
