"""What every sampler promises."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from opd.config.schema import SamplingConfig
from opd.types import Completion


class Sampler(Protocol):
    """Prompt ids in, completions out.

    A completion depends on (weights, prompt, seed, sampling) alone, not on which other prompts share the batch.
    """

    policy_version: int

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[int],
        sampling: SamplingConfig,
        *,
        batch_size: int = 64,
        on_batch: Callable[[Sequence[int], Sequence[Completion]], None] | None = None,
    ) -> list[Completion]:
        """One completion for each prompt, in order.

        Args:
            prompts: token ids of each prompt; no padding.
            seeds: one seed a prompt; the same seed, prompt and weights give the same completion.
            sampling: temperature, top-k, top-p, min-p and the length limit.
            batch_size: how many completions are decoded side by side.
            on_batch: called with the indices and completions of each finished batch, for progress and for resuming.
        """
        ...
