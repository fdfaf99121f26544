"""Geometry: right padding changes nothing, positions are those of each sequence alone, rows read what they should."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tiny
from opd.forward import (
    body_of,
    completion_hidden,
    eval_mode,
    micro_batches,
    pad_right,
    score_hidden,
    shared_prefix,
)

CPU = torch.device("cpu")
PROMPTS = [[5, 6, 7, 8, 9], [10], [11, 12, 13]]
COMPLETIONS = [[20, 21], [22, 23, 24, 25, 2], [26]]


def test_rows_read_the_position_before_each_completion_token():
    ids, rows = pad_right(PROMPTS, COMPLETIONS, 0, CPU)
    assert ids.shape == (3, 6)
    places = [divmod(row, 6) for row in rows.tolist()]
    assert places == [(0, 4), (0, 5), (1, 0), (1, 1), (1, 2), (1, 3), (1, 4), (2, 2)]
    # The id at a row is the token before the one it predicts: first the prompt's last, never the completion's last.
    before = [*PROMPTS[0][-1:], 20, *PROMPTS[1][-1:], 22, 23, 24, 25, *PROMPTS[2][-1:]]
    assert ids.flatten()[rows].tolist() == before


@pytest.mark.parametrize("architecture", list(tiny.ARCHITECTURES))
def test_padding_and_order_change_no_hidden_state(architecture: str):
    model = tiny.ARCHITECTURES[architecture](64)
    prompts = [[5 + i % 7 for i in range(n)] for n in (3, 20, 9)]
    body = body_of(model)
    with torch.no_grad():
        together = score_hidden(body, prompts, COMPLETIONS, pad_id=2, max_tokens=10_000, device=CPU)
        split = score_hidden(body, prompts, COMPLETIONS, pad_id=0, max_tokens=1, device=CPU)
        alone = torch.cat(
            [completion_hidden(body, *pad_right([p], [c], 0, CPU)) for p, c in zip(prompts, COMPLETIONS, strict=True)]
        )
    torch.testing.assert_close(together, alone, atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(split, alone, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("architecture", list(tiny.ARCHITECTURES))
def test_a_prefix_run_once_changes_no_hidden_state(architecture: str):
    model = tiny.ARCHITECTURES[architecture](64)
    shared = [3 + i % 50 for i in range(40)]  # longer than the sliding window of the tiny Gemma
    prompts = [[*shared, *own] for own in ([5, 6], [7], [8, 9, 10])]
    body = body_of(model)
    with torch.no_grad():
        alone = torch.cat(
            [completion_hidden(body, *pad_right([p], [c], 0, CPU)) for p, c in zip(prompts, COMPLETIONS, strict=True)]
        )
    for max_tokens in (1, 10, 10_000):
        found = score_hidden(body, prompts, COMPLETIONS, pad_id=2, max_tokens=max_tokens, device=CPU)
        torch.testing.assert_close(found, alone, atol=2e-5, rtol=2e-5)


@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=8), min_size=2, max_size=6))
def test_the_shared_prefix_is_the_longest_that_leaves_everyone_a_token(prompts: list[list[int]]):
    found = shared_prefix(prompts)
    assert all(prompt[:found] == prompts[0][:found] and len(prompt) > found for prompt in prompts)
    longer = [prompt[: found + 1] for prompt in prompts]
    assert min(map(len, prompts)) == found + 1 or any(prefix != longer[0] for prefix in longer)


@given(st.lists(st.integers(1, 500), min_size=1, max_size=60), st.integers(1, 2000))
def test_micro_batches_hold_everything_once_within_the_budget(lengths: list[int], budget: int):
    groups = micro_batches(lengths, budget)
    assert sorted(index for group in groups for index in group) == list(range(len(lengths)))
    for group in groups:
        assert len(group) == 1 or len(group) * max(lengths[index] for index in group) <= budget


def test_eval_mode_gives_back_each_modules_own_mode():
    model = torch.nn.Sequential(torch.nn.Dropout(), torch.nn.Linear(2, 2))
    model.train()
    model[1].eval()
    with eval_mode(model):
        assert not any(module.training for module in model.modules())
    assert (model.training, model[0].training, model[1].training) == (True, True, False)
