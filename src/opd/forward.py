"""One forward pass over prompt + completion, for teacher and student alike.

Sequences are padded on the right and no attention mask is passed: under causal attention nothing left of a pad can see
it, so positions are contiguous from prompt to completion by construction, whatever the padding. The head never runs
over prompt positions: what comes out are the last hidden states that predict completion tokens, and nothing else.

B sequences, T tokens, N completion tokens of the batch, D hidden.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn
from transformers import DynamicCache

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# A shared prefix shorter than this costs more to keep than to run again.
MIN_SHARED_TOKENS = 16


def base_model(model: nn.Module) -> PreTrainedModel:
    """The causal language model inside, without a peft wrapper (its LoRA layers stay in place)."""
    get_base_model = getattr(model, "get_base_model", None)
    return get_base_model() if get_base_model is not None else model  # pyright: ignore[reportReturnType]


def body_of(model: nn.Module) -> nn.Module:
    """The decoder without its head: ids in, last hidden states out."""
    decoder = base_model(model).get_decoder()
    assert isinstance(decoder, nn.Module)
    return decoder


@contextmanager
def compute_dtype(device: torch.device, dtype: torch.dtype) -> Generator[None]:
    """Matrix products in `dtype`: trained weights stay in float32, so bfloat16 means autocast, not bfloat16 weights."""
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
        yield


@contextmanager
def eval_mode(model: nn.Module) -> Generator[None]:
    """Dropout off inside, every module's own mode back afterwards."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def pad_right(
    prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]], pad_id: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Input ids and where to read.

    The last completion token is no input: nothing after it is predicted.

    Returns:
        ids_BT [B, T] int64 (prompt + completion[:-1], padded on the right) and rows_N [N] int64, the flat positions in
        B*T whose hidden state predicts a completion token, sequence by sequence, in order.
    """
    length = max(len(prompt) + len(completion) - 1 for prompt, completion in zip(prompts, completions, strict=True))
    ids_BT = torch.full((len(prompts), length), pad_id, dtype=torch.int64)
    rows: list[Tensor] = []
    for index, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        assert prompt, "a prompt has at least one token"
        assert completion, "a completion has at least one token"
        sequence = [*prompt, *completion[:-1]]
        ids_BT[index, : len(sequence)] = torch.tensor(sequence, dtype=torch.int64)
        first = index * length + len(prompt) - 1
        rows.append(torch.arange(first, first + len(completion)))
    return ids_BT.to(device), torch.cat(rows).to(device)


def completion_hidden(body: nn.Module, ids_BT: Tensor, rows_N: Tensor, prefix: DynamicCache | None = None) -> Tensor:
    """Last hidden states [N, D] at the flat positions `rows_N` of `ids_BT`, which continue `prefix` if there is one."""
    cache = {} if prefix is None else {cache_keyword(body): prefix}
    hidden_BTD: Tensor = body(input_ids=ids_BT, use_cache=prefix is not None, **cache).last_hidden_state
    return hidden_BTD.flatten(0, 1).index_select(0, rows_N)


def micro_batches(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Indices grouped so that (rows x longest) of each group stays within `max_tokens`; longest first, ties in order.

    A single sequence longer than `max_tokens` is a group of its own: nothing is cut.
    """
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    groups: list[list[int]] = []
    for index in order:
        if groups and (len(groups[-1]) + 1) * lengths[groups[-1][0]] <= max_tokens:
            groups[-1].append(index)
        else:
            groups.append([index])
    return groups


@torch.no_grad()
def score_hidden(
    body: nn.Module,
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[int]],
    *,
    pad_id: int,
    max_tokens: int,
    device: torch.device,
) -> Tensor:
    """Hidden states [N, D] of all completions in the order given, in micro-batches of at most `max_tokens`; no graph.

    What all prompts begin with (a system message, the same solved examples) runs once, and its keys and values serve
    every sequence.
    """
    shared = shared_prefix(prompts)
    prefix = _prefix_cache(body, prompts[0][:shared], device) if shared >= MIN_SHARED_TOKENS else None
    if prefix is not None:
        prompts = [prompt[shared:] for prompt in prompts]
    parts: list[Tensor] = [torch.empty(0)] * len(prompts)
    lengths = [len(prompt) + len(completion) - 1 for prompt, completion in zip(prompts, completions, strict=True)]
    for group in micro_batches(lengths, max_tokens):
        ids_BT, rows_N = pad_right([prompts[i] for i in group], [completions[i] for i in group], pad_id, device)
        hidden_ND = completion_hidden(body, ids_BT, rows_N, _repeated(prefix, len(group)))
        for index, part in zip(group, hidden_ND.split([len(completions[i]) for i in group]), strict=True):
            parts[index] = part
    return torch.cat(parts)


def shared_prefix(prompts: Sequence[Sequence[int]]) -> int:
    """How many ids all prompts begin with in common, leaving each at least one of its own; 0 for a single prompt."""
    if len(prompts) < 2:
        return 0
    limit = min(map(len, prompts)) - 1
    first, last = min(map(tuple, prompts)), max(map(tuple, prompts))  # the two that differ earliest in sorted order
    return next((place for place in range(limit) if first[place] != last[place]), limit)


def cache_keyword(body: nn.Module) -> str:
    """What the decoder calls its cache: transformers renamed it within version 5, and both names are in the range."""
    return "cache" if "cache" in inspect.signature(body.forward).parameters else "past_key_values"


def _prefix_cache(body: nn.Module, ids: Sequence[int], device: torch.device) -> DynamicCache:
    cache = DynamicCache(config=cast("PreTrainedModel", body).config)
    body(input_ids=torch.tensor([list(ids)], device=device), use_cache=True, **{cache_keyword(body): cache})
    return cache


def _repeated(prefix: DynamicCache | None, num_rows: int) -> DynamicCache | None:
    """A copy of the prefix for each row: a forward pass appends to the cache that it is given."""
    if prefix is None:
        return None
    cache = copy.deepcopy(prefix)
    cache.batch_repeat_interleave(num_rows)
    return cache
