"""What every teacher promises."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor

from opd.types import Rollout, TeacherScores


class Teacher(Protocol):
    """Scores the student's tokens after its own prompt."""

    def score(self, rollouts: Sequence[Rollout]) -> TeacherScores:
        """What the teacher says at every completion token, rollout by rollout in order: N rows, no graph kept."""
        ...

    def after_update(self) -> None:
        """Called once after each optimizer step (an EMA moves here)."""
        ...

    def state(self) -> Mapping[str, Tensor]:
        """What a checkpoint must hold so that the teacher goes on exactly: empty for a fixed one."""
        ...

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Take back what `state` gave."""
        ...
