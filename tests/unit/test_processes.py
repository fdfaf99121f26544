"""Two processes over gloo on the CPU train as one does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

GATE = {"teacher_entropy": {"min": 3.9, "max": 4.6}}
MIX = {
    "name": "mix",
    "reduction": "sequence",
    "mask": GATE,
    "parts": [
        {"loss": {"name": "reverse_kl"}, "weight": 0.8},
        {"loss": {"name": "sft"}, "weight": 0.2},
    ],
}
LOSSES = {
    "plain": ({"name": "forward_kl"}, 3, 1),
    "sequence": ({"name": "forward_kl", "reduction": "sequence"}, 3, 1),
    "gate": ({"name": "forward_kl", "mask": GATE}, 3, 1),
    "solutions, sequence and gate": (MIX, 3, 1),
    # Two completions of one problem on two processes: one has no solution, and each needs the other's advantages.
    "more processes than problems": (MIX, 1, 2),
    "baseline": ({"name": "sampled_reverse_kl", "group_baseline": True, "discount": 0.5}, 2, 3),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", list(LOSSES))
def test_two_processes_give_the_losses_and_weights_of_one(name: str, tiny_model_folder: Path, tmp_path: Path):
    loss, num_problems, num_samples = LOSSES[name]
    recipe = {
        "name": "tiny",
        "student": {"model": str(tiny_model_folder), "dtype": "float32", "adapter": {"name": "lora", "r": 4}},
        "data": {"train": {"name": "task", "task": "products"}},
        "rollout": {"max_new_tokens": 6, "num_samples": num_samples},
        "loss": loss,
        # An odd number of completions: one process has one more than the other; and micro-batches of a single sequence.
        "train": {
            "num_steps": 4,
            "num_problems_per_step": num_problems,
            "learning_rate": 0.01,
            "micro_batch_tokens": 1,
        },
    }
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(recipe))
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", "opd"]
    for run, start in (("one", [sys.executable, "-m", "opd"]), ("two", launch)):
        command = [*start, "train", "tiny.yaml", f"folder={tmp_path / run}", "--device", "cpu", "--skip-doctor"]
        environment = {**os.environ, "ACCELERATE_USE_CPU": "true"}
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=300
        )
        assert done.returncode == 0, done.stderr[-2000:]

    def steps(run: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (tmp_path / run / "steps.jsonl").read_text().splitlines()]

    def column(run: str, field: str) -> list[float]:
        return [line[field] for line in steps(run)]

    for field in ("num_supervised_tokens", "num_given_tokens", "num_completions", "skipped"):
        assert column("two", field) == column("one", field)
    assert not any(column("one", "skipped"))
    if "mask" in loss:
        assert any(0 < line["metrics"]["supervised"] < 1 for line in steps("one"))
    for first, second in zip(steps("one"), steps("two"), strict=True):
        assert second["metrics"] == pytest.approx(first["metrics"], rel=1e-3, abs=1e-5)
    assert column("two", "loss") == pytest.approx(column("one", "loss"), rel=1e-4)
    # AdamW hides a gradient that is off by a factor; its norm does not.
    assert column("two", "grad_norm") == pytest.approx(column("one", "grad_norm"), rel=1e-3)
    one, two = (load_file(tmp_path / run / "final" / "adapter_model.safetensors") for run in ("one", "two"))
    assert any(tensor.abs().max() > 0 for key, tensor in one.items() if "lora_B" in key)
    for key, tensor in one.items():
        torch.testing.assert_close(two[key], tensor, rtol=1e-3, atol=1e-4)
