"""Learning rate as a function of the step: no state, so nothing to save or to lose on resume."""

from __future__ import annotations

import math

from opd.config.schema import TrainConfig


def learning_rate(config: TrainConfig, step: int) -> float:
    """The rate of step `step` (from 1 to `num_steps`).

    Warm-up rises linearly to the peak, reached at step `num_warmup_steps`; then constant, linear or cosine decay down
    to `final_frac` of the peak at the last step.
    """
    schedule = config.schedule
    if step <= schedule.num_warmup_steps:
        return config.learning_rate * step / schedule.num_warmup_steps
    if schedule.name == "constant":
        return config.learning_rate
    done_frac = (step - schedule.num_warmup_steps) / max(1, config.num_steps - schedule.num_warmup_steps)
    left_frac = 1 - done_frac if schedule.name == "linear" else 0.5 * (1 + math.cos(math.pi * done_frac))
    return config.learning_rate * (schedule.final_frac + (1 - schedule.final_frac) * left_frac)
