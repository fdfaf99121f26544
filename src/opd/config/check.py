"""Rules that span sections, checked before any model is loaded; and what a run would do, for `--dry-run`.

Each rule is a function that yields faults (errors) and warnings; the rules stand in `method_rules`, `loss_rules`,
`prompt_rules` and `data_rules`. All errors are raised together.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from opd.config import data_rules, loss_rules, method_rules, prompt_rules
from opd.config.faults import Fault, raise_all
from opd.config.findings import Rule, Warning_
from opd.config.formula import PROVIDES, formula, needs, objective, temperatures
from opd.config.load import LoadedRecipe
from opd.config.schema import (
    EmaWeights,
    FileSource,
    HubSource,
    LoraConfig,
    Recipe,
    SelfTeacherConfig,
    Source,
    StudentConfig,
    TeacherConfig,
)

if TYPE_CHECKING:
    from rich.text import Text

RULES: tuple[Rule, ...] = (*method_rules.RULES, *loss_rules.RULES, *prompt_rules.RULES, *data_rules.RULES)


def check(recipe: Recipe) -> list[Warning_]:
    """Refuse a recipe that cannot do what it says.

    Returns:
        Warnings: what runs, but probably not as hoped.

    Raises:
        OpdError: that holds every error, each with a concrete fix.
    """
    findings = [finding for rule in RULES for finding in rule(recipe)]
    raise_all(f"recipe {recipe.name!r}", [finding for finding in findings if isinstance(finding, Fault)])
    return [finding for finding in findings if isinstance(finding, Warning_)]


def dry_run_summary(loaded: LoadedRecipe) -> Text:
    """What a run of this recipe would do, one line a thing; nothing is loaded. `.plain` is the text without styles.

    Raises:
        OpdError: from `check`.
    """
    from rich.text import Text

    recipe = loaded.recipe
    warnings = check(recipe)
    lines = {
        "recipe": f"{recipe.name} ({' < '.join(loaded.layers)})",
        "student": _student(recipe.student),
        "teacher": f"{_teacher(recipe.teacher)}, shown {_context(recipe)}",
        "minimises": objective(recipe.loss),
        "temperatures": f"rollout {recipe.rollout.temperature:g}, loss {temperatures(recipe.loss)}",
        "data": _source(recipe.data.train),
        "budget": _budget(recipe),
        "evaluation": _evaluation(recipe),
        "folder": str(recipe.folder or f"runs/{recipe.name}"),
    }
    summary = Text(no_wrap=True, overflow="ignore")
    for name, line in lines.items():
        summary.append(f"{name:>12}", style="bold").append(f"  {line}\n")
    for warning in warnings:
        summary.append(f"{'warning':>12}", style="bold yellow").append(f"  {warning}\n")
    summary.rstrip()
    return summary


def _student(student: StudentConfig) -> str:
    adapter = student.adapter
    how = f"LoRA r {adapter.r}, alpha {adapter.alpha:g}" if isinstance(adapter, LoraConfig) else "every weight"
    return f"{student.model} in {student.dtype}, training {how}"


def _teacher(teacher: TeacherConfig) -> str:
    if not isinstance(teacher, SelfTeacherConfig):
        return f"{teacher.model} in {teacher.dtype}"
    weights = teacher.weights
    decay = f" (decay {weights.decay:g})" if isinstance(weights, EmaWeights) else ""
    return f"the student itself with {weights.name} weights{decay}"


def _context(recipe: Recipe) -> str:
    context = recipe.context
    what = {
        "reference_solution": "the reference solution",
        "answer_only": "the final answer",
        "demonstrations": "",
        "placebo": "another problem's solution (placebo)",
        "none": "nothing more than the student",
    }[context.name]
    examples = f"{context.num_demonstrations} solved examples" if context.num_demonstrations else ""
    return " and ".join(part for part in (what, examples) if part)


def _source(source: Source) -> str:
    limit = f", {source.num_problems:,} problems" if source.num_problems is not None else ""
    if isinstance(source, FileSource):
        return f"{source.path}{limit}"
    if isinstance(source, HubSource):
        subset = f"/{source.subset}" if source.subset is not None else ""
        return f"{source.dataset}{subset}, split {source.split}{limit}"
    return f"task {source.task}, split {source.split}, seed {source.seed}{limit}"


def _budget(recipe: Recipe) -> str:
    train, rollout = recipe.train, recipe.rollout
    per_step = train.num_problems_per_step * rollout.num_samples
    tokens = train.num_steps * per_step * rollout.max_new_tokens
    return (
        f"{train.num_steps:,} steps x {train.num_problems_per_step:,} problems x {rollout.num_samples} samples "
        f"x at most {rollout.max_new_tokens:,} tokens = at most {tokens:,} sampled tokens"
    )


def _evaluation(recipe: Recipe) -> str:
    if recipe.eval is None:
        return "none"
    temperature = recipe.eval.sampling.temperature
    return f"{_source(recipe.eval.data)}, {recipe.eval.num_samples} samples a problem at temperature {temperature:g}"


__all__ = ["PROVIDES", "Warning_", "check", "dry_run_summary", "formula", "needs"]
