"""Prompts and completions for the page: special tokens and odd characters visible, no text of a model trusted."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

from markupsafe import Markup, escape

from opd.diagnose.run_folder import RunFolder

NUM_STEPS_SHOWN = 12
NUM_PAIRS_SHOWN = 6
NUM_PAIRS_FOLDED = 60

# Special tokens of the common families: <|im_end|> (also with full-width bars), </s>, <eos>, <start_of_turn>, [INST].
_SPECIAL = re.compile(
    r"<[|\uff5c][^<>|\uff5c\n]{1,60}[|\uff5c]>|</?s>|<(?:eos|bos|pad|unk)>|<(?:start|end)_of_turn>|</?think>|\[/?INST\]"
)


@dataclass(frozen=True)
class StepSamples:
    """The samples that one step logged: (problem, prompt, completion, how it ended)."""

    step: int
    samples: list[tuple[str, Markup, Markup, str]]


@dataclass(frozen=True)
class Side:
    """One completion of a pair; `correct` in the box, `contains` the answer anywhere."""

    text: Markup
    correct: bool
    contains: bool
    ended: str


@dataclass(frozen=True)
class Pair:
    """The same problem before and after training, first sample of each."""

    problem: str
    answer: str
    prompt: Markup
    before: Side
    after: Side


@dataclass(frozen=True)
class Pairs:
    """All pairs in the evaluation's order; `outcomes` counts (right before, right after) over every one of them."""

    shown: list[Pair]
    folded: list[Pair]
    num_left_out: int
    outcomes: dict[tuple[bool, bool], int]


def visible(text: str) -> Markup:
    """Text as HTML: escaped, special tokens marked, line ends and characters that do not show made visible."""
    parts: list[Markup] = []
    end = 0
    for match in _SPECIAL.finditer(text):
        parts += [_plain(text[end : match.start()]), Markup('<b class="special">{}</b>').format(match.group())]
        end = match.end()
    parts.append(_plain(text[end:]))
    return Markup("").join(parts)


def samples_over_time(run: RunFolder) -> tuple[list[StepSamples], int]:
    """At most 12 steps, evenly spread with the first and the last among them; and how many steps have samples."""
    by_step: dict[int, list[tuple[str, Markup, Markup, str]]] = {}
    for row in run.samples:
        sample = (
            str(row.get("problem", "")),
            visible(str(row.get("prompt", ""))),
            visible(str(row.get("completion", ""))),
            _ended(row.get("finish_reason"), len(row.get("completion_ids") or ())),
        )
        by_step.setdefault(int(row["step"]), []).append(sample)
    steps = sorted(by_step)
    last = len(steps) - 1
    if last >= NUM_STEPS_SHOWN:
        steps = [steps[round(place * last / (NUM_STEPS_SHOWN - 1))] for place in range(NUM_STEPS_SHOWN)]
    return [StepSamples(step, by_step[step]) for step in steps], len(by_step)


def before_and_after(run: RunFolder) -> Pairs | None:
    """The first sample of every problem, before and after; None when either evaluation or its samples are missing.

    The pairs stand in the order of the evaluation: nothing is picked.
    """
    before, after = run.arms.get("before"), run.arms.get("after")
    if before is None or after is None or before.manifest is None:
        return None
    rows = {arm.name: {row.id: row for row in arm.result.results} for arm in (before, after)}
    pairs: list[Pair] = []
    for question in before.manifest.questions:
        sides: list[Side] = []
        for arm in (before, after):
            sample, row = arm.samples.get((question.id, 0)), rows[arm.name].get(question.id)
            if sample is not None and row is not None:
                ended = _ended(sample.finish_reason, len(sample.ids))
                sides.append(Side(visible(sample.text), row.correct[0], row.contains[0], ended))
        if len(sides) == 2:
            pairs.append(Pair(question.problem, question.answer, visible(question.prompt), sides[0], sides[1]))
    if not pairs:
        return None
    folded = pairs[NUM_PAIRS_SHOWN : NUM_PAIRS_SHOWN + NUM_PAIRS_FOLDED]
    outcomes = Counter((pair.before.correct, pair.after.correct) for pair in pairs)
    shown = pairs[:NUM_PAIRS_SHOWN]
    return Pairs(shown, folded, len(pairs) - len(shown) - len(folded), dict(outcomes))


def _plain(text: str) -> Markup:
    return Markup("".join(char if char.isprintable() or char == "\t" else _mark(char) for char in escape(text)))


def _mark(char: str) -> str:
    """A sign for what does not show; controls and marks that turn the direction of writing would act instead."""
    return '<i class="mark">↵</i>\n' if char == "\n" else f'<i class="mark">U+{ord(char):04X}</i>'


def _ended(reason: object, num_tokens: int) -> str:
    how = {"stop": "stopped", "length": "cut at the limit"}.get(str(reason), str(reason))
    return f"{num_tokens} tokens, {how}"
