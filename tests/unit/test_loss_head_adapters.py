"""Adapters on the output layer: the head has what the model has in every state, and refuses what it cannot hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from peft import IA3Config, LoHaConfig, LoraConfig, PeftConfig, TrainableTokensConfig, inject_adapter_in_model
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

import tiny
from heads import LORA, NUM_ROWS, VOCAB_SIZE, adapted, move
from opd.errors import OpdError
from opd.forward import body_of
from opd.loss import Head, LowRank

IDS = torch.arange(40).reshape(2, 20)


def own_logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(IDS).logits[..., :VOCAB_SIZE].flatten(0, 1).float()


def head_logits(head: Head, model: nn.Module) -> Tensor:
    with torch.no_grad():
        return head.logits(body_of(model)(IDS).last_hidden_state.flatten(0, 1))


# ---- states ----------------------------------------------------------------------------------------------------------


def _two_adapters() -> Any:
    model = adapted(tiny.build_llama(NUM_ROWS), LoraConfig(**LORA))
    model.add_adapter("second", LoraConfig(**(LORA | {"r": 2, "use_rslora": True})))
    model.base_model.set_adapter(["default", "second"])
    return move(model)


def _with_bias() -> Any:
    with pytest.warns(UserWarning, match="no bias"):
        return adapted(tiny.build_llama(NUM_ROWS), LoraConfig(**LORA, lora_bias=True))


def _merged() -> Any:
    model = adapted(tiny.build_llama(NUM_ROWS), LoraConfig(**LORA))
    model.merge_adapter()
    return model


def _inactive() -> Any:
    """The active adapter is not on the head, another one is."""
    model = adapted(tiny.build_llama(NUM_ROWS), LoraConfig(**LORA))
    model.add_adapter("body", LoraConfig(target_modules=["q_proj"]))
    model.set_adapter("body")
    return move(model)


STATES: dict[str, tuple[Callable[[], Any], int]] = {
    "untied": (lambda: adapted(tiny.build_llama(NUM_ROWS), LoraConfig(**LORA)), 1),
    "tied": (lambda: adapted(tiny.build_qwen3(NUM_ROWS), LoraConfig(**LORA)), 1),
    "tied adapters": (
        lambda: adapted(tiny.build_qwen3(NUM_ROWS), LoraConfig(target_modules=["lm_head"], ensure_weight_tying=True)),
        1,
    ),
    "softcap": (lambda: adapted(tiny.build_gemma2(NUM_ROWS), LoraConfig(**LORA)), 1),
    "divided": (lambda: adapted(tiny.build_granite(NUM_ROWS), LoraConfig(**LORA)), 1),
    "multiplied": (lambda: adapted(tiny.build_cohere(NUM_ROWS), LoraConfig(**LORA)), 1),
    "rank-stabilised": (lambda: adapted(tiny.build_llama(NUM_ROWS), LoraConfig(**LORA, use_rslora=True)), 1),
    "bias": (_with_bias, 1),
    "two adapters": (_two_adapters, 2),
    "merged": (_merged, 0),
    "another adapter is active": (_inactive, 0),
    "embedding alone": (lambda: adapted(tiny.build_qwen3(NUM_ROWS), LoraConfig(target_modules=["embed_tokens"])), 0),
    "trained copy": (
        lambda: adapted(tiny.build_llama(NUM_ROWS), LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"])),
        0,
    ),
}


@pytest.mark.parametrize("state", STATES)
def test_gives_the_models_own_logits_in_every_state(state: str) -> None:
    build, num_adapters = STATES[state]
    model = build()
    on = Head.from_model(model, vocab_size=VOCAB_SIZE)
    assert len(on.low_rank) == num_adapters
    torch.testing.assert_close(head_logits(on, model), own_logits(model), rtol=1e-5, atol=1e-5)
    before = own_logits(model)
    with model.disable_adapter():
        off = on.reread(model)
        own = own_logits(model)
        torch.testing.assert_close(head_logits(off, model), own, rtol=1e-5, atol=1e-5)
        Head.from_model(model)
    assert not off.low_rank
    assert (before - own).abs().max() > 0.1
    if num_adapters:
        with pytest.raises(OpdError, match="own logits"), _unnoticed(model):
            Head.from_model(model)


@contextmanager
def _unnoticed(model: Any) -> Iterator[None]:
    """Heads are read as if the adapter were off, while the model still runs it."""
    layer = model.get_base_model().get_output_embeddings()
    replaced = layer.active_adapters
    forward = layer.forward

    def with_adapter(*args: Any, **keys: Any) -> Any:
        layer._active_adapter = replaced
        try:
            return forward(*args, **keys)
        finally:
            layer._active_adapter = []

    layer._active_adapter, layer.forward = [], with_adapter
    try:
        yield
    finally:
        layer._active_adapter, layer.forward = replaced, forward


def test_a_fresh_adapter_is_in_the_head_although_the_proof_cannot_see_it() -> None:
    model = adapted(tiny.build_llama(NUM_ROWS), LoraConfig(**LORA), moved=False)
    head = Head.from_model(model, vocab_size=VOCAB_SIZE)
    layer = model.get_base_model().lm_head
    assert head.low_rank[0].up is layer.lora_B["default"].weight
    assert head.low_rank[0].down is layer.lora_A["default"].weight
    assert head.low_rank[0].scale == 2.0
    assert not head.low_rank[0].up.any()
    move(model)
    torch.testing.assert_close(head_logits(head, model), own_logits(model), rtol=1e-5, atol=1e-5)


def test_an_adapter_without_a_peft_model_around_it_is_in_the_head() -> None:
    model = inject_adapter_in_model(LoraConfig(**LORA), tiny.build_llama(NUM_ROWS))
    move(model)
    head = Head.from_model(model, vocab_size=VOCAB_SIZE)
    assert len(head.low_rank) == 1
    torch.testing.assert_close(head_logits(head, model), own_logits(model), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("base", [torch.bfloat16, torch.float16])
def test_a_half_precision_matrix_with_a_float32_adapter(base: torch.dtype) -> None:
    model = adapted(tiny.build_llama(NUM_ROWS).to(base), LoraConfig(**LORA))
    head = Head.from_model(model, vocab_size=VOCAB_SIZE)
    assert (head.weight.dtype, head.low_rank[0].up.dtype) == (base, torch.float32)
    with pytest.raises(OpdError, match="own logits"), _unnoticed(model):
        Head.from_model(model)


def test_the_copy_that_trains_is_the_head_and_the_original_is_with_the_adapter_off() -> None:
    model = STATES["trained copy"][0]()
    head = Head.from_model(model)
    wrapper = model.get_base_model().lm_head
    assert head.weight is wrapper.modules_to_save["default"].weight
    assert head.weight.requires_grad
    with model.disable_adapter():
        assert head.reread(model).weight is wrapper.original_module.weight


@pytest.mark.parametrize("state", [nullcontext, "disable_adapter"])
def test_single_trained_tokens_on_another_layer_are_no_matter(state: Any) -> None:
    """An untied head is plain; a tied one is plain while the adapter is off."""
    tie = state != nullcontext
    model = adapted(
        tiny.build_llama(NUM_ROWS, tie=tie), LoraConfig(target_modules=["q_proj"], trainable_token_indices=[3, 5])
    )
    context: AbstractContextManager[Any] = model.disable_adapter() if tie else nullcontext()
    with context:
        head = Head.from_model(model, vocab_size=VOCAB_SIZE)
        torch.testing.assert_close(head_logits(head, model), own_logits(model), rtol=1e-5, atol=1e-5)
    if tie:
        with pytest.raises(OpdError, match="cannot be used") as error:
            head.reread(model)
        assert "trainable_token_indices" in error.value.why
        model.merge_adapter()
        Head.from_model(model)


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (LoraConfig(**LORA, use_dora=True), "DoraLinearVariant"),
        (IA3Config(target_modules=["lm_head", "q_proj"], feedforward_modules=[]), "ia3.layer.Linear"),
        (LoHaConfig(target_modules=["lm_head"]), "loha.layer.Linear"),
        (TrainableTokensConfig(target_modules=["lm_head"], token_indices=[3]), "trainable_tokens"),
        (LoraConfig(**LORA, lora_dropout=0.25), "dropout 0.25"),
    ],
)
def test_what_a_head_cannot_hold_is_refused_until_it_is_off(config: PeftConfig, named: str) -> None:
    model = adapted(tiny.build_llama(NUM_ROWS), config)
    with pytest.raises(OpdError, match="cannot be used") as error:
        Head.from_model(model)
    assert named in error.value.why
    assert "target_modules" in error.value.fix
    with model.disable_adapter():
        assert Head.from_model(model).is_plain


def test_dropout_of_a_trained_adapter_that_is_only_scored_with_is_no_matter() -> None:
    model = adapted(tiny.build_llama(NUM_ROWS), LoraConfig(**LORA, lora_dropout=0.25))
    model.eval().requires_grad_(False)
    assert Head.from_model(model).low_rank
    model.train()
    with pytest.raises(OpdError, match="cannot be used"):
        Head.from_model(model)


def test_a_transposed_layer_is_refused_with_and_without_an_adapter() -> None:
    base = tiny.build_llama(NUM_ROWS)
    weight = base.lm_head.weight
    base.lm_head = Conv1D(NUM_ROWS, weight.shape[1])
    with pytest.raises(OpdError, match="cannot be used") as error:
        Head.from_model(base)
    assert "transposed" in error.value.why
    model = adapted(base, LoraConfig(target_modules=["lm_head"], fan_in_fan_out=True))
    with pytest.raises(OpdError, match="cannot be used") as error:
        Head.from_model(model)
    assert "transposed" in error.value.why


def test_a_quantised_layer_is_refused() -> None:
    base = tiny.build_llama(NUM_ROWS)
    base.lm_head.weight = nn.Parameter(base.lm_head.weight.to(torch.int8), requires_grad=False)
    with pytest.raises(OpdError, match="cannot be used") as error:
        Head.from_model(base)
    assert "torch.int8" in error.value.why


def test_a_layer_that_trains_more_than_its_matrix_is_refused_even_where_that_changes_nothing_yet() -> None:
    base = tiny.build_llama(NUM_ROWS)
    base.lm_head.gain = nn.Parameter(torch.ones(NUM_ROWS))
    base.lm_head.register_forward_hook(lambda layer, _args, output: output * layer.gain)
    with pytest.raises(OpdError, match="cannot be used") as error:
        Head.from_model(base)
    assert "gain" in error.value.why
    base.lm_head.gain.requires_grad_(False)
    Head.from_model(base)


@pytest.mark.parametrize(
    "fields",
    [
        {"low_rank": (LowRank(torch.zeros(2, 4), torch.zeros(9, 2)),)},
        {"low_rank": (LowRank(torch.zeros(2, 5), torch.zeros(NUM_ROWS, 2)),)},
        {"low_rank": (LowRank(torch.zeros(2, 4), torch.zeros(NUM_ROWS, 2), float("nan")),)},
        {"low_rank": (LowRank(torch.zeros(2, 4), torch.zeros(NUM_ROWS, 2), bias=torch.zeros(3)),)},
        {"bias": torch.zeros(3)},
    ],
)
def test_adapters_and_biases_of_another_shape_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(OpdError, match="cannot be used"):
        Head(torch.zeros(NUM_ROWS, 4), **fields)


def test_detached_keeps_what_the_tensors_were() -> None:
    model = _with_bias()
    head = Head.from_model(model, vocab_size=VOCAB_SIZE)
    hidden = torch.randn(3, 32)
    still, before = head.detached(), head.logits(hidden).detach()
    for parameter in model.parameters():
        parameter.data = torch.zeros_like(parameter)
    assert not head.logits(hidden).any()
    assert torch.equal(still.logits(hidden), before)
    assert not still.logits(hidden).requires_grad


def test_reread_keeps_scale_softcap_and_size() -> None:
    model = adapted(tiny.build_gemma2(NUM_ROWS), LoraConfig(**LORA))
    head = replace(Head.from_model(model, vocab_size=VOCAB_SIZE), scale=0.5)
    with model.disable_adapter():
        off = head.reread(model)
    assert (off.scale, off.softcap, off.vocab_size, off.low_rank) == (0.5, 5.0, VOCAB_SIZE, ())
