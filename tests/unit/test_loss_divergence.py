"""Divergences and clips against the float64 reference, and what each of them promises."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor

from opd.loss import Full, Head, Loss, build
from reference import losses as reference

# N supervised tokens, V vocabulary, D hidden size.
N, V, D = 9, 13, 6
DIVERGENCES = ("forward_kl", "reverse_kl", "jsd")
# Bounds that some rows (or entries) of the data below exceed and others do not.
CLIPS = (
    {"name": "none"},
    {"name": "per_token", "max": 0.4},
    {"name": "weight", "max": 0.4},
    {"name": "per_entry", "max": 0.05},
)


def pair(seed: int = 0, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Logits of a student and of a teacher that agree on the first rows and less and less on the later ones."""
    generator = torch.Generator().manual_seed(seed)
    student = torch.randn(N, V, generator=generator, dtype=torch.float64) * 2
    away = torch.randn(N, V, generator=generator, dtype=torch.float64)
    return student.to(dtype), (student + away * torch.linspace(0.05, 2.5, N, dtype=torch.float64)[:, None]).to(dtype)


def value_and_gradient(loss: Loss, student: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
    student = student.clone().requires_grad_()
    values = loss.tokens(student, Full.from_logits(teacher)).values
    values.sum().backward()
    assert student.grad is not None
    return values.detach(), student.grad


@pytest.mark.parametrize(
    ("name", "clip", "temperature"),
    [*product(DIVERGENCES, CLIPS, (1.0, 0.7))],
    ids=lambda x: str(x["name"] if isinstance(x, dict) else x),
)
def test_equals_the_reference(name: str, clip: dict[str, object], temperature: float) -> None:
    config = {"name": name, "clip": clip, "temperature": temperature}
    options = {"clip": clip, "temperature": temperature}
    if name == "jsd":
        config["teacher_weight"] = options["teacher_weight"] = 0.3
    student, teacher = pair()
    values, gradient = value_and_gradient(build(config), student, teacher)
    np.testing.assert_allclose(
        values, reference.divergence(name, student.numpy(), teacher.numpy(), **options), rtol=1e-10
    )
    expected = reference.divergence_gradient(name, student.numpy(), teacher.numpy(), **options)
    np.testing.assert_allclose(gradient, expected, atol=1e-8)


@pytest.mark.parametrize("name", DIVERGENCES)
@pytest.mark.parametrize("clip", CLIPS, ids=lambda clip: clip["name"])
def test_linear_equals_tokens_in_float32(name: str, clip: dict[str, object]) -> None:
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    hidden, head = draw(N, D), Head(draw(V + 3, D), draw(V + 3), scale=0.5, softcap=3.0, vocab_size=V)
    teacher_hidden, teacher_head = draw(N, 4), Head(draw(V, 4))
    loss = build({"name": name, "clip": clip, "temperature": 1.5}, chunk_bytes=2 * V * 4)
    linear_in, tokens_in = hidden.clone().requires_grad_(), hidden.clone().requires_grad_()
    linear = loss.linear(linear_in, head, Full(teacher_hidden, teacher_head))
    tokens = loss.tokens(head.logits(tokens_in), Full.from_logits(teacher_head.logits(teacher_hidden)))
    torch.testing.assert_close(linear.values, tokens.values, rtol=1e-5, atol=1e-5)
    assert linear.metrics.keys() == tokens.metrics.keys()
    for metric in linear.metrics:
        torch.testing.assert_close(linear.metrics[metric], tokens.metrics[metric], rtol=1e-4, atol=1e-5)
    upstream = draw(N)
    (linear.values @ upstream).backward()
    (tokens.values @ upstream).backward()
    torch.testing.assert_close(linear_in.grad, tokens_in.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", DIVERGENCES)
@pytest.mark.parametrize("clip", CLIPS, ids=lambda clip: clip["name"])
def test_zero_and_flat_where_student_equals_teacher(name: str, clip: dict[str, object]) -> None:
    student, _ = pair(dtype=torch.float32)
    values, gradient = value_and_gradient(build({"name": name, "clip": clip}), student, student)
    assert values.abs().max() < 1e-6
    assert gradient.abs().max() < 1e-6


@pytest.mark.parametrize("name", DIVERGENCES)
@pytest.mark.parametrize("seed", range(5))
def test_never_negative_and_a_step_down_the_gradient_lowers_it(name: str, seed: int) -> None:
    student, teacher = pair(seed)
    loss = build({"name": name})
    values, gradient = value_and_gradient(loss, student, teacher)
    assert values.min() > 0
    stepped, _ = value_and_gradient(loss, student - 0.05 * gradient, teacher)
    assert bool((stepped < values).all())


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


def test_clips_report_what_they_did() -> None:
    student, teacher = pair()
    plain = build({"name": "reverse_kl"}).tokens(student, Full.from_logits(teacher))
    _, gradient = value_and_gradient(build({"name": "reverse_kl"}), student, teacher)
    assert "clipped" not in plain.metrics
    for clip in CLIPS[1:]:
        loss = build({"name": "reverse_kl", "clip": clip})
        metrics = loss.tokens(student, Full.from_logits(teacher)).metrics
        _, clipped_gradient = value_and_gradient(loss, student, teacher)
        torch.testing.assert_close(metrics["unclipped"], plain.values)
        torch.testing.assert_close(metrics["reverse_kl"], plain.values)
        if clip["name"] == "per_entry":
            over = reference.entries("reverse_kl", student.numpy(), teacher.numpy(), 1.0).max(-1) > 0.05
        else:
            over = plain.values.numpy() > 0.4
        assert 0 < over.sum() < N
        np.testing.assert_array_equal(metrics["clipped"], over)
        torch.testing.assert_close(metrics["grad_norm_unclipped"], gradient.norm(dim=-1))
        removed = 1 - clipped_gradient.norm(dim=-1) / gradient.norm(dim=-1)
        torch.testing.assert_close(metrics["grad_removed_frac"], removed)


def test_weight_clip_keeps_the_direction_and_per_token_drops_it() -> None:
    student, teacher = pair()
    values, gradient = value_and_gradient(build({"name": "forward_kl"}), student, teacher)
    over = values > 0.4
    _, weighted = value_and_gradient(build({"name": "forward_kl", "clip": CLIPS[2]}), student, teacher)
    _, dropped = value_and_gradient(build({"name": "forward_kl", "clip": CLIPS[1]}), student, teacher)
    torch.testing.assert_close(weighted, gradient * (0.4 / values).clamp(max=1)[:, None])
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


def test_entropies_and_agreement() -> None:
    student, teacher = pair()
    metrics = build({"name": "forward_kl", "temperature": 0.7}).tokens(student, Full.from_logits(teacher)).metrics
    for name, logits in (("entropy_student", student), ("entropy_teacher", teacher)):
        log_p = reference.log_softmax(logits.numpy(), 0.7)
        np.testing.assert_allclose(metrics[name], -(np.exp(log_p) * log_p).sum(-1))
    agree = (student.argmax(-1) == teacher.argmax(-1)).double()
    assert 0 < agree.sum() < N
    torch.testing.assert_close(metrics["teacher_top1_agreement"], agree)
    assert not any(metric.requires_grad for metric in metrics.values())
