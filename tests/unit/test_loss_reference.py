"""Every divergence × clip × support × tail, and every other loss, against the float64 reference: values, gradients and
metrics, over several chunks of rows and tiles of the vocabulary.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from loss_cases import CLIPS, COMBINATIONS, DIVERGENCES, N, V, cut_vocabulary, draw, label, pair, without_shape_checks
from opd.loss import Full, RolloutTokens, Sampled, TokenLoss, TopK, build
from opd.loss.sampled import discounted, group_baseline
from reference import losses as reference

IDS = torch.randint(V, (N,), generator=torch.Generator().manual_seed(1))
SEQUENCES = torch.tensor([4, 4, 4, 1, 1])
STUDENT, TEACHER = pair()
UPSTREAM = draw(N, seed=2)


@pytest.fixture(autouse=True)
def chunk_bytes(monkeypatch: pytest.MonkeyPatch) -> int:
    """Chunks of 3 and 2 rows, tiles of 4, 4 and 3 tokens."""
    return cut_vocabulary(monkeypatch, num_rows=3, width=4, dtype=torch.float64)


def agree(scores: TokenLoss, student: Tensor, expected: reference.Scores) -> None:
    """Values, gradient, and every metric that both sides have."""
    (scores.values @ UPSTREAM).backward()
    assert student.grad is not None
    np.testing.assert_allclose(scores.values.detach(), expected.values, rtol=1e-11, atol=1e-12)
    np.testing.assert_allclose(student.grad, UPSTREAM.numpy()[:, None] * expected.gradient, rtol=1e-9, atol=1e-10)
    for name in (
        "unclipped",
        "clipped",
        "entropy_student",
        "entropy_teacher",
        "kept_mass_student",
        "kept_mass_teacher",
    ):
        if name in scores.metrics and not np.isnan(getattr(expected, name)).any():
            np.testing.assert_allclose(scores.metrics[name], getattr(expected, name), atol=1e-11, err_msg=name)
    if "grad_removed_frac" in scores.metrics:
        before = np.linalg.norm(expected.unclipped_gradient, axis=-1)
        np.testing.assert_allclose(scores.metrics["grad_norm_unclipped"], before, atol=1e-10)
        removed = 1 - np.linalg.norm(expected.gradient, axis=-1) / before
        np.testing.assert_allclose(scores.metrics["grad_removed_frac"], removed, atol=1e-8)


@pytest.mark.parametrize("config", COMBINATIONS, ids=label)
def test_divergence(config: dict[str, Any], chunk_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    without_shape_checks(monkeypatch)
    student = STUDENT.clone().requires_grad_()
    scores = build(config, chunk_bytes=chunk_bytes).tokens(student, Full.from_logits(TEACHER))
    expected = reference.divergence(config, STUDENT.numpy(), TEACHER.numpy())
    agree(scores, student, expected)
    if config["clip"]["name"] != "none":
        assert 0 < expected.clipped.sum() < N, "a clip that never or always acts proves half of itself"
    if config["support"]["name"] == "top_k":
        assert expected.kept_mass_student.max() < 0.999, "a support that leaves nothing out proves no tail"


@pytest.mark.parametrize("tail", ["renormalize", "bucket"])
@pytest.mark.parametrize("clip", CLIPS, ids=lambda clip: clip["name"])
@pytest.mark.parametrize("divergence", DIVERGENCES, ids=lambda config: config["name"])
def test_divergence_from_the_likeliest_tokens_alone(
    divergence: dict[str, Any], clip: dict[str, Any], tail: str, chunk_bytes: int
) -> None:
    """The teacher gives six tokens, in no order, of which the support takes four."""
    config = {**divergence, "clip": clip, "support": {"name": "top_k", "k": 4, "tail": tail}}
    logp, ids = torch.log_softmax(TEACHER, -1).topk(6, dim=-1)
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    ids, logp = ids[:, order], logp[:, order]
    student = STUDENT.clone().requires_grad_()
    scores = build(config, chunk_bytes=chunk_bytes).tokens(student, TopK(ids, logp))
    agree(scores, student, reference.divergence(config, STUDENT.numpy(), (ids.numpy(), logp.numpy())))


GATES = [
    {"student_entropy": {"min": 1.8}},
    {"student_entropy": {"min": 1.7, "max": 2.05}, "teacher_entropy": {"max": 1.88}},
    {"teacher_entropy": {"min": 1.75}},
]


@pytest.mark.parametrize("mask", GATES)
@pytest.mark.parametrize("support", [{"name": "full"}, {"name": "top_k", "k": 3}], ids=lambda s: s["name"])
@pytest.mark.parametrize("name", ["forward_kl", "entropy_aware"])
def test_gates_and_squared_temperature(
    name: str, support: dict[str, Any], mask: dict[str, Any], chunk_bytes: int
) -> None:
    config = {"name": name, "temperature": 1.3, "scale_by_temperature_squared": True, "support": support, "mask": mask}
    config["clip"] = {"name": "weight", "max": 0.3}
    student = STUDENT.clone().requires_grad_()
    scores = build(config, chunk_bytes=chunk_bytes).tokens(student, Full.from_logits(TEACHER))
    expected = reference.divergence(config, STUDENT.numpy(), TEACHER.numpy())
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(scores.metrics["supervised"], expected.values != 0)
    assert 0 < (expected.values != 0).sum() < N
    scores = TokenLoss(scores.values, {k: v for k, v in scores.metrics.items() if not k.startswith("grad_")})
    agree(scores, student, expected)


@pytest.mark.parametrize("mask", [{}, {"student_entropy": {"min": 1.4}}])
def test_cross_entropy(mask: dict[str, Any], chunk_bytes: int) -> None:
    config = {"name": "sft", "mask": mask}
    student = STUDENT.clone().requires_grad_()
    scores = build(config, chunk_bytes=chunk_bytes).tokens(student, Full.from_logits(TEACHER), RolloutTokens(IDS))
    agree(scores, student, reference.sft(config, STUDENT.numpy(), IDS.numpy()))


BEHAVIOR = torch.log_softmax(STUDENT + 0.5 * draw(N, V, seed=2), -1)[torch.arange(N), IDS]
BASELINE = draw(N, seed=3)
OPTIONS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7},
    {"discount": 0.9},
    {"discount": 1.0},
    {"group_baseline": True},
    {"max_advantage": 0.5},
    {"importance": {"clip": 1.1}},
    {"mask": {"student_entropy": {"min": 1.4}}},
    {
        "discount": 0.5,
        "group_baseline": True,
        "max_advantage": 0.7,
        "importance": {"clip": 1.1},
        "temperature": 1.3,
        "mask": {"student_entropy": {"max": 1.8}},
    },
]


def teacher_logp(config: dict[str, Any]) -> Tensor:
    return torch.log_softmax(TEACHER / config.get("temperature", 1.0), -1)[torch.arange(N), IDS]


def sampled_reference(config: dict[str, Any]) -> reference.Scores:
    return reference.sampled_reverse_kl(
        config,
        STUDENT.numpy(),
        teacher_logp(config).numpy(),
        IDS.numpy(),
        behavior_logp_N=BEHAVIOR.numpy(),
        sequence_N=SEQUENCES.numpy(),
        baseline_N=BASELINE.numpy(),
    )


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "+".join(options) or "plain")
def test_sampled_reverse_kl(options: dict[str, Any], chunk_bytes: int) -> None:
    config = {"name": "sampled_reverse_kl", **options}
    student, rollout = STUDENT.clone().requires_grad_(), RolloutTokens(IDS, BEHAVIOR, SEQUENCES, BASELINE)
    scores = build(config, chunk_bytes=chunk_bytes).tokens(student, Sampled(teacher_logp(config)), rollout)
    agree(scores, student, sampled_reference(config))


@pytest.mark.parametrize("discount", [0.0, 0.5])
def test_group_baseline(discount: float) -> None:
    """Sequences 4 and 1 belong to one problem; 7 has a problem of its own, and no baseline."""
    advantage, sequences = draw(9), torch.tensor([4, 4, 4, 1, 1, 7, 7, 2, 2])
    groups = torch.tensor([30, 30, 30, 30, 30, 10, 10, 30, 30])
    advantage = discounted(advantage, sequences, discount)
    expected = reference.group_baseline(advantage.numpy(), sequences.numpy(), groups.numpy())
    np.testing.assert_allclose(group_baseline(advantage, sequences, groups), expected, rtol=1e-12)
    assert expected[5] == 0 != expected[0]


MIXES: list[list[tuple[float, dict[str, Any]]]] = [
    [(0.5, {"name": "forward_kl", "clip": {"name": "weight", "max": 0.2}}), (0.1, {"name": "sft"})],
    [
        (0.3, {"name": "adaptive_kl", "support": {"name": "top_k", "k": 3}}),
        (0.7, {"name": "tvd", "clip": {"name": "per_entry", "max": 0.05}}),
        (0.2, {"name": "sampled_reverse_kl", "discount": 0.5}),
        (1.5, {"name": "sft"}),
    ],
]
SEVERAL_TEMPERATURES = [
    (1.0, {"name": "reverse_kl", "temperature": 0.7}),
    (2.0, {"name": "reverse_kl", "temperature": 1.6}),
]
GATE = {"student_entropy": {"min": 1.4}}


@pytest.mark.parametrize(
    ("parts", "mask"),
    [*((parts, mask) for parts in MIXES for mask in ({}, GATE)), (SEVERAL_TEMPERATURES, {})],
    ids=lambda x: "+".join(part["name"] for _, part in x) if isinstance(x, list) else "gated" if x else "everywhere",
)
def test_mix(parts: list[tuple[float, dict[str, Any]]], mask: dict[str, Any], chunk_bytes: int) -> None:
    config = {"name": "mix", "mask": mask, "parts": [{"loss": part, "weight": weight} for weight, part in parts]}
    student, rollout = STUDENT.clone().requires_grad_(), RolloutTokens(IDS, BEHAVIOR, SEQUENCES, BASELINE)
    scores = build(config, chunk_bytes=chunk_bytes).tokens(student, Full.from_logits(TEACHER), rollout)
    (scores.values @ UPSTREAM).backward()
    found: list[reference.Scores] = []
    for _, part in parts:
        if part["name"] == "sft":
            found.append(reference.sft(part, STUDENT.numpy(), IDS.numpy()))
        elif part["name"] == "sampled_reverse_kl":
            found.append(sampled_reference(part))
        else:
            found.append(reference.divergence(part, STUDENT.numpy(), TEACHER.numpy()))
    values, gradient = reference.mix([weight for weight, _ in parts], found)
    kept = np.ones(N, dtype=bool)
    if mask:
        kept = scores.metrics["supervised"].numpy() == 1
        assert 0 < kept.sum() < N
    np.testing.assert_allclose(scores.values.detach(), np.where(kept, values, 0.0), rtol=1e-11)
    assert student.grad is not None
    expected = np.where(kept[:, None], UPSTREAM.numpy()[:, None] * gradient, 0.0)
    np.testing.assert_allclose(student.grad, expected, rtol=1e-9, atol=1e-10)
    unclipped = sum(
        weight * (s.values if np.isnan(s.unclipped).any() else s.unclipped)
        for (weight, _), s in zip(parts, found, strict=True)
    )
    np.testing.assert_allclose(scores.metrics["unclipped"], np.where(kept, unclipped, 0.0), rtol=1e-11)
