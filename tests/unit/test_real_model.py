"""The demo's own path on the demo's own model, for a few steps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from opd.bench.experiment import experiment
from opd.log import read_steps
from opd.models import LoadedModel

RECIPE = Path(__file__).parents[2] / "recipes" / "demo.yaml"


@pytest.mark.slow
@pytest.mark.real_model
def test_the_demo_recipe_trains_and_its_adapter_loads_in_peft(smollm2: LoadedModel, tmp_path: Path):
    from peft import PeftModel

    folder = tmp_path / "run"
    overrides = (
        f"folder={folder}",
        "train.num_steps=8",
        "train.num_problems_per_step=8",
        "eval.data.num_problems=6",
        "eval.num_samples=1",
    )
    verdict = experiment(RECIPE, overrides, device="cpu", command="opd demo")
    losses = [step["loss"] for step in read_steps(folder)]
    assert len(losses) == 8
    assert sum(losses[-3:]) < 0.8 * sum(losses[:3])  # format is learned within a few steps
    assert json.loads((folder / "doctor.json").read_text())["checks"]
    assert verdict.num_problems == 6

    ids = torch.tensor([smollm2.tokenizer("What is 7 + 22?")["input_ids"]])
    with torch.no_grad():
        before = smollm2.model(ids).logits
        adapted = PeftModel.from_pretrained(smollm2.model, folder / "final").eval()
        after = adapted(ids).logits
    adapted.unload()
    assert (after - before).abs().max() > 0.5
