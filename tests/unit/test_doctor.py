"""The doctor passes a sound run, leaves it untouched, and names each fault that is planted."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from torch import Tensor
from typer.testing import CliRunner

import tiny
from opd import forward
from opd.cli.doctor import doctor
from opd.config.schema import Recipe
from opd.data.render import RenderFacts
from opd.diagnose import probe as probe_module
from opd.diagnose.checks import CHECKS, forwards, memory, tokens
from opd.diagnose.diagnosis import CheckResult, Diagnosis
from opd.diagnose.doctor import examine, refuse_if_failed
from opd.errors import OpdError
from opd.loss import Full
from opd.training import student as student_module
from opd.training.assemble import Parts, assemble
from opd.training.distributed import Ranks
from opd.training.learner import Learner
from opd.training.loop import train_step
from opd.types import Completion, PromptPair, Rollout

CPU = torch.device("cpu")
Build = Callable[..., Parts]

MIX_PARTS = [
    {"loss": {"name": "skew_kl"}, "weight": 0.5},
    {"loss": {"name": "sampled_reverse_kl"}, "weight": 0.5},
    {"loss": {"name": "sft"}, "weight": 0.1},
]
ROWS = [
    {"problem": "What is 8 times 3?", "solution": "Eight times three is 24.", "answer": "24"},
    {
        "problem": "Add 12 and 35, then subtract 9, then add one more.",
        "solution": "12 + 35 = 47, 38, 39.",
        "answer": "39",
    },
    {"problem": "40 - 9?", "solution": "31", "answer": "31"},
    {"problem": "What is the answer to the question of the user?", "solution": "The answer is 24.", "answer": "24"},
]


@pytest.fixture
def build(tiny_model_folder: Path, tmp_path: Path) -> Build:
    """Parts of a run of the tiny model; keyword arguments are sections of the recipe that replace the defaults."""

    def build(**sections: Any) -> Parts:
        data = tmp_path / "problems.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
        recipe: dict[str, Any] = {
            "name": "sick",
            "student": {"model": str(tiny_model_folder), "dtype": "float32", "adapter": {"name": "lora", "r": 4}},
            "data": {"train": {"name": "file", "path": str(data)}},
            "rollout": {"max_new_tokens": 8},
            "train": {"num_steps": 2, "num_problems_per_step": 2, "learning_rate": 1e-2},
        }
        return assemble(Recipe.model_validate({**recipe, **sections}), CPU)

    return build


def student(folder: Path, **keys: Any) -> dict[str, Any]:
    return {"model": str(folder), "dtype": "float32", **keys}


def named(diagnosis: Diagnosis) -> dict[str, str]:
    """Name -> status of every check that did not pass."""
    return {check.name: check.status for check in diagnosis.checks if check.status != "pass"}


def result(diagnosis: Diagnosis, name: str) -> CheckResult:
    return next(check for check in diagnosis.checks if check.name == name)


# ---- a sound run ----------------------------------------------------------------------------------------------------


def test_a_sound_run_passes_every_check(build: Build, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    diagnosis = examine(build(), folder=tmp_path)
    assert named(diagnosis) == {}
    assert len(diagnosis.checks) == len(CHECKS)
    refuse_if_failed(diagnosis)
    assert "doctor: 14 passed, 0 warnings, 0 failed" in capsys.readouterr().out

    written = json.loads((tmp_path / "doctor.json").read_text())
    assert [check["name"] for check in written["checks"]] == [check.name for check in diagnosis.checks]
    assert written["num_samples"] == 4
    assert written["num_tokens"] == diagnosis.num_tokens > 4


@pytest.mark.parametrize(
    "sections",
    [
        {"teacher": {"name": "self", "weights": {"name": "live"}}},
        {"teacher": {"name": "self", "weights": {"name": "ema"}}},
        {"loss": {"name": "reverse_kl", "temperature": 2.0}},
        {"loss": {"name": "jsd", "clip": {"name": "weight", "max": 1.0}}},
        {"loss": {"name": "sampled_reverse_kl", "discount": 0.5}},
        {"loss": {"name": "sampled_reverse_kl", "group_baseline": True}, "rollout": {"num_samples": 2}},
        {"loss": {"name": "forward_kl", "reduction": "sequence", "mask": {"first": 2, "skip_boundary": True}}},
        {"loss": {"name": "reverse_kl", "mask": {"teacher_entropy": {"min": 3.9}, "skip_special_tokens": True}}},
        {"loss": {"name": "mix", "parts": MIX_PARTS, "mask": {"student_entropy": {"max": 4.5}}}},
        {"rollout": {"max_new_tokens": 8, "temperature": 0.7, "top_k": 20, "top_p": 0.9}},
        {"rollout": {"max_new_tokens": 8, "merge_adapter": True}},
        {"rollout": {"max_new_tokens": 1}},
    ],
    ids=lambda sections: json.dumps(next(iter(sections.values()))),
)
def test_sound_variants_pass(build: Build, sections: dict[str, Any]) -> None:
    assert named(examine(build(**sections))) == {}


@pytest.mark.parametrize("weights", ["initial", "live", "ema"])
def test_training_every_weight_passes(build: Build, tiny_model_folder: Path, weights: str) -> None:
    parts = build(
        student=student(tiny_model_folder, adapter={"name": "full"}),
        teacher={"name": "self", "weights": {"name": weights}},
    )
    assert named(examine(parts)) == {}
    assert all(parameter.grad is None for parameter in parts.student.trained().values())


def test_another_model_as_teacher_passes(build: Build, tiny_tokenizer: Any, tmp_path: Path) -> None:
    folder = tmp_path / "teacher"
    tiny.build_qwen3(tiny.padded_rows(tiny_tokenizer), seed=3).save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    teacher = {"name": "model", "model": str(folder), "dtype": "float32"}
    assert named(examine(build(teacher=teacher))) == {}


def test_bfloat16_stays_within_its_tolerances(build: Build, tiny_model_folder: Path) -> None:
    diagnosis = examine(build(student=student(tiny_model_folder, dtype="bfloat16")))
    assert not diagnosis.having("fail")
    assert result(diagnosis, "geometry").tolerance == probe_module.BFLOAT16.kl


# ---- the run is left untouched ---------------------------------------------------------------------------------------


def test_weights_modes_versions_and_random_state_stay_to_the_bit(build: Build) -> None:
    parts = build()
    parts.student.model.train()
    parts.sampler.policy_version = 7
    before = {name: tensor.clone() for name, tensor in parts.student.model.state_dict().items()}
    torch.manual_seed(5)
    state = torch.get_rng_state()
    examine(parts)
    assert torch.equal(torch.get_rng_state(), state)
    assert parts.sampler.policy_version == 7
    assert all(module.training for module in parts.student.model.modules())
    after = parts.student.model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert all(parameter.grad is None for parameter in parts.student.model.parameters())


def test_the_first_step_is_the_same_with_and_without_the_doctor(build: Build, tmp_path: Path) -> None:
    def first_step(*, examined: bool) -> tuple[Any, dict[str, Tensor]]:
        parts = build(student=student(Path(recipe_model), adapter={"name": "lora", "r": 4, "dropout": 0.1}))
        if examined:
            examine(parts)
        ranks = Ranks(parts.recipe.log, tmp_path, device="cpu")
        record = train_step(parts, Learner(parts.student, parts.loss, parts.recipe, ranks), ranks, 1)
        return record, parts.student.snapshot()

    recipe_model = build().recipe.student.model
    (plain, plain_weights), (examined, examined_weights) = first_step(examined=False), first_step(examined=True)
    assert (plain.loss, plain.grad_norm, plain.samples) == (examined.loss, examined.grad_norm, examined.samples)
    assert all(torch.equal(plain_weights[name], examined_weights[name]) for name in plain_weights)


# ---- refusing --------------------------------------------------------------------------------------------------------


def test_a_failure_refuses_the_run_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    checks = [
        CheckResult("geometry", (2,), 0.06, 1e-5, "fail", "largest KL [nats]", "Use other attention."),
        CheckResult("template", (4,), "fine", None, "pass", "student ...'[/INST]'"),
        CheckResult("expected memory", (), float("nan"), 1.0, "warn", "unknown", "Look."),
    ]
    with pytest.raises(OpdError, match="refuses this run: geometry") as caught:
        refuse_if_failed(Diagnosis(checks, 4, 20, 1.0))
    assert "0.06" in caught.value.why
    assert "Use other attention." in caught.value.fix
    shown = capsys.readouterr().out
    assert "[/INST]" in shown  # text of prompts is no markup
    assert "1 passed, 1 warning, 1 failed" in shown


def test_a_figure_that_is_not_finite_is_null_in_json(tmp_path: Path) -> None:
    check = CheckResult("geometry", (2,), float("nan"), 1e-5, "fail", "", "")
    Diagnosis([check], 4, 20, 1.0).write(tmp_path / "doctor.json")
    assert json.loads((tmp_path / "doctor.json").read_text())["checks"][0]["figure"] is None


def test_warnings_do_not_refuse(build: Build) -> None:
    diagnosis = examine(build(loss={"name": "forward_kl", "clip": {"name": "per_entry", "max": 0.05}}))
    assert named(diagnosis) == {"loss and sampling": "warn"}
    assert "weight" in result(diagnosis, "loss and sampling").advice
    refuse_if_failed(diagnosis)


def test_greedy_rollouts_and_biased_ratios_are_warned_of(build: Build) -> None:
    greedy = examine(build(rollout={"max_new_tokens": 8, "temperature": 0.0}))
    assert named(greedy) == {"loss and sampling": "warn"}
    biased = build(
        rollout={"max_new_tokens": 8, "top_k": 5}, loss={"name": "sampled_reverse_kl", "importance": {"clip": 2.0}}
    )
    assert "biased" in result(examine(biased), "loss and sampling").advice


# ---- planted faults --------------------------------------------------------------------------------------------------


def test_names_a_pad_gap_between_prompt_and_completion(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = build()
    plant_pad_gap(monkeypatch)
    found = named(examine(parts))
    assert found["geometry"] == "fail"
    assert found["scored ids = sampled ids"] == "fail"


def plant_pad_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts padded to one length and completions appended, as trainers do that keep the two apart."""

    def gapped(prompts: Any, completions: Any, pad_id: int, device: torch.device) -> tuple[Tensor, Tensor]:
        longest = max(map(len, prompts))
        padded = [[*prompt, *[pad_id] * (longest - len(prompt))] for prompt in prompts]
        return forward_pad_right(padded, completions, pad_id, device)

    forward_pad_right = forward.pad_right
    monkeypatch.setattr(forward, "pad_right", gapped)


