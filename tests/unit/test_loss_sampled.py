"""What the sampled-token objectives promise, beyond their value (which `test_loss_reference.py` compares)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from opd.errors import OpdError
from opd.loss import Full, Head, RolloutTokens, Sampled, TopK, build, token_logp
from opd.loss.sampled import discounted
from reference import losses as reference

# N supervised tokens, V vocabulary, D hidden size.
N, V, D = 8, 12, 5
SEQUENCES = torch.tensor([4, 4, 4, 1, 1, 9, 9, 9])


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


IDS = torch.randint(V, (N,), generator=torch.Generator().manual_seed(1))
STUDENT, TEACHER = draw(N, V) * 2, draw(N, V, seed=1) * 2
TEACHER_LOGP = torch.log_softmax(TEACHER, -1)[torch.arange(N), IDS]
BEHAVIOR = torch.log_softmax(STUDENT + 0.5 * draw(N, V, seed=2), -1)[torch.arange(N), IDS]
ROLLOUT = RolloutTokens(IDS, BEHAVIOR, SEQUENCES)


def test_mean_gradient_over_all_tokens_is_that_of_reverse_kl() -> None:
    """Weighted by q(y), the sampled objective's gradient over every y is the gradient of KL(q‖p)."""
    logits = STUDENT[:1].expand(V, V).clone().requires_grad_()
    teacher = Full.from_logits(TEACHER[:1].expand(V, V).clone())
    scores = build({"name": "sampled_reverse_kl"}).tokens(logits, teacher, RolloutTokens(torch.arange(V)))
    q = torch.softmax(STUDENT[0], -1)
    (scores.values @ q).backward()
    assert logits.grad is not None
    expected = reference.divergence({"name": "reverse_kl"}, STUDENT[:1].numpy(), TEACHER[:1].numpy())
    np.testing.assert_allclose(logits.grad.sum(0), expected.gradient[0], atol=1e-10)
    # And the metric of that name is the estimator whose mean is the divergence.
    assert float(scores.metrics["sampled_reverse_kl"] @ q) == pytest.approx(expected.values[0])


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_full_scores_are_looked_up_at_the_sampled_token(temperature: float) -> None:
    loss = build({"name": "sampled_reverse_kl", "temperature": temperature}, chunk_bytes=3 * V * 8)
    logp = torch.log_softmax(TEACHER / temperature, -1)[torch.arange(N), IDS]
    sampled = loss.tokens(STUDENT, Sampled(logp), ROLLOUT)
    full = loss.tokens(STUDENT, Full.from_logits(TEACHER), ROLLOUT)
    torch.testing.assert_close(full.values, sampled.values)


def test_linear_equals_tokens() -> None:
    hidden, head = draw(N, D), Head(draw(V, D, seed=3), scale=0.5)
    loss = build({"name": "sampled_reverse_kl", "discount": 0.5}, chunk_bytes=3 * V * 8)
    linear = loss.linear(hidden, head, Sampled(TEACHER_LOGP), ROLLOUT)
    tokens = loss.tokens(head.logits(hidden), Sampled(TEACHER_LOGP), ROLLOUT)
    torch.testing.assert_close(linear.values, tokens.values)


def test_student_equals_teacher_gives_nothing() -> None:
    student = STUDENT.clone().requires_grad_()
    values = build({"name": "sampled_reverse_kl"}).tokens(student, Full.from_logits(STUDENT), ROLLOUT).values
    values.sum().backward()
    assert student.grad is not None
    assert values.abs().max() < 1e-12
    assert student.grad.abs().max() < 1e-12


def test_a_token_the_teacher_likes_better_gains() -> None:
    student = torch.zeros(1, 3).requires_grad_()
    loss = build({"name": "sampled_reverse_kl"})
    loss.tokens(student, Sampled(torch.tensor([-0.1])), RolloutTokens(torch.tensor([1]))).values.sum().backward()
    assert student.grad is not None
    assert student.grad[0, 1] < 0 < student.grad[0, 0]


def test_importance_reports_ratio_and_truncation() -> None:
    loss = build({"name": "sampled_reverse_kl", "importance": {"clip": 1.1}})
    metrics = loss.tokens(STUDENT, Sampled(TEACHER_LOGP), ROLLOUT).metrics
    ratio = (torch.log_softmax(STUDENT, -1)[torch.arange(N), IDS] - BEHAVIOR).exp()
    torch.testing.assert_close(metrics["importance_ratio"], ratio)
    assert 0 < metrics["clipped"].sum() < N
    torch.testing.assert_close(metrics["clipped"], (ratio > 1.1).double())
    assert (
        "clipped" not in build({"name": "sampled_reverse_kl"}).tokens(STUDENT, Sampled(TEACHER_LOGP), ROLLOUT).metrics
    )


def test_discount_stays_within_a_sequence() -> None:
    advantage = torch.tensor([1.0, 2.0, 4.0, 8.0])
    result = discounted(advantage, torch.tensor([0, 0, 1, 1]), 0.5)
    assert result.tolist() == [2.0, 2.0, 8.0, 8.0]
    with pytest.raises(OpdError, match="cannot be summed"):
        discounted(advantage, torch.tensor([0, 1, 0, 1]), 0.5)


def test_token_logp_is_the_log_softmax_entry() -> None:
    expected = torch.log_softmax(STUDENT / 1.3, -1)[torch.arange(N), IDS]
    torch.testing.assert_close(token_logp(STUDENT, None, IDS, 1.3, chunk_bytes=3 * V * 8), expected)


@pytest.mark.parametrize(
    ("config", "teacher", "rollout", "message"),
    [
        ({}, Sampled(TEACHER_LOGP), None, "the sampled tokens"),
        ({"discount": 0.5}, Sampled(TEACHER_LOGP), RolloutTokens(IDS, BEHAVIOR), "which sequence"),
        ({"importance": {"clip": 2.0}}, Sampled(TEACHER_LOGP), RolloutTokens(IDS), "log-probabilities"),
        ({}, TopK(IDS[:, None], TEACHER_LOGP[:, None]), ROLLOUT, "cannot be computed"),
        ({}, Sampled(TEACHER_LOGP[1:]), ROLLOUT, "other positions"),
        ({}, Sampled(TEACHER_LOGP), RolloutTokens(IDS[1:]), "other positions"),
        ({}, Sampled(TEACHER_LOGP), RolloutTokens(IDS + V), "outside the vocabulary"),
    ],
)
def test_what_is_missing_is_named(
    config: dict[str, Any], teacher: Any, rollout: RolloutTokens | None, message: str
) -> None:
    with pytest.raises(OpdError, match=message):
        build({"name": "sampled_reverse_kl", **config}).tokens(STUDENT, teacher, rollout)
