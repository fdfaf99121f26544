"""Are two pieces of LaTeX equal? Asked of math-verify in a process of its own, killed when it takes too long.

A signal or a thread in this process could not stop a big-number multiplication in C, and could not bound its memory.
"""

from __future__ import annotations

import atexit
import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Literal, cast

from opd.errors import OpdError

Outcome = Literal["equal", "different", "unparsed", "timeout"]
START_LIMIT_S = 300.0  # sympy takes a second to import, and much longer on a machine that is out of memory


class MathChecker:
    """A worker process that starts with the first question, serves many, and is replaced after a time-out.

    Safe to use from several threads: questions wait for each other.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()
        self.num_started = 0

    def check(self, gold: str, answer: str, *, time_limit_s: float) -> Outcome:
        """Compare two pieces of LaTeX (no dollar signs, no box).

        Returns:
            ``"equal"`` or ``"different"``; ``"unparsed"`` when math-verify cannot read one of them or fails on them;
            ``"timeout"`` when it takes longer than ``time_limit_s`` seconds or more memory than the worker may have.
        """
        request = json.dumps({"gold": gold, "answer": answer, "time_limit_s": time_limit_s})
        with self._lock:
            process = self._running()
            reply = self._exchange(process, request, time_limit_s)
            if reply is None:
                self._stop()
                return "timeout"
            return cast(Outcome, json.loads(reply)["outcome"])

    def close(self) -> None:
        """End the worker; the next question would start another."""
        with self._lock:
            self._stop()

    def _running(self) -> subprocess.Popen[str]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        self._stop()
        # subprocess, neither fork (unsafe once torch has threads) nor multiprocessing's spawn (which imports the user's
        # script again); -P keeps this folder's modules from hiding the standard library's.
        command = [sys.executable, "-P", str(Path(__file__).with_name("mathcheck.py"))]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, encoding="utf-8"
        )
        self.num_started += 1
        if self._exchange(self._process, None, START_LIMIT_S) is None:
            self._stop()
            raise OpdError(
                "the answer checker did not start",
                why=f"the process `{' '.join(command)}` ended or gave no sign for {START_LIMIT_S:.0f} s",
                fix="run that command by hand to see its error; if math-verify is missing: pip install math-verify",
            )
        return self._process

    def _exchange(self, process: subprocess.Popen[str], request: str | None, limit_s: float) -> str | None:
        """Send a request, wait for one line; None when the process is dead, killed for its time or by its memory."""
        assert process.stdin is not None
        assert process.stdout is not None
        timer = threading.Timer(limit_s, process.kill)
        timer.start()
        try:
            if request is not None:
                process.stdin.write(request + "\n")
                process.stdin.flush()
            line = process.stdout.readline()
        except (BrokenPipeError, OSError):
            line = ""
        finally:
            timer.cancel()
            timer.join()  # after this the timer has fired or never will: it cannot kill the next question
        return line if line.endswith("\n") else None

    def _stop(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            assert stream is not None
            try:
                stream.close()
            except BrokenPipeError:  # a request that was never read is still in the buffer
                continue


_shared = MathChecker()
atexit.register(_shared.close)


def shared_checker() -> MathChecker:
    """The checker that `grade` uses unless given another: one worker for the whole process."""
    return _shared
