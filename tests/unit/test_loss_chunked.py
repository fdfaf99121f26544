"""The kernel: exact in hidden states and head, the same for any chunking, and never [N, V]."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from opd.loss import Full, Head, RolloutTokens, Sampled, build, token_logp
from reference import losses as reference

# N supervised tokens, V vocabulary, D hidden size.
N, V, D = 7, 11, 5
LOSSES = ("forward_kl", "reverse_kl", "jsd")


def draw(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def teacher_scores(num_rows: int = N, dtype: torch.dtype = torch.float64) -> Full:
    """A teacher of another width."""
    return Full(draw(num_rows, 4, dtype=dtype, seed=7), Head(draw(V, 4, dtype=dtype, seed=8)))


def chunk(num_rows: int, dtype: torch.dtype = torch.float64) -> int:
    return 2 * num_rows * V * dtype.itemsize  # the logits of both models


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize(
    "clip", [{"name": "none"}, {"name": "per_token", "max": 0.5}, {"name": "per_entry", "max": 0.1}]
)
def test_gradcheck_in_hidden_states_and_head(name: str, clip: dict[str, Any]) -> None:
    num_rows, num_tokens, width = 3, 5, 2
    loss = build({"name": name, "clip": clip, "temperature": 1.3}, chunk_bytes=4 * num_tokens * 8)
    teacher = Full(draw(num_rows, num_tokens, seed=3), None)

    def values(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        head = Head(weight, bias, scale=0.7, softcap=2.0, vocab_size=num_tokens)
        return loss.linear(hidden, head, teacher).values

    inputs = (draw(num_rows, width), draw(num_tokens + 1, width, seed=1), draw(num_tokens + 1, seed=2))
    assert torch.autograd.gradcheck(values, tuple(tensor.requires_grad_() for tensor in inputs))


def test_gradcheck_of_token_logp() -> None:
    ids = torch.tensor([0, 4, 2])

    def values(hidden: Tensor, weight: Tensor) -> Tensor:
        return token_logp(hidden, Head(weight, scale=0.5), ids, 0.8, chunk_bytes=4 * 5 * 8)

    assert torch.autograd.gradcheck(values, (draw(3, 2).requires_grad_(), draw(5, 2, seed=1).requires_grad_()))


def test_trained_head_equals_dense_autograd_in_float32() -> None:
    """The head is also the input embedding: its gradient must add to what came from there, not replace it."""
    loss = build({"name": "reverse_kl"}, chunk_bytes=chunk(2, torch.float32))
    teacher = teacher_scores(dtype=torch.float32)
    upstream = draw(N, dtype=torch.float32, seed=5)
    ids = torch.tensor([1, 2, 3, 4, 5, 6, 7])
    gradients = list[Tensor]()
    for path in ("linear", "tokens"):
        weight = draw(V + 2, D, dtype=torch.float32, seed=1).requires_grad_()
        hidden = torch.tanh(weight[ids])
        head = Head(weight, vocab_size=V)
        scores = loss.linear(hidden, head, teacher) if path == "linear" else loss.tokens(head.logits(hidden), teacher)
        (scores.values @ upstream).backward()
        assert weight.grad is not None
        gradients.append(weight.grad)
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", LOSSES)
def test_same_for_any_chunk_size_and_order(name: str) -> None:
    order = torch.randperm(N, generator=torch.Generator().manual_seed(3))
    hidden, weight = draw(N, D, dtype=torch.float32), draw(V, D, dtype=torch.float32, seed=1)
    teacher = teacher_scores(dtype=torch.float32)

    def run(num_rows: int, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        student, head = hidden[rows].requires_grad_(), weight.clone().requires_grad_()
        loss = build({"name": name}, chunk_bytes=chunk(num_rows, torch.float32))
        scores = loss.linear(student, Head(head), teacher.rows(rows))
        scores.values.sum().backward()
        assert student.grad is not None
        assert head.grad is not None
        return scores.values.detach(), student.grad, head.grad

    values, d_hidden, d_weight = run(N, torch.arange(N))
    for num_rows in (1, 3, 1000):
        other = run(num_rows, order)
        torch.testing.assert_close(other[0], values[order], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(other[1], d_hidden[order], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(other[2], d_weight, rtol=1e-5, atol=1e-6)


class LargestTensor(TorchDispatchMode):
    """Records the largest number of elements of any tensor that an operation returns."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, Tensor):
                self.largest = max(self.largest, tensor.numel())
        return result


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("name", [*LOSSES, "sampled_reverse_kl"])
def test_nothing_of_size_n_times_v_exists(name: str, trained: bool) -> None:
    num_rows, num_tokens, width = 64, 500, 6
    hidden = draw(num_rows, width, dtype=torch.float32).requires_grad_()
    head = Head(draw(num_tokens, width, dtype=torch.float32, seed=1).requires_grad_(trained), softcap=3.0)
    teacher = Full(
        draw(num_rows, width, dtype=torch.float32, seed=2), Head(draw(num_tokens, width, dtype=torch.float32))
    )
    rollout = RolloutTokens(torch.arange(num_rows))
    loss = build({"name": name}, chunk_bytes=2 * 8 * num_tokens * 4)
    with LargestTensor() as recorded:
        loss.linear(hidden, head, teacher, rollout).values.sum().backward()
    assert hidden.grad is not None
    assert (head.weight.grad is not None) == trained
    # One chunk of logits, or a tile as large with a column to spare: the mode saw the kernel, and nothing larger.
    assert 8 * num_tokens <= recorded.largest <= 8 * (num_tokens + 1)


