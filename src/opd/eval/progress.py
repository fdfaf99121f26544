"""Progress of an evaluation in the terminal: samples done, time left."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

NUM_PLAIN_LINES = 10


class SampleProgress:
    """A live bar on a terminal; elsewhere (a file, a batch job) a plain line at every tenth of the way.

    Args:
        total: samples of the whole evaluation.
        done: samples that are there already.
        shown: False prints nothing but what is said.
    """

    def __init__(self, total: int, done: int, *, shown: bool) -> None:
        self._console = Console(stderr=True)
        self._shown = shown
        self._total = total
        self._done = done
        self._bar = Progress(
            TextColumn("samples"),
            MofNCompleteColumn(),
            BarColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self._console,
            disable=not (shown and self._console.is_terminal),
        )
        self._task = self._bar.add_task("eval", total=total, completed=done)

    def __enter__(self) -> SampleProgress:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def say(self, note: str) -> None:
        """A line that stays, shown or not: it tells what the user must know about the samples."""
        self._console.print(f"eval: {note}", markup=False, highlight=False)

    def advance(self, num_samples: int) -> None:
        """So many more samples are on disk."""
        before, self._done = self._done, self._done + num_samples
        self._bar.update(self._task, advance=num_samples)
        steps = (done * NUM_PLAIN_LINES // self._total for done in (before, self._done))
        if self._shown and not self._console.is_terminal and len(set(steps)) > 1:
            self.say(f"{self._done} of {self._total} samples")
