"""Divergences between the student's and the teacher's next-token distributions.

A divergence is a sum over vocabulary entries, D = Σ_v d_v. Each one here is a function of a `Pair` and its config that
returns the entries d_v and their slopes ∂d_v/∂log q_v, in two buffers. Clips, metrics and both ways in (logits, or
hidden states and a head) follow from these two by themselves, and so does the gradient: with q = softmax(z/τ),

    dD/dz_j = (slope_j − q_j Σ_v slope_v) / τ.

Tensor suffixes: N supervised tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from opd.config.loss import DivergenceConfig, ForwardKLConfig, JSDConfig, ReverseKLConfig
from opd.errors import OpdError
from opd.loss.base import Loss, Needs, RolloutTokens, check_full
from opd.loss.chunked import Buffers, RowTerms, rowwise
from opd.loss.clip import CLIPS, Entries
from opd.loss.head import Head
from opd.types import TeacherScores, TokenLoss

# Probability zero counts as exp(-10,000): 0·log 0 is 0, and a divergence that is infinite (one side excludes what the
# other expects) is large and finite, with a finite gradient that leads away from it. No other row is touched.
LOG_ZERO = -1e4


@dataclass
class Pair:
    """Student q and teacher p of a chunk, and a fifth buffer; all [N, V].

    A divergence may overwrite all but ``q``, and leaves its results in others than ``scratch``.
    """

    log_q: Tensor
    q: Tensor
    log_p: Tensor
    p: Tensor
    scratch: Tensor


# (pair, config) -> (d_v, ∂d_v/∂log q_v)
Divergence = Callable[[Pair, Any], tuple[Tensor, Tensor]]


def forward_kl(pair: Pair, _config: ForwardKLConfig) -> tuple[Tensor, Tensor]:
    """KL(p‖q): d = p (log p − log q). Classic distillation, and the choice of OPSD (arXiv 2601.18734)."""
    values = pair.log_p.sub_(pair.log_q).mul_(pair.p)
    return values, pair.p.neg_()


def reverse_kl(pair: Pair, _config: ReverseKLConfig) -> tuple[Tensor, Tensor]:
    """KL(q‖p): d = q (log q − log p). MiniLLM (arXiv 2306.08543), Thinking Machines."""
    values = pair.log_q.sub_(pair.log_p).mul_(pair.q)
    return values, torch.add(values, pair.q, out=pair.log_p)


def jsd(pair: Pair, config: JSDConfig) -> tuple[Tensor, Tensor]:
    """w KL(p‖m) + (1−w) KL(q‖m) with m = w p + (1−w) q: GKD (arXiv 2306.13649, eq. 2), whose β is w."""
    weight = config.teacher_weight
    mixture = torch.lerp(pair.q, pair.p, weight, out=pair.scratch)
    # Where the mixture underflows both sides are zero, and any finite logarithm will do.
    log_mixture = mixture.clamp_(min=torch.finfo(mixture.dtype).tiny).log_()
    teacher_part = pair.log_p.sub_(log_mixture).mul_(pair.p).mul_(weight)
    student_part = pair.log_q.sub_(log_mixture).mul_(pair.q).mul_(1 - weight)
    # The slope of the teacher's part and that of log m in the student's cancel.
    return teacher_part.add_(student_part), student_part


class DivergenceLoss(Loss):
    """A divergence with its temperature and clip.

    Metrics, [N] each: the divergence before the clip, as ``unclipped`` and under its own name; ``entropy_student`` and
    ``entropy_teacher`` in nats; ``teacher_top1_agreement`` (1 where the teacher's most likely token is the student's
    too); and with a clip ``clipped`` (1 where it acted), ``grad_norm_unclipped`` (of d/d(logits)) and
    ``grad_removed_frac``, the share of that norm which the clip removed.

    Args:
        divergence: entries and slopes.
        config: its config.
        chunk_bytes: see `rowwise`.
    """

    needs: ClassVar[Needs] = "full"

    def __init__(self, divergence: Divergence, config: Any, chunk_bytes: int | None = None) -> None:
        super().__init__(config)
        self.config: DivergenceConfig = config
        self._divergence = divergence
        self._chunk_bytes = chunk_bytes

    def _rows(
        self, hidden_ND: Tensor, head: Head | None, teacher: TeacherScores, _rollout: RolloutTokens | None, /
    ) -> TokenLoss:
        full = check_full(self.name, hidden_ND, head, teacher)

        def objective(logits_NV: Tensor, rows: slice, buffers: Buffers) -> RowTerms:
            teacher_NV = buffers.take("teacher", logits_NV.shape[0])
            if full.head is None:
                teacher_NV.copy_(full.hidden_ND[rows])
            else:
                full.head.logits(full.hidden_ND[rows], out=teacher_NV)
            return self._terms(logits_NV, teacher_NV, buffers)

        return rowwise(objective, hidden_ND, head, self._chunk_bytes)

    def _terms(self, student_NV: Float[Tensor, "N V"], teacher_NV: Float[Tensor, "N V"], buffers: Buffers) -> RowTerms:
        """Value, gradient and metrics of a chunk. Both logits are overwritten."""
        temperature, clip = self.config.temperature, self.config.clip
        pair, metrics = _pair(student_NV, teacher_NV, temperature, buffers)
        q_NV = pair.q
        entries = Entries(*self._divergence(pair, self.config), pair.scratch)

        def gradient(slope_NV: Tensor) -> Tensor:
            grad_NV = slope_NV.addcmul_(q_NV, slope_NV.sum(-1, keepdim=True), value=-1)
            return grad_NV if temperature == 1.0 else grad_NV.div_(temperature)

        clipped = CLIPS[clip.name](entries, gradient, clip)
        metrics |= {"unclipped": clipped.unclipped_N, self.name: clipped.unclipped_N, **clipped.metrics}
        values_N, grad_NV = clipped.values_N, clipped.grad_NV
        if self.config.scale_by_temperature_squared:
            values_N, grad_NV = values_N * temperature**2, grad_NV.mul_(temperature**2)
        return RowTerms(values_N, grad_NV, metrics)


def jsd_loss(config: JSDConfig, chunk_bytes: int | None = None) -> DivergenceLoss:
    """`jsd` as a loss.

    Raises:
        OpdError: a weight outside (0, 1).
    """
    if not 0 < config.teacher_weight < 1:
        raise OpdError(
            f"jsd with teacher_weight {config.teacher_weight:g} is not a Jensen-Shannon divergence.",
            why="at 0 and at 1 the mixture is one of the two distributions and the divergence is zero. GKD's code "
            "turns beta 0 into KL(teacher‖student) and beta 1 into KL(student‖teacher), which its own formula does not",
            fix="name: forward_kl for GKD's beta 0, name: reverse_kl for its beta 1, or 0 < teacher_weight < 1",
        )
    return DivergenceLoss(jsd, config, chunk_bytes)


def log_softmax(
    logits_NV: Float[Tensor, "N V"], temperature: float, buffers: Buffers, name: str
) -> tuple[Float[Tensor, "N V"], Float[Tensor, "N V"], Float[Tensor, " N"]]:
    """Log-probabilities (in the logits' memory), probabilities (in the named buffer) and entropy [N], all finite."""
    if temperature != 1.0:
        logits_NV.div_(temperature)
    log_q_NV = logits_NV.sub_(logits_NV.amax(-1, keepdim=True))
    q_NV = torch.exp(log_q_NV, out=buffers.take(name, logits_NV.shape[0]))
    total_N1 = q_NV.sum(-1, keepdim=True)
    log_q_NV.sub_(total_N1.log())
    q_NV.div_(total_N1)
    scratch_NV = buffers.take("scratch", logits_NV.shape[0])
    entropy_N = torch.mul(q_NV, log_q_NV, out=scratch_NV).sum(-1).neg_()
    # One outcome of probability zero makes its row's entropy NaN (0 · −inf): a look at N numbers saves a pass over N·V.
    if not bool(entropy_N.isfinite().all()):
        log_q_NV.masked_fill_(log_q_NV == -torch.inf, LOG_ZERO)
        entropy_N = torch.mul(q_NV, log_q_NV, out=scratch_NV).sum(-1).neg_()
    return log_q_NV, q_NV, entropy_N


def _pair(
    student_NV: Tensor, teacher_NV: Tensor, temperature: float, buffers: Buffers
) -> tuple[Pair, dict[str, Tensor]]:
    """Both distributions, and the metrics that need them as they are."""
    log_q, q, entropy_student_N = log_softmax(student_NV, temperature, buffers, "q")
    log_p, p, entropy_teacher_N = log_softmax(teacher_NV, temperature, buffers, "p")
    # Looking the teacher's choice up in the student costs half of a second argmax.
    top_N1 = log_p.argmax(-1, keepdim=True)
    agreement_N = (log_q.gather(-1, top_N1)[:, 0] >= log_q.amax(-1)).to(log_q.dtype)
    metrics = {
        "entropy_student": entropy_student_N,
        "entropy_teacher": entropy_teacher_N,
        "teacher_top1_agreement": agreement_N,
    }
    return Pair(log_q, q, log_p, p, buffers.take("scratch", log_q.shape[0])), metrics
