"""Generated problems: the built-in tasks and reasoning-gym's, split by construction.

A stable hash of what makes two questions the same question (for a product the unordered pair, so that 3 * 8 never leaks
8 * 3; for reasoning-gym the question's text) decides the split, whatever the seed and the ranges. Train and held-out
are therefore disjoint as long as both use the same `heldout_frac`.
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice

from pydantic import ValidationError

from opd.config.schema import TaskSource
from opd.data.builtin import TASKS, TaskOptions
from opd.data.gym import GYM_PREFIX, gym_entries, gym_name, gym_scorer
from opd.data.rows import nearest
from opd.errors import OpdError
from opd.types import Problem

__all__ = ["TASKS", "generate", "majority_answer", "task_scorer"]

DEFAULT_NUM_PROBLEMS = 1000
"""Without `num_problems` a task gives all its problems, or this many when there are more."""

Scorer = Callable[[str | None, Problem], float]
"""(extracted answer or None, problem) -> score in [0, 1]."""


def generate(source: TaskSource) -> tuple[Problem, ...]:
    """The problems of a task: the same for the same source, on every machine.

    Raises:
        OpdError: the task or an option is unknown, or the split holds fewer problems than `num_problems`.
    """
    everything = _gym_problems(source) if source.task.startswith(GYM_PREFIX) else _builtin_problems(source)
    problems = tuple(islice(everything, source.num_problems or DEFAULT_NUM_PROBLEMS))
    if not problems or len(problems) < (source.num_problems or 1):
        raise OpdError(
            f"task {source.task}: the {source.split} split holds {len(problems)} problems",
            why=f"{source.num_problems or 1} are asked for, and each question comes once and in one split alone",
            fix="ask for fewer with num_problems, widen the task's ranges, or change heldout_frac for both splits",
        )
    return problems


def task_scorer(task: str) -> Scorer:
    """How answers to a task's problems are scored: by reasoning-gym's own scorer, or by equal text for built-in tasks.

    Raises:
        OpdError: the task is unknown, or its scorer would run the model's answer as code.
    """
    if task.startswith(GYM_PREFIX):
        return gym_scorer(gym_name(task))
    _require_builtin(task)
    return _equal_text


def majority_answer(problems: Sequence[Problem]) -> tuple[str, float]:
    """The most frequent answer and its share: what a model scores that always says the same.

    Of several that are equally frequent the first in the order of text is taken.

    Raises:
        OpdError: there is no problem, or one has no answer.
    """
    without = next((problem.id for problem in problems if problem.answer is None), None)
    if without is not None or not problems:
        raise OpdError(
            "there is no majority answer",
            why=f"problem {without!r} has no answer" if without is not None else "there are no problems",
            fix="take a data source whose problems have answers",
        )
    counts = Counter(str(problem.answer) for problem in problems)
    answer = min(counts, key=lambda text: (-counts[text], text))
    return answer, counts[answer] / len(problems)


def _equal_text(answer: str | None, problem: Problem) -> float:
    return float(answer is not None and answer.strip() == problem.answer)


def in_heldout(task: str, key: str, heldout_frac: float) -> bool:
    """Whether questions with this key are held out: true for a share of `heldout_frac` of all keys."""
    digest = hashlib.sha256(f"{task}\0{key}".encode()).digest()
    return int.from_bytes(digest[:8], "big") < heldout_frac * 2**64


# ---- built-in ------------------------------------------------------------------------------------------------------


def _builtin_problems(source: TaskSource) -> Iterator[Problem]:
    _require_builtin(source.task)
    task = TASKS[source.task]
    options = _options(source, task.options)
    rng = random.Random(f"{source.task} {source.split} {source.seed}")
    for item in task.items(options, rng):
        if in_heldout(source.task, item.key, options.heldout_frac) != (source.split == "heldout"):
            continue
        yield Problem(
            id=f"{source.task}:{item.name}",
            problem=item.question,
            solution=item.solution(options.solution_style),
            answer=item.answer,
            metadata={"task": source.task, "question_key": f"{source.task}:{item.key}"},
        )


def _require_builtin(task: str) -> None:
    if task in TASKS:
        return
    raise OpdError(
        f"there is no task {task!r}",
        why=f"built-in are {', '.join(TASKS)}; reasoning-gym's are written {GYM_PREFIX}NAME",
        fix=f"{nearest(task, list(TASKS))}set task to one of these",
    )


def _options(source: TaskSource, model: type[TaskOptions]) -> TaskOptions:
    _require_known_options(source, model.model_fields)
    try:
        return model.model_validate(dict(source.options))
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "options"
        raise OpdError(
            f"task {source.task}: {place} cannot be {first['input']!r}" if first["loc"] else f"task {source.task}",
            why=first["msg"],
            fix="change the task's options",
        ) from error


def _require_known_options(source: TaskSource, known: Iterable[str]) -> None:
    names = list(known)
    for name in source.options:
        if name not in names:
            raise OpdError(
                f"task {source.task} has no option {name!r}",
                why=f"its options are {', '.join(names)}",
                fix=f"{nearest(name, names)}remove it or use one of these",
            )


# ---- reasoning-gym -------------------------------------------------------------------------------------------------


def _gym_problems(source: TaskSource) -> Iterator[Problem]:
    name = gym_name(source.task)
    options = dict(source.options)
    heldout_frac = options.pop("heldout_frac", 0.3)
    if isinstance(heldout_frac, bool) or not isinstance(heldout_frac, int | float) or not 0.01 <= heldout_frac <= 0.99:
        raise OpdError(
            f"task {source.task}: heldout_frac cannot be {heldout_frac!r}",
            why="it is the share of questions that are held out",
            fix="set it between 0.01 and 0.99, the same for both splits",
        )
    seen: set[str] = set()
    for index, entry in gym_entries(name, options, source):
        question = str(entry["question"]).strip()
        if question in seen or in_heldout(source.task, question, heldout_frac) != (source.split == "heldout"):
            continue
        seen.add(question)
        yield Problem(
            id=f"{source.task}:{source.seed}:{index}",
            problem=question,
            answer=str(entry["answer"]),
            metadata=entry["metadata"],
        )
