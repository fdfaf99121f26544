"""A divergence as a loss: its temperature, support, clip, entropy gates and metrics.

Tensor suffixes: N supervised tokens, V vocabulary, D hidden size.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from importlib.util import find_spec
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from opd.config.loss import AnyDivergenceConfig, FullSupport, JSDConfig, NoClip, TopKSupport
from opd.errors import OpdError
from opd.loss.base import Needs, RolloutTokens, RowLoss, check_full, check_top_k
from opd.loss.chunked import Chunk, Objective, Terms, rowwise
from opd.loss.clip import CLIPS, entry_bound, row_bound
from opd.loss.divergence import DIVERGENCES, Entries, Outcomes, Pair
from opd.loss.gate import gated
from opd.loss.head import Head, statistics_dtype
from opd.loss.logits import row_sum
from opd.loss.outcomes import FullOutcomes, GradientNorms, Slopes, Sums, TopKOutcomes
from opd.types import Full, TeacherScores, TokenLoss, TopK


class DivergenceLoss(RowLoss):
    """A divergence with its temperature, support and clip.

    Metrics, [N] each: the divergence before the clip, as ``unclipped`` and under its own name; ``entropy_student`` and
    ``entropy_teacher`` in nats; ``teacher_top1_agreement`` (1 where the teacher's most likely token is the student's
    too); with a top-k support ``kept_mass_student`` and ``kept_mass_teacher``; with a clip ``clipped`` (1 where it
    acted), ``grad_norm_unclipped`` (of d/d(logits)) and ``grad_removed_frac``, the share of that norm which the clip
    removed; with an entropy gate ``supervised`` (0 where a gate was shut; all other metrics are 0 there).
    """

    needs: Needs = "full"

    def __init__(self, config: AnyDivergenceConfig, chunk_bytes: int | None = None) -> None:
        super().__init__(config, chunk_bytes)
        self.config = config
        self._divergence = DIVERGENCES[self.name]
        if isinstance(config, JSDConfig):
            _check_weight(config)

    def _rows(
        self, hidden_ND: Tensor, head: Head | None, teacher: TeacherScores, rollout: RolloutTokens | None, /
    ) -> TokenLoss:
        fused = _fused(hidden_ND.device)
        config = self.config
        if fused is None or not fused.fits(config, statistics_dtype(hidden_ND if head is None else head.weight)):
            return super()._rows(hidden_ND, head, teacher, rollout)
        scores = check_full(self.name, hidden_ND, head, teacher, config.support)

        def objective(chunk: Chunk) -> Terms:
            return fused.terms(chunk, scores, config, head)

        return rowwise(objective, hidden_ND, head, self._chunk_bytes, uniform=self._uniform)

    def objective(
        self, hidden_ND: Tensor, head: Head | None, teacher: TeacherScores, _rollout: RolloutTokens | None, /
    ) -> Objective:
        """Value and gradient of a chunk of rows."""
        support = self.config.support
        if isinstance(support, TopKSupport) and isinstance(teacher, TopK):
            scores = check_top_k(self.name, hidden_ND, head, teacher, self.config)
        else:
            scores = check_full(self.name, hidden_ND, head, teacher, support)
        return lambda chunk: gated(self._terms(chunk, scores), self.config.mask)

    def _terms(self, chunk: Chunk, scores: Full | TopK) -> Terms:
        config = self.config
        if isinstance(config.support, FullSupport):
            assert isinstance(scores, Full)
            outcomes = FullOutcomes(chunk, scores, config.temperature)
        else:
            outcomes = TopKOutcomes(chunk, scores, config.support, config.temperature)
        weights, bound = self._divergence.weights(outcomes, config), entry_bound(config.clip)

        def entries(pair: Pair) -> Entries:
            return self._divergence.entries(pair, config, weights)

        def slopes_of(pair: Pair) -> Slopes:
            values, slope = entries(pair)
            return Slopes(slope if bound == math.inf else torch.where(values > bound, 0.0, slope), slope)

        total = _summed(outcomes, entries, bound)
        value, factor = CLIPS[config.clip.name](total.value, config.clip)
        metrics = {
            "unclipped": total.unclipped[:, 0],
            self.name: total.unclipped[:, 0],
            "entropy_student": outcomes.entropy_student[:, 0],
            "entropy_teacher": outcomes.entropy_teacher[:, 0],
            **outcomes.metrics,
        }
        squared = config.temperature**2 if config.scale_by_temperature_squared else 1.0
        if isinstance(config.clip, NoClip):
            sums = Sums(total.slope, total.slope, None if squared == 1.0 else torch.full_like(value, squared))
            return Terms((value * squared)[:, 0], outcomes.gradient(slopes_of, sums, None), metrics)
        over = total.is_over | (total.unclipped > row_bound(config.clip))
        metrics["clipped"] = over[:, 0].to(value.dtype)
        norms = GradientNorms(value)
        sums = Sums(total.bounded_slope, total.slope, factor * squared)
        gradient = outcomes.gradient(slopes_of, sums, norms)
        return Terms((value * squared)[:, 0], gradient, metrics, lambda: norms.metrics(factor))


class _Total(NamedTuple):
    """Sums over all outcomes of a row, [N, 1]: of entries and slopes as they are, and with the bound on entries."""

    unclipped: Tensor
    slope: Tensor
    value: Tensor
    bounded_slope: Tensor
    is_over: Tensor


def _summed(outcomes: Outcomes, entries: Callable[[Pair], Entries], bound: float) -> _Total:
    zero = torch.zeros_like(outcomes.entropy_teacher)
    unclipped = slope = value = bounded_slope = zero
    is_over = torch.zeros_like(zero, dtype=torch.bool)
    for pair in outcomes.pairs():
        values, slopes = entries(pair)
        unclipped, slope = unclipped + row_sum(values), slope + row_sum(slopes)
        if bound < math.inf:
            over = values > bound
            is_over = is_over | over.any(-1, keepdim=True)
            bounded_slope = bounded_slope + row_sum(slopes.masked_fill_(over, 0))
            value = value + row_sum(values.clamp_(max=bound))
    if bound == math.inf:
        return _Total(unclipped, slope, unclipped, slope, is_over)
    return _Total(unclipped, slope, value, bounded_slope, is_over)


def _fused(device: torch.device) -> ModuleType | None:
    """The Triton kernel where there is one: on a GPU, and on a CPU under Triton's interpreter."""
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return None
    if find_spec("triton") is None:
        return None
    from opd.loss import fused

    return fused


def _check_weight(config: JSDConfig) -> None:
    if not 0 < config.teacher_weight < 1:
        raise OpdError(
            f"jsd with teacher_weight {config.teacher_weight:g} is not a Jensen-Shannon divergence.",
            why="at 0 and at 1 the mixture is one of the two distributions and the divergence is zero. GKD's code "
            "turns beta 0 into KL(teacher‖student) and beta 1 into KL(student‖teacher), which its own formula does not",
            fix="name: forward_kl for GKD's beta 0, name: reverse_kl for its beta 1, or 0 < teacher_weight < 1",
        )
