"""The kernel: exact in hidden states and head, the same for any chunking, and never [N, V]."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from loss_cases import DIVERGENCES, draw, label, without_shape_checks
from opd.loss import Full, Head, LowRank, RolloutTokens, Sampled, build, token_logp
from reference import losses as reference

# N supervised tokens, V vocabulary, D hidden size.
N, V, D = 7, 11, 5
# What is compared with finite differences: not what has a factor that counts as a constant, which autograd's do not
# hold. `test_loss_reference.py` holds it.
DIFFERENTIABLE = [
    {**divergence, "clip": clip, "support": support, "temperature": 1.3}
    for divergence in DIVERGENCES
    for clip, support in (
        ({"name": "none"}, {"name": "full"}),
        ({"name": "none"}, {"name": "top_k", "k": 2, "of": "union"}),
        ({"name": "per_entry", "max": 0.05}, {"name": "full"}),
    )
    if divergence["name"] != "adaptive_kl"
]
EVERY = [
    {**divergence, "support": support}
    for divergence in DIVERGENCES
    for support in ({"name": "full"}, {"name": "top_k", "k": 5})
]


def teacher_scores(num_rows: int = N, dtype: torch.dtype = torch.float64) -> Full:
    """A teacher of another width."""
    return Full(draw(num_rows, 4, dtype=dtype, seed=7), Head(draw(V, 4, dtype=dtype, seed=8)))


def chunk(num_rows: int, dtype: torch.dtype = torch.float64) -> int:
    return 2 * num_rows * V * dtype.itemsize  # the logits of both models


@pytest.mark.parametrize("config", DIFFERENTIABLE, ids=label)
def test_gradcheck_in_hidden_states_and_head(config: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    without_shape_checks(monkeypatch)
    num_rows, num_tokens, width = 2, 5, 2
    loss = build(config, chunk_bytes=2 * num_tokens * 8)
    teacher = Full.from_logits(draw(num_rows, num_tokens, seed=3))

    def values(hidden: Tensor, weight: Tensor, bias: Tensor, down: Tensor, up: Tensor) -> Tensor:
        low_rank = (LowRank(down, up, 0.5),)
        head = Head(weight, bias, scale=0.7, softcap=2.0, vocab_size=num_tokens, low_rank=low_rank)
        return loss.linear(hidden, head, teacher).values

    shapes = ((num_rows, width), (num_tokens + 1, width), (num_tokens + 1,), (1, width), (num_tokens + 1, 1))
    inputs = tuple(draw(*shape, seed=seed).requires_grad_() for seed, shape in enumerate(shapes))
    assert torch.autograd.gradcheck(values, inputs, fast_mode=True)


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


class LargestTensor(TorchDispatchMode):
    """Records the largest number of elements of any tensor that an operation returns, and counts matrix products."""

    largest = 0
    products = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.products += func.__name__.split(".")[0] in ("mm", "addmm", "addmm_")
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, Tensor):
                self.largest = max(self.largest, tensor.numel())
        return result


@pytest.mark.parametrize("trained", [False, True], ids=["frozen", "trained"])
@pytest.mark.parametrize("config", [*EVERY, {"name": "sft"}, {"name": "sampled_reverse_kl"}], ids=label)
def test_nothing_of_size_n_times_v_exists(
    config: dict[str, Any], trained: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_shape_checks(monkeypatch)
    num_rows, num_tokens, width = 24, 500, 6
    hidden = draw(num_rows, width, dtype=torch.float32).requires_grad_()
    head = Head(draw(num_tokens, width, dtype=torch.float32, seed=1).requires_grad_(trained), softcap=3.0)
    teacher = Full(
        draw(num_rows, width, dtype=torch.float32, seed=2), Head(draw(num_tokens, width, dtype=torch.float32))
    )
    rollout = RolloutTokens(torch.arange(num_rows))
    clip = {"clip": {"name": "weight", "max": 0.1}} if "support" in config else {}
    loss = build({**config, **clip}, chunk_bytes=2 * 8 * num_tokens * 4)
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
    hidden, head = draw(N, D).requires_grad_(), Head(draw(V, D).requires_grad_())
    found: list[int] = []
    for enabled in (True, False):
        with torch.set_grad_enabled(enabled), LargestTensor() as recorded:
            scores = build({"name": "forward_kl"}).linear(hidden, head, teacher_scores())
        found.append(recorded.products)
    assert found == [4, 2]  # both models' logits alone
    assert not scores.values.requires_grad
    assert not Sampled(scores.values).logp_N.requires_grad


def test_a_graph_that_is_kept_gives_the_same_gradient_again() -> None:
    hidden, weight = draw(N, D).requires_grad_(), draw(V, D, seed=1).requires_grad_()
    values = build({"name": "jsd"}, chunk_bytes=chunk(3)).linear(hidden, Head(weight), teacher_scores()).values
    for upstream in (torch.full((N,), 0.5, dtype=torch.float64), draw(N, seed=9)):
        first = torch.autograd.grad(values, (hidden, weight), upstream, retain_graph=True)
        second = torch.autograd.grad(values, (hidden, weight), upstream, retain_graph=True)
        for one, other in zip(first, second, strict=True):
            torch.testing.assert_close(one, other)
            assert one.data_ptr() != other.data_ptr()


def test_a_second_derivative_is_refused() -> None:
    """To autograd the gradient is a number: what it would say about that one's own would be wrong."""
    hidden = draw(N, D).requires_grad_()
    values = build({"name": "reverse_kl"}).linear(hidden, Head(draw(V, D, seed=1)), teacher_scores()).values
    (gradient,) = torch.autograd.grad(values.square().sum(), hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()
