"""Write docs/options.md: every option of a recipe, generated from the schema.

    python scripts/docs_options.py           # write the page
    python scripts/docs_options.py --check   # exit with 1 when the page is not up to date

Keys, types, limits and defaults come from `opd.config.schema`; what an option means, where the schema's own docstrings
do not say it option by option, stands in `MEANINGS` below. An option without a meaning, or a meaning without an option,
is an error.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from opd.config.base import Config
from opd.config.loss import MixPart
from opd.config.schema import MessageTemplate
from opd.config.shape import ROOT, Slot, names_of

PAGE = Path(__file__).parents[1] / "docs" / "options.md"

# "Class.field" -> meaning. A field that a class inherits is looked up in its base classes too.
MEANINGS = {
    "Recipe.name": "Name of the run; also of its folder.",
    "Recipe.folder": "Where the run writes; null is `runs/NAME`.",
    "Recipe.seed": "Every random choice of the run derives from it: adapter, order, samples, demonstrations.",
    "Recipe.student": "The model that samples and learns.",
    "Recipe.teacher": "Who scores the student's tokens.",
    "Recipe.context": "What the teacher is shown and the student is not.",
    "Recipe.prompt": "Messages of student and teacher.",
    "Recipe.data": "Training problems.",
    "Recipe.rollout": "How the student samples in training.",
    "Recipe.loss": "What is minimised.",
    "Recipe.train": "The optimizer and its steps.",
    "Recipe.eval": "Held-out problems; null evaluates nothing.",
    "Recipe.log": "Trackers and logged samples.",
    "ModelConfig.model": "Hub id, local folder, `gguf:PATH` or `package:NAME`.",
    "ModelConfig.revision": "Commit, branch or tag; for hub ids alone.",
    "ModelConfig.dtype": "Dtype of the matrix products; weights that train are kept in float32.",
    "ModelConfig.attention": "Attention implementation of transformers.",
    "ModelConfig.trust_remote_code": "Run the Python code that the model's repository ships.",
    "StudentConfig.adapter": "Train low-rank adapters or every weight.",
    "StudentConfig.gradient_checkpointing": "Recompute activations in the backward pass: less memory, more time.",
    "LoraConfig.r": "Rank.",
    "LoraConfig.alpha": "The adapter's product is scaled by alpha / r.",
    "LoraConfig.dropout": "Dropout on the adapter's input, in updates alone.",
    "LoraConfig.target_modules": "Which linear layers get an adapter; `lm_head` when named, with dropout 0.",
    "SelfTeacherConfig.weights": "Which of the student's weights teach.",
    "EmaWeights.decay": "ema = decay * ema + (1 - decay) * live, after each step.",
    "ContextConfig.name": "See the list above.",
    "ContextConfig.num_demonstrations": "Solved training problems in the teacher's prompt.",
    "ContextConfig.demonstration_choice": "Draw them for each problem, or show every problem the same.",
    "PromptConfig.student": "The student's; null is the row's own messages, or the problem as one user message.",
    "PromptConfig.teacher": "The teacher's; null is the student's with the context in a last paragraph.",
    "PromptConfig.demonstration": "One solved example as chat turns; null is the student's messages and the solution.",
    "PromptConfig.student_thinking": "`enable_thinking` of the chat template; null leaves the template's default.",
    "PromptConfig.teacher_thinking": "The same for the teacher.",
    "PromptConfig.max_student_prompt_tokens": "Longest student prompt, in tokens.",
    "PromptConfig.max_teacher_prompt_tokens": "Longest teacher prompt, in tokens.",
    "PromptConfig.on_long_prompt": "Stop at a longer prompt, or drop and count the problem. Nothing is cut.",
    "MessageTemplate.role": "Whose message.",
    "MessageTemplate.content": "Jinja2 template.",
    "DataConfig.train": "Where training problems come from.",
    "DataConfig.on_bad_row": "Stop at the first bad row and name it, or drop and count bad rows.",
    "TaskSource.task": "`products`, `sums`, `three_term_sums`, `letter_counting`, `gcd`, or `reasoning_gym:NAME`.",
    "TaskSource.split": "Which side of the split.",
    "TaskSource.num_problems": "How many; null is all, at most 1000.",
    "TaskSource.seed": "Order of the problems (for reasoning-gym: which ones).",
    "TaskSource.options": "The task's own options.",
    "FileSource.path": "The file; relative to the recipe that names it.",
    "FileSource.columns": "Which column holds what.",
    "FileSource.num_problems": "The first so many; null is all.",
    "HubSource.dataset": "Hub id, or a local folder of the same layout.",
    "HubSource.subset": "Configuration of the data set.",
    "HubSource.split": "Split, slices included (`train[:1000]`).",
    "HubSource.revision": "Commit, branch or tag; for hub ids alone.",
    "HubSource.columns": "Which column holds what.",
    "HubSource.num_problems": "The first so many; null is all.",
    "ColumnsConfig.problem": "The question.",
    "ColumnsConfig.solution": "The worked solution.",
    "ColumnsConfig.answer": "The final answer.",
    "ColumnsConfig.messages": "The conversation, in place of the question.",
    "ColumnsConfig.id": "A name for the row, unique.",
    "SamplingConfig.max_new_tokens": "Length limit of a completion, in tokens.",
    "SamplingConfig.temperature": "Divides the logits; 0 takes the most likely token.",
    "SamplingConfig.top_p": "Keep the likeliest tokens whose mass reaches this share.",
    "SamplingConfig.top_k": "Keep so many of the likeliest tokens.",
    "SamplingConfig.min_p": "Keep tokens at least this share as likely as the likeliest.",
    "RolloutConfig.num_samples": "Completions of each problem in a step.",
    "RolloutConfig.batch_size": "Completions decoded side by side: memory and speed.",
    "RolloutConfig.merge_adapter": "Sample with the adapter folded into copies of the weights.",
    "DivergenceConfig.temperature": "Divides the logits of both sides in the loss.",
    "DivergenceConfig.scale_by_temperature_squared": "Multiply the clipped value by the temperature's square.",
    "DivergenceConfig.clip": "How large values are bounded.",
    "PerTokenClip.max": "Bound, nats.",
    "WeightClip.max": "Bound, nats.",
    "PerEntryClip.max": "Bound of one vocabulary entry, nats.",
    "DivergenceConfig.support": "Over which tokens distributions are compared.",
    "TopKSupport.k": "How many tokens of a side.",
    "TopKSupport.of": "Whose likeliest tokens.",
    "TopKSupport.tail": "Keep what is left of each side as one more outcome, or scale what is kept to one.",
    "BaseLossConfig.mask": "Which tokens of a completion are supervised.",
    "BaseLossConfig.reduction": "Mean over tokens, or over each completion's tokens and then over completions.",
    "MaskConfig.first": "Keep the first so many tokens of a completion; null keeps all.",
    "MaskConfig.last": "Keep the last so many; with `first`, both ends.",
    "MaskConfig.skip_boundary": "Leave out the first token after the prompt.",
    "MaskConfig.skip_special_tokens": "Leave out special tokens, but for the stop token that ends the completion.",
    "MaskConfig.skip_whitespace": "Leave out tokens that are nothing but white space.",
    "MaskConfig.teacher_entropy": "Keep tokens where the teacher's entropy lies in a range; null keeps all.",
    "MaskConfig.student_entropy": "Keep tokens where the student's entropy lies in a range; null keeps all.",
    "EntropyGate.min": "Least entropy, nats.",
    "EntropyGate.max": "Largest entropy, nats; null is no limit.",
    "JSDConfig.teacher_weight": "Weight of the teacher in the mixture, inside (0, 1).",
    "SkewKLConfig.alpha": "Weight of the teacher in the mixture.",
    "SkewReverseKLConfig.alpha": "Weight of the student in the mixture.",
    "AdaptiveKLConfig.head_mass": "Mass of the teacher's likeliest tokens that make the head.",
    "EntropyAwareConfig.threshold": "Teacher's entropy above which forward KL joins, nats.",
    "EntropyAwareConfig.forward_weight": "What forward KL is multiplied with there.",
    "SampledReverseKLConfig.temperature": "Divides the logits of both sides in the loss.",
    "SampledReverseKLConfig.importance": "Correct for a sampler that was not the student; null does not.",
    "SampledReverseKLConfig.discount": "Weight of later tokens' advantages, per token of distance.",
    "SampledReverseKLConfig.group_baseline": "Subtract the mean advantage of the problem's other completions.",
    "SampledReverseKLConfig.max_advantage": "Bound of an advantage's size, nats.",
    "ImportanceConfig.clip": "Largest ratio.",
    "MixConfig.parts": "The losses and their weights.",
    "MixPart.loss": "A loss; its mask and reduction are the mix's.",
    "MixPart.weight": "What it is multiplied with.",
    "TrainConfig.num_steps": "Optimizer steps.",
    "TrainConfig.num_problems_per_step": "Problems of one step.",
    "TrainConfig.learning_rate": "Peak learning rate of AdamW.",
    "TrainConfig.schedule": "Learning rate over the steps.",
    "TrainConfig.weight_decay": "AdamW's.",
    "TrainConfig.betas": "AdamW's averages.",
    "TrainConfig.eps": "AdamW's.",
    "TrainConfig.max_grad_norm": "Clip the gradient at this norm; null does not clip.",
    "TrainConfig.micro_batch_tokens": "Tokens of one forward and backward pass, padding included: memory and speed.",
    "TrainConfig.on_nonfinite": "A loss or gradient that is not finite stops the run, or skips the step.",
    "TrainConfig.checkpoint_every_num_steps": "Null writes one at the end, or when interrupted.",
    "TrainConfig.num_checkpoints_kept": "The newest so many.",
    "TrainConfig.num_threads": "CPU threads of torch; null leaves torch's choice.",
    "ScheduleConfig.name": "What follows the warm-up.",
    "ScheduleConfig.num_warmup_steps": "Linear rise to the peak.",
    "ScheduleConfig.final_frac": "Share of the peak at the last step.",
    "EvalConfig.data": "Held-out problems, each with an answer.",
    "EvalConfig.num_samples": "Completions of each problem.",
    "EvalConfig.seed": "Of the samples.",
    "EvalConfig.sampling": "How they are drawn.",
    "EvalConfig.batch_size": "Completions decoded side by side: memory and speed.",
    "LogConfig.trackers": "Where steps are sent besides the JSONL files.",
    "LogConfig.project": "Project name in the trackers.",
    "LogConfig.num_samples_per_step": "Completions of each step written to `samples.jsonl`.",
}

INTRODUCTION = """# Every option

