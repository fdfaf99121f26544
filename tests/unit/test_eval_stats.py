from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays
from scipy.stats import ttest_rel

from opd.errors import OpdError
from opd.eval import compare, maj_at_k, pass_at_k, summarize

matrices = arrays(np.bool_, array_shapes(min_dims=2, max_dims=2, min_side=1, max_side=6))


# ---- pass@k --------------------------------------------------------------------------------------------------------


@given(st.data())
def test_pass_at_k_is_the_share_of_subsets_with_a_correct_sample(data):
    n = data.draw(st.integers(1, 8))
    c, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    subsets = list(itertools.combinations([True] * c + [False] * (n - c), k))
    assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets), abs=1e-12)


@given(st.data())
def test_pass_at_k_is_exact_for_large_n(data):
    n = data.draw(st.integers(1, 3000))
    c, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    exact = 1 - Fraction(math.comb(n - c, k), math.comb(n, k))
    assert pass_at_k(n, c, k) == pytest.approx(float(exact), rel=1e-11, abs=0)


def test_pass_at_k_keeps_tiny_values():
    assert pass_at_k(10**12, 1, 1) == pytest.approx(1e-12, rel=1e-12)


@pytest.mark.parametrize(("n", "c", "k"), [(4, 2, 5), (4, 2, 0), (4, 5, 1), (4, -1, 1)])
def test_pass_at_k_refuses_the_impossible(n, c, k):
    with pytest.raises(OpdError):
        pass_at_k(n, c, k)


# ---- summary -------------------------------------------------------------------------------------------------------


@given(matrices)
def test_summary_follows_the_formulas(correct):
    num_problems, num_samples = correct.shape
    summary = summarize(correct)
    share = correct.mean(axis=1)
    assert summary.avg == pytest.approx(correct.mean())
    assert (summary.num_problems, summary.num_samples) == correct.shape
    if num_samples == 1:
        assert math.isnan(summary.sampling_se)
    else:
        expected = math.sqrt(sum(p * (1 - p) / (num_samples - 1) for p in share)) / num_problems
        assert summary.sampling_se == pytest.approx(expected)
    if num_problems == 1:
        assert math.isnan(summary.problem_se)
    else:
        assert summary.problem_se == pytest.approx(share.std(ddof=1) / math.sqrt(num_problems), abs=1e-12)
        assert 0 <= summary.low <= summary.avg + 1e-12
        assert summary.avg - 1e-12 <= summary.high <= 1
    assert summary.pass_at[1] == pytest.approx(summary.avg)
    assert summary.pass_at[num_samples] == pytest.approx(correct.any(axis=1).mean())


def test_sampling_se_is_the_spread_over_new_samples_of_the_same_problems():
    generator = np.random.default_rng(0)
    rates = generator.random(20)
    draws = [generator.random((20, 6)) < rates[:, None] for _ in range(2000)]
    spread = np.std([draw.mean() for draw in draws])
    estimated = math.sqrt(np.mean([summarize(draw).sampling_se ** 2 for draw in draws]))
    assert estimated == pytest.approx(spread, rel=0.05)


def test_problem_se_is_the_spread_over_new_problems_and_wider_than_the_binomial():
    generator = np.random.default_rng(1)
    draws = [generator.random((30, 6)) < generator.beta(0.5, 0.5, size=(30, 1)) for _ in range(2000)]
    spread = np.std([draw.mean() for draw in draws])
    estimated = math.sqrt(np.mean([summarize(draw).problem_se ** 2 for draw in draws]))
    assert estimated == pytest.approx(spread, rel=0.05)
    assert math.sqrt(0.25 / (30 * 6)) < 0.7 * spread


@pytest.mark.parametrize("rate", [0.02, 0.1, 0.5, 0.9])
def test_summary_interval_covers_the_truth(rate):
    generator = np.random.default_rng(2)
    covered = 0
    for _ in range(1000):
        rates = generator.beta(2 * rate, 2 * (1 - rate), size=(25, 1))
        summary = summarize(generator.random((25, 4)) < rates)
        covered += summary.low <= rate <= summary.high
    assert 0.92 <= covered / 1000 <= 1


