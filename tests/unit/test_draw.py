"""One token from a row of logits: exact probabilities, exact truncation, no dependence on neighbours."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from opd.config.schema import SamplingConfig
from opd.rollout.hf import draw

PROBABILITIES = torch.tensor([0.5, 0.25, 0.15, 0.1])


def inverse(sampling: SamplingConfig, probabilities: torch.Tensor = PROBABILITIES, grid: int = 4000) -> np.ndarray:
    """Frequencies over a regular grid of uniform numbers: the drawn distribution without sampling noise."""
    uniform = (torch.arange(grid, dtype=torch.float64) + 0.5) / grid
    tokens, _, _ = draw(probabilities.log().expand(grid, -1).clone(), uniform, sampling)
    return np.bincount(tokens.numpy(), minlength=len(probabilities)) / grid


def one(uniform: float, sampling: SamplingConfig) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return draw(PROBABILITIES.log()[None], torch.tensor([uniform], dtype=torch.float64), sampling)


def test_draws_the_distribution_itself():
    np.testing.assert_allclose(inverse(SamplingConfig()), PROBABILITIES, atol=1e-3)


def test_temperature_sharpens():
    expected = PROBABILITIES**2 / (PROBABILITIES**2).sum()
    np.testing.assert_allclose(inverse(SamplingConfig(temperature=0.5)), expected, atol=1e-3)


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        (SamplingConfig(top_k=2), [0, 1]),
        (SamplingConfig(top_p=0.75), [0, 1]),
        (SamplingConfig(top_p=0.76), [0, 1, 2]),
        (SamplingConfig(top_p=0.01), [0]),
        (SamplingConfig(min_p=0.4), [0, 1]),
        (SamplingConfig(top_k=3, top_p=0.8), [0, 1]),  # nucleus of what top-k left: .5 + .25 of .9 reaches .8
        (SamplingConfig(top_k=100), [0, 1, 2, 3]),
    ],
)
def test_truncation_keeps_exactly_these(sampling: SamplingConfig, kept: list[int]):
    expected = torch.zeros(4)
    expected[kept] = PROBABILITIES[kept] / PROBABILITIES[kept].sum()
    np.testing.assert_allclose(inverse(sampling), expected, atol=1e-3)


def test_behavior_and_kept_mass_are_those_of_what_was_drawn_from():
    token, behavior, kept = draw(
        PROBABILITIES.log()[None], torch.tensor([0.9], dtype=torch.float64), SamplingConfig(top_k=2)
    )
    assert token.item() == 1
    assert behavior.item() == pytest.approx(math.log(0.25 / 0.75), abs=1e-6)
    assert kept.item() == pytest.approx(math.log(0.75), abs=1e-6)


def test_nothing_cut_means_kept_is_exactly_zero():
    _, _, kept = draw(torch.randn(8, 1000), torch.rand(8, dtype=torch.float64), SamplingConfig(temperature=0.7))
    assert (kept == 0).all()


def test_greedy_is_certain_and_keeps_the_log_probability():
    token, behavior, kept = draw(
        PROBABILITIES.log()[None], torch.tensor([0.99], dtype=torch.float64), SamplingConfig(temperature=0)
    )
    assert token.item() == 0
    assert behavior.item() == 0
    assert kept.item() == pytest.approx(math.log(0.5), abs=1e-6)


@settings(deadline=None, max_examples=60)
@given(
    logits=st.lists(st.floats(-30, 30, width=32) | st.just(float("-inf")), min_size=1, max_size=40).filter(
        lambda row: max(row) > float("-inf")
    ),
    uniform=st.floats(0, 1, exclude_max=True),
    sampling=st.builds(
        SamplingConfig,
        temperature=st.sampled_from([0, 0.1, 1, 3]),
        top_k=st.none() | st.integers(1, 50),
        top_p=st.floats(0.01, 1),
        min_p=st.sampled_from([0, 0.05, 0.9]),
    ),
)
def test_never_an_impossible_token_and_always_a_log_probability(
    logits: list[float], uniform: float, sampling: SamplingConfig
):
    row = torch.tensor([logits])
    token, behavior, kept = draw(row, torch.tensor([uniform], dtype=torch.float64), sampling)
    assert row[0, token.item()] > float("-inf")
    assert -1e3 < behavior.item() <= 1e-5
    assert kept.item() <= 0


def test_the_largest_uniform_number_never_falls_past_the_end():
    uniform = torch.tensor([np.nextafter(1.0, 0.0)])
    row = torch.full((1, 50_000), -20.0)
    row[0, 100] = 0.0
    row[0, 40_000:] = float("-inf")
    token, _, _ = draw(row, uniform, SamplingConfig())
    assert token.item() < 40_000


def test_a_row_does_not_depend_on_its_neighbours():
    logits, uniform = torch.randn(16, 300), torch.rand(16, dtype=torch.float64)
    together, _, _ = draw(logits.clone(), uniform, SamplingConfig(top_p=0.9))
    alone = [
        draw(logits[i : i + 1].clone(), uniform[i : i + 1], SamplingConfig(top_p=0.9))[0].item() for i in range(16)
    ]
    assert together.tolist() == alone
