"""Another local model with the same vocabulary as the teacher, as in GKD (arXiv 2306.13649)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from opd.config.schema import ModelTeacherConfig
from opd.forward import body_of, compute_dtype, eval_mode, score_hidden
from opd.loss.head import Head
from opd.models import load
from opd.rollout.hf import HfSampler
from opd.types import Full, Rollout


class ModelTeacher:
    """A frozen model that scores the student's tokens after the teacher's prompt.

    Its vocabulary must equal the student's; that is checked before either model is loaded.
    """

    def __init__(self, config: ModelTeacherConfig, *, vocab_size: int, device: torch.device, max_tokens: int) -> None:
        self.loaded = load(config, device=device)
        self.loaded.model.requires_grad_(requires_grad=False)
        self._dtype = torch.bfloat16 if config.dtype == "bfloat16" else torch.float32
        self._head = Head.from_model(self.loaded.model, vocab_size=vocab_size)
        self._max_tokens = max_tokens

    @torch.no_grad()
    def score(self, rollouts: Sequence[Rollout]) -> Full:
        """Hidden states [N, D] of the teacher, with its head."""
        device = self._head.weight.device
        with eval_mode(self.loaded.model), compute_dtype(device, self._dtype):
            hidden_ND = score_hidden(
                body_of(self.loaded.model),
                [rollout.pair.teacher_ids for rollout in rollouts],
                [rollout.completion.ids for rollout in rollouts],
                pad_id=self.loaded.pad_id,
                max_tokens=self._max_tokens,
                device=device,
            )
        return Full(hidden_ND, self._head)

    def sampler(self) -> HfSampler:
        """Draws from the teacher itself, for its own score."""
        return HfSampler(
            self.loaded.model,
            stop_ids=self.loaded.stop_ids,
            pad_id=self.loaded.pad_id,
            vocab_size=self._head.num_tokens,
            dtype=self._dtype,
        )

    def after_update(self) -> None:
        """A fixed teacher does not move."""

    def state(self) -> Mapping[str, Tensor]:
        """Nothing to keep."""
        return {}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Nothing to take back."""
        assert not state
