"""Objectives on the sampled (or given) tokens alone.

Tensor suffixes: N supervised tokens, V vocabulary, v a tile of it, D hidden size.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from opd.config.loss import SampledReverseKLConfig, SFTConfig
from opd.errors import OpdError
from opd.loss.base import (
    Loss,
    Needs,
    RolloutTokens,
    RowLoss,
    check_full,
    check_ids,
    check_rows,
    check_vector,
    vocabulary,
)
from opd.loss.chunked import Chunk, Objective, Terms, rowwise
from opd.loss.gate import gated, gated_tokens
from opd.loss.head import Head
from opd.loss.logits import put
from opd.types import Full, Sampled, TeacherScores, TokenLoss


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
    objective = _token_objective(hidden_ND, head, ids_N, temperature)
    return rowwise(objective, hidden_ND, head, chunk_bytes).values


def _token_objective(hidden_ND: Tensor, head: Head | None, ids_N: Tensor, temperature: float) -> Objective:
    """log q(y), with the student's entropy as a metric; d log q_y / dz_j = (1[j = y] − q_j) / τ."""
    check_vector("The log-probability of sampled tokens", "ids", ids_N, hidden_ND.shape[0])
    check_ids("The log-probability of sampled tokens", ids_N, vocabulary(hidden_ND, head))

    def objective(chunk: Chunk) -> Terms:
        ids_N1, student = ids_N[chunk.rows, None], chunk.student
        stats = student.stats(temperature)
        values_N1 = student.log_prob_at(ids_N1, temperature)
        one = torch.ones_like(values_N1)

        def gradient(tile: slice) -> Tensor:
            grad_Nv = student.log_prob(tile, temperature, "grad").exp_().neg_()
            put(grad_Nv, student.scratch, "grad", ids_N1, tile, one)
            return grad_Nv if temperature == 1.0 else grad_Nv.div_(temperature)

        return Terms(values_N1[:, 0], gradient, {"entropy_student": stats.entropy[:, 0]})

    return objective


class CrossEntropy(RowLoss):
    """−log q(y): supervised fine-tuning on the given tokens. It asks nothing of a teacher.

    Metrics, [N] each: ``sft``, the value; ``entropy_student``.
    """

    needs: Needs = "nothing"

    def __init__(self, config: SFTConfig, chunk_bytes: int | None = None) -> None:
        super().__init__(config, chunk_bytes)
        self.config = config

    def objective(
        self, hidden_ND: Tensor, head: Head | None, _teacher: TeacherScores, rollout: RolloutTokens | None, /
    ) -> Objective:
        """Value and gradient of a chunk of rows."""
        if rollout is None:
            raise _missing(self.name, "the given tokens", "rollout=RolloutTokens(ids_N)")
        log_q = _token_objective(hidden_ND, head, rollout.ids_N, 1.0)

        def objective(chunk: Chunk) -> Terms:
            terms = log_q(chunk)
            write = terms.gradient
            assert write is not None
            values_N = -terms.values_N
            metrics = {self.name: values_N, **terms.metrics}
            return gated(Terms(values_N, lambda tile: write(tile).neg_(), metrics), self.config.mask)

        return objective


