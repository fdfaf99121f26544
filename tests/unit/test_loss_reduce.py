"""The one division: the same gradient for any split of the batch."""

from __future__ import annotations

import math

import pytest
import torch

from opd.loss import Full, build
from opd.loss.reduce import global_mean, global_sequence_mean, metric_means, metric_sums, tokens_per_sequence

# N supervised tokens, V vocabulary.
N, V = 12, 9
SEQUENCES = torch.tensor([0] * 5 + [1] + [2] * 6)
LENGTHS = torch.tensor([5] * 5 + [1] + [6] * 6)


def gradient(splits: list[torch.Tensor], by: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(N, V, generator=generator).requires_grad_()
    teacher = Full.from_logits(torch.randn(N, V, generator=generator))
    for rows in splits:
        values = build({"name": "reverse_kl"}).tokens(logits[rows], teacher.rows(rows)).values
        share = global_mean(values, N) if by == "tokens" else global_sequence_mean(values, LENGTHS[rows], 3)
        assert share is not None
        share.backward()
    assert logits.grad is not None
    return logits.grad


@pytest.mark.parametrize("by", ["tokens", "sequences"])
def test_gradient_does_not_depend_on_the_split(by: str) -> None:
    whole = gradient([torch.arange(N)], by)
    order = torch.randperm(N, generator=torch.Generator().manual_seed(1))
    for splits in (list(torch.arange(N).split(1)), list(torch.arange(N).split([5, 1, 6])), list(order.split([2, 10]))):
        split = gradient(splits, by)
        assert (split - whole).norm() / whole.norm() < 1e-5
    assert whole.norm() > 0.01


def test_means_are_what_they_say() -> None:
    values = torch.arange(12.0)
    assert global_mean(values, 12) == values.mean()
    per_sequence = torch.stack([values[s == SEQUENCES].mean() for s in range(3)])
    torch.testing.assert_close(global_sequence_mean(values, LENGTHS, 3), per_sequence.mean())


def test_tokens_of_a_sequence_are_counted_as_far_as_gates_leave_them() -> None:
    assert tokens_per_sequence(SEQUENCES).tolist() == LENGTHS.tolist()
    # In any order, with any numbers for the sequences.
    assert tokens_per_sequence(torch.tensor([7, 3, 7, 7])).tolist() == [3, 1, 3, 3]
    open_N = torch.tensor([1.0, 0.0, 0.0, 1.0, 0.0])
    assert tokens_per_sequence(torch.tensor([0, 0, 1, 0, 1]), open_N).tolist() == [2, 2, 1, 2, 1]  # never divides by 0
    assert tokens_per_sequence(torch.zeros(0, dtype=torch.int64)).tolist() == []


def test_averaging_over_ranks_is_undone() -> None:
    values = torch.arange(12.0)
    shares = [global_mean(part, 12, num_ranks=2) for part in values.split([4, 8])]
    assert shares[0] is not None
    assert shares[1] is not None
    torch.testing.assert_close((shares[0] + shares[1]) / 2, values.mean())


def test_an_all_masked_batch_has_no_mean() -> None:
    assert global_mean(torch.zeros(0), 0) is None
    assert global_sequence_mean(torch.zeros(0), torch.zeros(0, dtype=torch.int64), 0) is None
    assert math.isnan(metric_means({"clipped": 0.0}, 0)["clipped"])


def test_an_empty_micro_batch_of_a_full_batch_adds_nothing() -> None:
    share = global_mean(torch.zeros(0, requires_grad=True), 5)
    assert share is not None
    assert share.item() == 0.0


def test_metrics_add_up_over_micro_batches() -> None:
    metric = torch.rand(12, generator=torch.Generator().manual_seed(0))
    parts = [metric_sums({"entropy": part}) for part in metric.split(5)]
    total = {"entropy": sum(part["entropy"] for part in parts)}
    assert metric_means(total, 12)["entropy"] == pytest.approx(metric.double().mean().item())
