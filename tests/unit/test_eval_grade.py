from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest

from opd.eval import contains, grade
from opd.eval.checker import MathChecker
from opd.eval.grade import boxed_answer, normalize

GOLDEN = Path(__file__).parents[1] / "golden" / "grading.jsonl"
ROWS = [json.loads(line) for line in GOLDEN.read_text(encoding="utf-8").splitlines()]
# Each of them keeps sympy busy for hours: in evaluation, in big-integer multiplication, in a factorial.
ENDLESS = (r"9^{9^{9^{9}}}", r"(10^{10})!", "12!!!!!")


@pytest.fixture(scope="module")
def checker():
    checker = MathChecker()
    yield checker
    checker.close()


@pytest.mark.parametrize("row", ROWS, ids=[row["note"] for row in ROWS])
def test_golden_pairs(row, checker):
    mark = grade(row["completion"], row["answer"], starts_thinking=row.get("starts_thinking", False), checker=checker)
    assert mark.verdict == row["verdict"]
    assert mark.correct == (row["verdict"] == "correct")
    assert mark.answer_found == (row["verdict"] != "no_answer") == (mark.answer is not None)


def test_golden_pairs_cover_every_verdict_but_timeout():
    assert len(ROWS) >= 40
    assert {row["verdict"] for row in ROWS} == {"correct", "wrong", "no_answer", "unparsed"}


@pytest.mark.parametrize("tower", ENDLESS)
def test_an_endless_answer_is_killed_and_the_next_one_graded(tower, checker):
    assert grade(r"\boxed{\frac{2}{4}}", "1/2", checker=checker).correct  # the worker is up: its start is not timed
    started, before = checker.num_started, time.monotonic()
    assert grade(rf"\boxed{{{tower}}}", "3", time_limit_s=0.3, checker=checker).verdict == "timeout"
    assert time.monotonic() - before < 5
    assert grade(r"\boxed{\frac{2}{4}}", "1/2", checker=checker).verdict == "correct"
    assert checker.num_started == started + 1  # killed once, replaced once


def test_one_worker_serves_many_answers_and_several_threads():
    checker = MathChecker()
    verdicts: dict[int, str] = {}

    def ask(number: int) -> None:
        verdicts[number] = grade(rf"\boxed{{\frac{{{number}}}{{7}}}}", f"{number}/7", checker=checker).verdict

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(1, 6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    checker.close()
    assert verdicts == dict.fromkeys(range(1, 6), "correct")
    assert checker.num_started == 1


def test_a_worker_that_died_is_replaced(checker):
    grade(r"\boxed{\frac{1}{2}}", "0.5", checker=checker)
    process = checker._process
    process.kill()
    process.wait()
    assert grade(r"\boxed{\frac{1}{2}}", "0.5", checker=checker).correct


def test_integers_and_words_need_no_worker():
    checker = MathChecker()
    assert grade(r"\boxed{1{,}024}", "1024", checker=checker).correct
    assert grade(r"\boxed{Tuesday}", "Monday", checker=checker).verdict == "wrong"
    assert checker.num_started == 0


def test_an_answer_is_never_run_as_code(tmp_path, checker):
    target = tmp_path / "written"
    attack = f"__import__('pathlib').Path('{target}').write_text('x')"
    assert not grade(rf"\boxed{{{attack}}}", "3", checker=checker).correct
    assert not target.exists()


@pytest.mark.parametrize(
    ("text", "answer", "found"),
    [
        ("8 * 3 = 24.", "24", True),
        ("24", "24", True),
        ("It is 24, I think", "24", True),
        (r"\boxed{24}", "24", True),
        ("$24$", "24", True),
        ("(3,24)", "24", True),
        ("so 0024", "24", True),
        ("1,024 apples", "1024", True),
        ("1024 apples", "1,024", True),
        ("30-24", "24", True),
        ("it is \u221224", "-24", True),
        ("<think>24?</think> no idea", "24", True),
        ("124", "24", False),
        ("241", "24", False),
        ("24.5", "24", False),
        ("3.24", "24", False),
        ("2,400", "24", False),
        ("1,024", "24", False),
        ("= -24", "24", False),
        ("24th", "24", False),
        ("x24", "24", False),
        ("", "24", False),
        ("24", "", False),
        ("0.5 of it", "0.5", True),
        ("10.5 of it", "0.5", False),
        ("The Cat sat", "cat", True),
        ("cats", "cat", False),
        ("a  red\ncar", "red car", True),
        ("a dog", "A", False),
        ("choose A", "A", True),
        (r"it is \dfrac{1}{2}", r"\frac{1}{2}", True),
    ],
)
def test_contains_finds_whole_tokens_only(text, answer, found):
    assert contains(text, answer) is found


def test_boxed_answer_keeps_what_was_written():
    assert boxed_answer(r"\boxed{ \dfrac{1}{2} }") == r"\dfrac{1}{2}"


def test_normalize_is_idempotent_on_the_golden_answers():
    for row in ROWS:
        once = normalize(row["answer"])
        assert normalize(once) == once
