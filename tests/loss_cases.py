"""Every combination of divergence, clip and support, and data on which each of them has something to do.

Tensor suffixes: N supervised tokens, V vocabulary, D hidden size.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import jaxtyping
import pytest
import torch
from torch import Tensor

from opd.loss import Full, Head, LowRank, RolloutTokens, TokenLoss, build

N, V, D = 5, 11, 4

# Parameters other than the defaults, chosen so that rows of the data below fall on both sides of every threshold.
DIVERGENCES: tuple[dict[str, Any], ...] = (
    {"name": "forward_kl"},
    {"name": "reverse_kl"},
    {"name": "jsd", "teacher_weight": 0.3},
    {"name": "skew_kl", "alpha": 0.2},
    {"name": "skew_reverse_kl", "alpha": 0.2},
    {"name": "adaptive_kl", "head_mass": 0.6},
    {"name": "entropy_aware", "threshold": 1.4, "forward_weight": 0.5},
    {"name": "tvd"},
)
CLIPS: tuple[dict[str, Any], ...] = (
    {"name": "none"},
    {"name": "per_token", "max": 0.06},
    {"name": "weight", "max": 0.06},
    {"name": "per_entry", "max": 0.02},
)
SUPPORTS: tuple[dict[str, Any], ...] = (
    {"name": "full"},
    *(
        {"name": "top_k", "k": 4, "of": of, "tail": tail}
        for of, tail in product(("teacher", "student", "union"), ("renormalize", "bucket"))
    ),
)
COMBINATIONS = [
    {**divergence, "clip": clip, "support": support, "temperature": (1.0, 0.7, 1.6)[number % 3]}
    for number, (divergence, clip, support) in enumerate(product(DIVERGENCES, CLIPS, SUPPORTS))
]
DISTANCES = [{**divergence, "support": support} for divergence in DIVERGENCES for support in SUPPORTS]
MIX = {
    "name": "mix",
    "parts": [
        {"loss": {"name": "jsd"}, "weight": 0.5},
        {"loss": {"name": "forward_kl", "support": {"name": "top_k", "k": 3}}, "weight": 0.5},
        {"loss": {"name": "sft"}, "weight": 0.1},
        {"loss": {"name": "sampled_reverse_kl"}, "weight": 0.3},
    ],
}
ALL = [*DISTANCES, {"name": "sft"}, {"name": "sampled_reverse_kl"}, MIX]
# One of every kind, for what has nothing to do with the divergence.
KINDS = [
    {"name": "reverse_kl"},
    {"name": "adaptive_kl", "support": SUPPORTS[1]},
    {"name": "jsd", "support": SUPPORTS[2], "clip": {"name": "weight", "max": 0.06}},
    {"name": "tvd", "support": SUPPORTS[6], "clip": {"name": "per_entry", "max": 0.02}},
    {"name": "sft"},
    {"name": "sampled_reverse_kl"},
    MIX,
]


def label(config: dict[str, Any]) -> str:
    support = config.get("support", {"name": "full"})
    where = "full" if support["name"] == "full" else f"{support.get('of', 'teacher')}_{support.get('tail', 'bucket')}"
    return f"{config['name']}-{config.get('clip', {'name': 'none'})['name']}-{where}"


def draw(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def pair(seed: int = 0, dtype: torch.dtype = torch.float64, shape: tuple[int, int] = (N, V)) -> tuple[Tensor, Tensor]:
    """Logits of a student and of a teacher that agree on the first rows and less and less on the later ones."""
    student, away = draw(*shape, seed=seed) * 1.5, draw(*shape, seed=seed + 1000)
    teacher = student + away * torch.linspace(0.1, 2.5, shape[0], dtype=torch.float64)[:, None]
    return student.to(dtype), teacher.to(dtype)


def heads(dtype: torch.dtype, num_tokens: int = V, width: int = D) -> dict[str, Head]:
    """One head of each kind; every tensor is a leaf."""

    def padded(seed: int) -> Tensor:
        return draw(num_tokens + 3, width, dtype=dtype, seed=seed)

    adapter = LowRank(draw(2, width, dtype=dtype, seed=24), draw(num_tokens + 3, 2, dtype=dtype, seed=25), scale=0.5)
    return {
        "plain": Head(draw(num_tokens, width, dtype=dtype, seed=20)),
        "bias_scale": Head(padded(21), draw(num_tokens + 3, dtype=dtype, seed=22), scale=0.7, vocab_size=num_tokens),
        "softcap_low_rank": Head(padded(23), scale=1.5, softcap=3.0, vocab_size=num_tokens, low_rank=(adapter,)),
    }


def leaves(head: Head) -> list[Tensor]:
    """The tensors of a head that could train."""
    bias = [] if head.bias is None else [head.bias]
    return [head.weight, *bias, *(tensor for low in head.low_rank for tensor in (low.down, low.up))]


def named(config: dict[str, Any]) -> str:
    return label(config) if "support" in config else config["name"]


def rotate(values: tuple[Any, ...]) -> list[Any]:
    """Each distance with one of the values, so that each divergence and each support meets all of them."""
    shown = [value["name"] if isinstance(value, dict) else str(value) for value in values]
    chosen = [i % len(values) for i in range(len(DISTANCES))]
    return [
        pytest.param(config, values[i], id=f"{named(config)}-{shown[i]}")
        for config, i in zip(DISTANCES, chosen, strict=True)
    ]


def rollout(num_rows: int = N, num_tokens: int = V) -> RolloutTokens:
    return RolloutTokens(torch.arange(num_rows) % num_tokens)


def run(config: dict[str, Any], student: Tensor, teacher: Tensor, **options: Any) -> tuple[TokenLoss, Tensor]:
    """Scores, and the gradient of their sum."""
    student = student.clone().requires_grad_()
    scores = build(config, **options).tokens(student, Full.from_logits(teacher), rollout(*student.shape))
    scores.values.sum().backward()
    assert student.grad is not None
    return scores, student.grad


def without_shape_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the checks of shapes at run time, which take most of the time at these sizes; other tests make them."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


def cut_vocabulary(monkeypatch: pytest.MonkeyPatch, num_rows: int, width: int, dtype: torch.dtype) -> int:
    """Let a tile hold `width` tokens of `num_rows` rows; returns the chunk_bytes that give chunks of so many rows."""
    monkeypatch.setattr("opd.loss.chunked._TILE_BYTES", num_rows * width * dtype.itemsize)
    return 2 * num_rows * V * dtype.itemsize
