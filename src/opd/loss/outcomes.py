"""What a divergence is summed over: the whole vocabulary, or the likeliest tokens and what is left of it.

Both say how log-probabilities of the outcomes come from logits, and how a gradient in the outcomes goes back to them.

Tensor suffixes: N rows of a chunk, V vocabulary, v a tile of it, K outcomes of a top-k support.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import cast

import torch
from jaxtyping import Float, Int
from torch import Tensor

from opd.config.loss import TopKSupport
from opd.loss.chunked import Chunk
from opd.loss.divergence import Pair
from opd.loss.logits import LOG_ZERO, Logits, Scratch, put, row_square
from opd.types import Full, TopK

Column = Float[Tensor, "N 1"]

# The teacher's head is looked for among this many of its likeliest tokens, and then among eight times as many.
_HEAD_TOKENS = 64


@dataclass(frozen=True)
class Slopes:
    """∂d_v/∂log q_v of the outcomes of one pair, with and without the bound on entries; the same tensor without one."""

    bounded: Tensor
    unbounded: Tensor


@dataclass(frozen=True)
class Sums:
    """Over all outcomes of a row, [N, 1]: Σ slope with and without the bound, and what scales the gradient, if any."""

    bounded: Column
    unbounded: Column
    factor: Column | None


class GradientNorms:
    """Norm of each row's gradient with respect to the logits before the clip, and after a bound on entries, [N, 1]."""

    def __init__(self, like: Column) -> None:
        self._before, self._after = torch.zeros_like(like), torch.zeros_like(like)

    def add(self, before: Tensor, after: Tensor) -> None:
        """Entries of both gradients, [N, any]; the same tensor where nothing was bounded."""
        squares = row_square(before)
        self._before += squares
        same = after is before
        self._after += squares if same else row_square(after)

    def metrics(self, factor: Column) -> dict[str, Tensor]:
        """`grad_norm_unclipped`, and the share of it that the clip removed."""
        before, after = self._before.sqrt(), self._after.sqrt() * factor
        # Nothing was removed from a gradient of zero.
        removed = torch.where(before > 0, 1 - after / before, 0.0)
        return {"grad_norm_unclipped": before[:, 0], "grad_removed_frac": removed[:, 0]}


SlopesOf = Callable[[Pair], Slopes]


class FullOutcomes:
    """Every token of the vocabulary."""

    def __init__(self, chunk: Chunk, teacher: Full, temperature: float) -> None:
        self._student, self._teacher, self._temperature = chunk.student, chunk.teacher(teacher), temperature
        self._scratch = chunk.student.scratch
        self.entropy_student = self._student.stats(temperature).entropy
        self.entropy_teacher = self._teacher.stats(temperature).entropy
        agreement_N = _agreement(self._student, self._teacher.likeliest(temperature), temperature)
        self.metrics = {"teacher_top1_agreement": agreement_N}

    def pairs(self) -> Iterator[Pair]:
        """All tokens, tile by tile."""
        for tile in self._student.tiles():
            yield self._pair(tile)

    def _pair(self, tile: slice) -> Pair:
        log_q = self._student.log_prob(tile, self._temperature, "log_q")
        return Pair(log_q, self._teacher.log_prob(tile, self._temperature, "log_p"), self._scratch)

    def teacher_head(self, mass: float) -> Column:
        """Log-probability of the least likely of the fewest tokens whose mass reaches `mass`."""
        return _head(lambda k: self._teacher.log_prob_at(self._teacher.top(k), self._temperature), mass)

    def gradient(
        self, slopes_of: SlopesOf, sums: Sums, norms: GradientNorms | None
    ) -> Callable[[slice], Float[Tensor, "N v"]]:
        """The gradient with respect to the student's logits, tile by tile."""

        def tile_gradient(tile: slice) -> Tensor:
            pair = self._pair(tile)
            q = pair.q
            slopes = slopes_of(pair)
            before = None
            if norms is not None and slopes.unbounded is not slopes.bounded:
                before = slopes.unbounded.addcmul_(q, sums.unbounded, value=-1).div_(self._temperature)
            grad = slopes.bounded.addcmul_(q, sums.bounded, value=-1)
            grad = grad if self._temperature == 1.0 else grad.div_(self._temperature)
            if norms is not None:
                norms.add(grad if before is None else before, grad)
            return grad if sums.factor is None else grad.mul_(sums.factor)

        return tile_gradient


