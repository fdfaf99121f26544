"""The doctor's checks, in the order in which they run.

To add one: a function `Probe -> CheckResult`, and a line in `CHECKS`.
"""

from __future__ import annotations

from collections.abc import Callable

from opd.diagnose.checks.forwards import geometry, head_kernel, sampler_matches_learner, teacher_fixed, teacher_rows
from opd.diagnose.checks.memory import expected_memory
from opd.diagnose.checks.signal import loss_settings, teacher_signal, zero_loss
from opd.diagnose.checks.tokens import round_trip, scored_ids, stop_ids, template, vocabulary
from opd.diagnose.diagnosis import CheckResult
from opd.diagnose.probe import Probe

Check = Callable[[Probe], CheckResult]

CHECKS: tuple[Check, ...] = (
    template,
    round_trip,
    vocabulary,
    stop_ids,
    scored_ids,
    geometry,
    head_kernel,
    sampler_matches_learner,
    zero_loss,
    teacher_rows,
    teacher_fixed,
    teacher_signal,
    loss_settings,
    expected_memory,
)
