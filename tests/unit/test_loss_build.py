"""Building a loss: what is accepted, what is refused and why."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from beartype.roar import BeartypeCallHintViolation
from jaxtyping import TypeCheckError
from pydantic import TypeAdapter

from opd.config.formula import formula, needs
from opd.config.loss import JSDConfig, LossConfig
from opd.errors import OpdError
from opd.loss import LOSSES, Full, Head, RolloutTokens, Sampled, TopK, build
from opd.loss.divergence import DIVERGENCES

PARTS = [{"loss": {"name": "forward_kl"}, "weight": 0.5}, {"loss": {"name": "sft"}, "weight": 0.1}]
CONFIGS: list[dict[str, Any]] = [{"name": name, **({"parts": PARTS} if name == "mix" else {})} for name in LOSSES]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config["name"])
def test_every_name_builds_and_says_what_it_minimises(config: dict[str, Any]) -> None:
    loss = build(config)
    assert loss.name == config["name"]
    assert "softmax" in loss.formula
    least = {"full": "Full", "sampled": "Sampled", "nothing": "Sampled"}[loss.needs]
    assert least in needs(TypeAdapter[LossConfig](LossConfig).validate_python(config))


def test_a_config_object_is_as_good_as_a_mapping() -> None:
    config = JSDConfig(name="jsd", teacher_weight=0.2)
    assert build(config).formula == formula(config) == build({"name": "jsd", "teacher_weight": 0.2}).formula


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"name": "forward_kl", "temperature": math.nan}, "loss.temperature"),
        ({"name": "forward_kl", "temperature": 0.0}, "loss.temperature"),
        ({"name": "jsd", "teacher_weight": math.nan}, "loss.teacher_weight"),
        ({"name": "skew_kl", "alpha": 0.0}, "loss.alpha"),
        ({"name": "skew_reverse_kl", "alpha": 1.0}, "loss.alpha"),
        ({"name": "reverse_kl", "clip": {"name": "weight", "max": math.nan}}, "loss.clip"),
        ({"name": "reverse_kl", "clip": {"name": "per_entry", "max": -1.0}}, "loss.clip"),
        ({"name": "sampled_reverse_kl", "discount": 1.5}, "loss.discount"),
        ({"name": "sampled_reverse_kl", "clip": {"name": "weight", "max": 1.0}}, "loss.clip"),
        ({"name": "reverse_kl", "beta": 0.1}, "loss.beta"),
        ({"name": "kl"}, "forward_kl"),
    ],
)
def test_bad_configs_name_the_key(config: dict[str, Any], named: str) -> None:
    with pytest.raises(OpdError, match="not valid") as error:
        build(config)
    assert named in error.value.why


@pytest.mark.parametrize("teacher_weight", [0.0, 1.0, -0.5, 1.5])
def test_jsd_at_its_ends_is_refused_and_the_other_name_given(teacher_weight: float) -> None:
    with pytest.raises(OpdError, match="not a Jensen-Shannon divergence") as error:
        build({"name": "jsd", "teacher_weight": teacher_weight})
    assert "forward_kl" in error.value.fix
    assert "reverse_kl" in error.value.fix


@pytest.mark.parametrize("name", list(DIVERGENCES))
def test_a_divergence_needs_the_whole_distribution(name: str) -> None:
    student = torch.zeros(3, 5)
    for teacher in (Sampled(torch.zeros(3)), TopK(torch.zeros(3, 1, dtype=torch.int64), torch.zeros(3, 1))):
        with pytest.raises(OpdError, match="cannot be computed") as error:
            build({"name": name}).tokens(student, teacher)
        assert type(teacher).__name__ in error.value.why


def test_vocabularies_and_rows_must_meet() -> None:
    loss = build({"name": "forward_kl"})
    with pytest.raises(OpdError, match="different vocabularies") as error:
        loss.tokens(torch.zeros(3, 5), Full.from_logits(torch.zeros(3, 6)))
    assert "5 outcomes and the teacher 6" in error.value.why
    with pytest.raises(OpdError, match="different vocabularies"):
        loss.linear(
            torch.zeros(3, 2), Head(torch.zeros(8, 2)), Full(torch.zeros(3, 2), Head(torch.zeros(8, 2), vocab_size=7))
        )
    with pytest.raises(OpdError, match="other positions"):
        loss.tokens(torch.zeros(3, 5), Full.from_logits(torch.zeros(4, 5)))


def test_shapes_are_checked_at_run_time_in_tests() -> None:
    """Guards the import hook of this folder's conftest: without it the annotations would be mere comments here."""
    with pytest.raises((TypeCheckError, BeartypeCallHintViolation)):
        build({"name": "forward_kl"}).tokens(torch.zeros(3), Full.from_logits(torch.zeros(3, 5)))


def test_a_mix_whose_gate_looks_at_the_teacher_needs_the_whole_of_it() -> None:
    part = {"name": "forward_kl", "support": {"name": "top_k", "k": 2}}
    gate = {"teacher_entropy": {"min": 0.5}}
    loss = build({"name": "mix", "mask": gate, "parts": [{"loss": part, "weight": 1.0}]})
    teacher = TopK(torch.tensor([[0, 1]] * 3), torch.full((3, 2), -1.0))
    with pytest.raises(OpdError, match="likeliest tokens") as error:
        loss.tokens(torch.zeros(3, 5), teacher)
    assert "entropy" in error.value.why


def test_top_k_of_logits_is_refused() -> None:
    logits = torch.tensor([[4.0, 3.0, 0.0]])
    loss = build({"name": "forward_kl", "support": {"name": "top_k", "k": 2}})
    with pytest.raises(OpdError, match="no log-probabilities"):
        loss.tokens(torch.zeros(1, 3), TopK(torch.tensor([[0, 1]]), logits[:, :2]))


def test_one_number_a_row_and_not_a_column_of_them() -> None:
    loss, rollout = build({"name": "sampled_reverse_kl"}), RolloutTokens(torch.tensor([0, 1, 2]))
    with pytest.raises(OpdError, match="wrong shape"):
        loss.tokens(torch.zeros(3, 5), Sampled(torch.zeros(3, 1)), rollout)


@pytest.mark.parametrize("chunk_bytes", [0, -1])
def test_a_chunk_holds_something(chunk_bytes: int) -> None:
    with pytest.raises(OpdError, match="chunk_bytes"):
        build({"name": "forward_kl"}, chunk_bytes=chunk_bytes)


def test_one_token_of_either_side_may_be_renormalised() -> None:
    support = {"name": "top_k", "k": 1, "tail": "renormalize"}
    with pytest.raises(OpdError, match="not valid"):
        build({"name": "forward_kl", "support": support})
    union = build({"name": "forward_kl", "support": {**support, "of": "union"}})
    student, teacher = torch.tensor([[2.0, 0.0, 0.0]]), torch.tensor([[0.0, 2.0, 0.0]])
    assert union.tokens(student, Full.from_logits(teacher)).values.item() > 0.1


def test_top_k_scores_that_name_a_token_twice_are_refused() -> None:
    loss = build({"name": "forward_kl", "support": {"name": "top_k", "k": 2}})
    teacher = TopK(torch.tensor([[0, 1], [3, 3], [4, 2]]), torch.full((3, 2), -1.0))
    with pytest.raises(OpdError, match="twice in one row"):
        loss.tokens(torch.zeros(3, 5), teacher)
