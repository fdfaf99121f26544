"""From one GGUF file to a folder as `save_pretrained` writes it: config, fp32 safetensors, tokenizer, chat template.

transformers reads the config and the tokenizer. Its weights route takes half a minute and more for 135M parameters, so
the two architectures that packages ship have their own (two seconds, equal to the bit: a test compares); any other
architecture goes through transformers.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opd.errors import OpdError

if TYPE_CHECKING:
    import numpy as np
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

# GGUF name -> name in transformers, without the suffix `.weight`; `{}` is the layer.
COMMON_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "blk.{}.attn_norm": "model.layers.{}.input_layernorm",
    "blk.{}.attn_q": "model.layers.{}.self_attn.q_proj",
    "blk.{}.attn_k": "model.layers.{}.self_attn.k_proj",
    "blk.{}.attn_v": "model.layers.{}.self_attn.v_proj",
    "blk.{}.attn_output": "model.layers.{}.self_attn.o_proj",
    "blk.{}.ffn_gate": "model.layers.{}.mlp.gate_proj",
    "blk.{}.ffn_up": "model.layers.{}.mlp.up_proj",
    "blk.{}.ffn_down": "model.layers.{}.mlp.down_proj",
}
NAMES = {
    "llama": COMMON_NAMES | {"blk.{}.ffn_norm": "model.layers.{}.post_attention_layernorm"},
    "gemma3": COMMON_NAMES
    | {
        "blk.{}.attn_q_norm": "model.layers.{}.self_attn.q_norm",
        "blk.{}.attn_k_norm": "model.layers.{}.self_attn.k_norm",
        "blk.{}.post_attention_norm": "model.layers.{}.post_attention_layernorm",
        "blk.{}.ffn_norm": "model.layers.{}.pre_feedforward_layernorm",
        "blk.{}.post_ffw_norm": "model.layers.{}.post_feedforward_layernorm",
    },
}


def convert(gguf_file: Path, folder: Path) -> None:
    """Write the model in `gguf_file` to the empty `folder`, in fp32.

    Raises:
        OpdError: the `gguf` package is missing, the file is broken, or its architecture is not known.
    """
    try:
        import gguf
    except ImportError as error:
        raise OpdError(
            f"cannot read {gguf_file.name}", why="the gguf package is not installed", fix="pip install 'opd[demo]'"
        ) from error

    try:
        reader: Any = gguf.GGUFReader(gguf_file)
        architecture = str(reader.fields["general.architecture"].contents())
        own_route = architecture in NAMES and all(_name(architecture, tensor.name) for tensor in reader.tensors)
        # Scaled rotary embeddings are described in header keys that only transformers' route reads.
        own_route = own_route and not any(".rope.scaling." in key for key in reader.fields)
        model = _own_route(gguf_file, reader, architecture) if own_route else _transformers_route(gguf_file)
        tokenizer = _tokenizer(gguf_file, reader)
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise OpdError(
            f"cannot read {gguf_file}",
            why=f"{type(error).__name__}: {error}",
            fix="check that the file is whole and that transformers knows its architecture",
        ) from error
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _own_route(gguf_file: Path, reader: Any, architecture: str) -> PreTrainedModel:
    """Dequantize tensor by tensor into a model that holds no weights yet."""
    import gguf
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config: Any = AutoConfig.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name)
    weights: dict[str, torch.Tensor] = {}
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        values = _undo_layout(values, architecture, tensor.name, config.num_attention_heads, config.num_key_value_heads)
        weights[_name(architecture, tensor.name)] = torch.from_numpy(values.copy()).to(torch.float32)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    missing, unexpected = model.load_state_dict(weights, strict=False, assign=True)
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set[str]()
    if set(missing) - tied or unexpected:
        raise ValueError(f"weights missing: {sorted(set(missing) - tied)}, not known: {sorted(unexpected)}")
    model.tie_weights()
    return model


def _name(architecture: str, gguf_name: str) -> str:
    """The name in transformers of one GGUF tensor; empty when the table does not know it."""
    stem, _, suffix = gguf_name.rpartition(".")
    layer = re.search(r"\.(\d+)\.", stem)
    pattern = stem.replace(layer[0], ".{}.", 1) if layer else stem
    known = NAMES[architecture].get(pattern)
    return f"{known.format(layer[1] if layer else '')}.{suffix}" if known and suffix == "weight" else ""


def _undo_layout(
    values: np.ndarray, architecture: str, gguf_name: str, num_heads: int, num_key_value_heads: int
) -> np.ndarray:
    """Undo what the GGUF format does to some tensors.

    llama: rows of q and k are stored with the two halves of each rotary pair interleaved. gemma3: norm weights are
    stored plus 1.
    """
    if architecture == "llama" and (".attn_q." in gguf_name or ".attn_k." in gguf_name):
        heads = num_heads if ".attn_q." in gguf_name else num_key_value_heads
        pairs = values.reshape(heads, values.shape[0] // heads // 2, 2, values.shape[1])
        return pairs.swapaxes(1, 2).reshape(values.shape)
    if architecture == "gemma3" and gguf_name.endswith("norm.weight"):
        return values - 1
    return values


def _transformers_route(gguf_file: Path) -> PreTrainedModel:
    """Any architecture that transformers knows, slower."""
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name, dtype=torch.float32)
    # The weights are dequantized, yet the model still calls itself quantized, and save_pretrained would refuse it.
    model.hf_quantizer = None
    model.is_quantized = False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    return model


def _tokenizer(gguf_file: Path, reader: Any) -> PreTrainedTokenizerBase:
    """The tokenizer that the file describes.

    transformers leaves out the digit splitter that the pre-tokenizer type `smollm` stands for; without it, two spaces
    before a digit become two tokens where the model was trained with one.
    """
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name)
    pre = reader.fields.get("tokenizer.ggml.pre")
    if pre is not None and pre.contents() == "smollm":
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
    return tokenizer
