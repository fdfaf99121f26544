"""A bar with the time left on a terminal; plain lines elsewhere (a file, a batch job) are for the caller to print."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


class Bar:
    """Enter it, then `advance`.

    Args:
        label: what is counted.
        total: how many there are.
        done: how many are done already.
        console: where to draw.
        shown: False draws nothing.
    """

    def __init__(self, label: str, total: int, done: int, console: Console, *, shown: bool) -> None:
        self.live = shown and console.is_terminal
        self._progress = Progress(
            TextColumn(label),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            disable=not self.live,
        )
        self._task = self._progress.add_task(label, total=total, completed=done, figures="")

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def advance(self, number: int, figures: str = "") -> None:
        """So many more are done; `figures` stand beside the bar."""
        self._progress.update(self._task, advance=number, figures=figures)
