"""`opd doctor`: the faults that users of this field's trainers reported, looked for on the user's own models.

A few short completions are sampled once; every check measures something on them and compares it with a tolerance. The
run is not touched: weights, random state, modes and the sampler's version are those of before.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from opd.diagnose.checks import CHECKS, Check
from opd.diagnose.diagnosis import CheckResult, Diagnosis
from opd.diagnose.probe import Probe
from opd.errors import OpdError

if TYPE_CHECKING:
    from opd.training.assemble import Parts

__all__ = ["CheckResult", "Diagnosis", "examine", "refuse_if_failed"]


def examine(parts: Parts, folder: Path | None = None, num_samples: int = 4) -> Diagnosis:
    """Run every check on a few real samples.

    Args:
        parts: from `opd.training.assemble.assemble`, before the first step.
        folder: where to write `doctor.json`; None writes nothing.
        num_samples: prompts to sample from, at least 2; each gives one completion of at most 16 tokens.

    Raises:
        OpdError: nothing could be sampled.
    """
    began = time.perf_counter()
    with _untouched(parts):
        probe = Probe(parts, num_samples)
        checks = [_run(check, probe) for check in CHECKS]
    diagnosis = Diagnosis(checks, len(probe.rollouts), probe.num_tokens, time.perf_counter() - began)
    if folder is not None:
        diagnosis.write(folder / "doctor.json")
    return diagnosis


def refuse_if_failed(diagnosis: Diagnosis) -> None:
    """Print what was found and stop the run if a check failed.

    Raises:
        OpdError: names the failing checks, with their figures and what to do.
    """
    from rich.console import Console

    console = Console()
    failed = diagnosis.having("fail")
    if failed or diagnosis.having("warn"):
        console.print(diagnosis.table())
    else:
        console.print(diagnosis.summary, markup=False, highlight=False)
    if failed:
        raise OpdError(
            f"The doctor refuses this run: {', '.join(check.name for check in failed)}.",
            why="; ".join(_reason(check) for check in failed),
            fix=" ".join(check.advice for check in failed) + " (--skip-doctor trains all the same.)",
        )


def _run(check: Check, probe: Probe) -> CheckResult:
    """One check. What cannot work at all for a reason that is known is a failed check, with that reason."""
    try:
        return check(probe)
    except OpdError as error:
        name = check.__name__.replace("_", " ")
        return CheckResult(name, (), error.what, None, "fail", error.why, error.fix)


def _reason(check: CheckResult) -> str:
    if isinstance(check.figure, str):
        return f"{check.name}: {check.figure}"
    limit = "" if check.tolerance is None else f" (tolerance {check.tolerance:.3g})"
    return f"{check.name}: {check.figure:.3g}{limit}, {check.detail}"


@contextmanager
def _untouched(parts: Parts) -> Generator[None]:
    """Random state and the sampler's version are those of before; modes and weights the checks put back themselves."""
    version = parts.sampler.policy_version
    device = parts.student.device
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        parts.sampler.policy_version = version
