"""Where losses break: probabilities of zero, NaN, empty batches, one token, and anything that must not matter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from loss_cases import (
    ALL,
    KINDS,
    SUPPORTS,
    D,
    N,
    V,
    cut_vocabulary,
    draw,
    heads,
    leaves,
    named,
    pair,
    rollout,
    rotate,
    run,
    without_shape_checks,
)
from opd.loss import Full, RolloutTokens, TopK, build

INF = torch.inf


@pytest.fixture(autouse=True)
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    without_shape_checks(monkeypatch)


# ---- probabilities of zero -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("config", "width"), rotate((4, 3, 100)))
def test_outcomes_that_both_sides_exclude_do_not_exist(
    config: dict[str, Any], width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first tile holds nothing else; with four tokens a tile the second is mixed."""
    chunk_bytes = cut_vocabulary(monkeypatch, num_rows=2, width=width, dtype=torch.float64)
    student, teacher = pair()
    gone, kept = torch.arange(5), torch.arange(5, V)
    narrow, narrow_gradient = run(config, student[:, kept], teacher[:, kept])
    student[:, gone] = teacher[:, gone] = -INF
    wide, gradient = run(config, student, teacher, chunk_bytes=chunk_bytes)
    torch.testing.assert_close(wide.values, narrow.values)
    for name, metric in wide.metrics.items():
        torch.testing.assert_close(metric, narrow.metrics[name], msg=lambda text, name=name: f"{name}: {text}")
    torch.testing.assert_close(gradient[:, kept], narrow_gradient)
    assert not gradient[:, gone].any()


@pytest.mark.parametrize(("config", "side"), rotate(("student", "teacher")))
def test_what_one_side_excludes_is_finite_and_touches_no_other_row(config: dict[str, Any], side: str) -> None:
    student, teacher = pair()
    likely = int((student if side == "teacher" else teacher)[3].argmax())
    plain, plain_gradient = run(config, student, teacher)
    (student if side == "student" else teacher)[3, likely] = -INF
    scores, gradient = run(config, student, teacher)
    others = torch.arange(N) != 3
    torch.testing.assert_close(scores.values[others], plain.values[others])
    torch.testing.assert_close(gradient[others], plain_gradient[others])
    assert bool(scores.values.isfinite().all())
    assert bool(gradient.isfinite().all())
    assert scores.values[3] > 0.01


@pytest.mark.parametrize(
    ("name", "side"), [("forward_kl", "student"), ("reverse_kl", "teacher"), ("adaptive_kl", "student")]
)
@pytest.mark.parametrize("support", SUPPORTS[:2] + SUPPORTS[2:3], ids=lambda s: s.get("tail", "full"))
def test_an_infinite_divergence_is_large_and_descent_leads_away(name: str, side: str, support: dict[str, Any]) -> None:
    student, teacher = pair()
    likely = int(teacher[3].argmax())
    student[3, likely] = 0.0
    (student if side == "student" else teacher)[3, likely] = -INF
    support = support if support["name"] == "full" else {**support, "k": 6, "of": "union"}
    scores, gradient = run({"name": name, "support": support}, student, teacher)
    assert scores.values[3] > 100
    # Toward the token that the student excludes, off the one that the teacher does.
    assert (gradient[3, likely] < 0) == (side == "student")


@pytest.mark.parametrize(("config", "side"), rotate(("student", "teacher", "both")))
def test_a_row_of_nothing_but_minus_infinity_is_nan_alone(config: dict[str, Any], side: str) -> None:
    student, teacher = pair()
    plain, plain_gradient = run(config, student, teacher)
    for name, logits in (("student", student), ("teacher", teacher)):
        if side in (name, "both"):
            logits[1] = -INF
    scores, gradient = run(config, student, teacher)
    assert bool(scores.values[1].isnan())
    others = torch.arange(N) != 1
    torch.testing.assert_close(scores.values[others], plain.values[others])
    torch.testing.assert_close(gradient[others], plain_gradient[others])


# ---- NaN in rows that nobody uses ------------------------------------------------------------------------------------


@pytest.mark.parametrize("masked", ["one", "all"])
@pytest.mark.parametrize("trained", [True, False], ids=["trained", "frozen"])
@pytest.mark.parametrize("config", KINDS, ids=named)
def test_nan_in_masked_rows_is_harmless(config: dict[str, Any], trained: bool, masked: str) -> None:
    """The trainer masks by an upstream gradient of zero; the student's row, the teacher's and both are NaN."""
    head = heads(torch.float64)["bias_scale"]
    for tensor in leaves(head):
        tensor.requires_grad_(trained)
    clean, broken = draw(N, D, seed=6), draw(N, D, seed=6)
    broken[0] = broken[2] = torch.nan
    teacher = draw(N, V, seed=7)
    broken_teacher = teacher.clone()
    broken_teacher[1] = broken_teacher[2] = torch.nan
    used = torch.tensor([False, False, False, True, True]) & (masked == "one")
    loss, found = build(config, chunk_bytes=2 * 2 * V * 8), list[list[Tensor]]()
    for hidden, scores in ((clean, teacher), (broken, broken_teacher)):
        hidden.requires_grad_()
        values = loss.linear(hidden, head, Full.from_logits(scores), rollout()).values
        inputs = [hidden, *(leaves(head) if trained else ())]
        found.append(list(torch.autograd.grad(torch.where(used, values, 0.0).sum(), inputs)))
        if hidden is broken:
            assert bool(values[[0, 2]].isnan().all()), "NaN is seen where it counts"
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)
    assert (found[0][0].abs().sum() > 0) == (masked == "one")


