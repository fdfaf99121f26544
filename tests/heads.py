"""Models for tests of the output head: any family of transformers, and adapters away from their start."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from peft import PeftConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import tiny

# Rows of the heads, and how many of them a token owns.
NUM_ROWS, VOCAB_SIZE = 96, 90
LORA: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": ["lm_head", "q_proj"]}


def build(name: str, **fields: Any) -> PreTrainedModel:
    """A tiny random model of any family that transformers knows."""
    shape = tiny.SHAPE | fields
    config = AutoConfig.for_model(name, vocab_size=NUM_ROWS, pad_token_id=0, bos_token_id=1, eos_token_id=2, **shape)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
    return model.eval()


def adapted(base: Any, config: PeftConfig, *, moved: bool = True) -> Any:
    """A peft model whose adapters are away from their start, where B is zero and any head would do."""
    torch.manual_seed(1)
    with warnings.catch_warnings():
        # Of a tied head, peft says that merging changes the embedding too.
        warnings.filterwarnings("ignore", message=".*tie_word_embeddings=True")
        model = get_peft_model(base, config)
    return move(model) if moved else model


def move(model: Any) -> Any:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad or "lora_" in name:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return model
