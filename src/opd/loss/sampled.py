"""Objectives on the sampled tokens alone.

Tensor suffixes: N supervised tokens, V vocabulary, D hidden size.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from opd.config.loss import SampledReverseKLConfig
from opd.errors import OpdError
from opd.loss.base import Loss, Needs, RolloutTokens, check_full, check_ids, check_rows, vocabulary
from opd.loss.chunked import Buffers, RowTerms, rowwise
from opd.loss.divergence import log_softmax
from opd.loss.head import Head
from opd.types import Sampled, TeacherScores, TokenLoss


def token_logp(
    hidden_ND: Float[Tensor, "N D"],
    head: Head | None,
    ids_N: Int[Tensor, " N"],
    temperature: float = 1.0,
    chunk_bytes: int | None = None,
) -> Float[Tensor, " N"]:
    """[N] nats: log softmax(head.logits(hidden)/τ) at each row's id, differentiable, without any [N, V].

    Args:
        hidden_ND: [N, D] last hidden states at the positions that predict the ids, or [N, V] logits without a head.
        head: the output head, or None.
        ids_N: [N] int64.
        temperature: τ.
        chunk_bytes: see `rowwise`.

    Raises:
        OpdError: as many ids as rows were not given, or one lies outside the vocabulary.
    """
    return _token_terms(hidden_ND, head, ids_N, temperature, chunk_bytes).values


def _token_terms(
    hidden_ND: Tensor, head: Head | None, ids_N: Tensor, temperature: float, chunk_bytes: int | None
) -> TokenLoss:
    """`token_logp`, with the student's entropy as a metric."""
    check_rows("The log-probability of sampled tokens", hidden_ND.shape[0], ids_N.shape[0])
    check_ids("The log-probability of sampled tokens", ids_N, vocabulary(hidden_ND, head))

    def objective(logits_NV: Tensor, rows: slice, buffers: Buffers) -> RowTerms:
        ids_N1 = ids_N[rows, None]
        log_q_NV, q_NV, entropy_N = log_softmax(logits_NV, temperature, buffers, "q")
        values_N = log_q_NV.gather(-1, ids_N1)[:, 0]
        grad_NV = q_NV.neg_()  # d log q_y / dz_j = (1[j = y] − q_j) / τ
        grad_NV.scatter_add_(-1, ids_N1, torch.ones_like(ids_N1, dtype=grad_NV.dtype))
        grad_NV = grad_NV if temperature == 1.0 else grad_NV.div_(temperature)
        return RowTerms(values_N, grad_NV, {"entropy_student": entropy_N})

    return rowwise(objective, hidden_ND, head, chunk_bytes)


