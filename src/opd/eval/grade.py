r"""Is a completion's answer right? The last ``\boxed{}`` after the thinking, compared as integer, as text, or as math.

What cannot be read is not called wrong: no answer, an answer that cannot be parsed and a check that ran out of time
are each their own verdict.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from opd.eval.checker import MathChecker, shared_checker

Verdict = Literal["correct", "wrong", "no_answer", "unparsed", "timeout"]
TIME_LIMIT_S = 5.0
GRADER_VERSION = "1"  # part of the frozen settings: raise it whenever any verdict may change

_THINK_OPEN, _THINK_CLOSE = "<think>", "</think>"
_BOX = re.compile(r"\\boxed\s*\{")
_INTEGER = re.compile(r"([+-]?)0*([0-9]+)(?:\.0*)?")
_THOUSANDS = re.compile(r"[+-]?[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]*)?")
_THIN_THOUSANDS = re.compile(r"(?<=[0-9])\\,(?=[0-9]{3}(?![0-9]))")
_WRAPPER = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|boxed|fbox)\s*\{(.*)\}", re.DOTALL)
_LATEX_SPACE = re.compile(r"(?<!\\)\\[,;:! ]|~|\\(?:quad|qquad|left|right)(?![A-Za-z])")
_WORDS = re.compile(r"(?=.*[^\W\d_]{3})[^\W\d_]+(?:[\s']+[^\W\d_]+)*")  # at least one of three letters: "xy" is algebra
_CHOICE = re.compile(r"\(([A-Z])\)")
_NUMBER_TOKEN = re.compile(
    r"(?<!\w)(?<![0-9]\.)"  # not inside a word or a decimal
    r"(?:(?<![\w)\]}])-)?"  # a minus is a sign unless an operand stands before it
    r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?"
    r"(?!\w|\.[0-9])"
)
_DECIMAL = re.compile(r"-?[0-9]+(?:\.[0-9]+)?")


@dataclass(frozen=True)
class Grade:
    """One graded completion.

    Args:
        verdict: ``correct``; ``wrong``; ``no_answer`` (no box, or thinking never ended); ``unparsed`` (there is a box,
            and it can neither be read nor is the reference's text); ``timeout`` (reading it took too long).
        answer: what the box holds, as written, or None.
    """

    verdict: Verdict
    answer: str | None

    @property
    def correct(self) -> bool:
        """Whether the answer equals the reference; every other verdict counts as not correct."""
        return self.verdict == "correct"

    @property
    def answer_found(self) -> bool:
        """Whether there is a boxed answer after the thinking part."""
        return self.answer is not None


def grade(
    completion: str,
    answer: str,
    *,
    starts_thinking: bool = False,
    time_limit_s: float = TIME_LIMIT_S,
    checker: MathChecker | None = None,
) -> Grade:
    r"""Grade one completion against the reference answer.

    Integers are compared as integers (thousands separators, leading zeros, a unicode minus, a trailing period and
    ``\text{}`` do not matter), words as words (case does not matter), everything else by math-verify in a process that
    is killed after ``time_limit_s``. Words come before mathematics because as products of letters "cat" equals "act".

    Args:
        completion: the model's text.
        answer: the reference, as plain text or LaTeX, with or without dollar signs or a box.
        starts_thinking: whether the prompt already opened the thinking part, so that the completion begins inside it.
        time_limit_s: for math-verify, seconds.
        checker: the worker to ask; by default one that is shared by the process.
    """
    found = boxed_answer(completion, starts_thinking=starts_thinking)
    if found is None:
        return Grade("no_answer", None)
    mine, reference = normalize(found), normalize(answer)
    if mine == reference:
        return Grade("correct", found)
    both = (mine, reference)
    if all(_INTEGER.fullmatch(text) for text in both):  # equal integers have the same normal form
        return Grade("wrong", found)
    if all(_WORDS.fullmatch(text) for text in both):
        return Grade("correct" if mine.casefold() == reference.casefold() else "wrong", found)
    outcome = (checker or shared_checker()).check(reference, mine, time_limit_s=time_limit_s)
    verdicts: dict[str, Verdict] = {"equal": "correct", "different": "wrong"}
    return Grade(verdicts.get(outcome, "unparsed" if outcome == "unparsed" else "timeout"), found)


def contains(completion: str, answer: str) -> bool:
    """Whether the answer stands anywhere in the text, thinking and working included, as a whole number or whole words.

    24 is in "8*3 = 24." and in "24, I think", not in "124", "24.5", "2,400", "-24" or "24th". A minus between two
    operands ("30-24") is not a sign. It tells a model that knows the answer from one that only learned the format; it
    is no grade, for a text may name many numbers. Case does not matter, except for an answer of one letter.
    """
    reference = normalize(answer)
    text = _plain(completion)
    if _DECIMAL.fullmatch(reference):
        return any(normalize(token.group()) == reference for token in _NUMBER_TOKEN.finditer(text))
    if not reference:
        return False
    words = r"\s+".join(map(re.escape, reference.split()))
    flags = re.IGNORECASE if len(reference) > 1 else re.NOFLAG  # "a" is in every English text, the choice "A" is not
    return re.search(rf"(?<!\w){words}(?!\w)", text, flags) is not None


def answer_part(completion: str, *, starts_thinking: bool = False) -> str | None:
    """The text after the thinking part, or None when the thinking never ended."""
    before, closed, after = completion.rpartition(_THINK_CLOSE)
    if _THINK_OPEN in after or (starts_thinking and not closed):
        return None
    return after if closed else before + after


def boxed_answer(completion: str, *, starts_thinking: bool = False) -> str | None:
    r"""What the last complete ``\boxed{}`` after the thinking part holds; None without one, or when it is empty.

    Braces are balanced; an escaped brace does not count. A box that was cut off before its closing brace is no answer,
    and neither is an earlier one that it was about to replace.
    """
    part = answer_part(completion, starts_thinking=starts_thinking)
    boxes = [] if part is None else list(_BOX.finditer(part))
    if part is None or not boxes:
        return None
    content = _balanced(part, boxes[-1].end())
    return content.strip() or None if content is not None else None


def normalize(text: str) -> str:
    r"""The form in which answers are compared as text: no dollars, ``\text{}``, spacing commands or trailing period.

    Integers become plain digits: ``1{,}024`` and ``+01024.`` are ``1024``.
    """
    text = _LATEX_SPACE.sub(" ", _plain(text))
    text = re.sub(r"(?<!\\)\$", "", text)
    previous = None
    while text != previous:
        previous = text
        text = text.strip().removesuffix(".").rstrip()
        wrapped = _WRAPPER.fullmatch(text)
        if wrapped and _balanced(text, wrapped.start(1)) == wrapped.group(1):
            text = wrapped.group(1)
        elif text.startswith("{") and _balanced(text, 1) == text[1:-1]:
            text = text[1:-1]
        elif choice := _CHOICE.fullmatch(text):
            text = choice.group(1)
    if _THOUSANDS.fullmatch(text):
        text = text.replace(",", "")
    if integer := _INTEGER.fullmatch(re.sub(r"(?<=^[+-])\s+", "", text)):
        sign, digits = integer.groups()
        # Digits stay text: int() refuses more than 4,300 of them.
        return "-" + digits if sign == "-" and digits != "0" else digits
    return re.sub(r"\s+", " ", text)


def _plain(text: str) -> str:
    """One spelling of minus, thousands separator and fraction."""
    text = text.replace("\u2212", "-").replace("{,}", ",").replace(",\\!", ",")
    text = _THIN_THOUSANDS.sub(",", text)
    return re.sub(r"\\[dt]frac(?![A-Za-z])", r"\\frac", text)


def _balanced(text: str, start: int) -> str | None:
    """From `start`, just inside an opening brace, up to its closing one; None when it never comes."""
    depth, position = 1, start
    while position < len(text):
        if text[position] == "\\":
            position += 2
            continue
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return text[start:position]
        position += 1
    return None
