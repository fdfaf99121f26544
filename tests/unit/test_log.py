"""The run's log: what is appended, what resuming cuts, and text that looks like line ends."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from opd.log import RunLog, read_steps
from opd.types import StepRecord


def record(step: int, **changes: Any) -> StepRecord:
    fields: dict[str, Any] = {
        "step": step,
        "loss": 0.5,
        "metrics": {"kl": 0.25},
        "num_completions": 1,
        "num_supervised_tokens": 3,
        "num_sampled_tokens": 3,
        "num_prompt_tokens": 5,
        "num_truncated": 0,
        "grad_norm": 1.0,
        "learning_rate": 1e-3,
        "skipped": False,
        "rollout_s": 1.0,
        "teacher_s": 1.0,
        "update_s": 1.0,
        "samples": [{"completion": f"text {step}"}],
    }
    return StepRecord(**{**fields, **changes})


def test_resuming_cuts_the_steps_that_run_again_and_a_torn_line(tmp_path: Path):
    log = RunLog(tmp_path, from_step=0)
    for step in (1, 2, 3):
        log.write(record(step))
    with log.steps_path.open("a") as file:
        file.write('{"step": 4, "los')
    RunLog(tmp_path, from_step=2)
    assert [line["step"] for line in read_steps(tmp_path)] == [1, 2]
    samples = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().split("\n") if line]
    assert [sample["step"] for sample in samples] == [1, 2]


def test_a_line_torn_within_a_character_is_cut(tmp_path: Path):
    log = RunLog(tmp_path, from_step=0)
    log.write(record(1, samples=[{"completion": "é"}]))
    with log.samples_path.open("ab") as file:
        file.write('{"step": 2, "completion": "é'.encode()[:-1])
    RunLog(tmp_path, from_step=2)
    (line,) = (tmp_path / "samples.jsonl").read_bytes().decode("utf-8").splitlines()
    assert json.loads(line)["completion"] == "é"


def test_characters_that_look_like_line_ends_lose_nothing(tmp_path: Path):
    log = RunLog(tmp_path, from_step=0)
    log.write(record(1, samples=[{"completion": "a\u2028b\u2029c\u0085d\ne\x0cf"}]))
    log.write(record(2))
    RunLog(tmp_path, from_step=2)
    samples = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().split("\n") if line]
    assert [sample["completion"] for sample in samples] == ["a\u2028b\u2029c\u0085d\ne\x0cf", "text 2"]


def test_a_missing_value_is_null_and_not_a_number(tmp_path: Path):
    RunLog(tmp_path, from_step=0).write(record(1, loss=math.nan, metrics={"kl": math.inf}))
    (line,) = read_steps(tmp_path)
    assert line["loss"] is None
    assert line["metrics"]["kl"] is None