Written by `scripts/docs_options.py` from the schema (`src/opd/config/schema.py`, `src/opd/config/loss.py`); a test
fails when it is not up to date. Where several choices compete, `name` says which is meant. *required* means that some
layer has to set it.
"""


def page() -> str:
    """The text of docs/options.md.

    Raises:
        ValueError: an option has no meaning in `MEANINGS`, or a meaning has no option.
    """
    used: set[str] = set()
    parts = [INTRODUCTION]
    for config, prefixes in _configs():
        parts.append(_section(config, prefixes, used))
    stale = sorted(MEANINGS.keys() - used)
    if stale:
        raise ValueError(f"meanings of options that do not exist: {', '.join(stale)}")
    return "\n".join(parts)


def _configs() -> list[tuple[type[Config], list[str]]]:
    """Every config class with the dotted places at which it stands, in the recipe's order."""
    places: dict[type[Config], list[str]] = {}

    def walk(slot: Slot, prefix: str) -> None:
        for config in slot.configs:
            if prefix not in places.setdefault(config, []):
                places[config].append(prefix)
            for key in config.model_fields:
                walk(slot.key(config, key), f"{prefix}.{key}" if prefix else key)

    walk(ROOT, "")
    walk(Slot(MixPart), "loss.parts.0")
    for prefixes in places.values():  # what a part shares with other losses is the mix's own
        prefixes[:] = [prefix for prefix in prefixes if not prefix.startswith("loss.parts.0.loss.mask")]
    places[MessageTemplate] = ["prompt.student.0", "prompt.teacher.0", "prompt.demonstration.0"]
    return list(places.items())