def test_half_precision_inputs_have_float32_statistics() -> None:
    hidden, weight = draw(N, D, dtype=torch.bfloat16).requires_grad_(), draw(V, D, dtype=torch.bfloat16, seed=1)
    teacher = teacher_scores(dtype=torch.bfloat16)
    loss = build({"name": "forward_kl"})
    for enabled in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            scores = loss.linear(hidden, Head(weight), teacher)
        assert scores.values.dtype == torch.float32
        # The product itself rounds to bfloat16, as the model's does; everything after it is exact to float32.
        student_logits = (hidden.detach() @ weight.T).double().numpy()
        assert teacher.head is not None
        teacher_logits = (teacher.hidden_ND @ teacher.head.weight.T).double().numpy()
        expected = reference.divergence({"name": "forward_kl"}, student_logits, teacher_logits)
        np.testing.assert_allclose(scores.values.detach(), expected.values, rtol=1e-5, atol=1e-6)
    scores.values.sum().backward()
    assert hidden.grad is not None
    assert hidden.grad.dtype == torch.bfloat16
    exact = expected.gradient @ weight.double().numpy()
    np.testing.assert_allclose(hidden.grad.double(), exact, atol=0.03)


def test_float32_weights_are_not_rounded_under_autocast() -> None:
    hidden, head = draw(N, D, dtype=torch.float32).requires_grad_(), Head(draw(V, D, dtype=torch.float32, seed=1))
    loss, teacher = build({"name": "reverse_kl"}), teacher_scores(dtype=torch.float32)
    plain = loss.linear(hidden, head, teacher).values
    with torch.autocast("cpu", dtype=torch.bfloat16):
        under = loss.linear(hidden, head, teacher).values
    assert torch.equal(plain, under)


@pytest.mark.parametrize("name", [*LOSSES, "sampled_reverse_kl"])
def test_a_nan_row_that_nobody_uses_is_harmless(name: str) -> None:
    hidden, weight = draw(N, D), draw(V, D, seed=1).requires_grad_()
    hidden[2] = torch.nan
    hidden.requires_grad_()
    used = torch.arange(N) != 2
    loss, rollout = build({"name": name}, chunk_bytes=chunk(4)), RolloutTokens(torch.zeros(N, dtype=torch.int64))
    scores = loss.linear(hidden, Head(weight), teacher_scores(), rollout)
    assert bool(scores.values[2].isnan())
    torch.where(used, scores.values, 0.0).sum().backward()

    alone_hidden, alone_weight = hidden.detach()[used].requires_grad_(), weight.detach().clone().requires_grad_()
    alone_rollout = RolloutTokens(rollout.ids_N[used])
    alone = loss.linear(alone_hidden, Head(alone_weight), teacher_scores().rows(used), alone_rollout)
    alone.values.sum().backward()
    assert hidden.grad is not None
    assert alone_hidden.grad is not None
    torch.testing.assert_close(scores.values[used], alone.values)
    torch.testing.assert_close(hidden.grad[used], alone_hidden.grad)
    assert not hidden.grad[2].any()
    torch.testing.assert_close(weight.grad, alone_weight.grad)


