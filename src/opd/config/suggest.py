"""Nearest neighbours of a mistyped name."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import SequenceMatcher

from opd.config.shape import all_keys

# Names that other trainers use for the same thing, so that a newcomer who types one is shown ours.
ELSEWHERE = {
    "attn_implementation": "student.attention",
    "batch_size": "train.num_problems_per_step",
    "beta": "loss.teacher_weight",
    "dataset_name": "data.train.dataset",
    "gradient_accumulation_steps": "train.micro_batch_tokens",
    "learning_rate_scheduler": "train.schedule.name",
    "lora_alpha": "student.adapter.alpha",
    "lora_dropout": "student.adapter.dropout",
    "lora_r": "student.adapter.r",
    "lora_rank": "student.adapter.r",
    "lr": "train.learning_rate",
    "lr_scheduler_type": "train.schedule.name",
    "max_completion_length": "rollout.max_new_tokens",
    "max_steps": "train.num_steps",
    "max_tokens": "rollout.max_new_tokens",
    "model_name_or_path": "student.model",
    "num_generations": "rollout.num_samples",
    "output_dir": "folder",
    "per_device_train_batch_size": "train.num_problems_per_step",
    "report_to": "log.trackers",
    "teacher_model_name_or_path": "teacher.model",
    "torch_dtype": "student.dtype",
    "warmup_steps": "train.schedule.num_warmup_steps",
}


def nearest(word: str, choices: Iterable[str]) -> str | None:
    """The choice that looks most like a word, or None when none does. Case, `-` and `_` make no difference."""

    def bare(text: str) -> str:
        return text.lower().replace("-", "_")

    def likeness(choice: str) -> float:
        return SequenceMatcher(None, bare(word), bare(choice)).ratio()

    best = max(sorted(choices), key=likeness, default=None)
    return best if best is not None and likeness(best) >= 0.6 else None


def nearest_key(parent: str, key: str, siblings: Iterable[str]) -> str | None:
    """The dotted key that was probably meant by `parent.key`.

    A neighbour among the siblings first, then the same key elsewhere in the recipe, then the name of another trainer's
    option, then the nearest key anywhere.

    Args:
        parent: dotted path of the mapping; empty for the top.
        key: what was written.
        siblings: the keys that the mapping may hold.
    """
    prefix = f"{parent}." if parent else ""
    sibling = nearest(key, siblings)
    if sibling is not None:
        return prefix + sibling
    by_last = {dotted.rsplit(".", 1)[-1]: dotted for dotted in reversed(list(all_keys()))}
    if key in by_last:
        return by_last[key]
    if key in ELSEWHERE:
        return ELSEWHERE[key]
    last = nearest(key, by_last)
    return by_last[last] if last is not None else None