def _section(config: type[Config], prefixes: list[str], used: set[str]) -> str:
    prefix = prefixes[0]
    names = names_of(config)
    heading = f"`{prefix}`" if prefix else "The recipe"
    chosen = len(names) == 1
    lines = [f"## {heading}{f': `name: {names[0]}`' if chosen else ''}", "", inspect.cleandoc(config.__doc__ or ""), ""]
    if prefixes[1:]:
        lines += [f"Also at {', '.join(f'`{other}`' for other in prefixes[1:])}.", ""]
    rows = [_row(config, prefix, key, used) for key in config.model_fields if not (chosen and key == "name")]
    if not rows:
        return "\n".join([*lines, "No further options.", ""])
    return "\n".join([*lines, "| option | values | default | meaning |", "|---|---|---|---|", *rows, ""])


def _row(config: type[Config], prefix: str, key: str, used: set[str]) -> str:
    owner = next((base for base in config.__mro__ if f"{base.__name__}.{key}" in MEANINGS), None)
    if owner is None:
        raise ValueError(f"{config.__name__}.{key} has no meaning: add it to MEANINGS")
    used.add(f"{owner.__name__}.{key}")
    field = config.model_fields[key]
    cells = (
        f"`{prefix}.{key}`" if prefix else f"`{key}`",
        _values(field),
        _default(field),
        MEANINGS[f"{owner.__name__}.{key}"],
    )
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "*required*"
    value = field.default_factory() if field.default is PydanticUndefined else field.default  # pyright: ignore
    if isinstance(value, Config):
        name = getattr(value, "name", None)
        return f"`{name}`" if name is not None else "its defaults"
    if isinstance(value, bool) or value is None:
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, tuple | list | dict):
        return f"`{list(value) or ('{}' if isinstance(value, dict) else '[]')}`"
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


