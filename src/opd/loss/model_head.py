"""What the output layer of a loaded model is made of: matrix, bias, adapters, scale, softcap; and the proof of it.

Tensor suffixes: B sequences, T tokens, N positions, V vocabulary, D hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from opd.errors import OpdError
from opd.forward import base_model, body_of, eval_mode
from opd.loss.head import Head, LowRank, statistics_dtype, unusable

# Largest difference from the model's own logits, as a share of the largest logit. A head is one product and a few
# elementwise operations: what is left is the rounding of the dtype, a few units of which the model may spend on a
# scale or softcap in half precision that is done in float32 here.
_TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 2e-2}
_PROBE_SHAPE_BT = (2, 8)

# What families call a number that the logits are multiplied with (Cohere, Falcon-H1, Muse) or divided by (Granite and
# MiniCPM, Inkling), and their softcap (Gemma and others, RecurrentGemma, xLSTM). A new name is a new entry here.
_MULTIPLIERS = ("logit_scale", "lm_head_multiplier", "output_multiplier")
_DIVISORS = ("logits_scaling", "logits_mup_width_multiplier")
_SOFTCAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
# HyperCLOVA X multiplies with what Granite divides by.
_MULTIPLIES_LOGITS_SCALING = ("hyperclovax",)

_LEAVE_OUT = "leave the output layer out of target_modules (student.adapter.target_modules), or use plain LoRA on it"


@dataclass(frozen=True, eq=False)
class OutputTensors:
    """The tensors of an output layer, the model's own; see `Head` for their shapes."""

    weight: Tensor
    bias: Tensor | None
    low_rank: tuple[LowRank, ...]


def output_tensors(model: nn.Module) -> OutputTensors:
    """Matrix, bias and adapters of the layer that makes logits, as the model's adapter state has them.

    Raises:
        OpdError: there is no such layer, or it or an adapter on it is more than a `Head` can hold.
    """
    base = base_model(model)
    layer: Any = base.get_output_embeddings()
    if layer is None:
        raise unusable(f"{type(base).__name__} has no output embeddings", "pass a causal language model")
    low_rank: tuple[LowRank, ...] = ()
    # Wrappers may lie in each other; what is left in the end is the model's own layer.
    while type(layer).__module__.startswith("peft."):
        layer, added = _without_adapter(layer)
        low_rank += added
    weight, bias = _matrix(layer)
    for low in low_rank:
        for tensor in (low.down, low.up):
            if tensor.dtype not in _TOLERANCE:
                raise unusable(f"an adapter on it holds {tensor.dtype}", "load the adapter in float32 or bfloat16")
    return OutputTensors(weight, bias, low_rank)


def scale_and_softcap(model: nn.Module) -> tuple[float, float | None]:
    """What the product is multiplied with, and the softcap or None, as the model's config has them."""
    # The decoder's, where a model has a text config for each side.
    config: Any = base_model(model).config.get_text_config(decoder=True)
    scale = 1.0
    for name in _MULTIPLIERS:
        scale *= _number(config, name)
    for name in _DIVISORS:
        value = _number(config, name)
        multiplies = name == "logits_scaling" and config.model_type in _MULTIPLIES_LOGITS_SCALING
        scale = scale * value if multiplies else scale / value
    softcaps = [float(value) for name in _SOFTCAPS if (value := getattr(config, name, None)) is not None]
    return scale, softcaps[0] if softcaps else None


def _number(config: Any, name: str) -> float:
    """The number that a config holds under a name, else 1; MPT's may be a word, which its model does not read."""
    value: Any = getattr(config, name, None)
    return float(value) if isinstance(value, int | float) else 1.0


def _matrix(layer: Any) -> tuple[Tensor, Tensor | None]:
    from transformers.pytorch_utils import Conv1D

    kind = type(layer).__name__
    weight: Any = getattr(layer, "weight", None)
    if isinstance(layer, Conv1D):
        raise unusable(
            f"the output layer ({kind}) holds its matrix transposed, [D, rows]",
            "replace it with a torch.nn.Linear that holds the transpose",
        )
    if not isinstance(weight, Tensor) or weight.ndim != 2 or weight.dtype not in _TOLERANCE:
        shown = f"{weight.dtype} {tuple(weight.shape)}" if isinstance(weight, Tensor) else repr(weight)
        raise unusable(
            f"the output layer ({kind}) holds no plain matrix: {shown}", "load the model without quantising lm_head"
        )
    bias: Tensor | None = getattr(layer, "bias", None)
    # A parameter that learns unseen: it may still have the value under which it changes no logit.
    learning = [name for name, tensor in layer.named_parameters() if tensor.requires_grad]
    others = sorted(set(learning) - {"weight", "bias"})
    if others:
        raise unusable(
            f"the output layer ({kind}) trains more than a matrix and a bias: {', '.join(others)}",
            "freeze those parameters, or use Loss.tokens on the model's logits",
        )
    return weight, bias


# ---- peft ------------------------------------------------------------------------------------------------------------


