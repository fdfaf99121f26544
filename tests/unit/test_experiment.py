"""Before, training, after, verdict: the files it leaves, and that the figures in them agree with each other."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from opd.bench import experiment as experiment_module
from opd.bench.experiment import CONTROLS, Change, Verdict, experiment
from opd.cli import app
from opd.errors import OpdError

ASK = {"role": "user", "content": "{{ problem }}"}


def recipe(model: Path, folder: Path) -> dict[str, Any]:
    sums = {"low": 2, "high": 9, "right_low": 11, "right_high": 30, "orders": "one"}
    return {
        "name": "tiny",
        "folder": str(folder),
        "student": {"model": str(model), "dtype": "float32", "adapter": {"name": "lora", "r": 4}},
        "context": {"name": "reference_solution", "num_demonstrations": 1},
        "prompt": {
            "student": [ASK],
            "demonstration": [ASK, {"role": "assistant", "content": "{{ solution }}"}],
            "teacher": [{"role": "user", "content": "{% if solution %}{{ solution }} {% endif %}{{ problem }}"}],
        },
        "data": {"train": {"name": "task", "task": "sums", "options": sums}},
        "rollout": {"max_new_tokens": 4},
        "train": {"num_steps": 2, "num_problems_per_step": 2, "learning_rate": 0.001},
        "eval": {
            "data": {"name": "task", "task": "sums", "split": "heldout", "options": sums, "num_problems": 5},
            "num_samples": 2,
            "sampling": {"max_new_tokens": 4},
        },
    }


@pytest.fixture(scope="module")
def finished(tiny_model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Verdict, Path]:
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    fields = recipe(tiny_model_folder, folder.with_name("never-made"))
    overrides = (f"folder={folder}", "seed=1")  # as the demo gives them: the controls must not set the folder twice
    return experiment(fields, overrides, full=True, device="cpu", command="opd demo"), folder


def test_the_verdict_file_holds_what_the_line_says(finished: tuple[Verdict, Path]):
    verdict, folder = finished
    fields = json.loads((folder / "verdict.json").read_text())
    for name in ("before", "after", "difference", "low", "high", "num_problems", "num_samples", "train_seconds"):
        assert name in fields
    assert fields["difference"] == pytest.approx(fields["after"] - fields["before"])
    assert fields["low"] <= fields["difference"] <= fields["high"]
    assert (fields["num_problems"], fields["num_samples"]) == (5, 2)
    assert fields["train_seconds"] > 0
    assert verdict.line().startswith(f"verdict: {fields['before']:.1f}% -> {fields['after']:.1f}% (")


def test_every_arm_is_evaluated_on_the_same_problems_under_the_same_settings(finished: tuple[Verdict, Path]):
    verdict, folder = finished
    assert set(verdict.controls) == set(CONTROLS)
    results = {path.parent.name: json.loads(path.read_text()) for path in folder.glob("eval/*/result.json")}
    assert set(results) == {"before", "after", "teacher", "few-shot", *CONTROLS}
    students = [results[name] for name in ("before", "after", *CONTROLS)]
    assert len({result["settings_hash"] for result in students}) == 1
    assert len({result["prompt_hash"] for result in students}) == 1
    assert len({result["dataset_hash"] for result in results.values()}) == 1
    assert results["before"]["checkpoint_kind"] == "base"
    assert results["after"]["checkpoint_kind"] == "adapter"
    assert {results[name]["checkpoint_kind"] for name in ("teacher", "few-shot")} == {"base"}
    assert results["teacher"]["prompt_hash"] != results["before"]["prompt_hash"]


def test_untrained_scores_are_those_of_the_untrained_student_where_every_weight_trains(
    tiny_model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from opd.bench import experiment as module

    order: list[str] = []
    real_evaluate, real_fit = module._evaluate, module.fit
    monkeypatch.setattr(module, "_evaluate", lambda *a, **k: order.append(a[2].name) or real_evaluate(*a, **k))
    monkeypatch.setattr(module, "fit", lambda *a, **k: order.append("fit") or real_fit(*a, **k))
    fields = recipe(tiny_model_folder, tmp_path / "run")
    fields["student"]["adapter"] = {"name": "full"}
    experiment(fields, full=True, device="cpu", command="opd demo")
    assert order[:4] == ["before", "teacher", "fit", "after"]
    assert order.index("few-shot") < order.index("demonstrations")
    assert order[order.index("few-shot") + 1] == "fit"


def test_an_interrupted_control_is_not_scored_as_if_it_had_trained(
    tiny_model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    real_fit = experiment_module.fit

    def interrupted(*arguments: Any, **options: Any) -> Any:
        result = real_fit(*arguments, **options)
        return replace(result, final=None, interrupted=True) if "controls" in str(result.folder) else result

    monkeypatch.setattr(experiment_module, "fit", interrupted)
    with pytest.raises(OpdError, match="interrupted, so there is no verdict"):
        experiment(recipe(tiny_model_folder, tmp_path / "run"), full=True, device="cpu", command="opd demo")
    assert not (tmp_path / "run" / "eval" / "placebo").exists()


def test_verdicts_stand_side_by_side(finished: tuple[Verdict, Path]):
    verdict, folder = finished
    result = CliRunner().invoke(app, ["verdicts", str(folder)])
    assert result.exit_code == 0
    lines = result.output.splitlines()
    assert f"{verdict.correct.before:.1f}% → {verdict.correct.after:.1f}%" in lines[2]
    assert [line.split(" |")[0] for line in lines[3:6]] == [f"| control: {name}" for name in CONTROLS]
    with pytest.raises(OpdError, match="no verdict"):
        CliRunner().invoke(app, ["verdicts", str(folder / "eval")], catch_exceptions=False)


def test_the_page_is_written(finished: tuple[Verdict, Path]):
    verdict, folder = finished
    assert f"{verdict.correct.after:.1f}" in (folder / "report.html").read_text()


def test_the_line_reads_as_documented():
    verdict = Verdict(
        correct=Change(0.0, 75.0, 75.0, 68.2, 81.8),
        contains=Change(1.0, 77.1, 76.1, 68.8, 82.8),
        num_problems=48,
        num_samples=4,
        train_seconds=301.4,
        seed=0,
        majority_answer_pct=2.1,
        controls={},
        untrained_pct={},
    )
    assert verdict.line() == (
        "verdict: 0.0% -> 75.0% (+75.0 points, 95% interval +68.2 to +81.8, n = 48 problems x 4 samples, "
        "301 s of training)"
    )


def test_a_recipe_without_held_out_problems_is_refused(tiny_model_folder: Path, tmp_path: Path):
    fields = recipe(tiny_model_folder, tmp_path / "run")
    del fields["eval"]
    with pytest.raises(OpdError, match="no eval section"):
        experiment(fields, device="cpu", command="opd demo")
    assert not (tmp_path / "run").exists()