class SampledReverseKL(Loss):
    """−A log q(y) with the advantage A = log p(y) − log q(y) detached: on samples of q its mean gradient is that of
    KL(q‖p) (Thinking Machines, "On-Policy Distillation").

    `Sampled` scores are at the loss's temperature. `Full` is accepted too: the sampled token is looked up in it.

    Metrics, [N] each: −A before any clip, as ``unclipped`` and ``sampled_reverse_kl`` (its mean estimates KL(q‖p));
    ``entropy_student``; ``importance_ratio`` before truncation when importance is on; ``clipped`` (1 where the
    advantage or the ratio was bounded) when either bound is set.
    """

    needs: ClassVar[Needs] = "sampled"

    def __init__(self, config: SampledReverseKLConfig, chunk_bytes: int | None = None) -> None:
        super().__init__(config)
        self.config = config
        self._chunk_bytes = chunk_bytes

    def _rows(
        self, hidden_ND: Tensor, head: Head | None, teacher: TeacherScores, rollout: RolloutTokens | None, /
    ) -> TokenLoss:
        if rollout is None:
            raise self._missing("the sampled tokens", "rollout=RolloutTokens(ids_N, ...)")
        student = _token_terms(hidden_ND, head, rollout.ids_N, self.config.temperature, self._chunk_bytes)
        log_q_N = student.values
        with torch.no_grad():
            log_p_N = self._teacher_logp(hidden_ND, head, teacher, rollout.ids_N)
            weight_N, metrics = self._weight(log_q_N.detach(), log_p_N.to(log_q_N.dtype), rollout)
        # A weight that is not finite shows in the value, where the trainer looks, and not in the gradient: times the
        # zero upstream of a masked row it would still be NaN.
        finite_N = weight_N.isfinite()
        values_N = torch.where(finite_N, -weight_N.where(finite_N, 0.0) * log_q_N, -weight_N)
        return TokenLoss(values_N, {**student.metrics, **metrics})

    def _teacher_logp(self, hidden_ND: Tensor, head: Head | None, teacher: TeacherScores, ids_N: Tensor) -> Tensor:
        if isinstance(teacher, Sampled):
            check_rows(self.name, ids_N.shape[0], teacher.logp_N.shape[0])
            return teacher.logp_N
        full = check_full(self.name, hidden_ND, head, teacher)
        return token_logp(full.hidden_ND, full.head, ids_N, self.config.temperature, self._chunk_bytes)

    def _weight(self, log_q_N: Tensor, log_p_N: Tensor, rollout: RolloutTokens) -> tuple[Tensor, dict[str, Tensor]]:
        """What multiplies log q(y): the advantage, discounted, bounded and corrected for the sampler."""
        config = self.config
        advantage_N = log_p_N - log_q_N
        metrics = {"unclipped": -advantage_N, self.name: -advantage_N}
        clipped_N = torch.zeros_like(advantage_N, dtype=torch.bool)
        if config.discount > 0:
            if rollout.sequence_N is None:
                raise self._missing("which sequence each token belongs to", "RolloutTokens(..., sequence_N=...)")
            advantage_N = discounted(advantage_N, rollout.sequence_N, config.discount)
        if config.max_advantage is not None:
            clipped_N |= advantage_N.abs() > config.max_advantage
            advantage_N = advantage_N.clamp(-config.max_advantage, config.max_advantage)
        if config.importance is not None:
            if rollout.behavior_logp_N is None:
                raise self._missing(
                    "what the sampler's log-probabilities were", "RolloutTokens(..., behavior_logp_N=...)"
                )
            check_rows(self.name, log_q_N.shape[0], rollout.behavior_logp_N.shape[0])
            ratio_N = (log_q_N - rollout.behavior_logp_N.to(log_q_N.dtype)).exp()
            metrics["importance_ratio"] = ratio_N
            clipped_N |= ratio_N > config.importance.clip
            advantage_N = advantage_N * ratio_N.clamp(max=config.importance.clip)
        if config.max_advantage is not None or config.importance is not None:
            metrics["clipped"] = clipped_N.to(advantage_N.dtype)
        return advantage_N, metrics

    def _missing(self, what: str, fix: str) -> OpdError:
        return OpdError(f"{self.name} was not told {what}.", why="with this config it needs them", fix=f"pass {fix}")


def discounted(advantage_N: Float[Tensor, " N"], sequence_N: Int[Tensor, " N"], discount: float) -> Float[Tensor, " N"]:
    """[N]: Σ_{s ≥ t} discount^(s−t) · advantage_s within each sequence; distances count supervised tokens.

    Raises:
        OpdError: the rows of one sequence do not stand together.
    """
    check_rows("The discount", advantage_N.shape[0], sequence_N.shape[0])
    sequences, values = sequence_N.tolist(), advantage_N.tolist()
    starts = [row for row, sequence in enumerate(sequences) if row == 0 or sequences[row - 1] != sequence]
    if len(starts) != len(set(sequences)):
        raise OpdError(
            "Future advantages cannot be summed.",
            why="the rows of one sequence are apart from each other, so their order is not known",
            fix="keep the tokens of each completion together and in order",
        )
    for row in range(len(values) - 2, -1, -1):
        if sequences[row] == sequences[row + 1]:
            values[row] += discount * values[row + 1]
    return advantage_N.new_tensor(values)
