"""Statistics of an evaluation: how good, how sure, and whether two results differ.

Suffix legend: N problems, n samples a problem, G clusters (groups of problems that are not independent of each other).

Two questions need two standard errors. *Would the same problems give this score again?* is answered by the sampling
error, *would other problems of this kind?* by the new-problem error. The binomial error over all N x n samples answers
neither: it is too small for the second and too large for the first.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.stats import t as student_t

from opd.errors import OpdError

CONFIDENCE = 0.95
POWER = 0.80
NUM_PERMUTATIONS = 10_000
MAX_EXACT_CLUSTERS = 13  # 2**13 sign patterns: all of them cost less than the 10,000 draws

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class Summary:
    """One result in numbers; shares are in [0, 1], and what cannot be known is NaN.

    Args:
        avg: avg@n, the mean over problems of the share of correct samples.
        sampling_se: standard error over new samples of the same problems; NaN for one sample a problem.
        problem_se: standard error over new problems (or clusters of them); NaN for a single cluster.
        low, high: 95% interval of ``avg`` over new problems.
        pass_at: k -> pass@k, for the powers of two up to n, and n.
        num_problems: N.
        num_samples: n.
    """

    avg: float
    sampling_se: float
    problem_se: float
    low: float
    high: float
    pass_at: dict[int, float]
    num_problems: int
    num_samples: int


@dataclass(frozen=True)
class Comparison:
    """How much higher B is than A on the same problems; shares in [0, 1], NaN where nothing can be known.

    Args:
        difference: avg of B minus avg of A.
        se: its standard error over new problems, paired by problem and clustered.
        low, high: 95% t-interval of the difference.
        p_value: two-sided, from flipping the sign of each cluster's difference.
        p_exact: whether all sign patterns were counted, rather than 10,000 seeded draws.
        minimum_detectable: the smallest true difference that this design finds with 80% power at the 5% level.
        avg_a, avg_b: the two averages.
        num_problems, num_clusters: N and G.
        num_samples_a, num_samples_b: samples a problem on either side.
    """

    difference: float
    se: float
    low: float
    high: float
    p_value: float
    p_exact: bool
    minimum_detectable: float
    avg_a: float
    avg_b: float
    num_problems: int
    num_clusters: int
    num_samples_a: int
    num_samples_b: int


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """The chance that at least one of k samples drawn without replacement is correct: 1 - C(n-c, k) / C(n, k).

    The unbiased estimator of Chen et al. 2021 (arXiv 2107.03374, eq. 1); the plug-in 1 - (1 - c/n)^k is biased low.
    Computed in logarithms over min(c, k) factors, so that large n neither overflows nor loses small values.

    Args:
        num_samples: n, samples drawn for the problem.
        num_correct: c, how many of them are correct.
        k: 1 <= k <= n.

    Raises:
        OpdError: k outside 1..n, or c outside 0..n.
    """
    if not 1 <= k <= num_samples:
        raise OpdError(
            f"pass@{k} cannot be estimated",
            why=f"k must be between 1 and the number of samples, which is {num_samples}",
            fix="draw more samples for each problem, or ask for a smaller k",
        )
    if not 0 <= num_correct <= num_samples:
        raise OpdError(
            f"pass@{k} cannot be estimated",
            why=f"{num_correct} correct of {num_samples} samples is impossible",
            fix="pass num_samples first, then num_correct",
        )
    if num_samples - num_correct < k:
        return 1.0
    # C(n-c, k) / C(n, k) = C(n-k, c) / C(n, c): multiply whichever has fewer factors.
    few, many = sorted((num_correct, k))
    return -math.expm1(math.fsum(math.log1p(-many / (num_samples - j)) for j in range(few)))


def summarize(correct: ArrayLike, *, clusters: Sequence[Hashable] | None = None) -> Summary:
    """Average, its two standard errors, its interval, and pass@k.

    sampling_se = sqrt(sum_i p_i (1 - p_i) / (n - 1)) / N, and problem_se = sd(p) / sqrt(N) or its cluster-robust form.
    The interval is Wilson's with the effective number of problems avg (1 - avg) / problem_se^2 (Korn and Graubard 1998)
    and Student's t for G - 1 degrees of freedom: unlike avg +- t se it stays inside [0, 1] and does not shrink to a
    point when every sample is right, or every one wrong.

    Args:
        correct: bool [N, n].
        clusters: one label a problem; problems with the same label are not counted as independent evidence.
    """
    correct_Nn = as_bools(correct, "correct")
    share_N = correct_Nn.mean(axis=1)
    num_problems, num_samples = correct_Nn.shape
    avg = float(share_N.mean())
    totals_G = _cluster_totals(share_N - avg, clusters)
    problem_se = _clustered_se(totals_G, num_problems)
    low, high = _wilson(avg, problem_se, len(totals_G))
    counts_N = [int(count) for count in correct_Nn.sum(axis=1)]
    return Summary(
        avg=avg,
        sampling_se=_sampling_se(share_N, num_samples),
        problem_se=problem_se,
        low=low,
        high=high,
        pass_at={k: mean([pass_at_k(num_samples, c, k) for c in counts_N]) for k in _ks(num_samples)},
        num_problems=num_problems,
        num_samples=num_samples,
    )


def compare(
    correct_a: ArrayLike, correct_b: ArrayLike, *, clusters: Sequence[Hashable] | None = None, seed: int = 0
) -> Comparison:
    """Is B better than A on these problems? ``difference`` is B minus A: positive when B is the better one.

    Paired by problem: each problem's difference of shares is one observation, so that easy and hard problems cancel.
    Clustered (Miller 2024, arXiv 2411.00640, section 2.2): with labels, the differences of a cluster are summed first.
    The p-value flips signs of whole clusters, which is exact under "A and B are exchangeable" and assumes no shape.

    Args:
        correct_a: bool [N, n_a], the baseline.
        correct_b: bool [N, n_b], the same problems in the same order.
        clusters: one label a problem, e.g. the two orders of one product share a label.
        seed: of the permutation draws, used when there are too many clusters to count every sign pattern.

    Raises:
        OpdError: no problems, not two-dimensional, not true-or-false values, or different numbers of problems.
    """
    a_Nn, b_Nn = as_bools(correct_a, "correct_a"), as_bools(correct_b, "correct_b")
    if len(a_Nn) != len(b_Nn):
        raise OpdError(
            "the two results cannot be paired",
            why=f"A has {len(a_Nn)} problems and B has {len(b_Nn)}",
            fix="pass the same problems in the same order",
        )
    share_a_N, share_b_N = a_Nn.mean(axis=1), b_Nn.mean(axis=1)
    difference_N = share_b_N - share_a_N
    num_problems = len(difference_N)
    difference = float(difference_N.mean())
    totals_G = _cluster_totals(difference_N - difference, clusters)
    se = _clustered_se(totals_G, num_problems)
    df = len(totals_G) - 1
    half = _t_quantile((1 + CONFIDENCE) / 2, df) * se
    p_value, p_exact = _sign_flip_p(_cluster_totals(difference_N, clusters), seed)
    sampling_se = math.hypot(_sampling_se(share_a_N, a_Nn.shape[1]), _sampling_se(share_b_N, b_Nn.shape[1]))
    # Identical results have no spread from problem to problem; what the design can detect is then up to the sampling.
    design_se = se if se > 0 else sampling_se
    quantiles = _t_quantile((1 + CONFIDENCE) / 2, df) + _t_quantile(POWER, df)
    return Comparison(
        difference=difference,
        se=se,
        low=difference - half,
        high=difference + half,
        p_value=p_value,
        p_exact=p_exact,
        minimum_detectable=quantiles * design_se if design_se > 0 else math.nan,
        avg_a=float(share_a_N.mean()),
        avg_b=float(share_b_N.mean()),
        num_problems=num_problems,
        num_clusters=len(totals_G),
        num_samples_a=a_Nn.shape[1],
        num_samples_b=b_Nn.shape[1],
    )


# ---- pieces --------------------------------------------------------------------------------------------------------


def as_bools(values: ArrayLike, name: str) -> Bools:
    """`values` as bool [N, n], or an error that names the argument."""
    array_Nn = np.asarray(values)
    if array_Nn.ndim != 2 or 0 in array_Nn.shape:
        raise OpdError(
            f"`{name}` must be [problems, samples] with at least one of each",
            why=f"its shape is {list(array_Nn.shape)}",
            fix="pass one row a problem and one column a sample; for one sample a problem use correct[:, None]",
        )
    if array_Nn.dtype != np.bool_ and not np.isin(array_Nn, (0, 1)).all():
        raise OpdError(
            f"`{name}` must hold true or false",
            why=f"it holds values other than 0 and 1 (type {array_Nn.dtype})",
            fix="compare with a threshold first, e.g. score > 0.5",
        )
    return array_Nn.astype(np.bool_)


def _ks(num_samples: int) -> list[int]:
    return sorted({2**i for i in range(num_samples.bit_length())} | {num_samples})


def mean(values: Sequence[float]) -> float:
    """The mean, with the sum rounded once."""
    return math.fsum(values) / len(values)


def _sampling_se(share_N: Floats, num_samples: int) -> float:
    if num_samples == 1:
        return math.nan
    return math.sqrt(float((share_N * (1 - share_N)).sum()) / (num_samples - 1)) / len(share_N)


def _cluster_totals(values_N: Floats, clusters: Sequence[Hashable] | None) -> Floats:
    """Sum of the values of each cluster [G]; without labels each problem is its own cluster."""
    if clusters is None:
        return values_N
    if len(clusters) != len(values_N):
        raise OpdError(
            "the cluster labels do not fit the problems",
            why=f"there are {len(clusters)} labels for {len(values_N)} problems",
            fix="pass one label a problem",
        )
    numbers: dict[Hashable, int] = {}
    index_N = [numbers.setdefault(label, len(numbers)) for label in clusters]
    return np.bincount(index_N, weights=values_N).astype(np.float64)


def _clustered_se(totals_G: Floats, num_problems: int) -> float:
    """Cluster-robust standard error of a mean, from each cluster's sum of deviations; sd / sqrt(N) when G = N."""
    num_clusters = len(totals_G)
    if num_clusters < 2:
        return math.nan
    squares = float((totals_G**2).sum())
    # Rounding leaves some 1e-17 a problem when all deviations are zero: a difference that never varies has se 0.
    if squares < num_problems * 1e-28:
        return 0.0
    return math.sqrt(num_clusters / (num_clusters - 1) * squares) / num_problems