class TopKOutcomes:
    """The likeliest tokens of each row; and, with `tail: bucket`, one more outcome that holds the remaining mass."""

    def __init__(self, chunk: Chunk, teacher: Full | TopK, support: TopKSupport, temperature: float) -> None:
        self._student, self._temperature = chunk.student, temperature
        self._scratch = chunk.student.scratch
        student = chunk.student
        scores = chunk.teacher(teacher) if isinstance(teacher, Full) else None
        self._ids_NK, top_p = _support(student, scores, teacher, support, chunk.rows)
        stats = student.stats(temperature)
        log_q = student.log_prob_at(self._ids_NK, temperature)
        log_p = top_p if scores is None else scores.log_prob_at(self._ids_NK, temperature)
        assert log_p is not None
        twice_NK = _repeats(self._ids_NK) if support.of == "union" else None
        if twice_NK is not None:
            log_q, log_p = log_q.masked_fill(twice_NK, LOG_ZERO), log_p.masked_fill(twice_NK, LOG_ZERO)
        self.entropy_student = stats.entropy
        likeliest_N1 = (
            self._ids_NK.gather(-1, log_p.argmax(-1, keepdim=True)) if scores is None else scores.likeliest(temperature)
        )
        self.metrics = {
            "kept_mass_student": log_q.exp().sum(-1),
            "kept_mass_teacher": log_p.exp().sum(-1),
            "teacher_top1_agreement": _agreement(student, likeliest_N1, temperature),
        }
        self._rest: Tensor | None = None
        if support.tail == "bucket":
            self._rest = student.rest(self._ids_NK, temperature)
            is_all = support.k == student.num_tokens
            rest_p = _tail(log_p, is_all) if scores is None else scores.rest(self._ids_NK, temperature)
            log_q = torch.cat([log_q, self._rest], -1)
            log_p = torch.cat([log_p, rest_p], -1)
        else:
            log_q, log_p = log_q.log_softmax(-1), log_p.log_softmax(-1)
        self._log_q, self._log_p = log_q.clamp(min=LOG_ZERO), log_p.clamp(min=LOG_ZERO)
        # Outcomes may be more than a tile holds, so their buffers are their own.
        num_rows, width = self._log_q.shape
        self._outcome_scratch = Scratch(num_rows, width, self._log_q.dtype, self._log_q.device)
        if scores is None:
            # Of a teacher that gives no more than its likeliest tokens, the entropy over the outcomes is all there is.
            self.entropy_teacher = -(self._log_p.exp() * self._log_p).sum(-1, keepdim=True)
        else:
            self.entropy_teacher = scores.stats(temperature).entropy

    def pairs(self) -> Iterator[Pair]:
        """All outcomes at once, in tensors of their own."""
        width = self._log_q.shape[1]
        is_bucket = None
        if self._rest is not None:
            is_bucket = torch.arange(width, device=self._log_q.device) == width - 1
        yield Pair(self._log_q.clone(), self._log_p.clone(), self._outcome_scratch, is_bucket)

    def teacher_head(self, mass: float) -> Column:
        """As for the whole vocabulary, among the tokens of the support."""
        tokens = self._log_p if self._rest is None else self._log_p[:, :-1]
        return _head(lambda k: tokens.topk(min(k, tokens.shape[1]), dim=-1).values, mass, tokens.shape[1])

    def gradient(
        self, slopes_of: SlopesOf, sums: Sums, norms: GradientNorms | None
    ) -> Callable[[slice], Float[Tensor, "N v"]]:
        """The gradient with respect to the student's logits, tile by tile.

        A token of the support has slope_j − q_j Σ slope; any other shares in the bucket, by the softmax over the rest:
        a_j (slope_rest − q_rest Σ slope) with a_j = q_j / q_rest. Without a bucket it has none.
        """
        (pair,) = self.pairs()
        q = pair.q
        slopes = slopes_of(pair)
        after = (slopes.bounded - q * sums.bounded) / self._temperature
        before = after
        if slopes.unbounded is not slopes.bounded:
            before = (slopes.unbounded - q * sums.unbounded) / self._temperature
        if norms is not None:
            self._add_norms(norms, before, after)
        after = after if sums.factor is None else after * sums.factor
        tokens, bucket = (after, None) if self._rest is None else (after[:, :-1].contiguous(), after[:, -1:])

        def tile_gradient(tile: slice) -> Tensor:
            if bucket is None:
                grad = self._scratch.take("grad", self._student.num_rows, tile.stop - tile.start).zero_()
            else:
                grad = self._shares(tile, "grad").mul_(bucket)
                put(grad, self._scratch, "grad", self._ids_NK, tile, 0.0)
            # Added, since a token that stands in the support twice has its gradient in one place and 0 in the other.
            put(grad, self._scratch, "grad", self._ids_NK, tile, tokens)
            return grad

        return tile_gradient

    def _shares(self, tile: slice, into: str) -> Float[Tensor, "N v"]:
        """a_j = q_j / q_rest of a tile."""
        rest = cast(Tensor, self._rest)
        # A token of the support may be likelier than all the rest together: its quotient is not used, and kept finite.
        return self._student.log_prob(tile, self._temperature, into).sub_(rest).clamp_(max=0.0).exp_()

    def _add_norms(self, norms: GradientNorms, before: Tensor, after: Tensor) -> None:
        if self._rest is None:
            norms.add(before, after)
            return
        squares = torch.zeros_like(self._rest)
        for tile in self._student.tiles():
            shares = self._shares(tile, "grad")
            put(shares, self._scratch, "grad", self._ids_NK, tile, 0.0)
            squares += row_square(shares)
        spread = squares.sqrt()
        new_before = torch.cat([before[:, :-1], before[:, -1:] * spread], -1)
        same = after is before
        norms.add(new_before, new_before if same else torch.cat([after[:, :-1], after[:, -1:] * spread], -1))