def _without_adapter(wrapper: Any) -> tuple[nn.Module, tuple[LowRank, ...]]:
    """What a wrapper of peft's stands for in its present state: the layer inside, and what is added to its product."""
    from peft.tuners.lora import Linear
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import ModulesToSaveWrapper, TrainableTokensWrapper

    kind = type(wrapper).__name__
    if isinstance(wrapper, ModulesToSaveWrapper):
        copy = _active(wrapper, wrapper.modules_to_save)
        return (wrapper.original_module if copy is None else wrapper.modules_to_save[copy]), ()
    if isinstance(wrapper, TrainableTokensWrapper):
        tokens: Any = wrapper.token_adapter
        if _active(wrapper, tokens.trainable_tokens_delta) is None or tokens.merged:
            return tokens.base_layer, ()
        raise unusable(
            "single rows of it train beside a frozen matrix (trainable_token_indices), and so its matrix is made anew "
            "in every forward",
            "untie the head from the embedding (tie_word_embeddings=false), or train it whole: "
            "modules_to_save=['lm_head']",
        )
    if not isinstance(wrapper, BaseTunerLayer):
        raise unusable(f"peft's {kind} around the output layer is not known", _LEAVE_OUT)
    inside: Any = wrapper
    # Merged, the matrix inside holds the adapter already; a disabled layer unmerges itself in the next forward.
    if inside.disable_adapters or inside.merged:
        return inside.base_layer, ()
    # Subclasses are layers for quantised matrices, with products of their own.
    if type(wrapper) is not Linear:
        method = type(wrapper).__module__.removeprefix("peft.tuners.")
        raise unusable(
            f"the adapter on the output layer is {method}.{kind}: another method than LoRA, or LoRA on a layer that is "
            "quantised or not linear",
            _LEAVE_OUT,
        )
    return inside.base_layer, tuple(_lora(inside, name) for name in inside.active_adapters if name in inside.lora_A)


def _active(wrapper: Any, adapters: Any) -> str | None:
    """The adapter whose parts an auxiliary wrapper uses, or None where it uses the original."""
    names: list[str] = wrapper.active_adapters
    if wrapper.disable_adapters or not names or any(name not in adapters for name in names):
        return None
    return names[0]


def _lora(layer: Any, name: str) -> LowRank:
    variant: Any = layer.lora_variant.get(name)
    if variant is not None:
        kind = type(variant).__name__
        raise unusable(
            f"the adapter {name!r} on the output layer is {kind}: not one low-rank product (DoRA, for one, divides "
            "by the norms of the whole adapted matrix)",
            _LEAVE_OUT,
        )
    down, up = layer.lora_A[name], layer.lora_B[name]
    dropout: float = getattr(layer.lora_dropout[name], "p", 0.0)
    # In an adapter that trains it will be on whenever the model trains, whatever mode the model is in now.
    if dropout > 0 and (layer.training or up.weight.requires_grad):
        raise unusable(
            f"LoRA on the output layer has dropout {dropout:g}: the adapter alone would see other hidden states than "
            "the matrix beside it",
            "set the adapter's dropout to 0 (student.adapter.dropout=0), or leave the output layer out of "
            "target_modules; to score with a trained adapter, call model.eval() and freeze it",
        )
    return LowRank(down.weight, up.weight, float(layer.scaling[name]), up.bias)


# ---- proof -----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def prove(head: Head, model: nn.Module) -> None:
    """Compare a head with the model's own logits; one forward, so that both start from the same hidden states.

    Raises:
        OpdError: they differ by more than rounding, or the model's last hidden states cannot be told.
    """
    hidden_BTD, own_BTV = _probe(head, model)
    difference = (head.logits(hidden_BTD) - own_BTV).abs().max().item()
    tensors = [head.weight, *(tensor for low in head.low_rank for tensor in (low.down, low.up))]
    coarsest = max((tensor.dtype for tensor in tensors), key=_TOLERANCE.__getitem__)
    limit = _TOLERANCE[coarsest] * own_BTV.abs().max().item()
    if not difference <= limit:  # a NaN is a failure too
        raise OpdError(
            "The output head does not give the model's own logits.",
            why=f"they differ by up to {difference:.3g}, and rounding in {coarsest} explains {limit:.3g}: "
            f"{type(base_model(model)).__name__} does more between its last hidden state and its logits than scale "
            f"{head.scale:g}, softcap {head.softcap} and {len(head.low_rank)} low-rank adapters",
            fix="build Head(weight, bias, scale=..., softcap=...) by hand, or use Loss.tokens on the model's logits",
        )


def _probe(head: Head, model: nn.Module) -> tuple[Tensor, Tensor]:
    """Last hidden states [B, T, D] and logits [B, T, V] of one forward over random ids."""
    body, name = body_of(model), type(base_model(model)).__name__
    hidden_states = list[Tensor]()

    def keep(_module: nn.Module, _args: Any, output: Any) -> None:
        hidden_states.append(output[0])

    # A generator of its own: where in a run a head is built must not change what the run draws.
    ids_BT = torch.randint(head.num_tokens, _PROBE_SHAPE_BT, generator=torch.Generator().manual_seed(0))
    ids_BT = ids_BT.to(head.weight.device)
    hook = body.register_forward_hook(keep)
    try:
        with eval_mode(model), torch.autocast(ids_BT.device.type, enabled=False):
            output: Any = model(input_ids=ids_BT, attention_mask=torch.ones_like(ids_BT), use_cache=False)
    finally:
        hook.remove()
    if len(hidden_states) != 1:
        raise unusable(
            f"{type(body).__name__} ran {len(hidden_states)} times in one forward of the model, not once",
            "use a decoder-only causal model",
        )
    hidden_BTD = hidden_states[0]
    if hidden_BTD.shape[-1] != head.weight.shape[1]:
        raise unusable(
            f"{name}.get_decoder() gives {tuple(hidden_BTD.shape)} and the output layer takes {head.weight.shape[1]} "
            "numbers a position, so its last hidden states are not known",
            "use a decoder-only causal model",
        )
    own_BTV: Tensor = output.logits[..., : head.num_tokens].to(statistics_dtype(head.weight))
    if own_BTV.shape[-1] != head.num_tokens:
        raise unusable(
            f"{name} gives {own_BTV.shape[-1]} logits, and the head {head.num_tokens}",
            f"pass vocab_size={own_BTV.shape[-1]} or less: the size of the tokenizer",
        )
    return hidden_BTD, own_BTV
