"""Hidden states and a head, or the logits they make: the same values, metrics and gradients, for every combination of
divergence, clip and support, every kind of head, trained and frozen, and any upstream gradient.

The quick tests give every combination one kind of head and one upstream gradient, so that every divergence, clip and
support meets all of them; the slow ones take the whole product.
"""

from __future__ import annotations

from itertools import cycle
from typing import Any

import pytest
import torch
from torch import Tensor

from loss_cases import COMBINATIONS, D, V, cut_vocabulary, draw, heads, label, leaves, without_shape_checks
from opd.loss import Full, Head, RolloutTokens, TokenLoss, build

N = 3
KINDS = ("plain", "bias_scale", "softcap_low_rank")
# The gradient of a head that trains is made in the forward pass for the first, and in the backward pass for the second.
UPSTREAMS = {"uniform": torch.full((N,), 0.4), "by_row": draw(N, dtype=torch.float32, seed=5)}
ROLLOUT = RolloutTokens(torch.arange(N))
TEACHER = Full(draw(N, 3, dtype=torch.float32, seed=7), Head(draw(V + 1, 3, dtype=torch.float32, seed=8), vocab_size=V))
OTHERS: list[dict[str, Any]] = [
    {"name": "sft"},
    {"name": "sampled_reverse_kl", "temperature": 1.3, "max_advantage": 1.0},
    {
        "name": "mix",
        "mask": {"student_entropy": {"max": 1.6}},
        "parts": [
            {"loss": {"name": "jsd", "support": {"name": "top_k", "k": 3, "of": "union"}}, "weight": 0.5},
            {"loss": {"name": "sft"}, "weight": 0.1},
            {"loss": {"name": "sampled_reverse_kl"}, "weight": 0.3},
        ],
    },
    {"name": "adaptive_kl", "mask": {"teacher_entropy": {"min": 1.0}}, "scale_by_temperature_squared": True},
]


@pytest.fixture(autouse=True)
def chunk_bytes(monkeypatch: pytest.MonkeyPatch) -> int:
    """Chunks of 2 and 1 rows, tiles of 4, 4 and 3 tokens."""
    return cut_vocabulary(monkeypatch, num_rows=2, width=4, dtype=torch.float32)


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    without_shape_checks(monkeypatch)


def inputs(kind: str, trained: bool) -> tuple[Tensor, Head]:
    head = heads(torch.float32)[kind]
    for tensor in leaves(head):
        tensor.requires_grad_(trained)
    return draw(N, D, dtype=torch.float32, seed=6).requires_grad_(), head


def gradients(scores: TokenLoss, upstream: Tensor, hidden: Tensor, head: Head) -> list[Tensor]:
    """Of hidden states and of whatever trains, leaving the graph for another upstream gradient."""
    tensors = [hidden, *(tensor for tensor in leaves(head) if tensor.requires_grad)]
    return list(torch.autograd.grad(scores.values, tensors, upstream, retain_graph=True))


def close(found: Tensor, expected: Tensor, what: str, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance, msg=lambda text: f"{what}: {text}")


def check(config: dict[str, Any], kind: str, chunk_bytes: int, upstreams: list[str], *, frozen_too: bool) -> None:
    loss = build(config, chunk_bytes=chunk_bytes)
    hidden, head = inputs(kind, trained=True)
    assert TEACHER.head is not None
    dense_teacher = Full.from_logits(TEACHER.head.logits(TEACHER.hidden_ND))
    dense = loss.tokens(head.logits(hidden), dense_teacher, ROLLOUT)
    expected = {name: gradients(dense, UPSTREAMS[name], hidden, head) for name in upstreams}
    for trained in (True, False) if frozen_too else (True,):
        hidden, head = inputs(kind, trained)
        scores = loss.linear(hidden, head, TEACHER, ROLLOUT)
        close(scores.values, dense.values, "values")
        assert scores.metrics.keys() == dense.metrics.keys()
        for name, metric in scores.metrics.items():
            # The share that a clip removed is one less a quotient of norms, which may both be small.
            close(metric, dense.metrics[name], name, 1e-4 if name.endswith("grad_removed_frac") else 1e-5)
        for name in upstreams:
            found = gradients(scores, UPSTREAMS[name], hidden, head)
            for ours, theirs in zip(found, expected[name], strict=trained):
                close(ours, theirs, f"gradient for {name} upstream, {'trained' if trained else 'frozen'} head")


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("config", "kind", "upstream"),
    [
        pytest.param(config, kind, upstream, id=f"{label(config)}-{kind}-{upstream}")
        for config, kind, upstream in zip(COMBINATIONS, cycle(KINDS), cycle(UPSTREAMS), strict=False)
    ],
)
def test_linear_equals_tokens(config: dict[str, Any], kind: str, upstream: str, chunk_bytes: int) -> None:
    check(config, kind, chunk_bytes, [upstream], frozen_too=False)


@pytest.mark.slow
@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("kind", KINDS)
def test_linear_equals_tokens_in_the_whole_product(kind: str, chunk_bytes: int) -> None:
    for config in COMBINATIONS:
        check(config, kind, chunk_bytes, list(UPSTREAMS), frozen_too=True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("config", OTHERS, ids=lambda config: config["name"])
def test_linear_equals_tokens_for_all_other_losses(config: dict[str, Any], kind: str, chunk_bytes: int) -> None:
    check(config, kind, chunk_bytes, list(UPSTREAMS), frozen_too=True)