def _support(
    student: Logits, scores: Logits | None, teacher: Full | TopK, support: TopKSupport, rows: slice
) -> tuple[Int[Tensor, "N K"], Tensor | None]:
    """Ids of the support, and the teacher's log-probabilities of them where it gave nothing else."""
    if isinstance(teacher, TopK):
        logp_NK, order_NK = teacher.logp_NK[rows].to(student.scratch.dtype).topk(support.k, dim=-1)
        return teacher.ids_NK[rows].gather(-1, order_NK), logp_NK.clamp(min=LOG_ZERO)
    assert scores is not None
    sides = {"teacher": (scores,), "student": (student,), "union": (scores, student)}[support.of]
    return torch.cat([side.top(support.k) for side in sides], -1), None


def _tail(log_p: Float[Tensor, "N K"], is_all: bool) -> Column:
    """log(1 − Σ p), or `LOG_ZERO` where these are all tokens.

    Rounding may leave nothing of a small rest, or less. It counts as the smallest rest that can be told from none: as
    nothing, the student would pay thousands of nats for each unit of mass that it leaves to the other tokens.
    """
    rest = 1 - log_p.exp().sum(-1, keepdim=True)
    return torch.full_like(rest, LOG_ZERO) if is_all else rest.clamp(min=torch.finfo(rest.dtype).eps).log()


def _repeats(ids_NK: Int[Tensor, "N K"]) -> Tensor:
    """[N, K] bool: the same id stands further left in the row."""
    ordered, order = ids_NK.sort(dim=-1, stable=True)
    again = torch.zeros_like(ordered, dtype=torch.bool)
    again[:, 1:] = ordered[:, 1:] == ordered[:, :-1]
    return torch.zeros_like(again).scatter_(-1, order, again)


def _head(likeliest: Callable[[int], Tensor], mass: float, most: int | None = None) -> Column:
    """Log-probability at which the running sum over the likeliest tokens reaches `mass`; of all, where none does."""
    k = _HEAD_TOKENS
    while True:
        log_p = likeliest(k)
        reached = log_p.exp().cumsum(-1) >= mass
        # Fewer than asked for: that is all there are.
        if bool(reached[:, -1].all()) or log_p.shape[1] < k or log_p.shape[1] == most:
            break
        k *= 8
    first = (~reached).sum(-1, keepdim=True).clamp(max=log_p.shape[1] - 1)
    return log_p.gather(-1, first)


def _agreement(student: Logits, ids_N1: Int[Tensor, "N 1"], temperature: float) -> Float[Tensor, " N"]:
    """1 where these tokens, the teacher's likeliest, are the student's likeliest too."""
    at_N1 = student.at(ids_N1).div_(temperature)
    return (at_N1 >= student.stats(temperature).maximum).to(at_N1.dtype)[:, 0]
