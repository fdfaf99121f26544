"""The last act of a run: adapter or weights, tokenizer, chat template and a model card with the exact command."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from opd.config.formula import objective
from opd.config.schema import ModelTeacherConfig, Recipe
from opd.training.assemble import Parts

_CARD = """---
base_model: {base}
library_name: {library}
tags: [on-policy-distillation, opd]
---

# {name}

Trained by on-policy distillation with [opd]: the student samples its own completions, a teacher scores every token, the
student moves toward the teacher.

| | |
|---|---|
| student | `{base}` |
| teacher | {teacher} |
| context shown to the teacher | {context} |
| minimised | {formula} |
| steps x problems x samples | {steps} x {problems} x {samples} |
| learning rate | {rate} |
| loss at the last step | {loss:.4f} nats |

Made by

```
{command}
```

in the environment below; `resolved.yaml` beside this folder holds every option with its source.

```json
{environment}
```

## Load it

```python
{load}
```
"""

_LOAD_ADAPTER = """from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{folder}")
model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(BASE), "{folder}")  # BASE: {base}"""

_LOAD_FULL = """from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{folder}")
model = AutoModelForCausalLM.from_pretrained("{folder}")"""


def save_final(parts: Parts, folder: Path, command: str, metrics: Mapping[str, float]) -> Path:
    """Write `folder/final` and return it."""
    final = folder / "final"
    parts.student.save(final)
    parts.student.loaded.tokenizer.save_pretrained(final)
    environment = json.loads((folder / "environment.json").read_text(encoding="utf-8"))
    text = card(parts.recipe, parts, final, command, metrics, environment["versions"])
    (final / "README.md").write_text(text, encoding="utf-8")
    return final


def card(
    recipe: Recipe,
    parts: Parts,
    final: Path,
    command: str,
    metrics: Mapping[str, float],
    versions: Mapping[str, str | None],
) -> str:
    """The model card's text."""
    teacher = recipe.teacher
    context = recipe.context.name.replace("_", " ")
    if recipe.context.num_demonstrations:
        context += f", {recipe.context.num_demonstrations} solved examples"
    load = _LOAD_ADAPTER if parts.student.has_adapter else _LOAD_FULL
    return _CARD.format(
        base=recipe.student.model,
        library="peft" if parts.student.has_adapter else "transformers",
        name=recipe.name,
        teacher=f"`{teacher.model}`"
        if isinstance(teacher, ModelTeacherConfig)
        else f"the student itself, {teacher.weights.name} weights",
        context=context,
        formula=objective(recipe.loss),
        steps=recipe.train.num_steps,
        problems=recipe.train.num_problems_per_step,
        samples=recipe.rollout.num_samples,
        rate=f"{recipe.train.learning_rate:g}, {recipe.train.schedule.name}",
        loss=metrics["loss"],
        command=command,
        environment=json.dumps(dict(versions), indent=2),
        load=load.format(folder=final, base=recipe.student.model),
    )
