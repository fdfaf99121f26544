"""A recipe becomes its parts: data, prompts, student, teacher, sampler, loss.

What cannot work is refused before a model is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from opd.align import MaskedIdentity
from opd.config.formula import on_policy, solution_weight
from opd.config.schema import ModelConfig, ModelTeacherConfig, Recipe, SelfTeacherConfig
from opd.data import Problems, check_disjoint, load_problems
from opd.data.render import Rendered, Renderer
from opd.data.rows import Dropped
from opd.errors import OpdError
from opd.loss import Loss, build
from opd.models import LoadedModel, describe, load_tokenizer, same_vocabulary
from opd.rollout.hf import HfSampler
from opd.seeds import derive_seed
from opd.teacher import ModelTeacher, SelfTeacher, Teacher
from opd.training.student import Student, load_student
from opd.types import Alignment, PromptPair, Rollout


@dataclass(frozen=True)
class Parts:
    """What a run is made of.

    Args:
        recipe: what it does.
        problems: training problems.
        renderer: what made the prompts.
        pairs: the usable training prompts.
        dropped: counts the others by reason.
        student: who learns.
        teacher: who scores.
        sampler: draws from the student.
        loss: of sampled completions: the recipe's, without `sft`.
        align: which tokens of a completion are supervised.
        solutions: problem id -> its solution as a completion, where the loss has a part for them; else empty.
    """

    recipe: Recipe
    problems: Problems
    renderer: Renderer
    pairs: Sequence[PromptPair]
    dropped: Mapping[str, Dropped]
    student: Student
    teacher: Teacher
    sampler: HfSampler
    loss: Loss
    align: Callable[[Rollout], Alignment]
    solutions: Mapping[str, tuple[int, ...]]

    def sampler_with(self, weights: Callable[[], AbstractContextManager[None]]) -> HfSampler:
        """A sampler over the same model with other weights in place, e.g. `student.adapter_off`."""
        return _sampler(self.student, weights)


def assemble(recipe: Recipe, device: torch.device) -> Parts:
    """Load everything that the recipe names."""
    sampled_loss = on_policy(recipe.loss)
    assert sampled_loss is not None, "a rule refuses recipes without an on-policy loss"
    loss = build(sampled_loss)
    problems = load_problems(recipe.data.train, on_bad_row=recipe.data.on_bad_row)
    if recipe.eval is not None:
        check_disjoint(problems.problems, load_problems(recipe.eval.data).problems)
    tokenizer = load_tokenizer(recipe.student)
    teacher_tokenizer = tokenizer
    if isinstance(recipe.teacher, ModelTeacherConfig):
        _refuse_another_vocabulary(recipe.student, recipe.teacher)
        teacher_tokenizer = load_tokenizer(recipe.teacher)
    renderer = Renderer(
        recipe.prompt,
        recipe.context,
        tokenizer,
        teacher_tokenizer,
        problems.problems,
        recipe.seed,
        on_bad_row=recipe.data.on_bad_row,
    )
    rendered = renderer.pairs(problems.problems, solutions=solution_weight(recipe.loss) > 0)
    if not rendered.pairs:
        raise OpdError(
            "No training prompt is left.",
            why=f"All {len(problems.problems)} problems were dropped: {dict(rendered.dropped)}.",
            fix="Raise prompt.max_student_prompt_tokens and prompt.max_teacher_prompt_tokens, or look at the data.",
        )
    student = load_student(recipe.student, device=device, seed=derive_seed(recipe.seed, "adapter"))
    teacher = _teacher(recipe, student, device)
    scoring = teacher.loaded if isinstance(teacher, ModelTeacher) else student.loaded
    num_new = recipe.rollout.max_new_tokens
    _refuse_past_the_end(student.loaded, "student", max(len(pair.student_ids) for pair in rendered.pairs), num_new)
    _refuse_long_solutions(student.loaded, rendered)
    _refuse_past_the_end(scoring, "teacher", max(len(pair.teacher_ids) for pair in rendered.pairs), num_new)
    return Parts(
        recipe=recipe,
        problems=problems,
        renderer=renderer,
        pairs=rendered.pairs,
        dropped={**problems.dropped, **rendered.dropped},
        student=student,
        teacher=teacher,
        sampler=_sampler(student, student.merged if recipe.rollout.merge_adapter else nullcontext),
        loss=loss,
        align=MaskedIdentity(recipe.loss.mask, tokenizer, student.loaded.vocab_size),
        solutions=rendered.solutions,
    )


def _refuse_another_vocabulary(student: ModelConfig, teacher: ModelConfig) -> None:
    difference = same_vocabulary(describe(student), describe(teacher))
    if difference is not None:
        raise OpdError(
            f"{teacher.model} cannot teach {student.model}: their vocabularies differ.",
            why=difference,
            fix="Choose a teacher of the same family: a token id must mean the same on both sides.",
        )


def _refuse_past_the_end(loaded: LoadedModel, side: str, num_prompt: int, num_new: int) -> None:
    """Positions that a model was never trained on run without a word, or end in an index error."""
    limit = _num_positions(loaded)
    if limit is not None and num_prompt + num_new > limit:
        raise OpdError(
            f"{loaded.reference} has {limit} positions, and the longest {side} sequence needs {num_prompt + num_new}.",
            why=f"The longest prompt has {num_prompt} tokens, rollout.max_new_tokens is {num_new}.",
            fix=f"Lower rollout.max_new_tokens, or set prompt.on_long_prompt=drop and prompt.max_{side}_prompt_tokens.",
        )


def _refuse_long_solutions(loaded: LoadedModel, rendered: Rendered) -> None:
    limit = _num_positions(loaded)
    if limit is None:
        return
    for pair in rendered.pairs if rendered.solutions else ():
        num_given = len(rendered.solutions[pair.problem.id])
        if len(pair.student_ids) + num_given > limit:
            raise OpdError(
                f"problem {pair.problem.id}: its prompt and solution do not fit into {loaded.reference}.",
                why=f"They have {len(pair.student_ids)} + {num_given} tokens, and the model has {limit} positions.",
                fix="Take the problem out of the data, shorten its solution, or take sft out of loss.parts.",
            )


def _num_positions(loaded: LoadedModel) -> int | None:
    return getattr(loaded.model.config.get_text_config(), "max_position_embeddings", None)


def _teacher(recipe: Recipe, student: Student, device: torch.device) -> Teacher:
    max_tokens = recipe.train.micro_batch_tokens
    if isinstance(recipe.teacher, SelfTeacherConfig):
        return SelfTeacher(student, recipe.teacher.weights, max_tokens=max_tokens)
    return ModelTeacher(recipe.teacher, vocab_size=student.loaded.vocab_size, device=device, max_tokens=max_tokens)


def _sampler(student: Student, weights: Callable[[], AbstractContextManager[None]]) -> HfSampler:
    return HfSampler(
        student.model,
        stop_ids=student.loaded.stop_ids,
        pad_id=student.loaded.pad_id,
        vocab_size=student.loaded.vocab_size,
        dtype=student.dtype,
        weights=weights,
    )
