"""Problems and prompts: where problems come from (`sources`, `tasks`) and how they become token ids (`render`)."""

from __future__ import annotations

from opd.data.rows import Dropped
from opd.data.sources import Problems, check_disjoint, load_problems
from opd.data.tasks import TASKS, majority_answer, task_scorer

__all__ = ["TASKS", "Dropped", "Problems", "check_disjoint", "load_problems", "majority_answer", "task_scorer"]