def _t_quantile(probability: float, df: int) -> float:
    return float(student_t.ppf(probability, df)) if df >= 1 else math.nan


def _wilson(avg: float, se: float, num_clusters: int) -> tuple[float, float]:
    if num_clusters < 2:
        return math.nan, math.nan
    effective = avg * (1 - avg) / se**2 if se > 0 else float(num_clusters)
    t2 = _t_quantile((1 + CONFIDENCE) / 2, num_clusters - 1) ** 2
    center = (avg + t2 / (2 * effective)) / (1 + t2 / effective)
    half = math.sqrt(t2) / (1 + t2 / effective) * math.sqrt(avg * (1 - avg) / effective + t2 / (4 * effective**2))
    # At the ends the two terms are equal; their rounded difference would leave 1e-18.
    return (0.0 if avg == 0 else max(0.0, center - half)), (1.0 if avg == 1 else min(1.0, center + half))


def _sign_flip_p(totals_G: Floats, seed: int) -> tuple[float, bool]:
    """Two-sided p of the sum under random signs, and whether every sign pattern was counted."""
    moved_G = totals_G[np.abs(totals_G) > 1e-12]  # flipping a zero changes nothing
    num_moved = len(moved_G)
    observed = abs(float(moved_G.sum())) - 1e-9  # sums that differ by rounding alone are ties
    if num_moved <= MAX_EXACT_CLUSTERS:
        patterns = np.arange(2**num_moved)[:, None] >> np.arange(num_moved)[None, :] & 1
        sums = (1 - 2 * patterns) @ moved_G
        return float((np.abs(sums) >= observed).mean()), True
    generator = np.random.default_rng(seed)
    num_extreme = 0
    for _ in range(10):  # in slices, so that thousands of problems do not need gigabytes
        signs = 1 - 2 * generator.integers(0, 2, size=(NUM_PERMUTATIONS // 10, num_moved), dtype=np.int8)
        num_extreme += int((np.abs(signs @ moved_G) >= observed).sum())
    # The observed pattern is one of the possible ones: counting it keeps p above zero and the test valid.
    return (num_extreme + 1) / (NUM_PERMUTATIONS + 1), False
