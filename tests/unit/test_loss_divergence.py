"""What each divergence and each clip promises, beyond its value (which `test_loss_reference.py` compares)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from loss_cases import CLIPS, COMBINATIONS, DIVERGENCES, SUPPORTS, N, label, pair, rotate, without_shape_checks
from opd.loss import Full, Loss, build
from reference import losses as reference


@pytest.fixture(autouse=True)
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    without_shape_checks(monkeypatch)


def value_and_gradient(loss: Loss, student: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
    student = student.clone().requires_grad_()
    values = loss.tokens(student, Full.from_logits(teacher)).values
    values.sum().backward()
    assert student.grad is not None
    return values.detach(), student.grad


@pytest.mark.parametrize(("config", "clip"), rotate(CLIPS))
def test_zero_and_flat_where_student_equals_teacher(config: dict[str, Any], clip: dict[str, Any]) -> None:
    student, _ = pair(dtype=torch.float32)
    config = {**config, "clip": clip}
    values, gradient = value_and_gradient(build(config), student, student)
    assert values.abs().max() < 1e-6
    assert gradient.abs().max() < 1e-6


@pytest.mark.parametrize(
    "config",
    [c for c in COMBINATIONS if c["clip"]["name"] != "per_entry" and c["support"] in (SUPPORTS[0], SUPPORTS[-1])],
    ids=label,
)
def test_never_negative_and_a_step_down_the_gradient_lowers_it(config: dict[str, Any]) -> None:
    student, teacher = pair(seed=1)
    loss = build(config)
    values, gradient = value_and_gradient(loss, student, teacher)
    assert values.min() > 0
    stepped, _ = value_and_gradient(build({**config, "clip": {"name": "none"}}), student - 0.01 * gradient, teacher)
    unclipped = loss.tokens(student, Full.from_logits(teacher)).metrics["unclipped"]
    moves = gradient.norm(dim=-1) > 0
    assert bool((stepped < unclipped)[moves].all())
    # Only a clip of tokens leaves a row where it is, and only rows above its bound.
    above = unclipped > config["clip"].get("max", torch.inf)
    assert torch.equal(~moves, above if config["clip"]["name"] == "per_token" else torch.zeros_like(moves))


@pytest.mark.parametrize("clip", CLIPS[:3], ids=lambda clip: clip["name"])
@pytest.mark.parametrize("divergence", DIVERGENCES, ids=lambda config: config["name"])
def test_descent_raises_the_token_that_the_teacher_prefers(divergence: dict[str, Any], clip: dict[str, Any]) -> None:
    teacher, student = torch.tensor([[0.6, 0.3, 0.07, 0.03]]).log(), torch.tensor([[0.2, 0.6, 0.15, 0.05]]).log()
    bound = {"per_token": 2.0}.get(clip["name"], 0.06)  # a clip of tokens that is reached gives no gradient at all
    clip = clip if clip["name"] == "none" else {**clip, "max": bound}
    _, gradient = value_and_gradient(build({**divergence, "clip": clip}), student, teacher)
    assert gradient[0].argmin() == 0
    assert gradient[0, 0] < -0.01
    assert gradient[0, 1] > 0


def test_directions_are_as_named() -> None:
    teacher, student = torch.tensor([[0.6, 0.3, 0.1]]), torch.tensor([[0.2, 0.5, 0.3]])
    forward, forward_gradient = value_and_gradient(build({"name": "forward_kl"}), student.log(), teacher.log())
    reverse, _ = value_and_gradient(build({"name": "reverse_kl"}), student.log(), teacher.log())
    assert forward.item() == pytest.approx((teacher * (teacher / student).log()).sum().item())
    assert reverse.item() == pytest.approx((student * (student / teacher).log()).sum().item())
    # Descending raises the logit of the token that the teacher prefers: the gradient of KL(p‖q) is q - p.
    torch.testing.assert_close(forward_gradient, student - teacher)


def test_jsd_is_symmetric_at_one_half_and_leans_to_its_weight() -> None:
    student, teacher = pair()
    half = build({"name": "jsd", "teacher_weight": 0.5})
    one_way, _ = value_and_gradient(half, student, teacher)
    other_way, _ = value_and_gradient(half, teacher, student)
    torch.testing.assert_close(one_way, other_way)
    assert one_way.max() < np.log(2)
    # Close to the ends jsd/w and jsd/(1-w) are the two KLs; at the ends themselves jsd is zero.
    near_zero, _ = value_and_gradient(build({"name": "jsd", "teacher_weight": 1e-7}), student, teacher)
    forward, _ = value_and_gradient(build({"name": "forward_kl"}), student, teacher)
    torch.testing.assert_close(near_zero / 1e-7, forward, rtol=1e-4, atol=1e-6)


def test_per_entry_clip_turns_the_published_example_around() -> None:
    teacher, student = torch.tensor([[0.6, 0.3, 0.07, 0.03]]), torch.tensor([[0.2, 0.6, 0.15, 0.05]])
    _, unclipped = value_and_gradient(build({"name": "forward_kl"}), student.log(), teacher.log())
    clip = {"name": "per_entry", "max": 0.05}
    value, clipped = value_and_gradient(build({"name": "forward_kl", "clip": clip}), student.log(), teacher.log())
    torch.testing.assert_close(-unclipped, torch.tensor([[0.40, -0.30, -0.08, -0.02]]))
    # The teacher's favourite is the only clipped entry, and its logit now goes down; the loss itself is negative.
    torch.testing.assert_close(-clipped, torch.tensor([[-0.08, 0.06, 0.01, 0.01]]))
    assert value.item() < 0


def test_a_loss_reports_what_it_was_before_the_clip_under_its_own_name() -> None:
    student, teacher = pair()
    plain = build({"name": "reverse_kl"}).tokens(student, Full.from_logits(teacher))
    assert "clipped" not in plain.metrics
    assert "grad_removed_frac" not in plain.metrics
    for clip in CLIPS[1:]:
        metrics = build({"name": "reverse_kl", "clip": clip}).tokens(student, Full.from_logits(teacher)).metrics
        torch.testing.assert_close(metrics["unclipped"], plain.values)
        torch.testing.assert_close(metrics["reverse_kl"], plain.values)


def test_weight_clip_keeps_the_direction_and_per_token_drops_it() -> None:
    student, teacher = pair()
    values, gradient = value_and_gradient(build({"name": "forward_kl"}), student, teacher)
    bound = CLIPS[1]["max"]
    over = values > bound
    assert 0 < over.sum() < N
    _, weighted = value_and_gradient(build({"name": "forward_kl", "clip": CLIPS[2]}), student, teacher)
    _, dropped = value_and_gradient(build({"name": "forward_kl", "clip": CLIPS[1]}), student, teacher)
    torch.testing.assert_close(weighted, gradient * (bound / values).clamp(max=1)[:, None])
    assert not dropped[over].any()
    torch.testing.assert_close(dropped[~over], gradient[~over])


def test_temperature_squared_multiplies_after_the_clip() -> None:
    student, teacher = pair()
    config = {"name": "forward_kl", "temperature": 2.0, "clip": {"name": "per_token", "max": 0.1}}
    values, gradient = value_and_gradient(build(config), student, teacher)
    scaled = build({**config, "scale_by_temperature_squared": True})
    scaled_values, scaled_gradient = value_and_gradient(scaled, student, teacher)
    torch.testing.assert_close(scaled_values, values * 4)
    torch.testing.assert_close(scaled_gradient, gradient * 4)
    assert scaled_values.max() == pytest.approx(0.4)


@pytest.mark.parametrize("support", SUPPORTS, ids=lambda s: "_".join(map(str, s.values())))
def test_agreement_is_about_the_whole_vocabulary_whatever_the_support(support: dict[str, Any]) -> None:
    student, teacher = pair(seed=5)
    metrics = build({"name": "forward_kl", "support": support}).tokens(student, Full.from_logits(teacher)).metrics
    agree = (student.argmax(-1) == teacher.argmax(-1)).double()
    assert 0 < agree.sum() < N
    torch.testing.assert_close(metrics["teacher_top1_agreement"], agree)
    assert not any(metric.requires_grad for metric in metrics.values())


def test_the_head_of_adaptive_kl_takes_ties_with_its_last_token() -> None:
    """Of (.4, .2, .2, .2) the fewest tokens that reach 0.5 are the first and one of the others: so all others too."""
    teacher, student = torch.tensor([[0.4, 0.2, 0.2, 0.2]]).log(), torch.tensor([[0.1, 0.5, 0.3, 0.1]]).log()
    adaptive, _ = value_and_gradient(build({"name": "adaptive_kl"}), student, teacher)
    forward, _ = value_and_gradient(build({"name": "forward_kl"}), student, teacher)
    torch.testing.assert_close(adaptive, forward)


def test_the_head_of_adaptive_kl_never_holds_the_bucket() -> None:
    """Three of twelve equal tokens do not reach half of the mass, and the rest together is likelier than each."""
    teacher, student = torch.zeros(1, 12), torch.tensor([[1.0, 0.5, *[0.0] * 10]])
    support = {"name": "top_k", "k": 3, "of": "student"}
    loss = build({"name": "adaptive_kl", "support": support, "head_mass": 0.99})
    value, _ = value_and_gradient(loss, student, teacher)
    expected = reference.divergence(loss.config.model_dump(), student.numpy(), teacher.numpy())
    np.testing.assert_allclose(value, expected.values, rtol=1e-6)
    reverse, _ = value_and_gradient(build({"name": "reverse_kl", "support": support}), student, teacher)
    forward, _ = value_and_gradient(build({"name": "forward_kl", "support": support}), student, teacher)
    assert min(forward, reverse) < value < max(forward, reverse)


def test_entropy_aware_is_reverse_kl_below_the_threshold_and_more_above() -> None:
    student, teacher = pair()
    reverse, _ = value_and_gradient(build({"name": "reverse_kl"}), student, teacher)
    forward, _ = value_and_gradient(build({"name": "forward_kl"}), student, teacher)
    loss = build({"name": "entropy_aware", "threshold": 1.5, "forward_weight": 0.25})
    scores = loss.tokens(student, Full.from_logits(teacher))
    above = scores.metrics["entropy_teacher"] > 1.5
    assert 0 < above.sum() < N
    torch.testing.assert_close(scores.values, reverse + 0.25 * torch.where(above, forward, 0.0))


def test_total_variation_is_half_the_distance() -> None:
    student, teacher = pair()
    values, _ = value_and_gradient(build({"name": "tvd"}), student, teacher)
    expected = (torch.softmax(student, -1) - torch.softmax(teacher, -1)).abs().sum(-1) / 2
    torch.testing.assert_close(values, expected)
