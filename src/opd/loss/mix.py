"""The weighted sum of several losses on the same tokens; parts that are row by row share the logits of a chunk.

Tensor suffixes: N supervised tokens, V vocabulary, v a tile of it, D hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from opd.config.loss import MixConfig
from opd.errors import OpdError
from opd.loss.base import Loss, Needs, RolloutTokens, RowLoss
from opd.loss.chunked import Chunk, Objective, Terms, rowwise
from opd.loss.gate import gated_tokens
from opd.loss.head import Head
from opd.types import TeacherScores, TokenLoss, TopK

# The same for every part.
_SHARED = ("entropy_student", "entropy_teacher", "teacher_top1_agreement")


class MixLoss(Loss):
    """Σ weight_i · loss_i.

    Metrics, [N] each: each part's value before its clip under the part's name (``forward_kl``, and ``forward_kl_2`` for
    the second of a name), and ``unclipped``, the weighted sum of these; its other metrics as ``<part>_<metric>``;
    entropies and agreement once. An entropy gate of the mix acts on the sum.

    Args:
        config: its parts and their weights.
        parts: the built losses, in the same order, without masks of their own.
    """

    def __init__(self, config: MixConfig, parts: Sequence[Loss], chunk_bytes: int | None = None) -> None:
        super().__init__(config, chunk_bytes)
        self.config = config
        kinds = {part.needs for part in parts}
        self.needs: Needs = "full" if "full" in kinds else "sampled" if "sampled" in kinds else "nothing"
        names = [part.name for part in parts]
        self._parts = [
            _Part(part.name if (n := names[:i].count(part.name)) == 0 else f"{part.name}_{n + 1}", given.weight, part)
            for i, (given, part) in enumerate(zip(config.parts, parts, strict=True))
        ]

    def _rows(
        self, hidden_ND: Tensor, head: Head | None, teacher: TeacherScores, rollout: RolloutTokens | None, /
    ) -> TokenLoss:
        if self.config.mask.teacher_entropy is not None and isinstance(teacher, TopK):
            raise OpdError(
                "mix cannot be computed from the teacher's likeliest tokens.",
                why="loss.mask.teacher_entropy needs the entropy of the whole distribution",
                fix="use a teacher that provides Full, or leave out that gate",
            )
        values: list[Tensor] = []
        metrics: dict[str, Tensor] = {}
        objectives = [
            (part, part.loss.objective(hidden_ND, head, teacher, rollout))
            for part in self._parts
            if isinstance(part.loss, RowLoss)
        ]
        if objectives:
            fused = rowwise(_sum(objectives), hidden_ND, head, self._chunk_bytes, uniform=self._uniform)
            values.append(fused.values)
            metrics.update(fused.metrics)
        for part in self._parts:
            if not isinstance(part.loss, RowLoss):
                alone = part.loss._rows(hidden_ND, head, teacher, rollout)
                values.append(part.weight * alone.values)
                part.report(alone.metrics, metrics)
        return gated_tokens(TokenLoss(torch.stack(values).sum(0), metrics), self.config.mask)


@dataclass(frozen=True)
class _Part:
    label: str
    weight: float
    loss: Loss

    def report(self, found: Mapping[str, Tensor], metrics: dict[str, Tensor]) -> None:
        """Add this part's metrics to those of the mix."""
        own = found[self.loss.name]
        metrics[self.label] = own
        metrics["unclipped"] = metrics["unclipped"] + self.weight * own if "unclipped" in metrics else self.weight * own
        for name, metric in found.items():
            if name in _SHARED:
                metrics.setdefault(name, metric)
            elif name not in ("unclipped", self.loss.name):
                metrics[f"{self.label}_{name}"] = metric


def _sum(parts: Sequence[tuple[_Part, Objective]]) -> Objective:
    """One objective whose gradient is the weighted sum of those of the parts."""

    def objective(chunk: Chunk) -> Terms:
        terms = [(part, objective(chunk)) for part, objective in parts]
        metrics: dict[str, Tensor] = {}
        for part, term in terms:
            part.report(term.metrics, metrics)

        def gradient(tile: slice) -> Tensor:
            num_rows, width = chunk.student.num_rows, tile.stop - tile.start
            total_Nv = chunk.student.scratch.take("mix", num_rows, width).zero_()
            for part, term in terms:
                assert term.gradient is not None, "parts of a mix leave the logits to each other"
                total_Nv.add_(term.gradient(tile), alpha=part.weight)
            return total_Nv

        def gradient_metrics() -> Mapping[str, Tensor]:
            return {
                f"{part.label}_{name}": metric
                for part, term in terms
                if term.gradient_metrics
                for name, metric in term.gradient_metrics().items()
            }

        values_N = torch.stack([part.weight * term.values_N for part, term in terms]).sum(0)
        measures = any(term.gradient_metrics for _, term in terms)
        return Terms(values_N, gradient, metrics, gradient_metrics if measures else None)

    return objective
