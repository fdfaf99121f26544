"""Sampling with the learner's own model, in process, through transformers' forward.

A decoding loop of its own rather than `generate`: ids in and ids out, one seed for each completion, the
log-probability under the distribution that was really sampled from, a head that runs on the last position alone,
prompts that occur several times prefilled once, and finished completions that leave the batch and stop costing.

Prompts are padded on the left with explicit positions, so that the first sampled token follows the prompt's last.

B sequences, T tokens, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from torch import Tensor, nn
from transformers import DynamicCache

from opd.config.schema import SamplingConfig
from opd.errors import OpdError
from opd.forward import base_model, body_of, cache_keyword, compute_dtype, eval_mode
from opd.loss.head import Head
from opd.models import LoadedModel
from opd.types import Completion, FinishReason


class HfSampler:
    """Samples from a transformers model that lives in this process; weights are shared with the learner, not copied.

    Args:
        model: a causal language model, with or without a peft adapter.
        stop_ids: a completion ends with the first of these that is sampled.
        pad_id: any valid id; it is masked and never scored.
        vocab_size: number of real tokens; rows of the head at or past it are never sampled.
        dtype: compute dtype of the forward passes.
        weights: entered around each call, e.g. `student.merged` or `student.initial`; default: the weights as they are.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        stop_ids: frozenset[int],
        pad_id: int,
        vocab_size: int,
        dtype: torch.dtype,
        weights: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        if not stop_ids:
            raise OpdError(
                "The sampler has no stop id.",
                why="Neither tokenizer nor generation_config names an end-of-sequence token: no completion could end.",
                fix="Set eos_token in the tokenizer's config or eos_token_id in generation_config.json.",
            )
        self.policy_version = 0
        self._model = model
        self._body = body_of(model)
        self._head = Head.from_model(model, vocab_size=vocab_size)
        self._stop_ids = stop_ids
        self._pad_id = pad_id
        self._dtype = dtype
        self._weights = weights
        self._device = self._head.weight.device
        self._cache_keyword = cache_keyword(self._body)

    @classmethod
    def of(cls, loaded: LoadedModel, dtype: torch.dtype) -> HfSampler:
        """The sampler of a model as it was loaded."""
        return cls(
            loaded.model,
            stop_ids=loaded.stop_ids,
            pad_id=loaded.pad_id,
            vocab_size=loaded.vocab_size,
            dtype=dtype,
        )

    @torch.no_grad()
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[int],
        sampling: SamplingConfig,
        *,
        batch_size: int = 64,
        on_batch: Callable[[Sequence[int], Sequence[Completion]], None] | None = None,
    ) -> list[Completion]:
        """One completion for each prompt, in order; see `Sampler.generate`."""
        if len(prompts) != len(seeds):
            raise ValueError(f"{len(prompts)} prompts, {len(seeds)} seeds")
        if any(not prompt for prompt in prompts):
            raise OpdError(
                "A prompt is empty.", why="The model needs at least one token to continue.", fix="Check the template."
            )
        # Similar lengths share a batch, equal prompts stand side by side.
        order = sorted(range(len(prompts)), key=lambda index: (-len(prompts[index]), tuple(prompts[index]), index))
        done: dict[int, Completion] = {}
        with eval_mode(self._model), self._weights(), compute_dtype(self._device, self._dtype):
            # An adapter on the head may be merged or off under these weights.
            own, self._head = self._head, self._head.reread(self._model)
            try:
                for start in range(0, len(order), batch_size):
                    batch = order[start : start + batch_size]
                    completions = self._decode([prompts[i] for i in batch], [seeds[i] for i in batch], sampling)
                    done.update(zip(batch, completions, strict=True))
                    if on_batch is not None:
                        on_batch(batch, completions)
            finally:
                self._head = own
        return [done[index] for index in range(len(prompts))]

    def _decode(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], sampling: SamplingConfig
    ) -> list[Completion]:
        unique = list(dict.fromkeys(tuple(prompt) for prompt in prompts))
        which = torch.tensor([unique.index(tuple(prompt)) for prompt in prompts], device=self._device)
        hidden_BD, cache, mask_BT = self._prefill(unique)
        if len(unique) < len(prompts):
            cache.batch_select_indices(which)
            hidden_BD, mask_BT = hidden_BD[which], mask_BT[which]
        positions_B = mask_BT.sum(1)  # the next position of each row

        uniforms = np.stack([np.random.default_rng(seed).random(sampling.max_new_tokens) for seed in seeds])
        ids: list[list[int]] = [[] for _ in prompts]
        behavior: list[list[float]] = [[] for _ in prompts]
        kept: list[list[float]] = [[] for _ in prompts]
        reasons: list[FinishReason] = ["length"] * len(prompts)
        alive = list(range(len(prompts)))
        for step in range(sampling.max_new_tokens):
            uniform_B = torch.from_numpy(uniforms[alive, step]).to(self._device)
            token_B, behavior_B, kept_B = draw(self._head.logits(hidden_BD), uniform_B, sampling)
            going: list[int] = []
            for row, (index, token, logp, mass) in enumerate(
                zip(alive, token_B.tolist(), behavior_B.tolist(), kept_B.tolist(), strict=True)
            ):
                if math.isnan(logp + mass):
                    raise _not_finite()
                ids[index].append(token)
                behavior[index].append(logp)
                kept[index].append(mass)
                if token in self._stop_ids:
                    reasons[index] = "stop"
                else:
                    going.append(row)
            if not going or step + 1 == sampling.max_new_tokens:
                break
            if len(going) < len(alive):
                rows = torch.tensor(going, device=self._device)
                cache.batch_select_indices(rows)
                token_B, mask_BT, positions_B = token_B[rows], mask_BT[rows], positions_B[rows]
                alive = [alive[row] for row in going]
            mask_BT = torch.cat([mask_BT, mask_BT.new_ones(len(alive), 1)], dim=1)
            hidden_BD = self._forward(token_B[:, None], mask_BT, positions_B[:, None], cache)
            positions_B = positions_B + 1
        return [
            Completion(tuple(row_ids), tuple(row_behavior), tuple(row_kept), reason)
            for row_ids, row_behavior, row_kept, reason in zip(ids, behavior, kept, reasons, strict=True)
        ]

    def _prefill(self, prompts: Sequence[Sequence[int]]) -> tuple[Tensor, DynamicCache, Tensor]:
        length = max(map(len, prompts))
        ids_BT = torch.full((len(prompts), length), self._pad_id, dtype=torch.int64)
        mask_BT = torch.zeros((len(prompts), length), dtype=torch.int64)
        for row, prompt in enumerate(prompts):
            ids_BT[row, length - len(prompt) :] = torch.tensor(prompt)
            mask_BT[row, length - len(prompt) :] = 1
        positions_BT = (mask_BT.cumsum(1) - 1).clamp(min=0)
        ids_BT, mask_BT, positions_BT = (tensor.to(self._device) for tensor in (ids_BT, mask_BT, positions_BT))
        cache = DynamicCache(config=base_model(self._model).config)
        return self._forward(ids_BT, mask_BT, positions_BT, cache), cache, mask_BT

    def _forward(self, ids_BT: Tensor, mask_BT: Tensor, positions_BT: Tensor, cache: DynamicCache) -> Tensor:
        output = self._body(
            input_ids=ids_BT,
            attention_mask=mask_BT,
            position_ids=positions_BT,
            use_cache=True,
            **{self._cache_keyword: cache},
        )
        return output.last_hidden_state[:, -1]


