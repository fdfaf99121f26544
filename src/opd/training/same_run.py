"""What makes two runs the same run: what a checkpoint must share with the recipe that goes on from it.

A run that goes on with another learning rate, loss or data would be neither of the two that its folder could stand for,
and nothing in its log would say so.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from opd.config.schema import Recipe
from opd.errors import OpdError
from opd.teacher import ModelTeacher
from opd.training.assemble import Parts

# May differ: names and places, what only observes, and what changes rounding alone. Data, prompts and models are
# compared by their content, so their files may have moved.
_FREE = (
    "name",
    "folder",
    "eval",
    "log",
    "student.model",
    "student.revision",
    "student.gradient_checkpointing",
    "teacher.model",
    "teacher.revision",
    "data.train.path",
    "data.on_bad_row",
    "prompt.on_long_prompt",
    "rollout.batch_size",
    "train.micro_batch_tokens",
    "train.on_nonfinite",
    "train.checkpoint_every_num_steps",
    "train.num_checkpoints_kept",
    "train.num_threads",
)


def identity_of(parts: Parts) -> dict[str, Any]:
    """Dotted key -> value of everything that decides what a run computes, as a checkpoint keeps it."""
    free = _FREE
    if parts.recipe.train.schedule.name == "constant":
        free = (*free, "train.num_steps")  # more steps change none of those that were taken
    values = {
        key: value for key, value in _flat(parts.recipe) if not any(f"{key}.".startswith(f"{one}.") for one in free)
    }
    values["student's weights"] = parts.student.loaded.fingerprint
    if isinstance(parts.teacher, ModelTeacher):
        values["teacher's weights"] = parts.teacher.loaded.fingerprint
    prompts = (ids for pair in parts.pairs for ids in (pair.student_ids, pair.teacher_ids))
    values["training prompts"] = _digest(prompts)
    if parts.solutions:
        values["training solutions"] = _digest(parts.solutions[pair.problem.id] for pair in parts.pairs)
    return values


def refuse_another(of_checkpoint: Mapping[str, Any], parts: Parts, *, where: str) -> None:
    """Refuse to go on from a checkpoint that another run wrote.

    Raises:
        OpdError: names what differs.
    """
    now = identity_of(parts)
    differing = [key for key in {**of_checkpoint, **now} if of_checkpoint.get(key) != now.get(key)]
    if not differing:
        return
    shown = [f"{key}: {of_checkpoint.get(key)} then, {now.get(key)} now" for key in differing[:5]]
    more = f" and {len(differing) - 5} more" if len(differing) > 5 else ""
    raise OpdError(
        f"{where} is of another run.",
        why="; ".join(shown) + more + ".",
        fix="Resume with the recipe that wrote it (resolved.yaml in the folder), or start a new run: folder=PATH.",
    )


def _flat(recipe: Recipe) -> Iterator[tuple[str, Any]]:
    def walk(value: Any, key: str) -> Iterator[tuple[str, Any]]:
        if isinstance(value, dict) and value:
            for name, item in value.items():
                yield from walk(item, f"{key}.{name}" if key else name)
        else:
            yield key, value

    yield from walk(recipe.model_dump(mode="json"), "")


def _digest(sequences: Iterable[Sequence[int]]) -> str:
    digest = hashlib.sha256()
    for ids in sequences:
        digest.update(np.asarray([len(ids), *ids], dtype=np.int64).tobytes())
    return digest.hexdigest()[:16]
