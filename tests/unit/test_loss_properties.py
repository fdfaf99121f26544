"""Laws that hold for any two distributions, on drawn ones: any size, logits up to a thousand apart, ties."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from loss_cases import DIVERGENCES, draw, without_shape_checks
from opd.loss import Full, TokenLoss, TopK, build

FULL: dict[str, Any] = {"name": "full"}
F_DIVERGENCES = ("forward_kl", "reverse_kl", "jsd", "skew_kl", "skew_reverse_kl", "tvd")
divergences = st.sampled_from(DIVERGENCES)
some = hypothesis.settings(max_examples=40, deadline=None, database=None)


@pytest.fixture(autouse=True, scope="module")
def unchecked() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        without_shape_checks(patch)
        yield


@st.composite
def pairs(draw_from: st.DrawFn) -> tuple[Tensor, Tensor]:
    """Logits of a student and of a teacher, [N, V] each; some are rounded to whole numbers, so that many tie."""
    shape = draw_from(st.tuples(st.integers(1, 4), st.integers(2, 20)))
    seed, scale = draw_from(st.integers(0, 2**31)), draw_from(st.sampled_from([0.1, 1.0, 3.0, 30.0, 1000.0]))
    logits = [scale * draw(*shape, seed=seed), scale * draw(*shape, seed=seed + 1)]
    if draw_from(st.booleans()):
        logits = [x.round() for x in logits]
    if draw_from(st.booleans()):
        logits[1] = logits[0] + logits[1] / 100
    return logits[0], logits[1]


def scores(config: dict[str, Any], student: Tensor, teacher: Full | TopK, *, small: bool = False) -> TokenLoss:
    chunk_bytes = 2 * student.shape[1] * student.element_size() if small else None
    return build(config, chunk_bytes=chunk_bytes).tokens(student, teacher)


def top_k(k: int, of: str, tail: str) -> dict[str, Any]:
    return {"name": "top_k", "k": k, "of": of, "tail": tail}


supports = st.tuples(
    st.integers(2, 8), st.sampled_from(["teacher", "student", "union"]), st.sampled_from(["bucket", "renormalize"])
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@hypothesis.given(
    divergence=divergences, logits=pairs(), support=st.none() | supports, temperature=st.sampled_from([0.5, 1.0, 2.0])
)
@some
def test_never_negative_and_always_finite(
    divergence: dict[str, Any],
    dtype: torch.dtype,
    logits: tuple[Tensor, Tensor],
    support: tuple[int, str, str] | None,
    temperature: float,
) -> None:
    student, teacher = (x.to(dtype) for x in logits)
    student.requires_grad_()
    config = {**divergence, "temperature": temperature}
    if support is not None:
        k, of, tail = support
        config["support"] = top_k(min(k, student.shape[1]), of, tail)
    found = scores(config, student, Full.from_logits(teacher), small=True)
    (gradient,) = torch.autograd.grad(found.values.sum(), student)
    assert bool(found.values.isfinite().all())
    assert bool(gradient.isfinite().all())
    # Rounding is relative to the logits.
    rounding = 20 * torch.finfo(dtype).eps * (1 + logits[0].abs().max() + logits[1].abs().max()) / temperature
    assert found.values.min() >= -rounding
    # A shift of all logits changes nothing, to first order.
    assert gradient.sum(-1).abs().max() <= rounding * (1 + found.values.max())


@pytest.mark.parametrize("tail", ["bucket", "renormalize"])
@hypothesis.given(divergence=divergences, logits=pairs(), of=st.sampled_from(["teacher", "student", "union"]))
@some
def test_a_support_of_all_tokens_is_the_whole_vocabulary(
    divergence: dict[str, Any], tail: str, logits: tuple[Tensor, Tensor], of: str
) -> None:
    student, teacher = logits[0].clone().requires_grad_(), Full.from_logits(logits[1])
    whole = scores(divergence, student, teacher)
    kept = scores({**divergence, "support": top_k(student.shape[1], of, tail)}, student, teacher)
    torch.testing.assert_close(kept.values, whole.values, rtol=1e-9, atol=1e-10)
    ours, theirs = (torch.autograd.grad(s.values.sum(), student)[0] for s in (kept, whole))
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


@hypothesis.given(
    name=st.sampled_from(F_DIVERGENCES),
    logits=pairs(),
    k=st.integers(1, 8),
    of=st.sampled_from(["teacher", "student", "union"]),
)
@some
def test_merging_outcomes_never_raises_a_divergence(name: str, logits: tuple[Tensor, Tensor], k: int, of: str) -> None:
    """The data processing inequality, which every f-divergence obeys: a bucket is a function of the token."""
    student, teacher = logits[0], Full.from_logits(logits[1])
    whole = scores({"name": name}, student, teacher).values
    merged = scores({"name": name, "support": top_k(min(k, student.shape[1]), of, "bucket")}, student, teacher).values
    assert bool((merged <= whole * (1 + 1e-9) + 1e-10).all())


@pytest.mark.parametrize("tail", ["bucket", "renormalize"])
@hypothesis.given(divergence=divergences, logits=pairs(), k=st.integers(2, 8), extra=st.integers(0, 3))
@some
def test_likeliest_tokens_of_a_teacher_equal_its_whole_distribution(
    divergence: dict[str, Any], tail: str, logits: tuple[Tensor, Tensor], k: int, extra: int
) -> None:
    student, teacher = logits[0].clone().requires_grad_(), logits[1]
    k = min(k, student.shape[1])
    config = {**divergence, "support": top_k(k, "teacher", tail)}
    logp, ids = torch.log_softmax(teacher, -1).topk(min(k + extra, student.shape[1]), dim=-1)
    whole, likeliest = scores(config, student, Full.from_logits(teacher)), scores(config, student, TopK(ids, logp))
    # The tail's mass is a difference here and a sum there: where it is mere rounding the two need not agree.
    clear = torch.ones(len(logp), dtype=torch.bool) if tail == "renormalize" else 1 - logp[:, :k].exp().sum(-1) > 1e-6
    # Ties at the edge of the support may be broken either way.
    edge = logp[:, k - 1 : k] == torch.log_softmax(teacher, -1)
    clear &= edge.sum(-1) == 1
    # Without the whole distribution, its entropy is that over the outcomes.
    if divergence["name"] == "entropy_aware":
        above = [s.metrics["entropy_teacher"] > divergence["threshold"] for s in (whole, likeliest)]
        clear &= above[0] == above[1]
    torch.testing.assert_close(likeliest.values[clear], whole.values[clear], rtol=1e-6, atol=1e-7)
    ours, theirs = (torch.autograd.grad(s.values.sum(), student)[0] for s in (likeliest, whole))
    torch.testing.assert_close(ours[clear], theirs[clear], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("tail", ["bucket", "renormalize"])
@hypothesis.given(divergence=divergences, logits=pairs(), k=st.integers(2, 8))
@some
def test_a_union_of_the_same_tokens_counts_each_once(
    divergence: dict[str, Any], tail: str, logits: tuple[Tensor, Tensor], k: int
) -> None:
    """A teacher that ranks tokens as the student does: then the union is either side's support."""
    teacher = Full.from_logits(logits[0] * 0.7)
    student = logits[0].clone().requires_grad_()
    k = min(k, student.shape[1])
    union, either = (
        scores({**divergence, "support": top_k(k, of, tail)}, student, teacher) for of in ("union", "teacher")
    )
    ties = torch.stack([x.sort(-1).values.diff(dim=-1) == 0 for x in (logits[0], logits[0] * 0.7)]).any(-1).any(0)
    torch.testing.assert_close(union.values[~ties], either.values[~ties], rtol=1e-9, atol=1e-10)
    ours, theirs = (torch.autograd.grad(s.values.sum(), student)[0] for s in (union, either))
    torch.testing.assert_close(ours[~ties], theirs[~ties], rtol=1e-9, atol=1e-10)
