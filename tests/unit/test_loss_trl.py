"""Parity with TRL where the definitions meet: the generalised JSD of its GKD trainer, dense, and its chunked kernel.

TRL's `beta` is the teacher's weight in the mixture, (1 - beta)·student + beta·teacher: `teacher_weight` here. Its
special cases beta 0 and beta 1 are KL(teacher‖student) and KL(student‖teacher): `forward_kl` and `reverse_kl` here.

Tensor suffixes: N supervised tokens, V vocabulary, D hidden size.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from loss_cases import D, N, V, cut_vocabulary, draw, pair
from opd.loss import Full, Head, build

with warnings.catch_warnings():
    # It says at import that its trainers may change, and its dependencies have deprecations of their own.
    warnings.simplefilter("ignore")
    from trl.experimental.gkd.gkd_trainer import GKDTrainer
    from trl.kernels.chunked_divergence import ChunkedDivergenceFunction

BETAS = [0.0, 0.1, 0.5, 0.8, 1.0]


def ours(beta: float, temperature: float) -> dict[str, Any]:
    """What TRL's `beta` is called here."""
    if beta in (0.0, 1.0):
        return {"name": "reverse_kl" if beta else "forward_kl", "temperature": temperature}
    return {"name": "jsd", "teacher_weight": beta, "temperature": temperature}


@pytest.fixture
def chunk_bytes(monkeypatch: pytest.MonkeyPatch) -> int:
    """Chunks of 2, 2 and 1 rows, tiles of 4, 4 and 3 tokens."""
    return cut_vocabulary(monkeypatch, num_rows=2, width=4, dtype=torch.float32)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("beta", BETAS)
def test_dense_generalised_jsd(beta: float, temperature: float) -> None:
    student, teacher = pair()
    found, expected = student.clone().requires_grad_(), student.clone().requires_grad_()
    values = build(ours(beta, temperature)).tokens(found, Full.from_logits(teacher)).values
    theirs = GKDTrainer.generalized_jsd_loss(
        expected[None], teacher[None], beta=beta, temperature=temperature, reduction="none"
    )
    torch.testing.assert_close(values, theirs[0].sum(-1))
    upstream = draw(N, seed=3)
    (values @ upstream).backward()
    (theirs[0].sum(-1) @ upstream).backward()
    torch.testing.assert_close(found.grad, expected.grad)


def test_dense_reduction_is_the_mean_over_tokens() -> None:
    """With labels, TRL's `batchmean` divides by the tokens that are not masked: as `opd.loss.reduce` does."""
    student, teacher = pair()
    labels = torch.tensor([[1, -100, 2, 3, -100]])
    theirs = GKDTrainer.generalized_jsd_loss(student[None], teacher[None], labels=labels, beta=0.3)
    kept = labels[0] != -100
    values = build(ours(0.3, 1.0)).tokens(student[kept], Full.from_logits(teacher[kept])).values
    torch.testing.assert_close(values.mean(), theirs)


@pytest.mark.parametrize(
    ("temperature", "scale", "softcap"), [(1.0, 1.0, None), (0.7, 1.0, None), (1.3, 0.5, None), (0.9, 1.5, 3.0)]
)
@pytest.mark.parametrize("beta", BETAS)
def test_chunked_kernel(beta: float, temperature: float, scale: float, softcap: float | None, chunk_bytes: int) -> None:
    """Hidden states, weight and bias of a head that trains; a teacher of another width, scale and softcap."""

    def student() -> tuple[Tensor, Tensor, Tensor]:
        shapes = ((N, D), (V, D), (V,))
        drawn = (draw(*shape, dtype=torch.float32, seed=seed).requires_grad_() for seed, shape in enumerate(shapes, 40))
        hidden, weight, bias = drawn
        return hidden, weight, bias

    teacher = Full(
        draw(N, 3, dtype=torch.float32, seed=7),
        Head(draw(V, 3, dtype=torch.float32, seed=8), draw(V, dtype=torch.float32, seed=9), scale=1.2, softcap=5.0),
    )
    assert teacher.head is not None
    found, expected = student(), student()
    loss = build(ours(beta, temperature), chunk_bytes=chunk_bytes)
    scores = loss.linear(found[0], Head(found[1], found[2], scale=scale, softcap=softcap), teacher)
    theirs, entropy = ChunkedDivergenceFunction.apply(
        *expected,
        teacher.hidden_ND,
        teacher.head.weight,
        teacher.head.bias,
        beta,
        temperature,
        scale,
        softcap,
        teacher.head.scale,
        teacher.head.softcap,
    )
    torch.testing.assert_close(scores.values, theirs, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(scores.metrics["entropy_student"], entropy, rtol=1e-5, atol=1e-5)
    for upstream in (torch.full((N,), 1 / N), draw(N, dtype=torch.float32, seed=3)):
        gradients = torch.autograd.grad(scores.values, found, upstream, retain_graph=True)
        references = torch.autograd.grad(theirs, expected, upstream, retain_graph=True)
        for one, other in zip(gradients, references, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
