"""reasoning-gym's tasks: names, options, entries and scorers. The package is an extra, imported when asked for."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from opd.config.schema import Scalar, TaskSource
from opd.data.rows import nearest
from opd.errors import OpdError
from opd.types import Problem

GYM_PREFIX = "reasoning_gym:"
MAX_NUM_ENTRIES = 200_000
MAX_NUM_REPEATS = 2_000

EVALUATES_ANSWER = re.compile(r"\b(?:eval|exec|parse_expr|sympify)\((?!entry\b)")
"""Calls that run text as Python, as sympy's parse_expr and sympify do too; the entry's own text is harmless."""


def _datasets() -> dict[str, Any]:
    """Name -> (data set class, config class)."""
    try:
        return importlib.import_module("reasoning_gym.factory").DATASETS
    except ModuleNotFoundError as error:
        raise OpdError(
            "reasoning-gym's tasks cannot be made",
            why=f"the module {error.name} is not installed",
            fix="pip install 'opd[demo]'",
        ) from error


def gym_name(task: str) -> str:
    """`reasoning_gym:NAME` -> `NAME`, checked.

    Raises:
        OpdError: reasoning-gym is not installed or has no such task.
    """
    name = task.removeprefix(GYM_PREFIX)
    names = sorted(_datasets())
    if name not in names:
        raise OpdError(
            f"there is no task {task!r}",
            why=f"reasoning-gym has {len(names)} tasks, none called {name!r}",
            fix=f"{nearest(name, names)}see reasoning-gym's gallery for the names",
        )
    return name


def gym_entries(name: str, options: Mapping[str, Scalar], source: TaskSource) -> Iterator[tuple[int, dict[str, Any]]]:
    """(index, entry) for the seed, until entries do nothing but repeat.

    The split is not made with seeds: reasoning-gym makes entry i of seed s from `s + i`, so that neighbouring seeds
    share all but one of their entries.
    """
    config_class = _datasets()[name][1]
    known = sorted(field.name for field in dataclasses.fields(config_class) if field.name not in ("seed", "size"))
    for option in options:
        if option not in known:
            raise OpdError(
                f"task {source.task} has no option {option!r}",
                why=f"its options are heldout_frac, {', '.join(known)}",
                fix=f"{nearest(option, known)}remove it or use one of these",
            )
    create: Callable[..., Any] = importlib.import_module("reasoning_gym").create_dataset
    try:
        dataset = create(name, size=MAX_NUM_ENTRIES, seed=source.seed, **options)
    except (AssertionError, ValueError, TypeError) as error:
        raise OpdError(
            f"task {source.task} refuses its options",
            why=f"{type(error).__name__}: {error}",
            fix="change the task's options",
        ) from error
    seen: set[str] = set()
    num_repeats = 0
    for index in range(MAX_NUM_ENTRIES):
        entry: dict[str, Any] = dataset[index]
        num_repeats = num_repeats + 1 if entry["question"] in seen else 0
        if num_repeats == MAX_NUM_REPEATS:  # a small task has no more questions
            return
        seen.add(entry["question"])
        yield index, entry


def evaluates_answers(name: str) -> bool:
    """Whether the task's scorer runs the answer as Python code."""
    # A composite passes answers on to the scorers of its parts, whatever they do.
    return name == "composite" or bool(EVALUATES_ANSWER.search(inspect.getsource(_datasets()[name][0].score_answer)))


def gym_scorer(name: str) -> Callable[[str | None, Problem], float]:
    """reasoning-gym's own scorer of a task, over `Problem`s that came from it.

    Raises:
        OpdError: the scorer runs the answer as Python code, which a model's output must never be.
    """
    if evaluates_answers(name):
        raise OpdError(
            f"the scorer of {GYM_PREFIX}{name} is refused",
            why="it runs the answer as Python code, and answers come from a model",
            fix="grade by the exact answer instead, or choose another task",
        )
    dataset_class, config_class = _datasets()[name]
    dataset = dataset_class(config=config_class())

    def score(answer: str | None, problem: Problem) -> float:
        entry = {"question": problem.problem, "answer": problem.answer, "metadata": dict(problem.metadata)}
        return float(dataset.score_answer(answer=answer, entry=entry))

    return score
