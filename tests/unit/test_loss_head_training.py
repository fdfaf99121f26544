"""A student that trains its head by an adapter: its step, teachers and sampler have the model's own logits.

N completion tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import opd
import tiny
from heads import move
from opd.config.load import load_recipe
from opd.config.schema import (
    EmaWeights,
    InitialWeights,
    LiveWeights,
    LogConfig,
    SamplingConfig,
    StudentConfig,
    TeacherWeights,
)
from opd.errors import OpdError
from opd.loss import Full, RolloutTokens, build
from opd.loss.reduce import global_mean
from opd.rollout.hf import HfSampler
from opd.teacher import SelfTeacher
from opd.training.distributed import Ranks
from opd.training.learner import Learner
from opd.training.student import Student, load_student
from opd.types import Alignment, Completion, Problem, PromptPair, Rollout

CPU = torch.device("cpu")
TARGETS = ("lm_head", "q_proj", "v_proj")
PAIRS = (((5, 6), (7, 8, 9), (20, 21, 22)), ((5,), (10, 11, 12, 13), (30, 31)))
ROLLOUTS = [
    Rollout(
        PromptPair(Problem(f"p{number}", "?"), student_ids, teacher_ids, "", ""),
        Completion(ids, (-1.0,) * len(ids), (0.0,) * len(ids), "length"),
        0,
        0,
    )
    for number, (student_ids, teacher_ids, ids) in enumerate(PAIRS)
]
ALIGNMENTS = [Alignment(tuple(range(len(ids))), tuple(range(len(ids)))) for *_, ids in PAIRS]


@pytest.fixture(params=["untied", "tied"], scope="module")
def folder(request: pytest.FixtureRequest, tiny_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp(request.param)
    rows = tiny.padded_rows(tiny_tokenizer)
    model = tiny.build_qwen3(rows) if request.param == "tied" else tiny.build_llama(rows)
    model.save_pretrained(place)
    tiny_tokenizer.save_pretrained(place)
    return place


def student_of(folder: Path, **adapter: Any) -> Student:
    fields = {"name": "lora", "r": 4, "alpha": 8, "target_modules": TARGETS} | adapter
    config = StudentConfig.model_validate({"model": str(folder), "dtype": "float32", "adapter": fields})
    return load_student(config, device=CPU, seed=1)


def recipe_of(folder: Path, run: Path, **changes: dict[str, Any]) -> dict[str, Any]:
    sections: dict[str, dict[str, Any]] = {
        "student": {"adapter": {"name": "lora", "r": 4, "target_modules": list(TARGETS)}},
        "data": {"train": {"name": "task", "task": "products"}},
        "rollout": {"max_new_tokens": 4},
        "train": {"num_steps": 2, "num_problems_per_step": 2, "learning_rate": 0.01},
    }
    sections["student"] = {"model": str(folder), "dtype": "float32"} | sections["student"]
    for name, fields in changes.items():
        sections[name] = sections.get(name, {}) | fields
    return {"name": "head", "folder": str(run), **sections}


def own_logits(student: Student, side: str) -> Tensor:
    """[N, V] of the model's own forward, one sequence at a time, under the weights that it holds."""
    rows = []
    for rollout in ROLLOUTS:
        prompt = rollout.pair.student_ids if side == "student" else rollout.pair.teacher_ids
        ids = [*prompt, *rollout.completion.ids]
        logits = student.model(input_ids=torch.tensor([ids]), use_cache=False).logits
        rows.append(logits[0, len(prompt) - 1 : -1, : student.loaded.vocab_size])
    return torch.cat(rows)


def score(teacher: SelfTeacher) -> Full:
    scores = teacher.score(ROLLOUTS)
    assert isinstance(scores, Full)
    return scores


def logits(scores: Full) -> Tensor:
    assert scores.head is not None
    return scores.head.logits(scores.hidden_ND)


@pytest.mark.parametrize("name", ["forward_kl", "sampled_reverse_kl"])
def test_a_step_moves_the_head_by_the_gradient_through_the_models_own_logits(
    folder: Path, tmp_path: Path, name: str
) -> None:
    student, loss = student_of(folder), build({"name": name})
    move(student.model)
    scores = score(SelfTeacher(student, InitialWeights(), max_tokens=1000))
    # Micro-batches of one sequence, and a step that is the gradient itself.
    recipe = recipe_of(
        folder,
        tmp_path,
        loss={"name": name},
        train={"learning_rate": 1.0, "micro_batch_tokens": 1, "max_grad_norm": None},
    )
    learner = Learner(student, loss, load_recipe(recipe).recipe, Ranks(LogConfig(), tmp_path, device="cpu"))
    learner.optimizer = torch.optim.SGD(list(learner.parameters.values()), lr=1.0)

    student.model.eval()
    ids = [token for rollout in ROLLOUTS for token in rollout.completion.ids]
    tokens = RolloutTokens(torch.tensor(ids), torch.full((5,), -1.0), torch.tensor([0, 0, 0, 1, 1]))
    values_N = loss.tokens(own_logits(student, "student"), Full.from_logits(logits(scores)), tokens).values
    share = global_mean(values_N, len(values_N))
    assert share is not None
    expected = dict(zip(student.trained(), torch.autograd.grad(share, list(student.trained().values())), strict=True))

    before = student.snapshot()
    update = learner.update(1, ROLLOUTS, ALIGNMENTS, scores)
    assert update.loss == pytest.approx(share.item(), rel=1e-5)
    for key, parameter in student.trained().items():
        moved = (before[key] - parameter.detach()) / update.learning_rate
        # Of the largest: a difference of two float32 weights resolves the gradients no further.
        assert (moved - expected[key]).abs().max() <= 1e-5 * max(expected[key].abs().max(), 1.0), key
        assert expected[key].abs().max() > 1e-2
    assert sum("lm_head" in key for key in expected) == 2


