"""Rules about student, teacher, sampling and training."""

from __future__ import annotations

from collections.abc import Iterator

from opd.config.faults import Fault
from opd.config.findings import Rule, Warning_
from opd.config.formula import PROVIDES, needs
from opd.config.prompt_rules import same_prompts
from opd.config.schema import (
    FullConfig,
    InitialWeights,
    LogConfig,
    ModelConfig,
    ModelTeacherConfig,
    Recipe,
    SamplingConfig,
    SelfTeacherConfig,
)


def teacher_differs_from_student(recipe: Recipe) -> Iterator[Fault | Warning_]:
    """Some difference between teacher and student has to exist, or there is nothing to learn."""
    teacher = recipe.teacher
    if isinstance(teacher, SelfTeacherConfig):
        if same_prompts(recipe):
            yield Fault(
                "the teacher is the student and has nothing to teach",
                f"teacher.name=self with {teacher.weights.name} weights sees the same prompt (context.name=none), so "
                "loss and gradient are zero from the first step on",
                "show the teacher something (context.name=reference_solution), or take a teacher.name=model",
            )
        return
    if (teacher.model, teacher.revision) != (recipe.student.model, recipe.student.revision):
        if "context" not in recipe.model_fields_set:
            yield Warning_(
                f"context.name={recipe.context.name} holds by default, and the teacher is another model",
                "it will be shown each problem's solution beside what it knows itself",
                "Set context.name=none for plain distillation, or write the context into the recipe",
            )
        return
    if same_prompts(recipe):
        yield Fault(
            "the teacher is the student and has nothing to teach",
            f"teacher.model and student.model are both {teacher.model}, and both see the same prompt",
            "name a larger model of the same family, or show the teacher something (context.name=reference_solution)",
        )
    else:
        yield Warning_(
            f"teacher.model is the student's own model {teacher.model}",
            "it is loaded a second time",
            "teacher.name=self with teacher.weights.name=initial is the same without the second copy",
        )


def scores_suffice(recipe: Recipe) -> Iterator[Fault | Warning_]:
    """The loss can work from what the teacher gives."""
    loss, teacher = recipe.loss, recipe.teacher.name
    needed, provided = needs(loss), PROVIDES[teacher]
    if not needed & provided:
        yield Fault(
            f"loss `{loss.name}` cannot work with teacher `{teacher}`",
            f"it needs {' or '.join(sorted(needed))}, and the teacher provides {', '.join(sorted(provided))}",
            "choose another teacher.name or loss.name",
        )


def sampling_makes_sense(recipe: Recipe) -> Iterator[Fault | Warning_]:
    """Greedy decoding uses no cut-offs and gives the same completion every time."""
    places: list[tuple[str, str, SamplingConfig, int]] = [
        ("rollout", "rollout.num_samples", recipe.rollout, recipe.rollout.num_samples)
    ]
    if recipe.eval is not None:
        places.append(("eval.sampling", "eval.num_samples", recipe.eval.sampling, recipe.eval.num_samples))
    for where, counter, sampling, num_samples in places:
        if sampling.temperature > 0:
            continue
        if num_samples > 1:
            yield Fault(
                f"`{counter}` is {num_samples} with greedy decoding",
                f"{where}.temperature=0 gives {num_samples} identical completions",
                f"set {counter}=1, or {where}.temperature=1",
            )
        cuts = {"top_p": (sampling.top_p, 1), "top_k": (sampling.top_k, None), "min_p": (sampling.min_p, 0)}
        for key, (value, off) in cuts.items():
            if value != off:
                yield Fault(
                    f"`{where}.{key}` is not used",
                    f"{where}.temperature=0 always takes the most likely token",
                    f"set {where}.{key}={'null' if off is None else off}, or {where}.temperature=1",
                )


