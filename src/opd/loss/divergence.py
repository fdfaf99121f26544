"""Divergences between the student's and the teacher's next-token distributions.

A divergence is a sum over outcomes, D = Σ_v d_v. Each one here is a function of a `Pair` and its config that returns
the entries d_v and their slopes ∂d_v/∂log q_v. Clips, supports, metrics and both ways in (logits, or hidden states and
a head) follow from these two by themselves, and so does the gradient: with q = softmax(z/τ),

    dD/dz_j = (slope_j − q_j Σ_v slope_v) / τ.

Two of them weigh forward against reverse KL token by token; those weights have no gradient and are found first.

Tensor suffixes: N supervised tokens, v a tile of the vocabulary (or all of a top-k support).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from opd.config.loss import (
    AdaptiveKLConfig,
    EntropyAwareConfig,
    ForwardKLConfig,
    JSDConfig,
    ReverseKLConfig,
    SkewKLConfig,
    SkewReverseKLConfig,
    TVDConfig,
)
from opd.loss.logits import Scratch, row_sum


class Weights(NamedTuple):
    """Of forward and reverse KL at each token, [N, 1]."""

    forward: Tensor
    reverse: Tensor


class Pair:
    """Student q and teacher p over the same outcomes, [N, v], in buffers that a divergence may overwrite, all but `q`.

    `p` and `q` are worked out when first asked for: ask before you overwrite their logarithms.

    Args:
        log_q: log-probabilities of the student.
        log_p: those of the teacher.
        scratch: where further buffers come from.
        is_bucket_v: [v] bool, true for an outcome that stands for all others; None when there is none.
    """

    def __init__(self, log_q: Tensor, log_p: Tensor, scratch: Scratch, is_bucket_v: Tensor | None = None) -> None:
        self.log_q, self.log_p, self.is_bucket_v = log_q, log_p, is_bucket_v
        self._scratch = scratch
        self._q: Tensor | None = None
        self._p: Tensor | None = None

    @property
    def q(self) -> Tensor:
        """The student's probabilities."""
        if self._q is None:
            self._q = torch.exp(self.log_q, out=self.buffer("q"))
        return self._q

    @property
    def p(self) -> Tensor:
        """The teacher's probabilities."""
        if self._p is None:
            self._p = torch.exp(self.log_p, out=self.buffer("p"))
        return self._p

    def buffer(self, name: str) -> Tensor:
        """An uninitialised [N, v] buffer."""
        return self._scratch.take(name, *self.log_q.shape)


@runtime_checkable
class Outcomes(Protocol):
    """What a divergence is summed over, and what is known of each row's distributions; entropies in nats, [N, 1]."""

    entropy_teacher: Tensor

    def pairs(self) -> Iterator[Pair]:
        """All outcomes, tile by tile."""
        ...

    def teacher_head(self, mass: float) -> Float[Tensor, "N 1"]:
        """Log-probability of the least likely of the fewest teacher's tokens whose mass reaches `mass`."""
        ...


Entries = tuple[Tensor, Tensor]


def forward_kl(pair: Pair, _config: ForwardKLConfig | SkewKLConfig, _weights: None) -> Entries:
    """KL(p‖q): d = p (log p − log q). Classic distillation, and the choice of OPSD (arXiv 2601.18734)."""
    p = pair.p
    return pair.log_p.sub_(pair.log_q).mul_(p), p.neg_()


def reverse_kl(pair: Pair, _config: ReverseKLConfig | SkewReverseKLConfig, _weights: None) -> Entries:
    """KL(q‖p): d = q (log q − log p). MiniLLM (arXiv 2306.08543), Thinking Machines."""
    q = pair.q
    values = pair.log_q.sub_(pair.log_p).mul_(q)
    return values, torch.add(values, q, out=pair.log_p)


def jsd(pair: Pair, config: JSDConfig, _weights: None) -> Entries:
    """w KL(p‖m) + (1−w) KL(q‖m) with m = w p + (1−w) q: GKD (arXiv 2306.13649, eq. 2), whose β is w."""
    weight, p, q = config.teacher_weight, pair.p, pair.q
    log_m = _log(torch.lerp(q, p, weight, out=pair.buffer("m")))
    teacher_part = pair.log_p.sub_(log_m).mul_(p).mul_(weight)
    student_part = pair.log_q.sub_(log_m).mul_(q).mul_(1 - weight)
    # The slope of the teacher's part and that of log m in the student's cancel.
    return teacher_part.add_(student_part), student_part


