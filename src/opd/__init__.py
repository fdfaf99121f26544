"""On-policy distillation of language models.

The student samples its own completions, a teacher scores every token of them, and the student moves toward the teacher.
Everything public is reachable from here and loaded on first use, so that `import opd` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from opd.errors import OpdError

if TYPE_CHECKING:
    from opd import align, eval, loss
    from opd.eval.runner import evaluate
    from opd.training.loop import RunResult
    from opd.training.run import train

__version__ = "0.1.0"
__all__ = ["OpdError", "RunResult", "align", "eval", "evaluate", "loss", "train"]

_LAZY = {
    "train": ("opd.training.run", "train"),
    "RunResult": ("opd.training.loop", "RunResult"),
    "evaluate": ("opd.eval.runner", "evaluate"),
    "align": ("opd.align", None),
    "eval": ("opd.eval", None),
    "loss": ("opd.loss", None),
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'opd' has no attribute {name!r}")
    module_name, attribute = _LAZY[name]
    module = importlib.import_module(module_name)
    return module if attribute is None else getattr(module, attribute)
