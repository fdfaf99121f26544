"""The process that compares two pieces of LaTeX with math-verify, started and killed by `opd.eval.checker`.

Run as a file (`python -P mathcheck.py`), so that starting it costs sympy's import and nothing of `opd`. One JSON
request a line comes in, one JSON reply a line goes out. A model's answer is hostile input: it can ask for a tower of
powers that never ends or fills the memory, so this process limits its own memory and time and is disposable.
"""

from __future__ import annotations

import contextlib
import json
import logging
import signal
import sys
from typing import Any

from math_verify import LatexExtractionConfig, parse, verify

MAX_MEMORY_BYTES = 4 * 1024**3


def main() -> None:
    """Say "ready", then answer requests until standard input closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    logging.disable(logging.CRITICAL)  # math-verify warns that its own time limit is off: the parent's replaces it
    replies = sys.stdout
    sys.stdout = sys.stderr  # nothing that a library prints may look like a reply
    _limit_memory()
    print(json.dumps({"ready": True}), file=replies, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        _limit_time(request["time_limit_s"])
        print(json.dumps({"outcome": _outcome(request["gold"], request["answer"])}), file=replies, flush=True)
        _limit_time(0.0)


def _outcome(gold: str, answer: str) -> str:
    try:
        gold_parsed, answer_parsed = _parse(gold), _parse(answer)
        if not gold_parsed or not answer_parsed:
            return "unparsed"
        # float_rounding=6, numeric_precision=15 and strict=True are math-verify's defaults, written out to freeze them.
        same = verify(
            gold_parsed, answer_parsed, float_rounding=6, numeric_precision=15, strict=True, timeout_seconds=None
        )
        return "equal" if same else "different"
    except (Exception, MemoryError, RecursionError):
        return "unparsed"


def _parse(latex: str) -> list[Any]:
    # LaTeX extraction only: the plain-expression extraction goes through sympy's parse_expr, which calls eval.
    return parse(
        "\\boxed{" + latex + "}",
        extraction_config=[LatexExtractionConfig(boxed_match_priority=0)],
        fallback_mode="no_fallback",
        parsing_timeout=None,  # pyright: ignore[reportArgumentType]
    )


def _limit_memory() -> None:
    with contextlib.suppress(ImportError, ValueError, OSError):  # not on Windows; a lower limit may be set already
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))


def _limit_time(seconds: float) -> None:
    """Die by SIGALRM some time after the limit: the parent kills earlier, unless it has been killed itself."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_REAL, seconds and seconds + 5.0)


if __name__ == "__main__":
    main()
