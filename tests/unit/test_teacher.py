"""Teachers: the fixed one is fixed, the moving ones move as stated, and nothing they do is seen by the student."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny
from opd.config.schema import EmaWeights, InitialWeights, LiveWeights, ModelConfig, ModelTeacherConfig, StudentConfig
from opd.errors import OpdError
from opd.teacher import ModelTeacher, SelfTeacher
from opd.training.assemble import assemble
from opd.training.student import Student, load_student
from opd.types import Completion, Problem, PromptPair, Rollout

CPU = torch.device("cpu")
LORA = {"name": "lora", "r": 4, "dropout": 0.5}


def student(folder: Path, adapter: dict[str, Any] = LORA) -> Student:
    config = StudentConfig.model_validate({"model": str(folder), "dtype": "float32", "adapter": adapter})
    return load_student(config, device=CPU, seed=1)


def rollouts() -> list[Rollout]:
    pair = PromptPair(Problem("p", "?"), (5, 6), (7, 8, 9), "", "")
    other = PromptPair(Problem("q", "?"), (5,), (10, 11, 12, 13), "", "")
    ids = [(20, 21, 22), (30, 31)]
    return [
        Rollout(p, Completion(i, (0.0,) * len(i), (0.0,) * len(i), "length"), 0, 0)
        for p, i in zip((pair, other), ids, strict=True)
    ]


def move(student: Student, size: float = 0.1) -> None:
    torch.manual_seed(7)
    with torch.no_grad():
        for parameter in student.trained().values():
            parameter.add_(torch.randn_like(parameter) * size)


def logits(teacher: SelfTeacher | ModelTeacher) -> torch.Tensor:
    scores = teacher.score(rollouts())
    assert scores.head is not None
    return scores.head.logits(scores.hidden_ND)


@pytest.mark.parametrize("adapter", [LORA, {"name": "full"}])
def test_the_initial_teacher_is_bit_equal_whatever_the_student_learns(adapter: dict[str, Any], tiny_model_folder: Path):
    learner = student(tiny_model_folder, adapter)
    teacher = SelfTeacher(learner, InitialWeights(), max_tokens=1000)
    before = logits(teacher)
    move(learner)
    assert torch.equal(logits(teacher), before)
    assert not torch.equal(logits(SelfTeacher(learner, LiveWeights(name="live"), max_tokens=1000)), before)


def test_scores_are_those_of_the_model_after_the_teachers_prompt(tiny_model_folder: Path):
    learner = student(tiny_model_folder)
    found = logits(SelfTeacher(learner, InitialWeights(), max_tokens=1))
    with learner.adapter_off(), torch.no_grad():
        learner.model.eval()
        rows = []
        for rollout in rollouts():
            ids = [*rollout.pair.teacher_ids, *rollout.completion.ids]
            own = learner.model(torch.tensor([ids])).logits[0]
            rows.append(own[len(rollout.pair.teacher_ids) - 1 : -1, : learner.loaded.vocab_size])
    torch.testing.assert_close(found, torch.cat(rows), atol=1e-5, rtol=1e-5)


def test_scoring_leaves_the_students_mode_and_keeps_no_graph(tiny_model_folder: Path):
    learner = student(tiny_model_folder)
    learner.model.train()
    scores = SelfTeacher(learner, LiveWeights(name="live"), max_tokens=1000).score(rollouts())
    assert learner.model.training
    assert scores.head is not None
    assert not scores.hidden_ND.requires_grad
    assert not scores.head.weight.requires_grad


def test_dropout_is_off_while_a_live_teacher_scores(tiny_model_folder: Path):
    learner = student(tiny_model_folder)
    move(learner)
    learner.model.train()
    teacher = SelfTeacher(learner, LiveWeights(name="live"), max_tokens=1000)
    assert torch.equal(logits(teacher), logits(teacher))


@pytest.mark.parametrize("adapter", [LORA, {"name": "full"}])
def test_the_average_starts_from_the_initial_weights_and_moves_as_stated(
    adapter: dict[str, Any], tiny_model_folder: Path
):
    learner = student(tiny_model_folder, adapter)
    initial = learner.snapshot()
    teacher = SelfTeacher(learner, EmaWeights(name="ema", decay=0.75), max_tokens=1000)
    first = logits(teacher)
    move(learner)
    live = learner.snapshot()
    assert torch.equal(logits(teacher), first)  # before the first step: the initial weights
    teacher.after_update()
    for name, tensor in teacher.state().items():
        torch.testing.assert_close(tensor, 0.75 * initial[name] + 0.25 * live[name])
    assert all(torch.equal(parameter, live[name]) for name, parameter in learner.trained().items())


def test_the_average_survives_a_checkpoint(tiny_model_folder: Path):
    learner = student(tiny_model_folder)
    teacher = SelfTeacher(learner, EmaWeights(name="ema"), max_tokens=1000)
    move(learner)
    teacher.after_update()
    saved = copy.deepcopy(dict(teacher.state()))
    other = SelfTeacher(student(tiny_model_folder), EmaWeights(name="ema"), max_tokens=1000)
    other.load_state(saved)
    assert torch.equal(logits(other), logits(teacher))
    with pytest.raises(OpdError, match="does not fit"):
        SelfTeacher(learner, LiveWeights(name="live"), max_tokens=1000).load_state(saved)


def test_a_copy_that_does_not_fit_is_refused(tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch):
    import psutil

    learner = student(tiny_model_folder, {"name": "full"})

    class Full:
        available = 1000

    monkeypatch.setattr(psutil, "virtual_memory", Full)
    with pytest.raises(OpdError, match="does not fit into memory"):
        SelfTeacher(learner, InitialWeights(), max_tokens=1000)


def test_another_model_teaches(tiny_model_folder: Path, tmp_path: Path, tiny_tokenizer: Any):
    other = tiny.build_qwen3(tiny.padded_rows(tiny_tokenizer) + 64, seed=9)  # more padding: the same vocabulary
    other.save_pretrained(tmp_path / "other")
    tiny_tokenizer.save_pretrained(tmp_path / "other")
    config = ModelTeacherConfig(name="model", model=str(tmp_path / "other"), dtype="float32")
    learner = student(tiny_model_folder)
    teacher = ModelTeacher(config, vocab_size=learner.loaded.vocab_size, device=CPU, max_tokens=1000)
    assert logits(teacher).shape == (5, learner.loaded.vocab_size)
    assert not any(parameter.requires_grad for parameter in teacher.loaded.model.parameters())


def test_another_vocabulary_is_refused_before_any_model_is_loaded(tiny_model_folder: Path, tmp_path: Path):
    from opd.config.load import load_recipe

    other = tmp_path / "other"
    other.mkdir()
    for file in tiny_model_folder.iterdir():
        if file.suffix != ".safetensors":  # no weights: loading it would fail another way
            (other / file.name).write_bytes(file.read_bytes())
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = list(vocabulary)[10:12]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    recipe = {
        "name": "t",
        "student": {"model": str(tiny_model_folder)},
        "teacher": {"name": "model", "model": str(other)},
        "data": {"train": {"name": "task", "task": "products"}},
        "train": {"num_steps": 1, "num_problems_per_step": 1, "learning_rate": 1e-3},
    }
    with pytest.raises(OpdError, match="vocabularies differ"):
        assemble(load_recipe(recipe).recipe, CPU)


def test_full_fine_tuning_teaches_the_embedding_of_a_stop_token_that_is_also_the_padding(tiny_model_folder: Path):
    learner = student(tiny_model_folder, {"name": "full"})
    stop = learner.loaded.pad_id
    assert stop in learner.loaded.stop_ids
    hidden = learner.module(torch.tensor([[5, stop, 6]]), torch.tensor([2]))
    hidden.square().sum().backward()
    embedding = learner.loaded.model.get_input_embeddings().weight
    assert embedding.grad is not None
    assert embedding.grad[stop].abs().max() > 0


def test_full_fine_tuning_keeps_float32_weights_under_bfloat16_compute(tiny_model_folder: Path):
    config = StudentConfig.model_validate({"model": str(tiny_model_folder), "adapter": {"name": "full"}})
    learner = load_student(config, device=CPU, seed=1)
    assert learner.dtype == torch.bfloat16
    assert {parameter.dtype for parameter in learner.trained().values()} == {torch.float32}
    assert ModelConfig(model="x").dtype == "bfloat16"
