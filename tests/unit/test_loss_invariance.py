"""What must not matter: chunks, tiles, order of rows, threads, a shift of all logits, padding, the dtype of inputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from loss_cases import (
    DISTANCES,
    KINDS,
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
from opd.loss import Full, Head, RolloutTokens, build


@pytest.fixture(autouse=True)
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    without_shape_checks(monkeypatch)


@pytest.mark.parametrize(
    ("num_rows", "width", "threads"), [(1, 1, 1), (2, 4, 1), (2, 6, 3), (3, V - 1, 1), (1000, 1000, 1)]
)
@pytest.mark.parametrize("config", KINDS, ids=named)
def test_chunks_tiles_order_and_threads(
    config: dict[str, Any], num_rows: int, width: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = torch.randperm(N, generator=torch.Generator().manual_seed(3))
    head, hidden, teacher = heads(torch.float64)["softcap_low_rank"], draw(N, D, seed=6), draw(N, V, seed=7)
    for tensor in leaves(head):
        tensor.requires_grad_()

    def gradients(rows: Tensor, chunk_bytes: int | None) -> tuple[Tensor, ...]:
        student, tokens = hidden[rows].requires_grad_(), RolloutTokens(rollout().ids_N[rows])
        scores = build(config, chunk_bytes=chunk_bytes).linear(student, head, Full.from_logits(teacher[rows]), tokens)
        metrics = [scores.metrics[name] for name in sorted(scores.metrics)]
        d_hidden, *others = torch.autograd.grad(scores.values.sum(), [student, *leaves(head)])
        back = torch.argsort(rows)
        return (scores.values[back], d_hidden[back], *(metric[back] for metric in metrics), *others)

    expected = gradients(torch.arange(N), None)
    chunk_bytes = cut_vocabulary(monkeypatch, num_rows=num_rows, width=width, dtype=torch.float64)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    for ours, theirs in zip(gradients(order, chunk_bytes), expected, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(("config", "shift"), rotate((-3e4, 3e4)))
def test_a_shift_of_all_logits(config: dict[str, Any], shift: float) -> None:
    student, teacher = pair()
    plain, plain_gradient = run(config, student, teacher)
    scores, gradient = run(config, student + shift, teacher - shift)
    torch.testing.assert_close(scores.values, plain.values, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(gradient, plain_gradient, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("config", DISTANCES, ids=named)
def test_padding_of_the_vocabulary(config: dict[str, Any]) -> None:
    """Rows of a head at or past `vocab_size` are as if they were not there, whatever they hold."""
    weight, hidden, teacher = draw(V + 4, D, seed=1), draw(N, D, seed=6), Full.from_logits(draw(N, V, seed=7))
    weight[V:] = torch.nan
    padded, plain = weight.requires_grad_(), weight[:V].detach().clone().requires_grad_()
    loss = build(config)
    scores, expected = (
        loss.linear(hidden, Head(padded, vocab_size=V), teacher),
        loss.linear(hidden, Head(plain), teacher),
    )
    torch.testing.assert_close(scores.values, expected.values)
    (d_padded,) = torch.autograd.grad(scores.values.sum(), padded)
    (d_plain,) = torch.autograd.grad(expected.values.sum(), plain)
    torch.testing.assert_close(d_padded[:V], d_plain)
    assert not d_padded[V:].any()


@pytest.mark.parametrize("config", KINDS, ids=named)
def test_bfloat16_logits_are_read_in_float32(config: dict[str, Any]) -> None:
    student, teacher = pair(dtype=torch.bfloat16)
    scores, gradient = run(config, student, teacher)
    exact, exact_gradient = run(config, student.float(), teacher.float())
    assert scores.values.dtype == torch.float32
    assert gradient.dtype == torch.bfloat16
    torch.testing.assert_close(scores.values, exact.values)
    torch.testing.assert_close(gradient.float(), exact_gradient, rtol=8e-3, atol=2e-3)


@pytest.mark.parametrize("config", KINDS, ids=named)
def test_bfloat16_heads_round_in_the_product_alone(config: dict[str, Any]) -> None:
    """The products are the model's own, in bfloat16; what follows them is exact to float32."""
    hidden = draw(N, D, dtype=torch.bfloat16, seed=6).requires_grad_()
    weight = draw(V, D, dtype=torch.bfloat16, seed=1).requires_grad_()
    teacher = Full.from_logits(draw(N, V, dtype=torch.bfloat16, seed=7))
    loss = build(config)
    scores = loss.linear(hidden, Head(weight), teacher, rollout())
    expected = loss.tokens(Head(weight).logits(hidden), teacher, rollout())
    torch.testing.assert_close(scores.values, expected.values, rtol=1e-5, atol=1e-6)
    for upstream in (torch.ones(N), draw(N, dtype=torch.float32)):
        ours = torch.autograd.grad(scores.values, (hidden, weight), upstream, retain_graph=True)
        theirs = torch.autograd.grad(expected.values, (hidden, weight), upstream, retain_graph=True)
        for one, other in zip(ours, theirs, strict=True):
            assert one.dtype == torch.bfloat16
            torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("of", ["teacher", "student", "union"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_of_equal_logits_the_first_are_the_likeliest_for_any_tile(
    of: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half precision has many equal logits; which of them a support takes must not depend on how rows are grouped."""
    generator = torch.Generator().manual_seed(0)
    student, teacher = (torch.randint(-2, 3, (12, 40), generator=generator).to(dtype) for _ in range(2))
    loss = {"name": "reverse_kl", "support": {"name": "top_k", "k": 5, "of": of, "tail": "renormalize"}}
    whole = build(loss).tokens(student, Full.from_logits(teacher)).values
    for rows in (1, 5):
        monkeypatch.setattr("opd.loss.chunked._TILE_BYTES", 7 * rows * 8)
        small = build(loss, chunk_bytes=2 * rows * 40 * 8).tokens(student, Full.from_logits(teacher)).values
        torch.testing.assert_close(small, whole)
