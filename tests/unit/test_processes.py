"""Two processes over gloo on the CPU train as one does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file


@pytest.mark.slow
def test_two_processes_give_the_losses_and_weights_of_one(tiny_model_folder: Path, tmp_path: Path):
    recipe = {
        "name": "tiny",
        "student": {"model": str(tiny_model_folder), "dtype": "float32", "adapter": {"name": "lora", "r": 4}},
        "data": {"train": {"name": "task", "task": "products"}},
        "rollout": {"max_new_tokens": 6},
        # Three completions: one process has two of them, the other one; and micro-batches of a single sequence.
        "train": {"num_steps": 4, "num_problems_per_step": 3, "learning_rate": 0.01, "micro_batch_tokens": 1},
    }
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(recipe))
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", "opd"]
    for name, start in (("one", [sys.executable, "-m", "opd"]), ("two", launch)):
        command = [*start, "train", "tiny.yaml", f"folder={tmp_path / name}", "--device", "cpu", "--skip-doctor"]
        environment = {**os.environ, "ACCELERATE_USE_CPU": "true"}
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=300
        )
        assert done.returncode == 0, done.stderr[-2000:]

    def column(run: str, field: str) -> list[float]:
        lines = (tmp_path / run / "steps.jsonl").read_text().splitlines()
        return [json.loads(line)[field] for line in lines]

    assert column("two", "loss") == pytest.approx(column("one", "loss"), rel=1e-4)
    # AdamW hides a gradient that is off by a factor; its norm does not.
    assert column("two", "grad_norm") == pytest.approx(column("one", "grad_norm"), rel=1e-3)
    one, two = (load_file(tmp_path / name / "final" / "adapter_model.safetensors") for name in ("one", "two"))
    assert any(tensor.abs().max() > 0 for name, tensor in one.items() if "lora_B" in name)
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, rtol=1e-3, atol=1e-4)
