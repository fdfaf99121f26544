"""The learning rate as a function of the step."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opd.config.schema import ScheduleConfig, TrainConfig
from opd.training.schedule import learning_rate


def rates(num_steps: int, **schedule: Any) -> list[float]:
    config = TrainConfig(
        num_steps=num_steps, num_problems_per_step=1, learning_rate=2.0, schedule=ScheduleConfig(**schedule)
    )
    return [learning_rate(config, step) for step in range(1, num_steps + 1)]


def test_constant_after_a_linear_warm_up():
    assert rates(6, num_warmup_steps=4) == [0.5, 1.0, 1.5, 2.0, 2.0, 2.0]


def test_linear_decay_reaches_its_end_at_the_last_step():
    assert rates(6, name="linear", num_warmup_steps=2, final_frac=0.5) == pytest.approx([1, 2, 1.75, 1.5, 1.25, 1])


def test_cosine_decay_is_half_way_in_the_middle():
    assert rates(4, name="cosine") == pytest.approx([2 * 0.853553, 1.0, 2 * 0.146447, 0.0], abs=1e-5)


@given(
    num_steps=st.integers(1, 50),
    warmup=st.integers(0, 49),
    name=st.sampled_from(["constant", "linear", "cosine"]),
    final=st.floats(0, 1),
)
def test_it_rises_to_the_peak_and_never_rises_again(num_steps: int, warmup: int, name: Any, final: float):
    found = rates(num_steps, name=name, num_warmup_steps=min(warmup, num_steps - 1), final_frac=final)
    peak = max(min(warmup, num_steps - 1), 1) - 1
    assert found[: peak + 1] == sorted(found[: peak + 1])
    assert all(a >= b - 1e-12 for a, b in pairwise(found[peak:]))
    assert max(found) <= 2.0
    if name != "constant" and num_steps > 1:
        assert found[-1] == pytest.approx(2.0 * final, abs=1e-9)