def draw(logits_BV: Tensor, uniform_B: Tensor, sampling: SamplingConfig) -> tuple[Tensor, Tensor, Tensor]:
    """One token for each row by inverting the cumulative distribution at a uniform number of its own.

    Args:
        logits_BV: [B, V] float32.
        uniform_B: [B] float64 in [0, 1): the only randomness, so a row's token does not depend on its neighbours.
        sampling: temperature, then top-k, top-p, min-p; temperature 0 takes the most likely token.

    Returns:
        token_B [B] int64; behavior_B [B] nats under the distribution drawn from; kept_B [B] log of the mass that
        top-k, top-p and min-p kept. For temperature 0 the choice is certain: behavior 0, and kept is the token's own
        log-probability at temperature 1.
    """
    if sampling.temperature == 0:
        logp_B, token_B = logits_BV.log_softmax(-1).max(-1)
        return token_B, torch.zeros_like(logp_B), logp_B
    logp_BV = (logits_BV / sampling.temperature).log_softmax(-1)
    weight_BV = _truncate(logp_BV, sampling).exp().double()
    cumulative_BV = weight_BV.cumsum_(-1)
    total_B = cumulative_BV[:, -1:]
    # Strictly below the total, so that rounding never lands past the last token with mass.
    target_B = torch.minimum(uniform_B[:, None] * total_B, torch.nextafter(total_B, torch.zeros_like(total_B)))
    # NaN logits have no place for it: some token, with NaN for its log-probability.
    token_B = torch.searchsorted(cumulative_BV, target_B, right=True).clamp_(max=logp_BV.shape[1] - 1)
    cut = sampling.top_k is not None or sampling.top_p < 1 or sampling.min_p > 0
    kept_B = total_B.squeeze(1).log().clamp(max=0.0).float() if cut else torch.zeros_like(logp_BV[:, 0])
    return token_B.squeeze(1), logp_BV.gather(1, token_B).squeeze(1) - kept_B, kept_B


def _not_finite() -> OpdError:
    return OpdError(
        "The model's logits are not finite, so nothing can be sampled.",
        why="Its weights hold NaN or infinity, or overflow in this dtype; in training, an earlier step was too large.",
        fix="Lower train.learning_rate, or load the model in float32.",
    )


def _truncate(logp_BV: Tensor, sampling: SamplingConfig) -> Tensor:
    """The log-probabilities with what top-k, top-p and min-p cut set to -inf, each rule on what the one before left.

    The most likely token always stays.
    """
    if sampling.top_k is not None and sampling.top_k < logp_BV.shape[1]:
        threshold_B = logp_BV.topk(sampling.top_k, dim=-1).values[:, -1:]
        logp_BV = logp_BV.masked_fill(logp_BV < threshold_B, -torch.inf)
    if sampling.top_p < 1:
        sorted_BV, index_BV = logp_BV.sort(dim=-1, descending=True)
        weight_BV = sorted_BV.exp()
        before_BV = weight_BV.cumsum(-1) - weight_BV
        cut_BV = before_BV >= sampling.top_p * weight_BV.sum(-1, keepdim=True)
        cut_BV[:, 0] = False
        logp_BV = logp_BV.masked_fill(torch.zeros_like(cut_BV).scatter_(1, index_BV, cut_BV), -torch.inf)
    if sampling.min_p > 0:
        floor_B = logp_BV.max(-1, keepdim=True).values + float(np.log(sampling.min_p))
        logp_BV = logp_BV.masked_fill(logp_BV < floor_B, -torch.inf)
    return logp_BV
