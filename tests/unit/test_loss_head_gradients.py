"""Gradients through a head with adapters equal dense autograd through the model's own logits; memory stays small."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import heads
import tiny
from heads import LORA, NUM_ROWS, VOCAB_SIZE, adapted
from opd.forward import body_of
from opd.loss import Full, Head, LowRank, RolloutTokens, build

# N positions, V vocabulary, D hidden size, r rank.
IDS = torch.arange(2 * 7).reshape(2, 7)
N = IDS.numel()
TEACHER = torch.randn(N, VOCAB_SIZE, generator=torch.Generator().manual_seed(0))
UPSTREAM = {"uniform": torch.full((N,), 1 / N), "uneven": torch.linspace(-1, 2, N)}


def losses(model: nn.Module, loss: Any, *, dense: bool) -> Tensor:
    """[N] losses on every position, from the model's own logits or through its head."""
    rollout = RolloutTokens(torch.arange(N) % VOCAB_SIZE)
    if dense:
        logits_NV = model(input_ids=IDS, use_cache=False).logits[..., :VOCAB_SIZE].flatten(0, 1)
        return loss.tokens(logits_NV, Full.from_logits(TEACHER.to(logits_NV.dtype)), rollout).values
    head = Head.from_model(model, vocab_size=VOCAB_SIZE)
    hidden_ND = body_of(model)(input_ids=IDS, use_cache=False).last_hidden_state.flatten(0, 1)
    return loss.linear(hidden_ND, head, Full.from_logits(TEACHER.to(hidden_ND.dtype)), rollout).values


def gradients(model: nn.Module, values_N: Tensor, upstream_N: Tensor) -> dict[str, Tensor]:
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    found = torch.autograd.grad(values_N @ upstream_N, list(trained.values()), allow_unused=True)
    return {name: grad for name, grad in zip(trained, found, strict=True) if grad is not None}


def _bias_and_two() -> nn.Module:
    """A biased matrix under two adapters, one with a bias of its own."""
    model = adapted(heads.build("phi"), LoraConfig(**LORA, lora_bias=True))
    model.add_adapter("second", LoraConfig(**(LORA | {"r": 2, "use_rslora": True})))
    model.base_model.set_adapter(["default", "second"])
    with torch.no_grad():
        model.get_base_model().lm_head.lora_B["second"].weight.normal_(std=0.3)
    return model


def _everything_learns(model: nn.Module) -> nn.Module:
    """The embedding and its tied head too, beside the adapter."""
    return model.requires_grad_(True)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "untied": lambda: adapted(tiny.build_llama(NUM_ROWS), LoraConfig(**LORA)),
    "tied": lambda: adapted(tiny.build_qwen3(NUM_ROWS), LoraConfig(**LORA)),
    "tied, all trained": lambda: _everything_learns(adapted(tiny.build_qwen3(NUM_ROWS), LoraConfig(**LORA))),
    "softcap": lambda: adapted(tiny.build_gemma2(NUM_ROWS), LoraConfig(**LORA)),
    "scale": lambda: adapted(tiny.build_cohere(NUM_ROWS), LoraConfig(**LORA)),
    "bias and two adapters": _bias_and_two,
    "bias, all trained": lambda: _everything_learns(_bias_and_two()),
    "trained copy": lambda: adapted(
        tiny.build_llama(NUM_ROWS), LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"])
    ),
}


@pytest.mark.parametrize("upstream", UPSTREAM)
@pytest.mark.parametrize("name", ["forward_kl", "sampled_reverse_kl"])
@pytest.mark.parametrize("kind", MODELS)
def test_equal_dense_autograd_through_the_models_own_logits(kind: str, name: str, upstream: str) -> None:
    model = MODELS[kind]()
    # Three chunks, the last of which is not full.
    loss = build({"name": name}, chunk_bytes=2 * 5 * VOCAB_SIZE * 4)
    dense_N, head_N = (losses(model, loss, dense=dense) for dense in (True, False))
    torch.testing.assert_close(head_N, dense_N, rtol=1e-5, atol=1e-5)
    dense, head = (gradients(model, values_N, UPSTREAM[upstream]) for values_N in (dense_N, head_N))
    assert dense.keys() == head.keys()
    assert {"lm_head" in key for key in dense} == {True, False}
    for key, expected in dense.items():
        # Gradients of a random body reach into the hundreds: a share of the largest, not of each.
        assert (head[key] - expected).abs().max() <= 1e-5 * expected.abs().max(), key
        if "lm_head.lora_B" in key:
            assert expected[:VOCAB_SIZE].abs().max() > 1e-3
            assert not head[key][VOCAB_SIZE:].any()


