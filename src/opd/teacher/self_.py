"""The student as its own teacher, shown the context: initial, live or averaged weights.

Self-distillation as in OPSD (arXiv 2601.18734): same model, privileged prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from opd.config.schema import EmaWeights, InitialWeights, TeacherWeights
from opd.errors import OpdError
from opd.forward import body_of, compute_dtype, eval_mode, score_hidden
from opd.memory import free_bytes
from opd.training.student import Student
from opd.types import Full, Rollout


class SelfTeacher:
    """Scores with the student's own model under the teacher's prompt.

    - `initial` with LoRA: the adapter is off while it scores. With full fine-tuning: a frozen copy of the trained
      weights, refused when it does not fit into memory.
    - `live`: the weights as they are.
    - `ema`: starts from the initial weights before step 1; after each step ema = decay*ema + (1-decay)*live. With LoRA
      the factors A and B are averaged each by itself, so the effective product is B_ema A_ema, not the average of the
      products; the two agree to second order in the weights' spread over the averaging window.

    Dropout is off while it scores, without changing the mode that the student is in.
    """

    def __init__(self, student: Student, weights: TeacherWeights, *, max_tokens: int) -> None:
        self._student = student
        self._weights = weights
        self._max_tokens = max_tokens
        self._copy: dict[str, Tensor] = {}
        if isinstance(weights, EmaWeights) or (isinstance(weights, InitialWeights) and not student.has_adapter):
            _refuse_if_it_does_not_fit(student)
            self._copy = student.snapshot()

    @torch.no_grad()
    def score(self, rollouts: Sequence[Rollout]) -> Full:
        """Hidden states [N, D] under the teacher's prompts, with the head as the teacher's weights have it."""
        student = self._student
        with eval_mode(student.model), self.weights_in_place(), compute_dtype(student.device, student.dtype):
            hidden_ND = score_hidden(
                body_of(student.model),
                [rollout.pair.teacher_ids for rollout in rollouts],
                [rollout.completion.ids for rollout in rollouts],
                pad_id=student.loaded.pad_id,
                max_tokens=self._max_tokens,
                device=student.device,
            )
            # Taken inside, where the model holds the teacher's weights: detached tensors keep pointing at them.
            return Full(hidden_ND, student.head.detached())

    def weights_in_place(self) -> AbstractContextManager[None]:
        """The model holds the teacher's weights inside."""
        if self._copy:
            return self._student.using(self._copy)
        if isinstance(self._weights, InitialWeights):
            return self._student.adapter_off()
        return nullcontext()

    @torch.no_grad()
    def after_update(self) -> None:
        """Move the average toward the live weights."""
        if isinstance(self._weights, EmaWeights):
            for name, parameter in self._student.trained().items():
                self._copy[name].lerp_(parameter, 1 - self._weights.decay)

    def state(self) -> Mapping[str, Tensor]:
        """The averaged weights. A frozen copy of the initial ones needs no saving: loading the model gives it."""
        return self._copy if isinstance(self._weights, EmaWeights) else {}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Take back what `state` gave."""
        if state.keys() != self.state().keys():
            raise OpdError(
                "The checkpoint's teacher does not fit this recipe.",
                why=f"It holds {len(state)} tensors of teacher weights, this teacher needs {len(self.state())}.",
                fix="Resume with the recipe that wrote the checkpoint.",
            )
        for name, tensor in state.items():
            self._copy[name].copy_(tensor)


def _refuse_if_it_does_not_fit(student: Student) -> None:
    # The copy, and what is still to come: gradients and the two moments of AdamW, each as large as the weights.
    needed = 4 * sum(parameter.nbytes for parameter in student.trained().values())
    free = free_bytes(student.device)
    if needed > free:
        raise OpdError(
            "A copy of the student's trained weights for the teacher does not fit into memory.",
            why=f"With gradients and optimizer it takes {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free.",
            fix="Train an adapter, whose initial weights cost nothing (student.adapter.name=lora).",
        )