@pytest.mark.parametrize("name", LOSSES)
def test_outcomes_that_both_sides_exclude_do_not_exist(name: str) -> None:
    student, teacher = draw(N, V), draw(N, V, seed=1)
    narrow = build({"name": name}).tokens(student[:, 2:], Full.from_logits(teacher[:, 2:]))
    student[:, :2] = teacher[:, :2] = -torch.inf
    student.requires_grad_()
    wide = build({"name": name}).tokens(student, Full.from_logits(teacher))
    wide.values.sum().backward()
    torch.testing.assert_close(wide.values, narrow.values)
    torch.testing.assert_close(wide.metrics["entropy_student"], narrow.metrics["entropy_student"])
    assert student.grad is not None
    assert bool(student.grad.isfinite().all())
    assert not student.grad[:, :2].any()


@pytest.mark.parametrize(("name", "side"), [("forward_kl", "student"), ("reverse_kl", "teacher")])
def test_an_infinite_divergence_is_large_finite_and_alone(name: str, side: str) -> None:
    student, teacher = draw(N, V), draw(N, V, seed=1)
    plain = build({"name": name}).tokens(student, Full.from_logits(teacher)).values
    {"student": student, "teacher": teacher}[side][3, 4] = -torch.inf
    student.requires_grad_()
    values = build({"name": name}).tokens(student, Full.from_logits(teacher)).values
    values.sum().backward()
    others = torch.arange(N) != 3
    assert torch.equal(values[others], plain[others])
    assert 10 < values[3] < torch.inf
    assert student.grad is not None
    assert bool(student.grad.isfinite().all())
    # Descent leads away from the mistake: toward the outcome the student excludes, or off the one the teacher does.
    assert (student.grad[3, 4] < 0) == (side == "student")


@pytest.mark.parametrize("name", [*LOSSES, "sampled_reverse_kl"])
def test_one_token_vocabulary_and_empty_batch(name: str) -> None:
    loss = build({"name": name})
    one = draw(N, 1).requires_grad_()
    scores = loss.tokens(one, Full.from_logits(draw(N, 1)), RolloutTokens(torch.zeros(N, dtype=torch.int64)))
    scores.values.sum().backward()
    assert one.grad is not None
    assert not scores.values.any()
    assert not one.grad.any()

    hidden, weight = draw(0, D).requires_grad_(), draw(V, D).requires_grad_()
    empty = loss.linear(hidden, Head(weight), teacher_scores(0), RolloutTokens(torch.zeros(0, dtype=torch.int64)))
    empty.values.sum().backward()
    assert empty.values.shape == (0,)
    assert empty.metrics.keys() == scores.metrics.keys()
    assert hidden.grad is not None
    assert weight.grad is not None
    assert not weight.grad.any()


def test_nothing_flows_into_the_teacher() -> None:
    teacher_hidden, teacher_weight = draw(N, 4).requires_grad_(), draw(V, 4).requires_grad_()
    hidden = draw(N, D).requires_grad_()
    build({"name": "jsd"}).linear(
        hidden, Head(draw(V, D)), Full(teacher_hidden, Head(teacher_weight))
    ).values.sum().backward()
    assert hidden.grad is not None
    assert teacher_hidden.grad is None
    assert teacher_weight.grad is None


def test_inputs_are_left_as_they_were() -> None:
    student, teacher = draw(N, V), draw(N, V, seed=1)
    before = student.clone(), teacher.clone()
    build({"name": "jsd", "temperature": 2.0}).tokens(student, Full.from_logits(teacher))
    token_logp(student, None, torch.zeros(N, dtype=torch.int64), 2.0)
    assert torch.equal(student, before[0])
    assert torch.equal(teacher, before[1])


def test_a_head_that_moves_between_forward_and_backward_is_an_error() -> None:
    """The backward makes the logits again: with another weight they would be another loss's."""
    weight = draw(V, D).requires_grad_()
    values = build({"name": "forward_kl"}).linear(draw(N, D), Head(weight), teacher_scores()).values
    with torch.no_grad():
        weight.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        values.sum().backward()


def test_without_gradients_none_is_computed() -> None:
    with torch.no_grad():
        scores = build({"name": "forward_kl"}).linear(draw(N, D).requires_grad_(), Head(draw(V, D)), teacher_scores())
    assert not scores.values.requires_grad
    assert not Sampled(scores.values).logp_N.requires_grad