def test_a_tied_matrix_gets_the_sum_of_both_uses() -> None:
    model = MODELS["tied, all trained"]()
    loss = build({"name": "forward_kl"})
    weight: Any = model.get_input_embeddings().weight  # pyright: ignore[reportCallIssue]
    name = next(name for name, parameter in model.named_parameters() if parameter is weight)
    both = gradients(model, losses(model, loss, dense=False), UPSTREAM["uneven"])[name]
    head = Head.from_model(model, vocab_size=VOCAB_SIZE)
    hidden_ND = body_of(model)(input_ids=IDS, use_cache=False).last_hidden_state.flatten(0, 1)
    as_head = loss.linear(hidden_ND.detach(), head, Full.from_logits(TEACHER)).values @ UPSTREAM["uneven"]
    as_embedding = loss.linear(hidden_ND, head.detached(), Full.from_logits(TEACHER)).values @ UPSTREAM["uneven"]
    parts = [torch.autograd.grad(total, weight)[0] for total in (as_head, as_embedding)]
    assert all(part.abs().max() > 1e-3 for part in parts)
    torch.testing.assert_close(both, parts[0] + parts[1], rtol=1e-4, atol=1e-5)


def test_gradcheck_in_every_tensor_of_a_head() -> None:
    num_rows, num_tokens, width, rank = 3, 4, 2, 2
    loss = build({"name": "reverse_kl", "temperature": 1.3}, chunk_bytes=4 * num_tokens * 8)
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()

    teacher = Full(draw(num_rows, num_tokens).detach(), None)

    def values(*tensors: Tensor) -> Tensor:
        hidden, weight, bias, down, up, low_bias, second_down, second_up = tensors
        low_rank = (LowRank(down, up, 0.6, low_bias), LowRank(second_down, second_up, -1.5))
        head = Head(weight, bias, scale=0.7, softcap=2.0, vocab_size=num_tokens, low_rank=low_rank)
        return loss.linear(hidden, head, teacher).values

    rows = num_tokens + 1
    tensors = [(num_rows, width), (rows, width), (rows,), (rank, width), (rows, rank), (rows,), (1, width), (rows, 1)]
    assert torch.autograd.gradcheck(values, tuple(draw(*shape) for shape in tensors))


def test_a_bfloat16_matrix_under_a_float32_adapter() -> None:
    """The adapter learns in float32 although the matrix rounds: its gradient is that of the rounded logits, exactly."""
    model = adapted(tiny.build_llama(NUM_ROWS).to(torch.bfloat16), LoraConfig(**LORA))
    head = Head.from_model(model, vocab_size=VOCAB_SIZE)
    low = head.low_rank[0]
    with torch.no_grad():
        hidden_ND = body_of(model)(input_ids=IDS, use_cache=False).last_hidden_state.flatten(0, 1)
    loss = build({"name": "forward_kl"}, chunk_bytes=2 * 5 * VOCAB_SIZE * 4)
    values_N = loss.linear(hidden_ND, head, Full.from_logits(TEACHER)).values
    found = torch.autograd.grad(values_N @ UPSTREAM["uneven"], [low.down, low.up])

    rounded_NV = (hidden_ND @ head.weight.T).float()
    added_NV = hidden_ND.float() @ low.down.T @ low.up.T * low.scale
    dense_N = loss.tokens((rounded_NV + added_NV)[:, :VOCAB_SIZE], Full.from_logits(TEACHER)).values
    torch.testing.assert_close(values_N, dense_N, rtol=1e-5, atol=1e-5)
    expected = torch.autograd.grad(dense_N @ UPSTREAM["uneven"], [low.down, low.up])
    assert {gradient.dtype for gradient in found} == {torch.float32}
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


class NewMemory(TorchDispatchMode):
    """The largest number of elements that an operation returned in memory of its own, so without views."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() not in given:
                self.largest = max(self.largest, tensor.numel())
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("upstream", ["uniform", "uneven"])
def test_an_adapter_on_a_frozen_matrix_makes_no_copy_of_it(dtype: torch.dtype, trained: bool, upstream: str) -> None:
    num_rows, num_tokens, width, rank, chunk = 64, 500, 100, 4, 8
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    weight = draw(num_tokens, width).to(dtype).requires_grad_(trained)
    down, up = draw(rank, width).requires_grad_(), draw(num_tokens, rank).requires_grad_()
    hidden = draw(num_rows, width).to(dtype).requires_grad_()
    teacher = Full(draw(num_rows, width).to(dtype), Head(draw(num_tokens, width).to(dtype)))
    loss = build({"name": "forward_kl"}, chunk_bytes=2 * chunk * num_tokens * 4)
    upstream_N = torch.ones(num_rows) if upstream == "uniform" else torch.linspace(-1, 1, num_rows)
    with NewMemory() as recorded:
        values_N = loss.linear(hidden, Head(weight, softcap=3.0, low_rank=(LowRank(down, up),)), teacher).values
        (values_N @ upstream_N).backward()
    assert up.grad is not None
    assert up.grad.abs().max() > 0
    assert (weight.grad is not None) == trained
    if trained:
        assert recorded.largest == num_tokens * width  # the mode would have seen a copy: the gradient is as large
    else:
        # A chunk of logits, a tile with a column to spare, or the hidden states of all rows.
        assert chunk * num_tokens <= recorded.largest <= max(chunk * (num_tokens + 1), num_rows * width)