def test_no_correct_sample_does_not_mean_certainly_zero():
    summary = summarize(np.zeros((64, 4), dtype=bool))
    assert summary.low == 0
    assert 0.03 < summary.high < 0.08  # about 3 / 64, the rule of three


def test_clusters_count_once():
    correct = np.random.default_rng(3).random((12, 5)) < 0.5
    doubled = np.concatenate([correct, correct])
    labels = [*range(12), *range(12)]
    once, naive, clustered = summarize(correct), summarize(doubled), summarize(doubled, clusters=labels)
    assert clustered.problem_se == pytest.approx(once.problem_se)
    assert naive.problem_se < 0.75 * once.problem_se
    assert summarize(correct, clusters=list(range(12))) == once


@pytest.mark.parametrize("bad", [[True, False], [], [[]], [[0.5, 1.0]], [[2, 0]], [[math.nan]]])
def test_summary_refuses_other_shapes_and_values(bad):
    with pytest.raises(OpdError):
        summarize(bad)


def test_wrong_number_of_labels_is_refused():
    with pytest.raises(OpdError, match="cluster labels"):
        summarize([[True], [False]], clusters=["a"])


# ---- comparison ----------------------------------------------------------------------------------------------------


@given(matrices)
def test_identical_results_do_not_differ(correct):
    comparison = compare(correct, correct)
    assert comparison.difference == 0
    assert comparison.p_value == 1
    assert not comparison.low > 0
    assert not comparison.high < 0


@given(st.data())
def test_swapping_sides_swaps_the_sign(data):
    shape = data.draw(array_shapes(min_dims=2, max_dims=2, min_side=2, max_side=6))
    a, b = (data.draw(arrays(np.bool_, shape)) for _ in "ab")
    forward, back = compare(a, b), compare(b, a)
    assert forward.difference == pytest.approx(b.mean() - a.mean())
    assert forward.difference == pytest.approx(-back.difference)
    assert forward.p_value == back.p_value
    assert (forward.low, forward.high) == pytest.approx((-back.high, -back.low))


def test_t_interval_is_that_of_the_paired_test():
    generator = np.random.default_rng(4)
    a, b = generator.random((20, 4)) < 0.4, generator.random((20, 6)) < 0.6
    comparison = compare(a, b)
    expected = ttest_rel(b.mean(axis=1), a.mean(axis=1)).confidence_interval(0.95)
    assert (comparison.low, comparison.high) == pytest.approx((expected.low, expected.high))
    assert (comparison.num_samples_a, comparison.num_samples_b) == (4, 6)


@settings(deadline=None)
@given(st.data())
def test_permutation_p_counts_every_sign_pattern(data):
    num_problems = data.draw(st.integers(1, 7))
    a, b = (data.draw(arrays(np.bool_, (num_problems, 3))) for _ in "ab")
    labels = data.draw(st.lists(st.integers(0, 3), min_size=num_problems, max_size=num_problems))
    tenths = b.sum(axis=1).astype(int) - a.sum(axis=1).astype(int)  # integers: no rounding in the reference
    totals = [sum(int(d) for d, label in zip(tenths, labels, strict=True) if label == g) for g in sorted(set(labels))]
    sums = [
        sum(s * t for s, t in zip(signs, totals, strict=True))
        for signs in itertools.product((1, -1), repeat=len(totals))
    ]
    expected = sum(abs(s) >= abs(sum(totals)) for s in sums) / len(sums)
    comparison = compare(a, b, clusters=labels)
    assert comparison.p_exact
    assert comparison.p_value == pytest.approx(expected)
    assert comparison.num_clusters == len(totals)


def test_many_problems_draw_seeded_patterns_that_agree_with_the_t_test():
    generator = np.random.default_rng(5)
    a, b = generator.random((60, 8)) < 0.5, generator.random((60, 8)) < 0.56
    first, again, other = compare(a, b), compare(a, b), compare(a, b, seed=1)
    assert not first.p_exact
    assert first == again
    assert first.p_value != other.p_value
    assert first.p_value == pytest.approx(ttest_rel(b.mean(axis=1), a.mean(axis=1)).pvalue, abs=0.02)


