"""Progress of a training run in the terminal: step, loss, KL, tokens a second, time left."""

from __future__ import annotations

import math
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from opd.types import StepRecord


class StepProgress:
    """A live bar on a terminal; elsewhere (a file, a batch job) one plain line a step."""

    def __init__(self, num_steps: int, start: int, *, shown: bool) -> None:
        console = Console()
        self._shown = shown
        self._console = console
        self._num_steps = num_steps
        self._bar = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            disable=not (shown and console.is_terminal),
        )
        self._task = self._bar.add_task("train", total=num_steps, completed=start, figures="")

    def __enter__(self) -> StepProgress:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def show(self, record: StepRecord) -> None:
        """One more step done."""
        seconds = record.rollout_s + record.teacher_s + record.update_s
        divergence = next((value for name, value in record.metrics.items() if name == "unclipped"), math.nan)
        figures = f"loss {record.loss:.4f}  kl {divergence:.4f}  {record.num_sampled_tokens / seconds:.0f} tok/s"
        if record.skipped:
            figures += "  skipped"
        self._bar.update(self._task, advance=1, figures=figures)
        if self._shown and not self._console.is_terminal:
            self._console.print(f"step {record.step}/{self._num_steps}  {figures}  {seconds:.1f} s")
