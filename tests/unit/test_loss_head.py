"""Heads of real architectures: taken apart right, proven, and refused when they are more than a head."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import PreTrainedModel

import tiny
from heads import NUM_ROWS, VOCAB_SIZE, build
from opd.errors import OpdError
from opd.forward import body_of
from opd.loss import Head

IDS = torch.arange(40).reshape(2, 20)


def own_logits(model: PreTrainedModel) -> Tensor:
    with torch.no_grad():
        return model(IDS, use_cache=False).logits[..., :VOCAB_SIZE].flatten(0, 1)


def head_logits(head: Head, model: Any) -> Tensor:
    with torch.no_grad():
        return head.logits(body_of(model)(IDS, use_cache=False).last_hidden_state.flatten(0, 1))


@pytest.mark.parametrize("architecture", tiny.ARCHITECTURES)
def test_gives_the_models_own_logits(architecture: str) -> None:
    model = tiny.ARCHITECTURES[architecture](NUM_ROWS)
    head = Head.from_model(model, vocab_size=VOCAB_SIZE)
    logits = head_logits(head, model)
    assert logits.shape == (40, VOCAB_SIZE)
    torch.testing.assert_close(logits, own_logits(model), rtol=1e-5, atol=1e-5)
    # What is special about the architecture is not a detail: without it the logits are far off.
    plain = head_logits(Head(head.weight, vocab_size=VOCAB_SIZE), model)
    far = (plain - logits).abs().max() > 0.1
    assert bool(far) == (architecture in {"gemma2", "granite", "cohere"})


@pytest.mark.parametrize("architecture", tiny.ARCHITECTURES)
def test_proof_holds_in_bfloat16(architecture: str) -> None:
    model = tiny.ARCHITECTURES[architecture](NUM_ROWS).to(torch.bfloat16)
    head = Head.from_model(model, vocab_size=VOCAB_SIZE)
    assert head_logits(head, model).dtype == torch.float32


# family -> fields beside the shape -> (scale, softcap, whether there is a bias)
FAMILIES: dict[str, tuple[dict[str, Any], tuple[float, float | None, bool]]] = {
    "olmo": ({}, (1.0, None, False)),
    "mpt": ({"logit_scale": "inv_sqrt_d_model", "d_model": 32, "n_heads": 4, "n_layers": 2}, (1.0, None, False)),
    "phi": ({}, (1.0, None, True)),
    "gptj": ({"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4}, (1.0, None, True)),
    "gpt2": ({"n_embd": 32, "n_layer": 2, "n_head": 4}, (1.0, None, False)),
    "mamba": ({}, (1.0, None, False)),
    "recurrent_gemma": ({"lru_width": 32, "logits_soft_cap": 3.0}, (1.0, 3.0, False)),
    "nanochat": ({"final_logit_softcapping": 3.0}, (1.0, 3.0, False)),
    "cohere2": ({"logit_scale": 0.25}, (0.25, None, False)),
    "falcon_h1": (
        {"lm_head_multiplier": 0.25, "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8},
        (0.25, None, False),
    ),
    "granitemoe": ({"logits_scaling": 4.0}, (0.25, None, False)),
    "minicpm3": (
        {"dim_model_base": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8, "head_dim": 4},
        (0.25, None, False),
    ),
    "hyperclovax": ({"logits_scaling": 4.0}, (4.0, None, False)),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_scale_softcap_and_bias_of_other_families(family: str) -> None:
    fields, expected = FAMILIES[family]
    model = build(family, **fields)
    head = Head.from_model(model, vocab_size=VOCAB_SIZE)
    assert (head.scale, head.softcap, head.bias is not None) == expected
    torch.testing.assert_close(head_logits(head, model), own_logits(model), rtol=1e-5, atol=1e-5)


def test_a_family_with_another_layer_before_its_matrix_is_refused() -> None:
    with pytest.raises(OpdError, match="own logits") as error:
        Head.from_model(build("roberta", is_decoder=True))
    assert "differ by up to" in error.value.why
    with pytest.raises(OpdError, match="cannot be used") as error:
        Head.from_model(build("rembert", is_decoder=True, input_embedding_size=16, output_embedding_size=24))
    assert "takes 24" in error.value.why


def test_a_scale_for_each_token_is_refused() -> None:
    model = build("dory").requires_grad_(False)
    with pytest.raises(OpdError, match="own logits"):
        Head.from_model(model)


def test_logits_that_the_model_cuts_itself_must_be_cut_here_too() -> None:
    model = tiny.build_llama(NUM_ROWS)
    model.lm_head.register_forward_hook(lambda _module, _args, output: output[..., :VOCAB_SIZE])
    with pytest.raises(OpdError, match="cannot be used") as error:
        Head.from_model(model)
    assert f"vocab_size={VOCAB_SIZE}" in error.value.fix
    Head.from_model(model, vocab_size=VOCAB_SIZE)


def test_a_tied_head_is_the_embedding_itself() -> None:
    model = tiny.build_qwen3(NUM_ROWS)
    assert Head.from_model(model).weight is model.get_input_embeddings().weight


def test_a_head_that_does_more_is_refused_with_the_difference() -> None:
    model = tiny.build_llama(NUM_ROWS)
    model.lm_head.register_forward_hook(lambda _module, _args, output: output * 1.5)
    with pytest.raises(OpdError, match="does not give the model's own logits") as error:
        Head.from_model(model)
    assert "differ by up to" in error.value.why


def test_a_nan_in_the_model_is_refused() -> None:
    model = tiny.build_llama(NUM_ROWS)
    with torch.no_grad():
        model.lm_head.weight[3, 3] = torch.nan
    with pytest.raises(OpdError, match="own logits"):
        Head.from_model(model)


def test_the_probe_changes_neither_mode_nor_random_state() -> None:
    base = tiny.build_llama(NUM_ROWS)
    model = get_peft_model(base, LoraConfig(target_modules="all-linear", lora_dropout=0.5, init_lora_weights=False))
    model.train()
    base.model.layers[0].eval()
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    Head.from_model(model)
    assert torch.equal(torch.rand(1), expected)
    assert model.training
    assert base.model.layers[1].training
    assert not base.model.layers[0].training
    assert not base.model._forward_hooks


def test_autocast_does_not_round_a_float32_head() -> None:
    head, hidden = Head(torch.randn(9, 4)), torch.randn(3, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        under = head.logits(hidden)
    assert torch.equal(under, hidden @ head.weight.T)


def test_lora_in_the_body_is_part_of_the_hidden_states() -> None:
    model = get_peft_model(tiny.build_llama(NUM_ROWS), LoraConfig(target_modules="all-linear", init_lora_weights=False))
    head = Head.from_model(model, vocab_size=VOCAB_SIZE)
    assert not head.weight.requires_grad
    torch.testing.assert_close(head_logits(head, model), own_logits(model), rtol=1e-5, atol=1e-5)


def test_follows_the_model_as_it_trains_and_reaches_its_gradient() -> None:
    model = tiny.build_llama(NUM_ROWS)
    with torch.no_grad():
        head = Head.from_model(model, vocab_size=VOCAB_SIZE)
        model.lm_head.weight.mul_(2.0)
    torch.testing.assert_close(head_logits(head, model), own_logits(model), rtol=1e-5, atol=1e-5)
    head.logits(torch.ones(1, 32)).sum().backward()
    gradient = model.lm_head.weight.grad
    assert bool((gradient[:VOCAB_SIZE] == 1).all())
    assert not gradient[VOCAB_SIZE:].any()


@pytest.mark.parametrize(
    "fields", [{"scale": float("nan")}, {"scale": 0.0}, {"softcap": 0.0}, {"softcap": float("inf")}, {"vocab_size": 97}]
)
def test_unusable_numbers_are_refused(fields: dict[str, float]) -> None:
    with pytest.raises(OpdError, match="cannot be used"):
        Head(torch.zeros(NUM_ROWS, 4), **fields)


def test_a_body_alone_is_refused() -> None:
    with pytest.raises(OpdError, match="cannot be used"):
        Head.from_model(copy.deepcopy(tiny.build_llama(NUM_ROWS).model))
