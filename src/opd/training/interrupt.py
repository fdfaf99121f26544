"""Ctrl-C asks for a stop after the current step; a second one stops at once.

A launcher answers Ctrl-C by sending its processes a SIGTERM of its own: that is not a second Ctrl-C.
"""

from __future__ import annotations

import signal
import sys
import threading
from types import FrameType, TracebackType


class Interruption:
    """While entered, SIGINT and SIGTERM set `asked`; a second signal of the same kind acts as it would have without us.

    Outside the main thread Python cannot take signals: then nothing is installed, and `asked` stays False.
    """

    def __init__(self) -> None:
        self.asked = False
        self._before: dict[int, signal.Handlers] = {}

    def __enter__(self) -> Interruption:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._ask)  # pyright: ignore[reportArgumentType]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._give_back()

    def _ask(self, number: int, _frame: FrameType | None) -> None:
        if not self.asked:
            print("\nStopping after this step, with a checkpoint. Once more to stop at once.", file=sys.stderr)
        self.asked = True
        signal.signal(number, self._before.pop(number))

    def _give_back(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()
