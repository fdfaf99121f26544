r"""The built-in tasks: one function each, from options and a random generator to questions with worked solutions.

To add a task: a config class for its options, a function that yields every question once, and a line in `TASKS`.

Questions are plain sentences; where the answer goes (`\boxed{}`) is for the recipe's prompt to say.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

from pydantic import Field, model_validator

from opd.config.base import Config

SolutionStyle = Literal["boxed", "stated", "worked"]


@dataclass(frozen=True)
class Item:
    """One question before it becomes a problem.

    Args:
        name: what tells it from every other question of the task; part of the problem's id.
        key: equal for questions that would give each other away; decides the split.
        question, answer: as text.
        boxed: the one-line solution.
        worked: the solution with its steps.
    """

    name: str
    key: str
    question: str
    answer: str
    boxed: str
    worked: str

    def solution(self, style: SolutionStyle) -> str:
        """In one of three styles: `8 * 3 = \\boxed{24}`; `8 * 3 = 24. The answer is \\boxed{24}.`; with its steps."""
        if style == "stated":
            box = f"\\boxed{{{self.answer}}}"
            return f"{self.boxed.replace(box, self.answer)}. The answer is {box}."
        return self.boxed if style == "boxed" else self.worked


class TaskOptions(Config):
    """What every built-in task understands."""

    heldout_frac: float = Field(default=0.3, ge=0.01, le=0.99)
    solution_style: SolutionStyle = "boxed"


_Options = TypeVar("_Options", bound=TaskOptions)


@dataclass(frozen=True)
class Task(Generic[_Options]):
    """A built-in task.

    Args:
        options: the config class of its options.
        items: every question once, in an order drawn from the generator; both splits together.
    """

    options: type[_Options]
    items: Callable[[_Options, random.Random], Iterator[Item]]


# ---- two operands --------------------------------------------------------------------------------------------------


class PairOptions(TaskOptions):
    """Ranges of two operands, both ends included; the right one's default to the left one's.

    `orders: both` asks 3 * 8 and 8 * 3; `one` asks each unordered pair once, left operand first where the ranges differ
    and the smaller first where they do not.
    """

    low: int = Field(default=2, ge=0)
    high: int = Field(default=12, ge=0)
    right_low: int | None = Field(default=None, ge=0)
    right_high: int | None = Field(default=None, ge=0)
    orders: Literal["both", "one"] = "both"

    @property
    def ranges(self) -> tuple[range, range]:
        """Left and right operand."""
        right_low = self.low if self.right_low is None else self.right_low
        right_high = self.high if self.right_high is None else self.right_high
        return range(self.low, self.high + 1), range(right_low, right_high + 1)

    @model_validator(mode="after")
    def _check_ranges(self) -> PairOptions:
        if not all(self.ranges):
            raise ValueError("an operand's low is above its high")
        return self


class SumOptions(PairOptions):
    """`digits` and `right_digits` give the ranges as numbers of digits, in place of low and high."""

    low: int = Field(default=10, ge=0)
    high: int = Field(default=99, ge=0)
    digits: int | None = Field(default=None, ge=1, le=15)
    right_digits: int | None = Field(default=None, ge=1, le=15)

    @property
    def ranges(self) -> tuple[range, range]:
        """Left and right operand."""
        if self.digits is None:
            return super().ranges
        return _with_digits(self.digits), _with_digits(self.right_digits or self.digits)

    @model_validator(mode="after")
    def _check_digits(self) -> SumOptions:
        if self.right_digits is not None and self.digits is None:
            raise ValueError("right_digits needs digits")
        if self.digits is not None and self.model_fields_set & {"low", "high", "right_low", "right_high"}:
            raise ValueError("digits and low/high both give the ranges: use one of them")
        return self


def _with_digits(digits: int) -> range:
    return range(10 ** (digits - 1), 10**digits)


def _pairs(options: PairOptions, rng: random.Random) -> Iterator[tuple[int, int]]:
    """The operand pairs to ask for, each once."""
    left, right = options.ranges
    for index in shuffled(len(left) * len(right), rng):
        a, b = left[index // len(right)], right[index % len(right)]
        mirrored_is_drawn_too = b in left and a in right
        if options.orders == "one":
            if a <= b or not mirrored_is_drawn_too:
                yield a, b
        else:
            yield a, b
            if not mirrored_is_drawn_too:
                yield b, a


def products(options: PairOptions, rng: random.Random) -> Iterator[Item]:
    """`What is 8 * 3?`"""
    for a, b in _pairs(options, rng):
        yield Item(
            name=f"{a}*{b}",
            key=f"{min(a, b)}*{max(a, b)}",
            question=f"What is {a} * {b}?",
            answer=str(a * b),
            boxed=f"{a} * {b} = {_box(a * b)}",
            worked=f"{a} * {b} = {' = '.join((*_product_steps(a, b), _box(a * b)))}",
        )


def sums(options: PairOptions, rng: random.Random) -> Iterator[Item]:
    """`What is 47 + 38?`"""
    for a, b in _pairs(options, rng):
        yield Item(
            name=f"{a}+{b}",
            key=f"{min(a, b)}+{max(a, b)}",
            question=f"What is {a} + {b}?",
            answer=str(a + b),
            boxed=f"{a} + {b} = {_box(a + b)}",
            worked=f"{a} + {b} = {' = '.join((*_sum_steps(a, b), _box(a + b)))}",
        )


class GcdOptions(PairOptions):
    """Ranges of the two numbers."""

    low: int = Field(default=2, ge=1)
    high: int = Field(default=60, ge=1)
    right_low: int | None = Field(default=None, ge=1)
    right_high: int | None = Field(default=None, ge=1)


def gcd(options: PairOptions, rng: random.Random) -> Iterator[Item]:
    """`What is the greatest common divisor of 12 and 18?`"""
    for a, b in _pairs(options, rng):
        divisor = math.gcd(a, b)
        boxed = f"gcd({a}, {b}) = {_box(divisor)}"
        yield Item(
            name=f"{a},{b}",
            key=f"{min(a, b)},{max(a, b)}",
            question=f"What is the greatest common divisor of {a} and {b}?",
            answer=str(divisor),
            boxed=boxed,
            worked="; ".join((*_euclid_steps(a, b), boxed)),
        )


# ---- others --------------------------------------------------------------------------------------------------------


class ThreeTermOptions(TaskOptions):
    """Range of the terms. `orders: both` asks all orders of three terms, `one` the ascending one."""

    low: int = Field(default=1, ge=0)
    high: int = Field(default=9, ge=0)
    orders: Literal["both", "one"] = "both"

    @model_validator(mode="after")
    def _check_range(self) -> ThreeTermOptions:
        if self.low > self.high:
            raise ValueError("low is above high")
        return self


def three_term_sums(options: ThreeTermOptions, rng: random.Random) -> Iterator[Item]:
    """`What is 4 + 7 + 2?`"""
    size = options.high - options.low + 1
    for index in shuffled(size**3, rng):
        a, b, c = (options.low + index // size**place % size for place in (2, 1, 0))
        if options.orders == "one" and not a <= b <= c:
            continue
        total = a + b + c
        yield Item(
            name=f"{a}+{b}+{c}",
            key="+".join(map(str, sorted((a, b, c)))),
            question=f"What is {a} + {b} + {c}?",
            answer=str(total),
            boxed=f"{a} + {b} + {c} = {_box(total)}",
            worked=f"{a} + {b} = {a + b}, {a + b} + {c} = {_box(total)}",
        )


_WORDS = """
anchor apple autumn balloon banana barrel basket blossom bottle bridge butter button cabbage camel candle carrot
castle cheese cherry chimney coffee copper corner cotton crystal curtain daisy desert dinner dragon eagle engine
evening feather ferry finger flower forest garden giraffe ginger glacier hammer harbor hollow honey island jacket
jungle kettle kitchen ladder lantern lemon letter lizard mammal marble meadow mirror mountain needle oatmeal
orange otter paddle pepper pigeon pillow planet pocket potato puzzle rabbit raccoon raven ribbon river rocket
saddle salmon scissors shoulder silver sparrow spinner strawberry summer sunset teapot thunder timber tomato
tunnel turnip valley velvet village violin waffle walnut whistle willow window winter wizard yellow zipper
"""
WORDS = tuple(_WORDS.split())


class LetterCountingOptions(TaskOptions):
    """`num_words` words make one text; letters that it holds fewer than `min_count` times are not asked for."""

    num_words: int = Field(default=1, ge=1, le=2)
    min_count: int = Field(default=1, ge=0)


def letter_counting(options: LetterCountingOptions, rng: random.Random) -> Iterator[Item]:
    """`How many times does the letter "t" appear in "butter"?`; held-out texts share no set of words with training."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    for index in shuffled(len(WORDS) ** options.num_words * len(letters), rng):
        words_index, letter = index // len(letters), letters[index % len(letters)]
        words = [WORDS[words_index // len(WORDS) ** place % len(WORDS)] for place in range(options.num_words)]
        text = " ".join(words)
        places = [place for place, char in enumerate(text.replace(" ", ""), start=1) if char == letter]
        if len(places) < options.min_count or len(set(words)) < len(words):
            continue
        where = f"at {', '.join(map(str, places))}" if places else "nowhere"
        yield Item(
            name=f"{letter}@{text}",
            key=" ".join(sorted(words)),
            question=f'How many times does the letter "{letter}" appear in "{text}"?',
            answer=str(len(places)),
            boxed=f'"{letter}" appears in "{text}": {_box(len(places))}',
            worked=f"{'-'.join(text.replace(' ', ''))} has {letter} {where}: {_box(len(places))}",
        )


TASKS: dict[str, Task[Any]] = {
    "products": Task(PairOptions, products),
    "sums": Task(SumOptions, sums),
    "three_term_sums": Task(ThreeTermOptions, three_term_sums),
    "letter_counting": Task(LetterCountingOptions, letter_counting),
    "gcd": Task(GcdOptions, gcd),
}


# ---- worked steps and orders ---------------------------------------------------------------------------------------


def _box(number: int) -> str:
    return f"\\boxed{{{number}}}"


def _place_values(number: int) -> list[int]:
    """47 -> [40, 7]; zeros are left out, except for 0 itself."""
    digits = str(number)
    parts = [int(digit) * 10 ** (len(digits) - place) for place, digit in enumerate(digits, start=1)]
    return [part for part in parts if part] or [0]


def _product_steps(a: int, b: int) -> list[str]:
    """What stands between `a * b` and the result: repeated addition, or the parts of the smaller factor."""
    small, large = min(a, b), max(a, b)
    if small < 2:
        return []
    if small < 10:
        return [" + ".join([str(large)] * small)]
    parts = _place_values(small)
    if len(parts) == 1:
        return [f"{large} * {small // 10} * 10"]
    split = " + ".join(f"{large} * {part}" for part in parts)
    return [split, " + ".join(str(large * part) for part in parts)]


def _sum_steps(a: int, b: int) -> list[str]:
    """What stands between `a + b` and the result: the sums of each place, the largest first."""
    places = [10**place for place in reversed(range(max(len(str(a)), len(str(b)))))]
    if len(places) == 1:
        return []
    digits = [(a // place % 10 * place, b // place % 10 * place) for place in places]
    return [" + ".join(f"({x} + {y})" for x, y in digits), " + ".join(str(x + y) for x, y in digits)]


def _euclid_steps(a: int, b: int) -> list[str]:
    """Euclid's algorithm, one division a step."""
    large, small = max(a, b), min(a, b)
    steps: list[str] = []
    while small:
        steps.append(f"{large} = {large // small} * {small} + {large % small}")
        large, small = small, large % small
    return steps


def shuffled(size: int, rng: random.Random) -> Iterator[int]:
    """The numbers below `size`, each once, in random order: a Fisher-Yates shuffle that costs only what is taken."""
    moved: dict[int, int] = {}
    for place in range(size):
        other = rng.randrange(place, size)
        yield moved.get(other, other)
        moved[other] = moved.pop(place, place)
