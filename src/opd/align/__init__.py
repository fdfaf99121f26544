"""Which student positions meet which teacher positions."""

from __future__ import annotations

from opd.types import Alignment, Rollout


def identity(rollout: Rollout) -> Alignment:
    """One tokenizer: every completion token meets itself, the stop token included when one was sampled."""
    positions = tuple(range(len(rollout.completion.ids)))
    return Alignment(student_positions=positions, teacher_positions=positions)
