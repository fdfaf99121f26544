"""The loop on a tiny model: it learns, repeats and resumes to the bit, and what it saves loads elsewhere."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import opd
from opd.config.load import load_recipe
from opd.errors import OpdError
from opd.training import loop
from opd.training.assemble import assemble
from opd.training.distributed import Ranks
from opd.training.learner import Learner
from opd.training.loop import step_pairs, train_step

CPU = torch.device("cpu")


def recipe(model: Path, folder: Path, **changes: Any) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "name": "tiny",
        "folder": str(folder),
        "seed": 3,
        "student": {"model": str(model), "dtype": "float32", "adapter": {"name": "lora", "r": 4, "alpha": 8}},
        "data": {"train": {"name": "task", "task": "products"}},
        "rollout": {"max_new_tokens": 6, "num_samples": 2},
        "loss": {"name": "forward_kl"},
        "train": {"num_steps": 4, "num_problems_per_step": 3, "learning_rate": 0.01, "checkpoint_every_num_steps": 2},
    }
    for name, value in changes.items():
        fields[name] = {**fields.get(name, {}), **value} if isinstance(value, dict) else value
    return fields


def run(fields: dict[str, Any], **options: Any) -> loop.RunResult:
    return opd.train(fields, skip_doctor=True, device="cpu", command="opd train tiny.yaml", **options)


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "steps.jsonl").read_text().splitlines()]


def final_weights(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(next((folder / "final").glob("*.safetensors")))


TEACHERS = {
    "initial": {"name": "self"},
    "live": {"name": "self", "weights": {"name": "live"}},
    "ema": {"name": "self", "weights": {"name": "ema", "decay": 0.5}},
}

ADAPTERS = {"lora": {"name": "lora", "r": 4, "dropout": 0.1}, "full": {"name": "full"}}  # dropout: its masks resume too


def test_it_learns_the_teachers_distribution(tiny_model_folder: Path, tmp_path: Path):
    result = run(recipe(tiny_model_folder, tmp_path / "run", train={"num_steps": 25, "num_problems_per_step": 6}))
    history = losses(result.folder)
    assert sum(history[-5:]) < 0.75 * sum(history[:5])


@pytest.mark.parametrize("teacher", TEACHERS)
@pytest.mark.parametrize("adapter", ADAPTERS)
def test_resuming_equals_never_having_stopped(
    teacher: str, adapter: str, tiny_model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    changes = {"teacher": TEACHERS[teacher], "student": {"adapter": ADAPTERS[adapter]}}
    whole = run(recipe(tiny_model_folder, tmp_path / "whole", **changes))

    fields = recipe(tiny_model_folder, tmp_path / "parts", **changes)
    real_step = train_step

    def dies_in_step_4(parts: Any, learner: Any, ranks: Any, step: int) -> Any:
        if step == 4:
            raise RuntimeError("power cut")
        return real_step(parts, learner, ranks, step)

    monkeypatch.setattr(loop, "train_step", dies_in_step_4)
    with pytest.raises(RuntimeError, match="power cut"):
        run(fields)
    monkeypatch.undo()
    assert len(losses(tmp_path / "parts")) == 3
    resumed = run(fields, resume=True)

    assert losses(resumed.folder) == losses(whole.folder)
    expected, found = final_weights(whole.folder), final_weights(resumed.folder)
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_ctrl_c_saves_says_how_to_go_on_and_loses_nothing(
    tiny_model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    whole = run(recipe(tiny_model_folder, tmp_path / "whole"))
    fields = recipe(tiny_model_folder, tmp_path / "parts", train={"checkpoint_every_num_steps": None})
    real_step = train_step

    def interrupted_in_step_3(parts: Any, learner: Any, ranks: Any, step: int) -> Any:
        if step == 3:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGTERM)  # what a launcher adds is not a second Ctrl-C
        return real_step(parts, learner, ranks, step)

    monkeypatch.setattr(loop, "train_step", interrupted_in_step_3)
    result = run(fields)
    assert result.interrupted
    assert result.final is None
    assert "opd train tiny.yaml --resume" in capsys.readouterr().out
    monkeypatch.undo()
    assert losses(run(fields, resume=True).folder) == losses(whole.folder)


def test_a_second_ctrl_c_stops_at_once(tiny_model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def interrupted_twice(*_: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(loop, "train_step", interrupted_twice)
    # A shell starts background jobs, and so perhaps these tests, with SIGINT ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            run(recipe(tiny_model_folder, tmp_path / "run"))
    finally:
        signal.signal(signal.SIGINT, before)


def test_trackers_get_every_step(tiny_model_folder: Path, tmp_path: Path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    result = run(recipe(tiny_model_folder, tmp_path / "run", log={"trackers": ["tensorboard"]}))
    events = EventAccumulator(str(next(result.folder.rglob("events.out.*")).parent))
    events.Reload()
    assert [event.step for event in events.Scalars("loss")] == [1, 2, 3, 4]
    assert [event.value for event in events.Scalars("loss")] == pytest.approx(losses(result.folder))


@pytest.mark.parametrize("policy", ["stop", "skip"])
def test_a_gradient_that_is_not_finite_names_its_problem_or_is_skipped(
    policy: str, tiny_model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from opd.teacher import SelfTeacher

    real_score = SelfTeacher.score

    def broken(self: SelfTeacher, rollouts: Any) -> Any:
        scores = real_score(self, rollouts)
        scores.hidden_ND[0] = float("nan")
        return scores

    monkeypatch.setattr(SelfTeacher, "score", broken)
    fields = recipe(tiny_model_folder, tmp_path / "run", train={"on_nonfinite": policy, "num_steps": 1})
    if policy == "stop":
        with pytest.raises(OpdError, match="not finite") as caught:
            run(fields)
        assert caught.value.why.count("products:") == 1
        return
    result = run(fields)
    (line,) = [json.loads(line) for line in (result.folder / "steps.jsonl").read_text().splitlines()]
    assert line["skipped"] is True
    assert line["loss"] is None
    assert all((tensor == 0).all() for name, tensor in final_weights(result.folder).items() if "lora_B" in name)


def test_a_damaged_newest_checkpoint_is_passed_over(
    tiny_model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    fields = recipe(tiny_model_folder, tmp_path / "run")
    whole = losses(run(fields).folder)
    newest = tmp_path / "run" / "checkpoints" / "step-000004" / "trained.safetensors"
    damaged = bytearray(newest.read_bytes())
    damaged[-1] ^= 1
    newest.write_bytes(damaged)
    run(fields, resume=True)
    assert "step-000004" in capsys.readouterr().err
    assert losses(tmp_path / "run") == whole


def test_damaged_checkpoints_do_not_push_out_whole_ones(tiny_model_folder: Path, tmp_path: Path):
    changes = {"num_checkpoints_kept": 1, "checkpoint_every_num_steps": 1}
    run(recipe(tiny_model_folder, tmp_path / "run", train=changes))
    (tmp_path / "run" / "checkpoints" / "step-000004" / "state.json").write_text("[]")
    run(recipe(tiny_model_folder, tmp_path / "run", train={**changes, "num_steps": 2}), resume=True)
    assert (tmp_path / "run" / "checkpoints" / "step-000002").is_dir()


@pytest.mark.parametrize(
    ("key", "changes"),
    [
        ("train.learning_rate", {"train": {"learning_rate": 0.02}}),
        ("loss.name", {"loss": {"name": "reverse_kl"}}),
        ("student.adapter.r", {"student": {"adapter": {"name": "lora", "r": 8}}}),
        ("training prompts", {"data": {"train": {"name": "task", "task": "sums"}}}),
        ("seed", {"seed": 4}),
    ],
)
def test_going_on_with_another_recipe_is_refused(
    key: str, changes: dict[str, Any], tiny_model_folder: Path, tmp_path: Path
):
    run(recipe(tiny_model_folder, tmp_path / "run", train={"num_steps": 1}))
    before = (tmp_path / "run" / "resolved.yaml").read_text()
    with pytest.raises(OpdError, match="another run") as caught:
        run(recipe(tiny_model_folder, tmp_path / "run", **changes), resume=True)
    assert f"{key}: " in caught.value.why
    assert (tmp_path / "run" / "resolved.yaml").read_text() == before
    assert len(losses(tmp_path / "run")) == 1


def test_going_on_with_other_weights_is_refused(tiny_model_folder: Path, tmp_path: Path):
    import shutil

    import tiny
    from opd.models import load_tokenizer

    run(recipe(tiny_model_folder, tmp_path / "run", train={"num_steps": 1}))
    moved = shutil.copytree(tiny_model_folder, tmp_path / "moved")
    run(recipe(moved, tmp_path / "run", train={"num_steps": 2}), resume=True)  # the same weights in another place
    tokenizer = load_tokenizer(load_recipe(recipe(moved, tmp_path)).recipe.student)
    tiny.build_llama(tiny.padded_rows(tokenizer), seed=1).save_pretrained(moved)
    with pytest.raises(OpdError, match="another run") as caught:
        run(recipe(moved, tmp_path / "run"), resume=True)
    assert "student's weights" in caught.value.why


def test_a_run_killed_before_its_last_files_is_finished_by_resuming(tiny_model_folder: Path, tmp_path: Path):
    import shutil

    fields = recipe(tiny_model_folder, tmp_path / "run")
    whole = run(fields)
    card = (tmp_path / "run" / "final" / "README.md").read_text()
    shutil.rmtree(tmp_path / "run" / "final")
    resumed = run(fields, resume=True)
    assert resumed.metrics == whole.metrics
    assert (tmp_path / "run" / "final" / "README.md").read_text() == card


def test_a_folder_that_cannot_be_used_is_named(tiny_model_folder: Path, tmp_path: Path):
    file = tmp_path / "file"
    file.write_text("")
    for folder in (file, file / "run"):
        with pytest.raises(OpdError, match="cannot be used"):
            run(recipe(tiny_model_folder, folder))


def test_a_tracker_that_is_not_installed_is_refused(
    tiny_model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from opd.training import distributed

    monkeypatch.setattr(distributed, "get_available_trackers", list)
    with pytest.raises(OpdError, match="not installed: tensorboard"):
        run(recipe(tiny_model_folder, tmp_path / "run", log={"trackers": ["tensorboard"]}))


def test_a_device_that_is_not_there_is_refused(tiny_model_folder: Path, tmp_path: Path):
    for device in ("tpu", "cuda:9"):
        with pytest.raises(OpdError, match="cannot run on"):
            opd.train(recipe(tiny_model_folder, tmp_path / "run"), device=device)


def test_weights_that_overflow_end_with_an_error_that_says_so(tiny_model_folder: Path, tmp_path: Path):
    with pytest.raises(OpdError, match="not finite"):
        run(recipe(tiny_model_folder, tmp_path / "run", train={"learning_rate": 1e30, "max_grad_norm": None}))


def test_held_out_questions_among_the_training_ones_are_refused(tiny_model_folder: Path, tmp_path: Path):
    for name, rows in {"train": ("1+1", "1+2"), "heldout": ("1+3", "1+2")}.items():
        lines = [json.dumps({"problem": row, "solution": "s", "answer": "a"}) + "\n" for row in rows]
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
    data = {name: {"name": "file", "path": str(tmp_path / f"{name}.jsonl")} for name in ("train", "heldout")}
    with pytest.raises(OpdError, match="not held out"):
        run(recipe(tiny_model_folder, tmp_path / "run", data={"train": data["train"]}, eval={"data": data["heldout"]}))


def test_sequences_past_the_models_last_position_are_refused(tiny_model_folder: Path, tmp_path: Path):
    with pytest.raises(OpdError, match="has 1024 positions, and the longest student sequence needs"):
        run(recipe(tiny_model_folder, tmp_path / "run", rollout={"max_new_tokens": 1020}))


def test_every_epoch_is_a_new_permutation_whatever_the_steps_cut_it_into():
    pairs: Any = list("abcdefg")

    def drawn(num_pairs: int) -> str:
        return "".join("".join(step_pairs(pairs, 3, step, num_pairs)) for step in range(1, 42 // num_pairs + 1))

    assert drawn(1) == drawn(3) == drawn(14) == drawn(42)
    epochs = [drawn(1)[start : start + 7] for start in range(0, 42, 7)]
    assert all(sorted(epoch) == sorted(pairs) for epoch in epochs)
    assert len(set(epochs)) > 1


def test_a_finished_folder_is_not_trained_into_again(tiny_model_folder: Path, tmp_path: Path):
    fields = recipe(tiny_model_folder, tmp_path / "run", train={"num_steps": 1})
    run(fields)
    with pytest.raises(OpdError, match="already holds a run"):
        run(fields)


@pytest.mark.parametrize(
    "loss", [{"name": "forward_kl"}, {"name": "jsd"}, {"name": "sampled_reverse_kl", "importance": {"clip": 2.0}}]
)
def test_the_gradient_does_not_depend_on_micro_batches(loss: dict[str, Any], tiny_model_folder: Path, tmp_path: Path):
    gradients: list[dict[str, torch.Tensor]] = []
    for tokens in (1, 100, 10_000):
        changes = {"loss": loss, "train": {"micro_batch_tokens": tokens, "max_grad_norm": None, "learning_rate": 1e-9}}
        loaded = load_recipe(recipe(tiny_model_folder, tmp_path / "run", **changes))
        ranks = Ranks(loaded.recipe.log, tmp_path, device="cpu")
        parts = assemble(loaded.recipe, CPU)
        learner = Learner(parts.student, parts.loss, loaded.recipe, ranks)
        train_step(parts, learner, ranks, 1)  # moves B off zero, so that A has a gradient too
        caught: dict[str, torch.Tensor] = {}
        learner.optimizer.register_step_pre_hook(
            lambda *_, into=caught, of=learner.parameters: into.update({name: p.grad.clone() for name, p in of.items()})
        )
        train_step(parts, learner, ranks, 2)
        gradients.append(caught)
    largest = max(gradient.abs().max() for gradient in gradients[-1].values())
    assert largest > 0
    for other in gradients[:-1]:
        for name, gradient in gradients[-1].items():
            assert (gradient - other[name]).abs().max() <= 1e-5 * largest, name


def test_the_saved_adapter_loads_in_peft_and_answers_the_same(tiny_model_folder: Path, tmp_path: Path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    fields = recipe(tiny_model_folder, tmp_path / "run")
    result = run(fields)
    assert result.final is not None
    base = AutoModelForCausalLM.from_pretrained(tiny_model_folder, dtype=torch.float32)
    ids = torch.arange(5, 25)[None]
    before = base(ids).logits
    after = PeftModel.from_pretrained(base, result.final).eval()(ids).logits
    assert (before - after).abs().max() > 1e-3

    from opd.training import checkpoint

    newest, _ = checkpoint.newest(result.folder / "checkpoints")
    assert newest is not None
    parts = assemble(load_recipe(fields).recipe, CPU)
    with torch.no_grad():
        for name, parameter in parts.student.trained().items():
            parameter.copy_(newest.trained[name])
        torch.testing.assert_close(parts.student.model.eval()(ids).logits, after)
    assert "opd train tiny.yaml" in (result.final / "README.md").read_text()
    assert AutoTokenizer.from_pretrained(result.final).chat_template


def test_merged_sampling_leaves_the_base_weights_alone(tiny_model_folder: Path, tmp_path: Path):
    parts = assemble(load_recipe(recipe(tiny_model_folder, tmp_path / "run")).recipe, CPU)
    student = parts.student
    with torch.no_grad():
        for parameter in student.trained().values():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    ids = torch.arange(5, 25)[None]
    before = {name: tensor.clone() for name, tensor in student.model.state_dict().items()}
    student.model.eval()
    with torch.no_grad():
        expected = student.model(ids).logits
        with student.merged():
            merged = student.model(ids).logits
        with student.adapter_off():
            off = student.model(ids).logits
    torch.testing.assert_close(merged, expected, atol=1e-4, rtol=1e-4)
    assert (off - expected).abs().max() > 1e-2
    assert all(torch.equal(before[name], tensor) for name, tensor in student.model.state_dict().items())


def test_an_adapter_beyond_linear_layers_is_not_merged_in_part(tiny_model_folder: Path, tmp_path: Path):
    adapter = {"name": "lora", "r": 4, "target_modules": ["embed_tokens", "q_proj"]}
    fields = recipe(tiny_model_folder, tmp_path / "run", student={"adapter": adapter}, rollout={"merge_adapter": True})
    with pytest.raises(OpdError, match="cannot be merged"):
        run(fields)