def test_interval_covers_the_true_difference_and_p_is_uniform_without_one():
    generator = np.random.default_rng(6)
    covered, rejected = 0, 0
    for _ in range(500):
        rates = generator.beta(1, 1, size=(12, 1))
        a, b, same = (generator.random((12, 4)) < np.clip(rates * factor, 0, 1) for factor in (1.0, 0.8, 1.0))
        comparison = compare(a, b)
        covered += comparison.low <= -0.1 <= comparison.high  # E[rate] is 0.5, so the true difference is -0.1
        rejected += compare(a, same).p_value <= 0.05
    assert 0.92 <= covered / 500 <= 0.98
    assert rejected / 500 <= 0.07


def test_clustered_comparison_does_not_count_both_orders_twice():
    generator = np.random.default_rng(7)
    a, b = generator.random((15, 4)) < 0.4, generator.random((15, 4)) < 0.6
    labels = [*range(15), *range(15)]
    once = compare(a, b)
    clustered = compare(np.concatenate([a, a]), np.concatenate([b, b]), clusters=labels)
    naive = compare(np.concatenate([a, a]), np.concatenate([b, b]))
    assert (clustered.se, clustered.low, clustered.high) == pytest.approx((once.se, once.low, once.high))
    assert clustered.p_value == pytest.approx(once.p_value, abs=0.02)
    assert naive.se < 0.75 * once.se


@pytest.mark.parametrize(("num_problems", "num_samples", "points"), [(30, 12, 7.4), (30, 48, 3.7), (90, 48, 2.2)])
def test_minimum_detectable_difference_of_known_designs(num_problems, num_samples, points):
    generator = np.random.default_rng(8)
    rates = np.where(np.arange(num_problems) % 2 == 0, 0.5 - 0.5**0.5 / 2, 0.5 + 0.5**0.5 / 2)[:, None]  # p (1-p) = 1/8
    found = [
        compare(*(generator.random((2, num_problems, num_samples)) < rates)).minimum_detectable for _ in range(200)
    ]
    assert 100 * np.mean(found) == pytest.approx(points, rel=0.06)  # the design's figures have z for t


def test_a_difference_of_the_minimum_detectable_size_is_found_four_times_in_five():
    generator = np.random.default_rng(9)
    rate, sizes, found = 0.3, [], 0
    for trial in range(600):
        shift = 0.0 if trial < 200 else float(np.mean(sizes))
        a, b = generator.random((30, 8)) < rate, generator.random((30, 8)) < rate + shift
        comparison = compare(a, b)
        if trial < 200:
            sizes.append(comparison.minimum_detectable)
        else:
            found += comparison.low > 0
    assert found / 400 == pytest.approx(0.8, abs=0.06)


def test_one_problem_gives_no_interval():
    comparison = compare([[True, False]], [[True, True]])
    assert comparison.difference == 0.5
    assert math.isnan(comparison.se)
    assert math.isnan(comparison.low)
    assert math.isnan(comparison.minimum_detectable)
    assert comparison.p_value == 1


def test_unpaired_results_are_refused():
    with pytest.raises(OpdError, match="paired"):
        compare([[True]], [[True], [False]])


# ---- majority ------------------------------------------------------------------------------------------------------


def test_majority_splits_ties_and_ignores_silence():
    answers = [["7", "7", "3"], ["7", "3", None], [None, None, None], ["1", "2", "3"], ["1/2", "0.5", "7"]]
    correct = [[1, 1, 0], [1, 0, 0], [0, 0, 0], [0, 0, 0], [1, 1, 0]]
    assert maj_at_k(answers, correct) == pytest.approx((1 + 0.5 + 0 + 0 + 1) / 5)


@given(st.data())
def test_maj_at_one_is_the_average(data):
    correct = data.draw(matrices)
    answers = [["right" if right else f"wrong {i}" for i, right in enumerate(row)] for row in correct]
    assert maj_at_k(answers, correct, 1) == pytest.approx(correct.mean())


def test_maj_at_k_averages_over_all_subsets():
    # Of the three pairs two hold the right answer and another one, a tie; the third is two different wrong ones.
    assert maj_at_k([["7", "1", "2"]], [[True, False, False]], 2) == pytest.approx((0.5 + 0.5 + 0) / 3)


def test_maj_at_k_refuses_more_votes_than_samples():
    with pytest.raises(OpdError, match="maj@3"):
        maj_at_k([["1", "2"]], [[True, False]], 3)