def skew_kl(pair: Pair, config: SkewKLConfig, _weights: None) -> Entries:
    """KL(p‖m) with m = α p + (1−α) q: DistiLLM (arXiv 2402.03898); slope −p (1−α) q / m."""
    p, q = pair.p, pair.q
    m = torch.lerp(q, p, config.alpha, out=pair.buffer("m"))
    slope = torch.mul(p, q, out=pair.log_q).mul_(config.alpha - 1).div_(_positive(m))
    return pair.log_p.sub_(m.log_()).mul_(p), slope


def skew_reverse_kl(pair: Pair, config: SkewReverseKLConfig, _weights: None) -> Entries:
    """KL(q‖m) with m = (1−α) p + α q: DistiLLM (arXiv 2402.03898); slope d + q (1 − α q / m)."""
    p, q = pair.p, pair.q
    m = torch.lerp(p, q, config.alpha, out=pair.buffer("m"))
    share = torch.div(q, _positive(m), out=pair.log_p).mul_(-config.alpha).add_(1.0).mul_(q)
    values = pair.log_q.sub_(m.log_()).mul_(q)
    return values, share.add_(values)


def weighted_kls(pair: Pair, _config: object, weights: Weights) -> Entries:
    """a KL(p‖q) + b KL(q‖p) with a and b by token: d = (log p − log q)(a p − b q), slope −a p + b (d_reverse + q)."""
    p, q = pair.p, pair.q
    ratio = pair.log_p.sub_(pair.log_q)
    forward, reverse = p.mul_(weights.forward), torch.mul(q, weights.reverse, out=pair.log_q)
    difference = torch.sub(forward, reverse, out=pair.buffer("m"))
    slope = torch.sub(ratio, 1.0, out=pair.buffer("slope")).mul_(reverse).add_(forward).neg_()
    return ratio.mul_(difference), slope


def tvd(pair: Pair, _config: TVDConfig, _weights: None) -> Entries:
    """½ Σ |p − q|: total variation distance (f-distill, arXiv 2307.15190); slope ½ sign(q − p) q."""
    q = pair.q
    difference = torch.sub(q, pair.p, out=pair.log_p)
    slope = torch.sign(difference, out=pair.log_q).mul_(q).mul_(0.5)
    return difference.abs_().mul_(0.5), slope


def adaptive_weights(outcomes: Outcomes, config: AdaptiveKLConfig) -> Weights:
    """Σ|p−q| over the teacher's head, and over its tail, each as a share of both: AKL (arXiv 2404.02657).

    Tokens that tie with the least likely of the head belong to it, an outcome that stands for all others to the tail.
    """
    least = outcomes.teacher_head(config.head_mass)
    head = tail = torch.zeros_like(least)
    for pair in outcomes.pairs():
        in_head = pair.log_p >= least
        if pair.is_bucket_v is not None:
            in_head &= ~pair.is_bucket_v
        gap = torch.sub(pair.p, pair.q, out=pair.buffer("m")).abs_()
        total = row_sum(gap)
        inside = row_sum(gap.mul_(in_head))
        head, tail = head + inside, tail + total - inside
    both = head + tail
    return Weights(torch.where(both > 0, head / both, 0.5), torch.where(both > 0, tail / both, 0.5))


def entropy_weights(outcomes: Outcomes, config: EntropyAwareConfig) -> Weights:
    """Reverse KL everywhere, forward KL where the teacher's entropy is above the threshold: EOPD (arXiv 2603.07079)."""
    uncertain = (outcomes.entropy_teacher > config.threshold).to(outcomes.entropy_teacher.dtype)
    return Weights(uncertain * config.forward_weight, torch.ones_like(uncertain))


def _positive(m: Tensor) -> Tensor:
    # Where a mixture underflows both sides are zero, and any finite logarithm or quotient will do.
    return m.clamp_(min=torch.finfo(m.dtype).tiny)


def _log(m: Tensor) -> Tensor:
    return _positive(m).log_()


@dataclass(frozen=True)
class Divergence:
    """Entries and slopes, and the weights they need, if any."""

    entries: Callable[[Pair, Any, Any], Entries]
    weights: Callable[[Outcomes, Any], Weights | None] = lambda _outcomes, _config: None


# name in a recipe -> how it is computed
DIVERGENCES: dict[str, Divergence] = {
    "forward_kl": Divergence(forward_kl),
    "reverse_kl": Divergence(reverse_kl),
    "jsd": Divergence(jsd),
    "skew_kl": Divergence(skew_kl),
    "skew_reverse_kl": Divergence(skew_reverse_kl),
    "adaptive_kl": Divergence(weighted_kls, adaptive_weights),
    "entropy_aware": Divergence(weighted_kls, entropy_weights),
    "tvd": Divergence(tvd),
}
