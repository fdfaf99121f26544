"""One row of a data set -> one `Problem`: which column means what, and which rows are bad.

A row is bad when it has no problem text, an empty problem, solution or answer, an answer that is neither text nor a
finite number, text that no tokenizer or file can hold (lone surrogates, NUL), or a conversation that does not end with
the user. What a bad row leads to (an error that names it, or a count) is the caller's choice.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from difflib import get_close_matches
from typing import Any, Literal, cast

from opd.config.schema import ColumnsConfig
from opd.errors import OpdError
from opd.types import Message, Problem

Field = Literal["problem", "solution", "answer", "messages", "id"]

ALIASES: dict[Field, tuple[str, ...]] = {
    "problem": ("problem", "question", "prompt"),
    "solution": ("solution", "rationale"),
    "answer": ("answer", "final_answer"),
    "messages": ("messages",),
    "id": ("id",),
}
"""Column names that are understood without `columns`; two of one line in the same data set are an ambiguity."""

GSM8K_ANSWER = re.compile(r"\A(?P<solution>.*?)^\s*####(?P<answer>[^\n]*)\s*\Z", re.DOTALL | re.MULTILINE)
"""GSM8K writes the worked solution and the final answer into one column: `... so 6 * 7 = 42\\n#### 42`."""

NUM_NAMED_ROWS = 3


class BadRowError(Exception):
    """A row that cannot become a problem; the message is the reason, the same words for every row of one kind."""


@dataclass(frozen=True)
class Dropped:
    """How many rows were dropped for one reason, and the names of the first few."""

    count: int
    rows: tuple[str, ...]


class DropCounter:
    """Counts dropped rows by reason."""

    def __init__(self) -> None:
        self._rows: dict[str, list[str]] = {}
        self._counts: dict[str, int] = {}

    def add(self, reason: str, row: str) -> None:
        """Count one row; only the first few are kept by name."""
        self._counts[reason] = self._counts.get(reason, 0) + 1
        names = self._rows.setdefault(reason, [])
        if len(names) < NUM_NAMED_ROWS:
            names.append(row)

    def result(self) -> dict[str, Dropped]:
        """Reason -> count and names, in the order in which the reasons first came up."""
        return {reason: Dropped(count, tuple(self._rows[reason])) for reason, count in self._counts.items()}


def nearest(name: str, known: Sequence[str]) -> str:
    """`did you mean 'x'?`, or an empty string when nothing is close: for the fix of an error."""
    close = get_close_matches(name, known, n=1)
    return f"did you mean {close[0]!r}? " if close else ""


# ---- columns -------------------------------------------------------------------------------------------------------


def map_columns(columns: ColumnsConfig, available: Sequence[str], *, source: str) -> dict[Field, str]:
    """Which column holds which field.

    A column that `columns` names must exist. Otherwise the first column of the field's `ALIASES` is taken; two that fit
    are an error, as are a problem column beside a messages column, unless `columns` names one of them.

    Args:
        columns: the recipe's mapping.
        available: the columns of the data set.
        source: the file or data set, for errors.

    Raises:
        OpdError: a named column is missing, two columns compete, or none holds the problem.
    """
    mapping: dict[Field, str] = {}
    for field, aliases in ALIASES.items():
        named = cast("str | None", getattr(columns, field))
        if named is not None:
            if named not in available:
                raise _missing_column(named, field, available, source)
            mapping[field] = named
            continue
        found = [alias for alias in aliases if alias in available]
        if len(found) > 1:
            raise OpdError(
                f"{source}: two columns could be the {field}",
                why=f"{' and '.join(map(repr, found))} both exist",
                fix=f"name one: columns.{field}={found[0]}",
            )
        if found:
            mapping[field] = found[0]
    _settle_problem_or_messages(mapping, columns, available, source)
    _refuse_shared_columns(mapping, source)
    return mapping


def _missing_column(named: str, field: Field, available: Sequence[str], source: str) -> OpdError:
    return OpdError(
        f"{source}: there is no column {named!r}",
        why=f"columns.{field} asks for it; the columns are {', '.join(available)}",
        fix=f"{nearest(named, available)}set columns.{field} to one of them",
    )


def _settle_problem_or_messages(
    mapping: dict[Field, str], columns: ColumnsConfig, available: Sequence[str], source: str
) -> None:
    """The question comes as text or as a conversation, from exactly one column."""
    if "problem" in mapping and "messages" in mapping:
        if (columns.problem is None) == (columns.messages is None):
            raise OpdError(
                f"{source}: the question could be text or a conversation",
                why=f"there are a problem column {mapping['problem']!r} and a messages column {mapping['messages']!r}",
                fix=f"name one: columns.problem={mapping['problem']} or columns.messages={mapping['messages']}",
            )
        del mapping["messages" if columns.messages is None else "problem"]
    if "problem" not in mapping and "messages" not in mapping:
        wanted = (*ALIASES["problem"], *ALIASES["messages"])
        guesses = (name for alias in wanted for name in get_close_matches(alias, available, n=1))
        guess = next(guesses, None)
        raise OpdError(
            f"{source}: no column holds the problem",
            why=f"none of {', '.join(wanted)} is among the columns {', '.join(available) or '(none)'}",
            fix=f"{f'did you mean {guess!r}? ' if guess else ''}set columns.problem to the column of the question",
        )


def _refuse_shared_columns(mapping: dict[Field, str], source: str) -> None:
    by_column: dict[str, Field] = {}
    for field, column in mapping.items():
        if column in by_column:
            raise OpdError(
                f"{source}: column {column!r} is asked to be two things",
                why=f"it is mapped to {by_column[column]} and to {field}",
                fix=f"set columns.{field} to another column",
            )
        by_column[column] = field


# ---- rows ----------------------------------------------------------------------------------------------------------


def to_problem(row: Mapping[str, Any], mapping: Mapping[Field, str], *, default_id: str) -> Problem:
    """One row as a `Problem`; columns that the mapping does not use become its metadata.

    A missing or null solution or answer is None; an empty one is bad. Whole and decimal numbers become text that reads
    back as the same number. Without a solution column, a GSM8K answer is split into solution and answer.

    Raises:
        BadRowError: the row cannot become a problem.
    """
    values = {field: row.get(column) for field, column in mapping.items()}
    messages: tuple[Message, ...] | None = None
    solution = _text(values.get("solution"), "solution")
    if "messages" in mapping:
        messages, reply = _conversation(values.get("messages"))
        problem = messages[-1]["content"]
        if reply is not None and solution is not None:
            raise BadRowError("a solution column and an assistant's last message are two solutions")
        solution = reply if reply is not None else solution
    else:
        question = _text(values.get("problem"), "problem")
        if question is None:
            raise BadRowError("no problem")
        problem = question
    answer = _number_or_text(values.get("answer"))
    if solution is None and answer is not None and (split := GSM8K_ANSWER.match(answer)):
        solution = split["solution"].strip() or None
        answer = split["answer"].strip()
        if not answer:
            raise BadRowError("empty answer after ####")
    metadata = {name: value for name, value in row.items() if name not in mapping.values()}
    for name, value in metadata.items():
        _check_text(value, f"column {name!r}")
    row_id = _number_or_text(values.get("id"), "id")
    return Problem(row_id if row_id is not None else default_id, problem, solution, answer, messages, metadata)


def _text(value: Any, field: str) -> str | None:
    """Text that is not empty, or None for a missing value."""
    if value is None:
        return None
    if not isinstance(value, str):
        raise BadRowError(f"{field} is not text")
    if not value.strip():
        raise BadRowError(f"empty {field}")
    _check_text(value, field)
    return value


def _number_or_text(value: Any, field: str = "answer") -> str | None:
    """Text, or a number as text that reads back as the same number. True and False are not numbers."""
    if isinstance(value, int | float | Decimal) and not isinstance(value, bool):
        if not math.isfinite(value):
            raise BadRowError(f"{field} is not a finite number")
        return _exact(value)
    if value is not None and not isinstance(value, str):
        raise BadRowError(f"{field} is neither text nor a number")
    return _text(value, field)


def _exact(value: int | float | Decimal) -> str:
    try:
        return str(value)
    except ValueError as error:  # Python refuses to write integers of more than 4,300 digits
        raise BadRowError("a number of thousands of digits") from error


def _conversation(value: Any) -> tuple[tuple[Message, ...], str | None]:
    """The messages up to the last user turn, and the assistant's reply after it if there is one."""
    if not isinstance(value, list | tuple) or not value:
        raise BadRowError("messages is not a list of chat messages")
    messages = [_message(item) for item in cast("Sequence[Any]", value)]
    if any(message["role"] == "system" for message in messages[1:]):
        raise BadRowError("a system message that is not the first")
    reply = messages.pop()["content"] if messages[-1]["role"] == "assistant" else None
    if not messages or messages[-1]["role"] != "user":
        raise BadRowError("the conversation's question is not a user message")
    return tuple(messages), reply


def _message(item: Any) -> dict[str, str]:
    if not isinstance(item, Mapping):
        raise BadRowError("messages is not a list of chat messages")
    message = cast("Mapping[str, Any]", item)
    role, content = message.get("role"), message.get("content")
    if role not in ("system", "user", "assistant"):
        raise BadRowError("a message whose role is not system, user or assistant")
    text = _text(content, "message")
    if text is None:
        raise BadRowError("a message without content")
    return {"role": role, "content": text}


def _check_text(value: Any, place: str) -> None:
    """Refuse text that cannot be written as UTF-8 or that cuts strings short, however deep it sits."""
    if isinstance(value, str):
        if "\0" in value:
            raise BadRowError(f"NUL character in {place}")
        if any("\ud800" <= char <= "\udfff" for char in value):
            raise BadRowError(f"lone surrogate in {place}")
    elif isinstance(value, Mapping):
        for key, item in cast("Mapping[Any, Any]", value).items():
            _check_text(key, place)
            _check_text(item, place)
    elif isinstance(value, list | tuple):
        for item in cast("Sequence[Any]", value):
            _check_text(item, place)