WEIGHTS: dict[str, TeacherWeights] = {
    "initial": InitialWeights(),
    "live": LiveWeights(name="live"),
    "ema": EmaWeights(name="ema", decay=0.75),
}


@pytest.mark.parametrize("weights", WEIGHTS)
def test_a_self_teacher_scores_with_the_models_own_logits_under_its_weights(folder: Path, weights: str) -> None:
    student = student_of(folder)
    move(student.model)
    teacher = SelfTeacher(student, WEIGHTS[weights], max_tokens=1)
    start = student.snapshot()
    move(student.model)
    live = student.snapshot()
    teacher.after_update()
    scores = score(teacher)

    student.model.eval()
    averaged = {name: 0.75 * start[name] + 0.25 * live[name] for name in live}
    states: dict[str, Callable[[], AbstractContextManager[None]]] = {
        "initial": student.adapter_off,
        "live": nullcontext,
        "ema": lambda: student.using(averaged),
    }
    own = {}
    with torch.no_grad():
        for name, state in states.items():
            with state():
                own[name] = own_logits(student, "teacher")
    for name, own_NV in own.items():
        difference = (logits(scores) - own_NV).abs().max()
        assert difference < 1e-4 if name == weights else difference > 0.1, name
    # What was scored stays so, whatever the parameters point to afterwards.
    kept = logits(scores)
    with student.using({name: torch.zeros_like(tensor) for name, tensor in live.items()}):
        assert torch.equal(logits(scores), kept)
    assert not kept.requires_grad


@pytest.mark.parametrize("state", ["plain", "merged", "adapter_off"])
def test_the_sampler_draws_from_the_models_own_logits_under_its_weights(folder: Path, state: str) -> None:
    student = student_of(folder)
    embedding: Any = student.loaded.model.get_input_embeddings().weight
    sampler = HfSampler(
        student.model,
        stop_ids=student.loaded.stop_ids,
        pad_id=student.loaded.pad_id,
        vocab_size=student.loaded.vocab_size,
        dtype=torch.float32,
        weights=nullcontext if state == "plain" else getattr(student, state),
    )
    move(student.model)  # after the sampler was built: it follows
    before = {name: tensor.clone() for name, tensor in student.model.state_dict().items()}
    prompts = [(5, 6, 7), (8, 9)]
    completions = sampler.generate(prompts, [1, 2], SamplingConfig(max_new_tokens=6))

    student.model.eval()
    context = student.adapter_off() if state == "adapter_off" else nullcontext()
    with torch.no_grad(), context:
        for prompt, completion in zip(prompts, completions, strict=True):
            ids = torch.tensor([[*prompt, *completion.ids]])
            own = student.model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
            own_logp = own[:, : student.loaded.vocab_size].log_softmax(-1)
            expected = own_logp.gather(1, torch.tensor(completion.ids)[:, None])[:, 0]
            torch.testing.assert_close(torch.tensor(completion.behavior_logp), expected, atol=1e-3, rtol=1e-3)
    assert all(torch.equal(before[name], tensor) for name, tensor in student.model.state_dict().items())
    assert student.loaded.model.get_input_embeddings().weight is embedding
    assert len(student.head.low_rank) == 1


def test_merging_a_tied_head_leaves_the_embedding_alone(folder: Path) -> None:
    student = student_of(folder, target_modules=("lm_head",))
    move(student.model)
    embedding: nn.Module = student.loaded.model.get_input_embeddings()
    ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        vectors = embedding(ids)
        own = student.model(input_ids=ids, use_cache=False).logits
        with student.merged():
            assert not student.head.low_rank
            assert torch.equal(embedding(ids), vectors)
            merged = student.model(input_ids=ids, use_cache=False).logits
    torch.testing.assert_close(merged, own, atol=1e-4, rtol=1e-4)


def test_dropout_on_the_head_is_refused_with_the_option_to_change(folder: Path) -> None:
    with pytest.raises(OpdError, match="cannot be used") as error:
        student_of(folder, dropout=0.1)
    assert "student.adapter.dropout=0" in error.value.fix


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("merge", [False, True])
def test_a_run_with_an_adapter_on_the_head_passes_the_doctor_trains_and_saves_it(
    folder: Path, tmp_path: Path, merge: bool, dtype: str
) -> None:
    recipe = recipe_of(folder, tmp_path / "run", rollout={"merge_adapter": merge}, student={"dtype": dtype})
    result = opd.train(recipe, device="cpu", command="opd train head.yaml")
    saved = load_file(next(Path(result.final).glob("*.safetensors")))
    ups = {name: tensor for name, tensor in saved.items() if "lm_head.lora_B" in name}
    assert len(ups) == 1
    assert all(tensor.any() for tensor in ups.values())
    assert not any(name.endswith("lm_head.weight") for name in saved)
