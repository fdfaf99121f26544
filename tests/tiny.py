"""Tiny models for tests: built in memory in milliseconds, of several architectures, with random but fixed weights.

None of them can do anything. `tests/fixtures/tiny_sums` holds one that can.
"""

from __future__ import annotations

import random

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    GenerationConfig,
    GraniteConfig,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
)

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEXT = (
    "What is 8 times 3? Eight times three is twenty-four, so the answer is 24.",
    "You are a helpful assistant. Put the final answer in \\boxed{}.",
    "system user assistant question solution teacher student token distillation",
    "Add 12 and 35: 12 + 35 = 47. Subtract 9 from 40: 40 - 9 = 31.",
)


def build_tokenizer(vocab_size: int = 320) -> PreTrainedTokenizerFast:
    """A byte-level BPE with a ChatML-like template, trained on a few sentences; EOS is `<|im_end|>`, padding is EOS."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|im_end|>")
    fast.chat_template = CHAT_TEMPLATE
    return fast


def padded_rows(tokenizer: PreTrainedTokenizerFast) -> int:
    """The next multiple of 64 past the tokenizer, so that the head has rows that no token owns."""
    return (len(tokenizer) // 64 + 1) * 64


# What every tiny model shares: two layers, hidden 32, four heads of 8, two of them for keys and values.
SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
}


def build_llama(num_rows: int, *, tie: bool = False, seed: int = 0, eos_id: int = 2) -> PreTrainedModel:
    """A Llama without peculiarities."""
    return _build(LlamaConfig(vocab_size=num_rows, tie_word_embeddings=tie, **SHAPE), seed, eos_id)


def build_gemma2(num_rows: int, *, seed: int = 0, eos_id: int = 2) -> PreTrainedModel:
    """Tied head, logits soft-capped at 5 (low enough to bend random logits), a sliding window shorter than prompts."""
    config = Gemma2Config(
        vocab_size=num_rows,
        head_dim=8,
        query_pre_attn_scalar=8,
        final_logit_softcapping=5.0,
        sliding_window=16,
        **SHAPE,
    )
    return _build(config, seed, eos_id)


def build_granite(num_rows: int, *, seed: int = 0, eos_id: int = 2) -> PreTrainedModel:
    """Logits divided by `logits_scaling`."""
    return _build(GraniteConfig(vocab_size=num_rows, logits_scaling=4.0, **SHAPE), seed, eos_id)


def build_cohere(num_rows: int, *, seed: int = 0, eos_id: int = 2) -> PreTrainedModel:
    """Logits multiplied by `logit_scale`."""
    return _build(CohereConfig(vocab_size=num_rows, logit_scale=0.25, **SHAPE), seed, eos_id)


def build_qwen3(num_rows: int, *, seed: int = 0, eos_id: int = 2) -> PreTrainedModel:
    """Tied head, normalised queries and keys."""
    return _build(Qwen3Config(vocab_size=num_rows, head_dim=8, tie_word_embeddings=True, **SHAPE), seed, eos_id)


ARCHITECTURES = {
    "llama": build_llama,
    "gemma2": build_gemma2,
    "granite": build_granite,
    "cohere": build_cohere,
    "qwen3": build_qwen3,
}


def _build(config: PretrainedConfig, seed: int, eos_id: int) -> PreTrainedModel:
    config.bos_token_id, config.eos_token_id, config.pad_token_id = None, eos_id, eos_id
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        # Soft-capped attention has no sdpa kernel in transformers.
        attention = "eager" if isinstance(config, Gemma2Config) else "sdpa"
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=attention)
        # The default initialisation (0.02) leaves a tiny model's distributions all but uniform, and tests blind.
        for parameter in model.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.3)
    model.generation_config = GenerationConfig(eos_token_id=eos_id, pad_token_id=eos_id)
    return model.eval()


# ---- sums: what the trained model of tests/fixtures/tiny_sums does ---------------------------------------------------

SUMS_CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}{{ message['content'] + '<eos>' }}"
    "{% else %}{{ message['content'] + '=' }}{% endif %}{% endfor %}"
)


def build_sums_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte (so one a character of ASCII), then `<eos>`, id 256, which is the padding too.

    The template writes a user's `12+35` as `12+35=` and an assistant's `74` as `74<eos>`.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: token_id for token_id, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<eos>")
    fast.chat_template = SUMS_CHAT_TEMPLATE
    return fast


def question(a: int, b: int) -> str:
    """What the user asks: ``12+35``."""
    return f"{a}+{b}"


def answer(a: int, b: int) -> str:
    """The sum with its digits reversed, lowest first, as one adds by hand: 12 + 35 is ``74``."""
    return str(a + b)[::-1]


def sum_pairs(split: str) -> list[tuple[int, int]]:
    """The pairs of numbers below 100 that the model was trained on (``train``), or was not (``heldout``), shuffled.

    A pair and its mirror image are in the same split.
    """
    unordered = [(a, b) for a in range(100) for b in range(a, 100)]
    random.Random(0).shuffle(unordered)
    chosen = {"heldout": unordered[:260], "train": unordered[260:]}[split]
    return [pair for a, b in chosen for pair in sorted({(a, b), (b, a)})]
