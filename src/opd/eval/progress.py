"""Progress of an evaluation in the terminal: samples done, time left."""

from __future__ import annotations

from rich.console import Console

from opd.progress import Bar

NUM_PLAIN_LINES = 10


class SampleProgress(Bar):
    """A live bar on a terminal; elsewhere a plain line at every tenth of the way.

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
        super().__init__("samples", total, done, self._console, shown=shown)

    def say(self, note: str) -> None:
        """A line that stays, shown or not: it tells what the user must know about the samples."""
        self._console.print(f"eval: {note}", markup=False, highlight=False)

    def sampled(self, num_samples: int) -> None:
        """So many more samples are on disk."""
        before, self._done = self._done, self._done + num_samples
        self.advance(num_samples)
        tenths = {done * NUM_PLAIN_LINES // self._total for done in (before, self._done)}
        if self._shown and not self.live and len(tenths) > 1:
            self.say(f"{self._done} of {self._total} samples")
