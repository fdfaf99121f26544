"""What the teacher is shown beyond the problem: the five contexts, and where examples and donors come from.

Every draw depends on the seed and the problem's id alone, and fixed demonstrations on the seed alone.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation

from opd.config.schema import ContextConfig
from opd.data.builtin import shuffled
from opd.data.sources import question_key
from opd.errors import OpdError
from opd.types import Problem


@dataclass(frozen=True)
class Given:
    """What the teacher is shown of one problem; None where the context gives nothing."""

    solution: str | None
    answer: str | None
    demonstrations: tuple[Problem, ...]


class Contexts:
    """The recipe's context, for any problem.

    Args:
        config: which context, and how many solved examples.
        pool: problems with solutions that may serve as examples and placebo donors.
        seed: the recipe's seed.

    Raises:
        OpdError: the context contradicts itself.
    """

    def __init__(self, config: ContextConfig, pool: Sequence[Problem], seed: int) -> None:
        self._config = config
        self._pool = pool
        self._seed = seed
        name, num_demonstrations = config.name, config.num_demonstrations
        if name == "demonstrations" and num_demonstrations == 0:
            raise OpdError(
                "the context shows demonstrations, and there are none",
                why="context.name is demonstrations and context.num_demonstrations is 0",
                fix="set context.num_demonstrations=3",
            )
        if name == "none" and num_demonstrations > 0:
            raise OpdError(
                "the context shows nothing, and demonstrations",
                why=f"context.name is none and context.num_demonstrations is {num_demonstrations}",
                fix="set context.name=demonstrations",
            )

    def given(self, problem: Problem) -> Given:
        """What the teacher is shown of one problem.

        Raises:
            OpdError: the problem lacks what the context shows, or the pool has no example or donor for it.
        """
        name = self._config.name
        demonstrations = self._draw_demonstrations(problem)
        if name == "reference_solution":
            solution = _required(problem, problem.solution, "solution", name)
            return Given(solution, problem.answer, demonstrations)
        if name == "answer_only":
            answer = _required(problem, problem.answer, "answer", name)
            return Given(answer, answer, demonstrations)
        if name == "placebo":
            donor = self._draw_placebo(problem, demonstrations)
            return Given(donor.solution, donor.answer, demonstrations)
        return Given(None, None, demonstrations)

    def _draw_demonstrations(self, problem: Problem) -> tuple[Problem, ...]:
        """Solved examples: the same under every context, so that contexts can be compared; no question twice."""
        examples: list[Problem] = []
        keys: set[str] = set()
        if self._config.num_demonstrations:
            fixed = self._config.demonstration_choice == "fixed"
            order = f"demonstrations {self._seed}"
            for donor in self._donors(problem, order if fixed else f"{order} {problem.id}"):
                if question_key(donor) not in keys:
                    examples.append(donor)
                    keys.add(question_key(donor))
                if len(examples) == self._config.num_demonstrations:
                    return tuple(examples)
        if len(examples) < self._config.num_demonstrations:
            raise OpdError(
                f"problem {problem.id}: there are {len(examples)} solved examples to show",
                why=f"context.num_demonstrations asks for {self._config.num_demonstrations} training problems that "
                "have a solution and another question",
                fix="lower context.num_demonstrations, or give the training problems solutions",
            )
        return ()

    def _draw_placebo(self, problem: Problem, demonstrations: Sequence[Problem]) -> Problem:
        """Another problem's solution, wrong for this one: another answer, and another text."""
        shown = {example.id for example in demonstrations}

        def is_wrong(donor: Problem) -> bool:
            if donor.solution == problem.solution or donor.id in shown:
                return False
            if problem.answer is None:
                return True
            return donor.answer is not None and not same_answer(donor.answer, problem.answer)

        for donor in self._donors(problem, f"placebo {self._seed} {problem.id}"):
            if is_wrong(donor):
                return donor
        raise OpdError(
            f"problem {problem.id}: no other problem can lend it a wrong solution",
            why="the placebo context needs a training problem with a solution, another question and another answer",
            fix="take more training problems, with solutions and answers",
        )

    def _donors(self, problem: Problem, order: str) -> Iterator[Problem]:
        """The pool in the random order that the text `order` seeds, without the problem and its equals."""
        rng = random.Random(order)
        for index in shuffled(len(self._pool), rng):
            donor = self._pool[index]
            if donor.id != problem.id and not _same_question(donor, problem):
                yield donor


def same_answer(a: str, b: str) -> bool:
    """Equal as text or as numbers: `24`, ` 24` and `24.0` are one answer."""
    return _normal(a) == _normal(b)


def _normal(answer: str) -> Decimal | str:
    text = answer.strip()
    try:
        number = Decimal(text.replace(",", ""))
    except InvalidOperation:
        return text.casefold()
    return number if number.is_finite() else text.casefold()


def _required(problem: Problem, value: str | None, field: str, context: str) -> str:
    if value is None:
        raise OpdError(
            f"problem {problem.id} has no {field}",
            why=f"the context {context} shows the teacher the problem's {field}",
            fix=f"add the {field} to the data (columns.{field}), or choose another context",
        )
    return value


def _same_question(a: Problem, b: Problem) -> bool:
    return question_key(a) == question_key(b) or a.problem.strip() == b.problem.strip()