def adapter_options_have_one(recipe: Recipe) -> Iterator[Fault | Warning_]:
    """Options and habits of adapters do not carry over to full fine-tuning."""
    if not isinstance(recipe.student.adapter, FullConfig):
        return
    if recipe.rollout.merge_adapter:
        yield Fault(
            "`rollout.merge_adapter` is not used",
            "student.adapter.name=full has no adapter to merge",
            "set rollout.merge_adapter=false, or student.adapter.name=lora",
        )
    if recipe.train.learning_rate > 1e-4:
        yield Warning_(
            f"train.learning_rate={recipe.train.learning_rate:g} with full fine-tuning",
            "rates that suit LoRA are ten to a hundred times too large for all weights of a pretrained model",
            "Try 1e-6 to 1e-5",
        )
    teacher = recipe.teacher
    if isinstance(teacher, SelfTeacherConfig) and isinstance(teacher.weights, InitialWeights):
        yield Warning_(
            "full fine-tuning with teacher.weights.name=initial",
            "the teacher needs a frozen copy of every weight, and training stops at the start when it does not fit",
            "student.adapter.name=lora needs no copy",
        )


def models_can_load(recipe: Recipe) -> Iterator[Fault | Warning_]:
    """What is known of a model reference before anything is opened."""
    models: list[tuple[str, ModelConfig]] = [("student", recipe.student)]
    if isinstance(recipe.teacher, ModelTeacherConfig):
        models.append(("teacher", recipe.teacher))
    for where, config in models:
        if config.attention == "flash_attention_2" and config.dtype == "float32":
            yield Fault(
                f"`{where}.attention` is flash_attention_2 with {where}.dtype=float32",
                "its kernels compute in 16 bits only",
                f"set {where}.dtype=bfloat16, or {where}.attention=sdpa",
            )
        packed = config.model.startswith(("gguf:", "package:"))
        unused = [("revision", "null")] if packed and config.revision is not None else []
        unused += [("trust_remote_code", "false")] if packed and config.trust_remote_code else []
        for key, off in unused:
            yield Fault(
                f"`{where}.{key}` is not used",
                f"{config.model} is a file, with no revisions and no code of its own",
                f"set {where}.{key}={off}",
            )
        if config.trust_remote_code and not packed:
            yield Warning_(
                f"{where}.trust_remote_code is true",
                f"code from the repository of {config.model} will run on this machine",
                "Pin it with a revision that you have read",
            )


def training_adds_up(recipe: Recipe) -> Iterator[Fault | Warning_]:
    """Steps, warm-up, optimizer and log."""
    train, schedule = recipe.train, recipe.train.schedule
    if schedule.num_warmup_steps >= train.num_steps:
        yield Fault(
            f"`train.schedule.num_warmup_steps` is {schedule.num_warmup_steps} of {train.num_steps} steps",
            "the learning rate would never get past its warm-up",
            f"set train.schedule.num_warmup_steps={train.num_steps // 10}, or raise train.num_steps",
        )
    if schedule.name == "constant" and schedule.final_frac:
        yield Fault(
            "`train.schedule.final_frac` is not used",
            "train.schedule.name=constant does not decay",
            "set train.schedule.final_frac=0, or train.schedule.name=cosine",
        )
    for number, beta in enumerate(train.betas):
        if not 0 <= beta < 1:
            yield Fault(
                f"`train.betas.{number}` is {beta:g}",
                "AdamW's averages need 0 <= beta < 1",
                "set train.betas=[0.9, 0.999]",
            )
    every = train.checkpoint_every_num_steps
    if every is not None and every > train.num_steps:
        yield Warning_(
            f"train.checkpoint_every_num_steps={every} is more than train.num_steps={train.num_steps}",
            "no checkpoint will be written on the way",
            f"Set it to {max(1, train.num_steps // 4)}, or to null",
        )
    if recipe.log.project != LogConfig().project and not recipe.log.trackers:
        yield Fault(
            "`log.project` is not used",
            "log.trackers is empty, and only trackers have projects",
            "set log.trackers=[tensorboard], or remove log.project",
        )


RULES: tuple[Rule, ...] = (
    models_can_load,
    teacher_differs_from_student,
    scores_suffice,
    sampling_makes_sense,
    adapter_options_have_one,
    training_adds_up,
)