class SampledReverseKL(Loss):
    """−A log q(y) with the advantage A = log p(y) − log q(y) detached: on samples of q its mean gradient is that of
    KL(q‖p) (Thinking Machines, "On-Policy Distillation").

    `Sampled` scores are at the loss's temperature. `Full` is accepted too: the sampled token is looked up in it.

    Metrics, [N] each: −A before any clip, as ``unclipped`` and ``sampled_reverse_kl`` (its mean estimates KL(q‖p));
    ``entropy_student``; ``importance_ratio`` before truncation when importance is on; ``clipped`` (1 where the
    advantage or the ratio was bounded) when either bound is set; ``supervised`` with an entropy gate (0 where it was
    shut; all other metrics are 0 there).
    """

    needs: Needs = "sampled"

    def __init__(self, config: SampledReverseKLConfig, chunk_bytes: int | None = None) -> None:
        super().__init__(config, chunk_bytes)
        self.config = config

    def _rows(
        self, hidden_ND: Tensor, head: Head | None, teacher: TeacherScores, rollout: RolloutTokens | None, /
    ) -> TokenLoss:
        if rollout is None:
            raise _missing(self.name, "the sampled tokens", "rollout=RolloutTokens(ids_N, ...)")
        objective = _token_objective(hidden_ND, head, rollout.ids_N, self.config.temperature)
        student = rowwise(objective, hidden_ND, head, self._chunk_bytes, uniform=False)
        log_q_N = student.values
        with torch.no_grad():
            log_p_N = self.teacher_logp(hidden_ND, head, teacher, rollout.ids_N)
            weight_N, metrics = self._weight(log_q_N.detach(), log_p_N.to(log_q_N.dtype), rollout)
        metrics = {**student.metrics, **metrics}
        # A weight that is not finite shows in the value, where the trainer looks, and not in the gradient: times the
        # zero upstream of a masked row it would still be NaN.
        finite_N = weight_N.isfinite()
        values_N = torch.where(finite_N, -weight_N.where(finite_N, 0.0) * log_q_N, -weight_N)
        return gated_tokens(TokenLoss(values_N, metrics), self.config.mask)

    def teacher_logp(
        self, hidden_ND: Float[Tensor, "N D"], head: Head | None, teacher: TeacherScores, ids_N: Int[Tensor, " N"]
    ) -> Float[Tensor, " N"]:
        """[N] nats: what the teacher gave each sampled token, looked up where it gave the whole distribution."""
        if isinstance(teacher, Sampled):
            check_vector(self.name, "the teacher's log-probabilities", teacher.logp_N, len(ids_N))
            return teacher.logp_N
        full: Full = check_full(self.name, hidden_ND, head, teacher)
        return token_logp(full.hidden_ND, full.head, ids_N, self.config.temperature, self._chunk_bytes)

    def _weight(self, log_q_N: Tensor, log_p_N: Tensor, rollout: RolloutTokens) -> tuple[Tensor, dict[str, Tensor]]:
        """What multiplies log q(y): the advantage, discounted, relative, bounded and corrected for the sampler."""
        config = self.config
        advantage_N = log_p_N - log_q_N
        metrics = {"unclipped": -advantage_N, self.name: -advantage_N}
        clipped_N = torch.zeros_like(advantage_N, dtype=torch.bool)
        if config.discount > 0:
            if rollout.sequence_N is None:
                raise _missing(self.name, "which sequence each token belongs to", "RolloutTokens(..., sequence_N=...)")
            advantage_N = discounted(advantage_N, rollout.sequence_N, config.discount)
        if config.group_baseline:
            if rollout.baseline_N is None:
                raise _missing(self.name, "the baseline of each token", "RolloutTokens(..., baseline_N=...)")
            check_vector(self.name, "the baseline", rollout.baseline_N, len(log_q_N))
            advantage_N = advantage_N - rollout.baseline_N.to(log_q_N.dtype)
        if config.max_advantage is not None:
            clipped_N |= advantage_N.abs() > config.max_advantage
            advantage_N = advantage_N.clamp(-config.max_advantage, config.max_advantage)
        if config.importance is not None:
            if rollout.behavior_logp_N is None:
                raise _missing(
                    self.name, "what the sampler's log-probabilities were", "RolloutTokens(..., behavior_logp_N=...)"
                )
            check_vector(self.name, "the sampler's log-probabilities", rollout.behavior_logp_N, len(log_q_N))
            ratio_N = (log_q_N - rollout.behavior_logp_N.to(log_q_N.dtype)).exp()
            metrics["importance_ratio"] = ratio_N
            clipped_N |= ratio_N > config.importance.clip
            advantage_N = advantage_N * ratio_N.clamp(max=config.importance.clip)
        if config.max_advantage is not None or config.importance is not None:
            metrics["clipped"] = clipped_N.to(advantage_N.dtype)
        return advantage_N, metrics


def _missing(name: str, what: str, fix: str) -> OpdError:
    return OpdError(f"{name} was not told {what}.", why="with this config it needs them", fix=f"pass {fix}")


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


def group_baseline(
    advantage_N: Float[Tensor, " N"], sequence_N: Int[Tensor, " N"], group_N: Int[Tensor, " N"]
) -> Float[Tensor, " N"]:
    """[N]: the mean advantage over the tokens of the *other* sequences of each token's group; 0 where there are none.

    What it is made of does not depend on the token that it is subtracted from, so that the mean gradient stays the same
    (leave-one-out, as in RLOO, arXiv 2402.14740).

    Args:
        advantage_N: [N] nats, after any discount, over the whole batch.
        sequence_N: [N] which completion a token belongs to.
        group_N: [N] which problem it belongs to.
    """

    each_N2 = torch.stack([advantage_N.double(), torch.ones_like(advantage_N, dtype=torch.float64)], 1)

    def sums(index_N: Tensor) -> Tensor:
        values_S, index_N = index_N.unique(return_inverse=True)
        return each_N2.new_zeros(len(values_S), 2).index_add(0, index_N, each_N2)[index_N]

    return leave_one_out(sums(group_N), sums(sequence_N)).to(advantage_N.dtype)


def leave_one_out(group_S2: Float[Tensor, "S 2"], own_S2: Float[Tensor, "S 2"]) -> Float[Tensor, " S"]:
    """[S]: the mean over a group without one of its members, 0 where it has no other; from sums and counts of both."""
    total_S, count_S = (group_S2 - own_S2).unbind(1)
    return torch.where(count_S > 0, total_S / count_S.clamp(min=1), 0.0)
