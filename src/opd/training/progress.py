"""Progress of a training run in the terminal: step, loss, divergence, tokens a second, time left."""

from __future__ import annotations

import math

from rich.console import Console

from opd.progress import Bar
from opd.types import StepRecord


class StepProgress(Bar):
    """A live bar on a terminal; elsewhere one plain line a step.

    Args:
        num_steps: of the whole run.
        start: steps that were done before.
        divergence: name of the loss's own metric, shown before any clip.
        shown: False prints nothing.
    """

    def __init__(self, num_steps: int, start: int, divergence: str, *, shown: bool) -> None:
        self._console = Console()
        self._shown = shown
        self._num_steps = num_steps
        self._divergence = divergence
        super().__init__("step", num_steps, start, self._console, shown=shown)

    def show(self, record: StepRecord) -> None:
        """One more step done."""
        seconds = record.rollout_s + record.teacher_s + record.update_s
        value = record.metrics.get(self._divergence, math.nan)
        tokens_per_s = record.num_sampled_tokens / seconds
        figures = f"loss {record.loss:.4f}  {self._divergence} {value:.4f}  {tokens_per_s:.0f} tok/s"
        if record.skipped:
            figures += "  skipped: " + ("not finite" if record.num_supervised_tokens else "no token was supervised")
        self.advance(1, figures)
        if self._shown and not self.live:
            self._console.print(f"step {record.step}/{self._num_steps}  {figures}  {seconds:.1f} s")