def test_names_positions_that_count_padding(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = build()
    own = forwards._left_padded

    def gapped(prompt_probe: Any) -> Tensor:
        with monkeypatch.context() as patch:
            body = forward.body_of(parts.student.model)
            plain = body.forward

            def shifted(**inputs: Any) -> Any:
                # A jump of 200 positions in the middle of each sequence: what a gap of padding does.
                later = inputs["position_ids"] > inputs["position_ids"].amax(1, keepdim=True) // 2
                return plain(**{**inputs, "position_ids": inputs["position_ids"] + 200 * later})

            patch.setattr(body, "forward", shifted)
            return own(prompt_probe)

    monkeypatch.setattr(forwards, "_left_padded", gapped)
    assert named(examine(parts))["geometry"] == "fail"


def test_names_ids_that_are_not_those_sampled(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    """The row of the prompt's last token is left out: targets and states are one apart."""

    def shifted(prompts: Any, completions: Any, pad_id: int, device: torch.device) -> tuple[Tensor, Tensor]:
        ids_BT, rows_N = own(prompts, completions, pad_id, device)
        return ids_BT, rows_N - 1

    own = forward.pad_right
    parts = build()
    monkeypatch.setattr(forward, "pad_right", shifted)
    assert named(examine(parts))["scored ids = sampled ids"] == "fail"


def test_names_targets_that_are_shifted(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    own = tokens.realised_tokens

    def shifted(*arguments: Any) -> Any:
        scored = own(*arguments)
        return replace(scored, ids_N=scored.ids_N.roll(1))

    parts = build()
    monkeypatch.setattr(tokens, "realised_tokens", shifted)
    assert named(examine(parts)) == {"scored ids = sampled ids": "fail"}


def test_names_a_stop_token_that_did_not_stop(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = build()
    own = parts.sampler.generate

    def generate(*arguments: Any, **keys: Any) -> list[Completion]:
        stop = min(parts.student.loaded.stop_ids)
        return [replace(c, ids=(*c.ids[:-2], stop, stop), finish_reason="stop") for c in own(*arguments, **keys)]

    monkeypatch.setattr(parts.sampler, "generate", generate)
    diagnosis = examine(parts)
    assert result(diagnosis, "scored ids = sampled ids").status == "fail"
    assert "stop tokens are not where" in result(diagnosis, "scored ids = sampled ids").detail


def test_names_wrong_behaviour_log_probabilities(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = build()
    own = parts.sampler.generate

    def generate(*arguments: Any, **keys: Any) -> list[Completion]:
        completions = own(*arguments, **keys)
        return [replace(c, behavior_logp=tuple(logp - 0.1 for logp in c.behavior_logp)) for c in completions]

    monkeypatch.setattr(parts.sampler, "generate", generate)
    assert named(examine(parts)) == {"sampler = learner": "fail"}


def test_names_a_sampler_that_ignores_temperature(build: Build) -> None:
    parts = build(rollout={"max_new_tokens": 8, "temperature": 0.5})
    own = parts.sampler.generate

    def generate(prompts: Any, seeds: Any, sampling: Any, **keys: Any) -> list[Completion]:
        return own(prompts, seeds, sampling.model_copy(update={"temperature": 1.0}), **keys)

    parts.sampler.generate = generate  # pyright: ignore
    assert named(examine(parts)) == {"sampler = learner": "fail"}


def test_names_a_sampler_without_the_adapter(build: Build) -> None:
    """At the start the adapter changes nothing: only the moved weights give it away."""
    parts = build()
    without = replace(parts, sampler=parts.sampler_with(parts.student.adapter_off))
    diagnosis = examine(without)
    assert named(diagnosis) == {"sampler = learner": "fail"}
    at_the_start, _, _ = result(diagnosis, "sampler = learner").detail.partition("at the start ")[2].partition(",")
    assert float(at_the_start) < 1e-4


def test_says_when_the_canary_proves_nothing(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = build()
    monkeypatch.setattr(probe_module.Probe, "moved_weights", property(lambda _: parts.student.snapshot()))
    found = named(examine(parts))
    assert found == {"sampler = learner": "warn"}


def test_names_an_adapter_that_stays_on_in_the_teacher(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def nothing(_: Any) -> Iterator[None]:
        yield

    parts = build()
    monkeypatch.setattr(student_module.Student, "adapter_off", nothing)
    assert named(examine(parts)) == {"teacher fixed": "fail"}


def test_names_a_live_teacher_that_does_not_follow(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = build(teacher={"name": "self", "weights": {"name": "live"}})
    monkeypatch.setattr(type(parts.teacher), "weights_in_place", lambda _: parts.student.adapter_off())
    assert named(examine(parts)) == {"teacher follows": "fail"}


def test_names_teacher_ids_that_are_off_by_one(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = build()
    own = parts.teacher.score

    def shifted(rollouts: list[Rollout]) -> Full:
        scores = own(rollouts)
        assert isinstance(scores, Full)
        return Full(scores.hidden_ND.roll(1, 0), scores.head)

    monkeypatch.setattr(parts.teacher, "score", shifted)
    assert named(examine(parts)) == {"teacher scores its rows": "fail"}


def test_names_a_teacher_that_is_shown_the_students_prompt(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = build()
    own = parts.teacher.score

    def blind(rollouts: list[Rollout]) -> Any:
        return own([replace(r, pair=replace(r.pair, teacher_ids=r.pair.student_ids)) for r in rollouts])

    monkeypatch.setattr(parts.teacher, "score", blind)
    assert named(examine(parts)) == {"teacher scores its rows": "fail", "teacher signal": "fail"}


def test_names_a_teacher_that_leaves_rows_out(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = build()
    own = parts.teacher.score

    def short(rollouts: list[Rollout]) -> Any:
        scores = own(rollouts)
        assert isinstance(scores, Full)
        return scores.rows(slice(1, None))

    monkeypatch.setattr(parts.teacher, "score", short)
    diagnosis = examine(parts)
    assert any("does not score every completion token" in str(check.figure) for check in diagnosis.having("fail"))


def test_names_a_context_that_teaches_nothing(build: Build) -> None:
    diagnosis = examine(build(context={"name": "none"}))
    assert named(diagnosis) == {"teacher signal": "fail"}
    assert result(diagnosis, "teacher signal").figure == 0.0


def test_names_scores_that_are_lost_on_the_way_to_the_loss(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = build()
    own = parts.loss.linear

    def deaf(hidden_ND: Tensor, head: Any, teacher: Any, rollout: Any) -> Any:
        return own(hidden_ND, head, Full(torch.ones_like(hidden_ND), head), rollout)

    monkeypatch.setattr(parts.loss, "linear", deaf)
    found = named(examine(parts))
    assert found == {"zero loss from itself": "fail", "teacher signal": "fail"}


def test_names_a_clip_that_leaves_no_gradient(build: Build) -> None:
    parts = build(loss={"name": "forward_kl", "clip": {"name": "per_token", "max": 1e-9}})
    assert named(examine(parts))["teacher signal"] == "fail"


def test_names_gates_that_leave_no_token(build: Build) -> None:
    diagnosis = examine(build(loss={"name": "forward_kl", "mask": {"student_entropy": {"min": 50.0}}}))
    assert result(diagnosis, "teacher signal").status == "fail"
    assert "loss.mask" in result(diagnosis, "teacher signal").advice


def test_names_targets_that_a_mask_shifts(build: Build) -> None:
    """A mask that leaves tokens out by closing the gap: the rows that are read no longer fit."""
    parts = build(loss={"name": "forward_kl", "mask": {"skip_boundary": True}})
    assert named(examine(parts)) == {}
    own = tokens.supervised_rows

    def shifted(*arguments: Any) -> list[int]:
        return [row - 1 for row in own(*arguments)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokens, "supervised_rows", shifted)
        assert named(examine(parts)) == {"scored ids = sampled ids": "fail"}


def test_says_what_a_mix_minimises_and_counts_what_its_mask_leaves(build: Build) -> None:
    mix = {"name": "mix", "mask": {"first": 1}}
    per_entry = {"loss": {"name": "forward_kl", "clip": {"name": "per_entry", "max": 0.05}}, "weight": 0.5}
    diagnosis = examine(build(loss={**mix, "parts": [per_entry, *MIX_PARTS[2:]]}))
    settings = result(diagnosis, "loss and sampling")
    assert settings.figure == "mix, clip per_entry"
    assert settings.status == "warn"
    assert "plus 0.1·[-log q(s_t)], s the problem's own solution" in settings.detail
    assert "4 supervised tokens of " in result(diagnosis, "scored ids = sampled ids").detail


def test_memory_counts_the_longest_solution(build: Build) -> None:
    train = {"num_steps": 2, "num_problems_per_step": 1, "learning_rate": 1e-2, "micro_batch_tokens": 1}
    sections = {"train": train, "rollout": {"max_new_tokens": 1}, "context": {"name": "answer_only"}}
    plain, mixed = build(**sections), build(**sections, loss={"name": "mix", "parts": MIX_PARTS})
    without, with_solutions = (memory.estimate(probe_module.Probe(parts, 2)) for parts in (plain, mixed))
    longest = max(len(pair.student_ids) + len(mixed.solutions[pair.problem.id]) for pair in mixed.pairs)
    prompt = max(len(pair.student_ids) for pair in mixed.pairs) + 1
    assert with_solutions.activation_bytes / without.activation_bytes == pytest.approx(longest / prompt)


def test_names_a_loss_that_pulls_the_student_from_itself(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    """Teacher and student at different temperatures, as where only one side of a loss is divided by it."""
    parts = build()
    own = parts.loss.linear

    def lopsided(hidden_ND: Tensor, head: Any, teacher: Full, rollout: Any) -> Any:
        return own(hidden_ND, head, Full(teacher.hidden_ND * 0.9, teacher.head), rollout)

    monkeypatch.setattr(parts.loss, "linear", lopsided)
    assert named(examine(parts)) == {"zero loss from itself": "fail"}


def test_names_a_head_that_is_not_the_models_own(build: Build) -> None:
    parts = build()
    parts.student.head = replace(parts.student.head, scale=0.5)
    assert named(examine(parts))["head kernel = model"] == "fail"


def test_names_rows_that_no_token_owns(build: Build) -> None:
    parts = build()
    parts.student.head = replace(parts.student.head, vocab_size=None)
    diagnosis = examine(parts)
    assert result(diagnosis, "vocabulary").status == "fail"
    assert "384 rows for a tokenizer of 320" in str(result(diagnosis, "vocabulary").figure)


def test_names_ids_past_the_vocabulary(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = build()
    own = parts.sampler.generate

    def generate(*arguments: Any, **keys: Any) -> list[Completion]:
        return [replace(c, ids=(321, *c.ids[1:])) for c in own(*arguments, **keys)]

    monkeypatch.setattr(parts.sampler, "generate", generate)
    diagnosis = examine(parts)
    assert "id 321 was sampled" in str(result(diagnosis, "vocabulary").figure)


def test_names_a_stop_id_that_would_not_stop(build: Build) -> None:
    parts = build()
    generation = parts.student.loaded.model.generation_config
    assert generation is not None
    generation.eos_token_id = [2, 0]
    diagnosis = examine(parts)
    assert named(diagnosis) == {"stop ids": "fail"}
    assert "[0]" in str(result(diagnosis, "stop ids").figure)


def test_warns_of_a_stop_id_that_cannot_be_sampled(build: Build) -> None:
    parts = build()
    parts.student.loaded = replace(parts.student.loaded, stop_ids=frozenset({2, 330}))
    assert named(examine(parts)) == {"stop ids": "warn"}


def with_pairs(parts: Parts, change: Callable[[PromptPair], PromptPair]) -> Parts:
    return replace(parts, pairs=[change(pair) for pair in parts.pairs])


def test_names_a_prompt_that_does_not_ask(build: Build) -> None:
    """The generation prompt is missing: the model would open the assistant's turn itself."""
    asking = "<|im_start|>assistant\n"

    def cut(pair: PromptPair) -> PromptPair:
        assert pair.student_text.endswith(asking)
        return replace(pair, student_text=pair.student_text.removesuffix(asking))

    found = named(examine(with_pairs(build(), cut)))
    assert found["template"] == "fail"


def test_names_prompts_whose_ids_are_not_their_text(build: Build) -> None:
    diagnosis = examine(with_pairs(build(), lambda pair: replace(pair, teacher_ids=pair.teacher_ids[1:])))
    assert named(diagnosis) == {"tokenizer round trip": "fail"}
    assert result(diagnosis, "tokenizer round trip").figure == 4.0


def test_names_a_doubled_bos(build: Build) -> None:
    parts = build()
    parts.student.loaded.tokenizer.bos_token = "<|endoftext|>"
    bos = parts.student.loaded.tokenizer.bos_token_id
    doubled = with_pairs(parts, lambda pair: replace(pair, student_ids=(bos, bos, *pair.student_ids)))
    diagnosis = examine(doubled)
    assert result(diagnosis, "template").status == "fail"
    assert "BOS twice" in str(result(diagnosis, "template").figure)


def test_warns_when_one_side_alone_prefills_thinking(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = build()
    facts = parts.renderer.facts
    thinking = RenderFacts(replace(facts.student, thinking="open"), facts.teacher)
    monkeypatch.setattr(type(parts.renderer), "facts", property(lambda _: thinking))
    diagnosis = examine(parts)
    assert named(diagnosis) == {"template": "warn"}
    assert "open for the student, absent for the teacher" in str(result(diagnosis, "template").figure)


def test_names_memory_that_is_not_there(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = build()
    monkeypatch.setattr(memory, "free_bytes", lambda _: 1000)
    assert named(examine(parts)) == {"expected memory": "fail"}
    probe = probe_module.Probe(parts, 2)
    needed = memory.estimate(probe)
    trained = sum(parameter.numel() for parameter in parts.student.trained().values())
    assert needed.optimizer_bytes == 3 * 4 * trained
    monkeypatch.setattr(memory, "free_bytes", lambda _: needed.optimizer_bytes + 1)
    assert named(examine(parts)) == {"expected memory": "warn"}


# ---- the command and a real model -----------------------------------------------------------------------------------


def test_the_command_exits_with_1_on_a_failure(build: Build, tmp_path: Path) -> None:
    parts = build()
    recipe = parts.recipe.model_dump(mode="json", exclude_none=True)
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))  # JSON is YAML
    app = typer.Typer()
    app.command()(doctor)
    arguments = [str(tmp_path / "recipe.yaml"), "--device", "cpu", "--out", str(tmp_path / "out")]
    sound = CliRunner().invoke(app, arguments)
    assert sound.exit_code == 0, sound.output
    assert "14 passed" in sound.output
    assert (tmp_path / "out" / "doctor.json").exists()
    sick = CliRunner().invoke(app, [*arguments, "context.name=none"])
    assert sick.exit_code == 1, sick.output


@pytest.mark.slow
@pytest.mark.real_model
def test_smollm2_passes_in_bfloat16_and_a_pad_gap_does_not(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = build(student={"model": "package:smollm2-135m-instruct"})
    assert named(examine(parts)) == {}
    plant_pad_gap(monkeypatch)
    assert result(examine(parts), "geometry").status == "fail"


# ---- small parts -----------------------------------------------------------------------------------------------------


def test_kl_by_hand() -> None:
    p, q = torch.tensor([[0.5, 0.5, 0.0]]), torch.tensor([[0.25, 0.25, 0.5]])
    assert probe_module.kl(p.log(), q.log()).item() == pytest.approx(0.6931471805599453)
    assert probe_module.kl(p.log(), p.log()).item() == 0.0


def test_not_a_number_is_never_within_tolerance() -> None:
    nan_N = torch.tensor([0.0, float("nan")])
    assert not probe_module.FLOAT32.admit_kl(nan_N)
    assert not probe_module.FLOAT32.admit_logp(nan_N)


def test_prompts_are_chosen_from_short_to_long_and_repeated_when_few(build: Build) -> None:
    pairs = build().pairs
    lengths = [len(pair.student_ids) for pair in probe_module.choose_pairs(pairs, 3)]
    assert lengths[0] == min(len(pair.student_ids) for pair in pairs)
    assert lengths[-1] == max(len(pair.student_ids) for pair in pairs)
    assert len(probe_module.choose_pairs(pairs[:1], 4)) == 4
