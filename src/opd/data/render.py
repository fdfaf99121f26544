"""`Problem` -> `PromptPair`: what student and teacher are shown, as messages and as each model's own token ids.

The student sees the problem. The teacher sees what the context adds: a solution, an answer, solved examples, or another
problem's solution. Every choice (examples, placebo donors) depends on the recipe's seed and the problem's id alone, so
that a problem has the same prompts in every run, in every batch, beside whichever others.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from opd.config.schema import ContextConfig, PromptConfig
from opd.data.chat import Boundary, Chat, SpecialTokenError
from opd.data.context import Contexts
from opd.data.rows import DropCounter, Dropped
from opd.data.templates import (
    DEFAULT_CONTEXT,
    DEMONSTRATION_VARIABLES,
    STUDENT_VARIABLES,
    TEACHER_VARIABLES,
    Templates,
)
from opd.errors import OpdError
from opd.types import Message, Problem, PromptPair

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class LongPromptError(OpdError):
    """A prompt has more tokens than the recipe allows."""


@dataclass(frozen=True)
class Rendered:
    """What a training loop needs of a set of problems.

    Args:
        pairs: prompt pairs in the order of the problems.
        dropped: what was dropped by reason, with the first few problem ids.
        solutions: problem id -> its solution as a completion of the student's prompt; empty unless asked for.
    """

    pairs: tuple[PromptPair, ...]
    dropped: dict[str, Dropped]
    solutions: dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class RenderFacts:
    """Where prompts end and completions begin, for both models."""

    student: Boundary
    teacher: Boundary

    @property
    def same_thinking(self) -> bool:
        """Whether completions begin inside the thinking part for both models or for neither.

        Where they do not, the teacher scores the student's thoughts as an answer, or its answer as thoughts.
        """
        return self.student.thinking == self.teacher.thinking


class Renderer:
    """Renders problems for a student and a teacher.

    Templates see `problem` (text) and `metadata`; the teacher's also what the context gives:

    | context | `solution` | `answer` |
    |---|---|---|
    | `reference_solution` | the problem's solution | its answer, or None |
    | `answer_only` | the answer's text | the answer |
    | `placebo` | another problem's solution | that problem's answer, or None |
    | `demonstrations`, `none` | None | None |

    and `demonstrations`, a list of `problem`, `solution`, `answer`, `metadata`. A teacher template that uses that
    variable places the examples itself; otherwise they become chat turns after the system message, by
    `prompt.demonstration` or, without it, as the student's messages for that example and its solution as the reply.

    Args:
        prompt: templates, thinking switches and limits.
        context: what the teacher is shown.
        student_tokenizer: renders and encodes the student's prompts with its own chat template.
        teacher_tokenizer: likewise for the teacher; the same object for a self-teacher.
        pool: training problems, from which examples and placebo donors are drawn.
        seed: the recipe's seed.
        on_bad_row: whether `pairs` drops problems whose text holds special tokens, or stops at the first.

    Raises:
        OpdError: a template, a thinking switch or a context cannot work, whatever the problem.
    """

    def __init__(
        self,
        prompt: PromptConfig,
        context: ContextConfig,
        student_tokenizer: PreTrainedTokenizerBase,
        teacher_tokenizer: PreTrainedTokenizerBase,
        pool: Sequence[Problem],
        seed: int,
        *,
        on_bad_row: Literal["error", "drop"] = "error",
    ) -> None:
        self._prompt = prompt
        self._context = context
        self._on_bad_row = on_bad_row
        self._student = _templates(prompt, "student", STUDENT_VARIABLES)
        self._teacher = _templates(prompt, "teacher", TEACHER_VARIABLES)
        self._demonstration = _templates(prompt, "demonstration", DEMONSTRATION_VARIABLES)
        self._check_recipe()
        self._student_chat = Chat(student_tokenizer, prompt.student_thinking, side="student")
        self._teacher_chat = Chat(teacher_tokenizer, prompt.teacher_thinking, side="teacher")
        donors = [problem for problem in pool if self._may_donate(problem)]
        self._contexts = Contexts(context, donors, seed)

    @property
    def facts(self) -> RenderFacts:
        """The boundary between prompt and completion of both models, for the doctor."""
        return RenderFacts(self._student_chat.boundary(), self._teacher_chat.boundary())

    def pairs(self, problems: Iterable[Problem], *, solutions: bool = False) -> Rendered:
        """Both prompts of every problem; long prompts and bad rows are errors or are dropped, as the recipe says.

        Args:
            problems: what to render.
            solutions: also encode each problem's own solution.

        Raises:
            OpdError: a problem cannot be rendered, or every problem was dropped.
        """
        pairs: list[PromptPair] = []
        encoded: dict[str, tuple[int, ...]] = {}
        drops = DropCounter()
        for problem in problems:
            try:
                pair = self.pair(problem)
                if solutions:
                    encoded[problem.id] = self.solution_ids(problem)
                pairs.append(pair)
            except LongPromptError as error:
                if self._prompt.on_long_prompt == "error":
                    raise
                drops.add(error.what.removeprefix(f"problem {problem.id}: "), problem.id)
            except SpecialTokenError as error:
                if self._on_bad_row == "error":
                    raise
                drops.add(f"special token {error.token} in the text", problem.id)
        dropped = drops.result()
        if dropped and not pairs:
            reasons = ", ".join(f"{item.count} x {reason}" for reason, item in dropped.items())
            raise OpdError("no problem is left to render", why=reasons, fix="raise the limits, or take other data")
        return Rendered(tuple(pairs), dropped, encoded)

    def pair(self, problem: Problem) -> PromptPair:
        """Both prompts of one problem.

        Raises:
            OpdError: it lacks what the context needs, its text holds a special token, or a prompt is too long.
        """
        student_ids, student_text = self.student_ids(problem)
        teacher_ids, teacher_text = self.teacher_ids(problem)
        return PromptPair(problem, student_ids, teacher_ids, student_text, teacher_text)

    def student_ids(self, problem: Problem) -> tuple[tuple[int, ...], str]:
        """The student's prompt as token ids, up to where the completion begins, and as text.

        Raises:
            OpdError: as `pair`.
        """
        ids, text = self._student_chat.encode(self.student_messages(problem), problem.id)
        self._check_length(problem, len(ids), "student", self._prompt.max_student_prompt_tokens)
        return ids, text

    def teacher_ids(self, problem: Problem) -> tuple[tuple[int, ...], str]:
        """The teacher's prompt as token ids, up to where the completion begins, and as text.

        Raises:
            OpdError: as `pair`.
        """
        ids, text = self._teacher_chat.encode(self.teacher_messages(problem), problem.id)
        self._check_length(problem, len(ids), "teacher", self._prompt.max_teacher_prompt_tokens)
        return ids, text

    def solution_ids(self, problem: Problem) -> tuple[int, ...]:
        """The problem's own solution as the completion of the student's prompt, its stop token included.

        Raises:
            OpdError: it has none, or the student's chat template cannot place it.
        """
        if problem.solution is None:
            raise OpdError(
                f"problem {problem.id} has no solution",
                why="sft in loss.parts trains on the problems' own solutions",
                fix="add the solution to the data (columns.solution), or take sft out of the mix",
            )
        return self._student_chat.answer_ids(self.student_messages(problem), problem.solution, problem.id)

    # ---- messages --------------------------------------------------------------------------------------------------

    def student_messages(self, problem: Problem) -> list[Message]:
        """The chat messages that the student is shown."""
        if self._student is None:
            return list(problem.messages or ({"role": "user", "content": problem.problem},))
        self._refuse_lost_messages(problem, "student")
        values = {"problem": problem.problem, "metadata": problem.metadata}
        return self._student.render(values, problem_id=problem.id)

    def teacher_messages(self, problem: Problem) -> list[Message]:
        """The chat messages that the teacher is shown."""
        given = self._contexts.given(problem)
        if self._teacher is None:
            messages = self.student_messages(problem)
            if given.solution is not None:
                paragraph = DEFAULT_CONTEXT[self._context.name].format(solution=given.solution.strip())
                last = messages[-1]
                messages[-1] = {"role": last["role"], "content": f"{last['content']}\n\n{paragraph}"}
        else:
            self._refuse_lost_messages(problem, "teacher")
            values = {
                "problem": problem.problem,
                "solution": given.solution,
                "answer": given.answer,
                "demonstrations": [_as_values(example) for example in given.demonstrations],
                "metadata": problem.metadata,
            }
            messages = self._teacher.render(values, problem_id=problem.id)
            if "demonstrations" in self._teacher.used:
                return messages
        turns = [turn for example in given.demonstrations for turn in self._turns(example)]
        num_system = int(messages[0]["role"] == "system")
        return [*messages[:num_system], *turns, *messages[num_system:]]

    def _turns(self, example: Problem) -> list[Message]:
        """One solved example as chat turns."""
        if self._demonstration is not None:
            return self._demonstration.render(_as_values(example), problem_id=example.id)
        asked = [message for message in self.student_messages(example) if message["role"] != "system"]
        return [*asked, {"role": "assistant", "content": str(example.solution)}]

    # ---- checks ----------------------------------------------------------------------------------------------------

    def _check_recipe(self) -> None:
        name, num_demonstrations = self._context.name, self._context.num_demonstrations
        if self._teacher is not None and name in DEFAULT_CONTEXT and not self._teacher.used & {"solution", "answer"}:
            raise OpdError(
                f"the context {name} would not reach the teacher",
                why="prompt.teacher uses neither `solution` nor `answer`",
                fix="write {{ solution }} where the teacher shall see it, or set context.name=none",
            )
        places_itself = self._teacher is not None and "demonstrations" in self._teacher.used
        if self._demonstration is not None and (num_demonstrations == 0 or places_itself):
            raise OpdError(
                "prompt.demonstration would be ignored",
                why="prompt.teacher places `demonstrations` itself"
                if places_itself
                else "context.num_demonstrations is 0",
                fix="remove prompt.demonstration",
            )

    def _may_donate(self, problem: Problem) -> bool:
        """Problems without a solution have nothing to show; bad rows are errors or left out, as for `pairs`."""
        if problem.solution is None:
            return False
        if self._context.num_demonstrations == 0 and self._context.name != "placebo":
            return False
        try:
            self._teacher_chat.check_texts(_texts(problem), problem.id)
        except SpecialTokenError:
            if self._on_bad_row == "error":
                raise
            return False
        return True

    def _refuse_lost_messages(self, problem: Problem, side: str) -> None:
        if problem.messages is not None and len(problem.messages) > 1:
            raise OpdError(
                f"problem {problem.id}: prompt.{side} would leave out a part of its conversation",
                why=f"the row has {len(problem.messages)} messages, and the template sees the last one alone",
                fix=f"remove prompt.{side}, so that the row's own messages are used",
            )

    def _check_length(self, problem: Problem, num_tokens: int, side: str, limit: int) -> None:
        if num_tokens > limit:
            raise LongPromptError(
                f"problem {problem.id}: the {side}'s prompt is too long",
                why=f"it has {num_tokens} tokens, prompt.max_{side}_prompt_tokens is {limit}",
                fix=f"raise prompt.max_{side}_prompt_tokens, or set prompt.on_long_prompt=drop",
            )


def _templates(
    prompt: PromptConfig, side: Literal["student", "teacher", "demonstration"], variables: Sequence[str]
) -> Templates | None:
    messages = getattr(prompt, side)
    if messages is None:
        return None
    templates = Templates(messages, place=f"prompt.{side}", variables=variables)
    last = "assistant" if side == "demonstration" else "user"
    if templates.roles[-1] != last or "system" in templates.roles[1:]:
        raise OpdError(
            f"prompt.{side} is not a conversation that ends with the {last}",
            why=f"its roles are {', '.join(templates.roles)}",
            fix="put the system message first and the "
            + ("solution last, as the assistant's" if side == "demonstration" else "question last, as the user's"),
        )
    if side == "demonstration" and "solution" not in templates.used:
        raise OpdError(
            "prompt.demonstration shows no solution",
            why="none of its messages uses `solution`",
            fix="write {{ solution }} in the assistant's message",
        )
    return templates


def _as_values(problem: Problem) -> dict[str, Any]:
    return {
        "problem": problem.problem,
        "solution": problem.solution,
        "answer": problem.answer,
        "metadata": problem.metadata,
    }


def _texts(problem: Problem) -> Iterator[str]:
    yield problem.problem
    yield from (text for text in (problem.solution, problem.answer) if text is not None)
    yield from (message["content"] for message in problem.messages or ())