@pytest.mark.parametrize("side", ["student", "teacher"])
def test_nan_behind_a_shut_gate_is_harmless_and_before_an_open_one_seen(side: str) -> None:
    student, teacher = pair()
    mask = {"student_entropy": {"min": 1.4}}
    shut = run({"name": "reverse_kl", "mask": mask}, student, teacher)[0].metrics["supervised"] == 0
    assert bool(shut[0])
    assert not bool(shut[2])
    (student if side == "student" else teacher)[[0, 2]] = torch.nan
    scores, gradient = run({"name": "reverse_kl", "mask": mask}, student, teacher)
    # Of a student that is NaN nobody knows whether its entropy is inside: the fault is seen.
    hidden = side == "teacher"
    assert bool(scores.values[0].isfinite()) == bool(gradient[0].isfinite().all()) == hidden
    assert bool(scores.values[2].isnan())
    assert bool(gradient[2].isnan().all())


# ---- sizes -----------------------------------------------------------------------------------------------------------


def fitting(config: dict[str, Any], num_tokens: int) -> dict[str, Any]:
    """The same with a support that a small vocabulary can hold."""
    if config["name"] == "mix":
        return {**config, "parts": [{**part, "loss": fitting(part["loss"], num_tokens)} for part in config["parts"]]}
    support = config.get("support", {"name": "full"})
    if support["name"] == "full":
        return config
    return {**config, "support": {**support, "k": min(support["k"], num_tokens), "tail": "bucket"}}


@pytest.mark.parametrize("config", ALL, ids=named)
def test_a_vocabulary_of_one_token_has_nothing_to_say(config: dict[str, Any]) -> None:
    scores, gradient = run(fitting(config, 1), draw(N, 1), draw(N, 1, seed=1))
    torch.testing.assert_close(scores.values, torch.zeros(N, dtype=torch.float64), atol=1e-12, rtol=0)
    torch.testing.assert_close(gradient, torch.zeros(N, 1, dtype=torch.float64), atol=1e-12, rtol=0)
    for name, metric in scores.metrics.items():
        assert bool(metric.isfinite().all()), name


@pytest.mark.parametrize("config", ALL, ids=named)
def test_one_row_alone_is_that_row_among_others_and_no_row_is_none(config: dict[str, Any]) -> None:
    head, other = heads(torch.float64)["softcap_low_rank"], draw(N, V, seed=7)
    for tensor in leaves(head):
        tensor.requires_grad_()
    hidden = draw(N, D, seed=6)
    loss = build(config)
    among = loss.linear(hidden, head, Full.from_logits(other), rollout())
    for rows in (slice(2, 3), slice(0, 0)):
        student = hidden[rows].clone().requires_grad_()
        tokens = RolloutTokens(rollout().ids_N[rows])
        scores = loss.linear(student, head, Full.from_logits(other[rows]), tokens)
        torch.testing.assert_close(scores.values, among.values[rows])
        assert scores.metrics.keys() == among.metrics.keys()
        for name, metric in scores.metrics.items():
            torch.testing.assert_close(metric, among.metrics[name][rows])
        gradients = torch.autograd.grad(scores.values.sum(), [student, *leaves(head)])
        assert bool(gradients[1].any()) == (rows.stop > rows.start)


# ---- a teacher that gives its likeliest tokens -----------------------------------------------------------------------


def test_a_tail_lost_to_rounding_is_no_exclusion() -> None:
    """The teacher is sure; in float32 its likeliest tokens sum to one or more. That the student leaves one percent to
    the rest costs what it costs against the smallest mass that can be told from none, not ten thousand nats a unit.
    """
    teacher = torch.tensor([[20.0, 1.0, 0.5, 0.0, 0.0, 0.0]])
    student = torch.log_softmax(torch.tensor([[6.0, 0.0, 0.0, 0.0, 0.0, 0.0]]), -1)
    logp, ids = torch.log_softmax(teacher, -1).topk(2, dim=-1)
    config = {"name": "reverse_kl", "support": {"name": "top_k", "k": 2}}
    exact = build(config).tokens(student, Full.from_logits(teacher)).values.item()
    found = build(config).tokens(student, TopK(ids, logp)).values.item()
    assert 0.05 < exact < 0.5
    assert found == pytest.approx(exact, rel=0.3)
