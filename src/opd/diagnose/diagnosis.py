"""What the doctor found: one line a check, as a table for people and as JSON for programs."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from rich.console import Group

Status = Literal["pass", "warn", "fail"]
_COLOURS: dict[Status, str] = {"pass": "green", "warn": "yellow", "fail": "bold red"}


@dataclass(frozen=True)
class CheckResult:
    """The outcome of one check.

    Args:
        name: of the check.
        contract_lines: lines of the correctness contract (docs/correctness.md) that it stands for; empty for advice.
        figure: what was measured, in the unit that `detail` names; text where no number says it.
        tolerance: the largest figure that passes (the smallest, where `detail` says "at least"); None for text.
        status: `fail` refuses the run, `warn` lets it go on.
        detail: what was seen, in one sentence or a few.
        advice: what to do about it; empty on a pass.
    """

    name: str
    contract_lines: tuple[int, ...]
    figure: float | str
    tolerance: float | None
    status: Status
    detail: str
    advice: str = ""


@dataclass(frozen=True)
class Diagnosis:
    """All results.

    Args:
        checks: in the order in which they ran.
        num_samples: completions that were drawn for the checks.
        num_tokens: their tokens.
        seconds: wall time of the whole examination.
    """

    checks: Sequence[CheckResult]
    num_samples: int
    num_tokens: int
    seconds: float

    def having(self, status: Status) -> list[CheckResult]:
        """The checks that ended with this status."""
        return [check for check in self.checks if check.status == status]

    @property
    def summary(self) -> str:
        """`doctor: 13 passed, 1 warning, 0 failed (4 samples, 52 tokens, 9.3 s)`."""
        passed, warned, failed = (len(self.having(status)) for status in ("pass", "warn", "fail"))
        return (
            f"doctor: {passed} passed, {warned} warning{'' if warned == 1 else 's'}, {failed} failed "
            f"({self.num_samples} samples, {self.num_tokens} tokens, {self.seconds:.1f} s)"
        )

    def table(self) -> Group:
        """A table of check, figure, tolerance and result; below it what each check saw, and what to do."""
        from rich.console import Group
        from rich.padding import Padding
        from rich.table import Table
        from rich.text import Text

        table = Table(title=self.summary, title_justify="left")
        for column in ("check", "figure", "tolerance", "result"):
            table.add_column(column, overflow="fold")
        seen: list[Text | Padding] = []
        for check in self.checks:
            # Text, not markup: prompts hold square brackets.
            tolerance = "" if check.tolerance is None else shown(check.tolerance)
            status = Text(check.status, style=_COLOURS[check.status])
            table.add_row(Text(check.name), Text(shown(check.figure)), Text(tolerance), status)
            seen.append(Text(check.name, style=_COLOURS[check.status]))
            seen.append(Padding(Text(check.detail, style="dim"), (0, 0, 0, 2)))
            if check.advice:
                seen.append(Padding(Text(f"-> {check.advice}"), (0, 0, 0, 2)))
        return Group(table, *seen)

    def write(self, path: Path) -> None:
        """The results as JSON; a figure that is not finite becomes null."""
        record = asdict(self) | {"checks": [asdict(check) for check in self.checks]}
        for check in record["checks"]:
            if isinstance(check["figure"], float) and not math.isfinite(check["figure"]):
                check["figure"] = None
        path.write_text(json.dumps(record, indent=2, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")


def shown(figure: float | str) -> str:
    """A figure with three significant digits."""
    return figure if isinstance(figure, str) else f"{figure:.3g}"