def _values(field: FieldInfo) -> str:
    kinds = list(dict.fromkeys(_kinds(field.annotation)))
    if all(kind.startswith("`") for kind in kinds):  # the names of a union
        return ", ".join(kinds)
    limits = [text for item in field.metadata for text in _limits(item)]
    null = ["null"] if kinds[-1] == "null" else []  # limits of `int | None` are those of the number
    return " or ".join([" ".join([" or ".join(kinds[: len(kinds) - len(null)]), *limits]), *null])


def _limits(item: Any) -> Iterator[str]:
    for kind, sign, name in ((Ge, "≥", "ge"), (Gt, ">", "gt"), (Le, "≤", "le"), (Lt, "<", "lt")):
        if isinstance(item, kind):
            yield f"{sign} {getattr(item, name):g}"
    if isinstance(item, MinLen):
        yield "(not empty)"


def _kinds(annotation: Any) -> Iterator[str]:
    """What may stand at a place, in words; null last."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        yield from _kinds(arguments[0])
    elif origin in (Union, UnionType):
        kinds = [kind for part in arguments if part is not NoneType for kind in _kinds(part)]
        yield from [*kinds, *(["null"] if NoneType in arguments else [])]
    elif origin is Literal:
        yield ", ".join(f"`{value}`" for value in arguments)
    elif origin is tuple:
        inner = next(_kinds(arguments[0]))
        yield f"list of {inner}" if arguments[-1] is Ellipsis else f"list of {len(arguments)} {inner}s"
    elif origin is dict:
        yield "mapping"
    elif isinstance(annotation, type) and issubclass(annotation, Config):
        names = names_of(annotation)
        yield ", ".join(f"`{name}`" for name in names) if names else _PLAIN.get(annotation, "section")
    else:
        yield _PLAIN[annotation]


_PLAIN: dict[Any, str] = {
    bool: "true, false",
    int: "whole number",
    float: "number",
    str: "text",
    Path: "path",
    MessageTemplate: "message",
    MixPart: "loss with its weight",
}


def main() -> None:
    """Write or check the page."""
    text = page()
    if "--check" in sys.argv[1:]:
        if not PAGE.exists() or PAGE.read_text(encoding="utf-8") != text:
            sys.exit(f"{PAGE} is not up to date: run python scripts/docs_options.py")
        return
    PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
