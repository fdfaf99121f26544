"""Evaluation: is the gain real? Grading, statistics, and the runner behind `opd eval`.

Everything public is here; what needs numpy or a model library is loaded on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

# Not lazily: the function must be bound after the module of the same name has been.
from opd.eval.grade import Grade, contains, grade

if TYPE_CHECKING:
    from opd.eval.majority import maj_at_k
    from opd.eval.result import Checkpoint, EvalResult, load_result
    from opd.eval.runner import evaluate, evaluate_with
    from opd.eval.score import regrade
    from opd.eval.stats import Comparison, Summary, compare, pass_at_k, summarize

__all__ = [
    "Checkpoint",
    "Comparison",
    "EvalResult",
    "Grade",
    "Summary",
    "compare",
    "contains",
    "evaluate",
    "evaluate_with",
    "grade",
    "load_result",
    "maj_at_k",
    "pass_at_k",
    "regrade",
    "summarize",
]

_HOMES = {
    "result": ("Checkpoint", "EvalResult", "load_result"),
    "stats": ("Comparison", "Summary", "compare", "pass_at_k", "summarize"),
    "majority": ("maj_at_k",),
    "runner": ("evaluate", "evaluate_with"),
    "score": ("regrade",),
}


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"opd.eval.{module}"), name)
    raise AttributeError(f"module 'opd.eval' has no attribute {name!r}")
