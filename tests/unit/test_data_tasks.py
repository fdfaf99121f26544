from __future__ import annotations

import contextlib
import inspect
import re
from collections import Counter
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opd.config.schema import TaskSource
from opd.data import TASKS, check_disjoint, load_problems, majority_answer, task_scorer
from opd.data.builtin import shuffled
from opd.data.gym import evaluates_answers
from opd.errors import OpdError
from opd.types import Problem


def source(task: str, split: Any = "train", **fields: Any) -> TaskSource:
    return TaskSource(name="task", task=task, split=split, **fields)


def problems(task: str, split: Any = "train", **fields: Any) -> tuple[Problem, ...]:
    return load_problems(source(task, split, **fields)).problems


def options_of(task: str) -> st.SearchStrategy[dict[str, Any]]:
    low, high = st.integers(1, 30), st.integers(31, 60)
    frac = st.sampled_from([0.2, 0.3, 0.5])
    if task == "letter_counting":
        return st.fixed_dictionaries({"heldout_frac": frac, "num_words": st.integers(1, 2)})
    ranges = {"low": low, "high": high, "orders": st.sampled_from(["both", "one"])}
    right = {} if task == "three_term_sums" else {"right_low": low, "right_high": high}
    return st.fixed_dictionaries({"heldout_frac": frac, **ranges}, optional=right)


@given(data=st.data(), task=st.sampled_from(sorted(TASKS)), seeds=st.tuples(st.integers(0, 99), st.integers(0, 99)))
@settings(max_examples=25, deadline=None)
def test_splits_share_no_question_whatever_options_and_seeds(
    data: st.DataObject, task: str, seeds: tuple[int, int]
) -> None:
    options = [data.draw(options_of(task)) for _ in range(2)]
    options[1]["heldout_frac"] = options[0]["heldout_frac"]
    train = problems(task, "train", seed=seeds[0], options=options[0])
    heldout = problems(task, "heldout", seed=seeds[1], options=options[1])
    check_disjoint(train, heldout)
    for split in (train, heldout):
        assert len({p.problem for p in split}) == len({p.id for p in split}) == len(split)
    numbers = [Counter(re.findall(r"\d+|\"[a-z ]+\"", p.problem)) for p in (*train, *heldout)]
    if task != "letter_counting":
        told = {frozenset(count.items()) for count in numbers[: len(train)]}
        assert not told & {frozenset(count.items()) for count in numbers[len(train) :]}


@pytest.mark.parametrize("task", sorted(TASKS))
@pytest.mark.parametrize("style", ["boxed", "worked"])
def test_solutions_end_in_the_boxed_answer_and_their_steps_are_true(task: str, style: str) -> None:
    for problem in problems(task, options={"solution_style": style}):
        assert problem.solution is not None
        assert problem.solution.endswith(f"\\boxed{{{problem.answer}}}")
        assert task_scorer(task)(f" {problem.answer}\n", problem) == 1.0
        assert task_scorer(task)(None, problem) == task_scorer(task)("x", problem) == 0.0
        if task in ("products", "sums", "three_term_sums"):
            for equation in re.split(r", ", problem.solution):
                sides = equation.replace("\\boxed", "").replace("{", "(").replace("}", ")").split(" = ")
                assert len({arithmetic(side) for side in sides}) == 1, problem.solution


def arithmetic(text: str) -> Fraction:
    """Sums of products of numbers and bracketed sums, which is all that solutions hold."""
    text = re.sub(r"\(([^()]*)\)", lambda inner: str(arithmetic(inner[1])), text)
    total = Fraction(0)
    for term in text.split(" + "):
        product = Fraction(1)
        for factor in term.split(" * "):
            product *= Fraction(factor)
        total += product
    return total


@pytest.mark.parametrize(
    ("task", "options", "solution"),
    [
        ("products", {"low": 8, "high": 8, "right_low": 3, "right_high": 3}, r"8 * 3 = 8 + 8 + 8 = \boxed{24}"),
        ("products", {"low": 13, "high": 13, "right_low": 12, "right_high": 12}, r"13 * 10 + 13 * 2 = 130 + 26 = "),
        ("sums", {"low": 47, "high": 47, "right_low": 38, "right_high": 38}, r"(40 + 30) + (7 + 8) = 70 + 15 = "),
        ("gcd", {"low": 12, "high": 12, "right_low": 18, "right_high": 18}, r"18 = 1 * 12 + 6; 12 = 2 * 6 + 0; gcd("),
        ("three_term_sums", {"low": 4, "high": 4}, r"4 + 4 = 8, 8 + 4 = \boxed{12}"),
    ],
)
def test_worked_solutions_show_the_steps(task: str, options: dict[str, Any], solution: str) -> None:
    made: list[Problem] = []
    for split in ("train", "heldout"):
        with contextlib.suppress(OpdError):  # one question: the other split holds none
            made += problems(task, split, options={**options, "solution_style": "worked"})
    assert any(solution in str(problem.solution) for problem in made)


def test_the_product_table_is_whole_and_answers_are_right() -> None:
    both = problems("products") + problems("products", "heldout")
    assert {p.problem for p in both} == {f"What is {a} * {b}?" for a in range(2, 13) for b in range(2, 13)}
    for problem in both:
        a, b = map(int, re.findall(r"\d+", problem.problem))
        assert problem.answer == str(a * b)


def test_one_order_asks_each_pair_once() -> None:
    options = {"orders": "one"}
    both = problems("products", options=options) + problems("products", "heldout", options=options)
    assert len(both) == 11 * 12 // 2
    uneven = {"orders": "both", "low": 2, "high": 9, "right_low": 20, "right_high": 29}
    both = problems("products", options=uneven) + problems("products", "heldout", options=uneven)
    assert len(both) == 8 * 10 * 2


def test_letters_are_counted() -> None:
    for problem in problems("letter_counting", options={"num_words": 2, "min_count": 2}, num_problems=50):
        letter, text = re.findall(r'"([^"]*)"', problem.problem)
        assert problem.answer == str(text.count(letter))
        assert text.count(letter) >= 2


def test_digits_give_the_ranges_of_sums() -> None:
    made = problems("sums", options={"digits": 1, "right_digits": 3, "orders": "one"}, num_problems=100)
    assert {tuple(map(len, re.findall(r"\d+", p.problem))) for p in made} == {(1, 3)}
    big = problems("sums", options={"digits": 15}, num_problems=5)
    assert len(big) == 5
    with pytest.raises(OpdError, match="task sums") as caught:
        problems("sums", options={"digits": 1, "low": 3})
    assert "use one of them" in caught.value.why


def test_the_same_source_gives_the_same_problems_and_another_seed_another_order() -> None:
    first = [p.id for p in problems("products", num_problems=20)]
    assert first == [p.id for p in problems("products", num_problems=20)]
    assert first[:3] == ["products:3*8", "products:4*9", "products:4*7"]  # on every machine
    assert first != [p.id for p in problems("products", num_problems=20, seed=1)]


def test_more_problems_than_the_split_holds_is_an_error() -> None:
    with pytest.raises(OpdError, match="the heldout split holds") as caught:
        problems("products", "heldout", num_problems=122)
    assert "122 are asked for" in caught.value.why


@pytest.mark.parametrize(
    ("task", "options", "said"),
    [
        ("prodcts", {}, "did you mean 'products'"),
        ("gym:gcd", {}, "reasoning_gym:NAME"),
        ("reasoning_gym:gcdd", {}, "did you mean 'gcd'"),
        ("products", {"lwo": 2}, "did you mean 'low'"),
        ("products", {"colour": 2}, "low, high, right_low, right_high, orders"),
        ("reasoning_gym:gcd", {"max_valeu": 2}, "did you mean 'max_value'"),
        ("reasoning_gym:gcd", {"seed": 2}, "min_numbers"),
        ("reasoning_gym:gcd", {"min_numbers": 9, "max_numbers": 2}, "AssertionError"),
        ("reasoning_gym:gcd", {"heldout_frac": 2}, "between 0.01 and 0.99"),
        ("products", {"low": 9, "high": 2}, "low is above its high"),
        ("products", {"low": "many"}, "valid integer"),
        ("products", {"heldout_frac": 0.0}, "greater than or equal to 0.01"),
    ],
)
def test_unknown_tasks_and_options_are_named(task: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(OpdError) as caught:
        problems(task, options=options)
    assert said in str(caught.value)


def test_gym_problems_are_disjoint_and_scored_by_their_own_scorer() -> None:
    # Few enough numbers that reasoning-gym repeats itself.
    train = problems("reasoning_gym:gcd", num_problems=60, options={"max_value": 12})
    # Neighbouring seeds share entries in reasoning-gym: the split must hold all the same.
    heldout = problems("reasoning_gym:gcd", "heldout", num_problems=20, seed=1, options={"max_value": 12})
    check_disjoint(train, heldout)
    assert len({p.problem for p in train}) == 60
    assert train == problems("reasoning_gym:gcd", num_problems=60, options={"max_value": 12})
    score = task_scorer("reasoning_gym:gcd")
    for problem in train[:5]:
        assert problem.metadata["source_dataset"] == "gcd"
        assert score(problem.answer, problem) == 1.0
        assert score("no", problem) == score(None, problem) == 0.0


def test_a_small_gym_task_ends_with_an_error_and_not_with_a_hang() -> None:
    with pytest.raises(OpdError, match="the train split holds"):
        problems("reasoning_gym:gcd", num_problems=100, options={"min_value": 1, "max_value": 3})


def test_scorers_that_run_answers_as_code_are_refused() -> None:
    from reasoning_gym.factory import DATASETS

    with pytest.raises(OpdError, match="the scorer of reasoning_gym:n_queens is refused"):
        task_scorer("reasoning_gym:n_queens")
    refused = {name for name in DATASETS if evaluates_answers(name)}
    assert refused >= {"binary_matrix", "n_queens", "spiral_matrix", "string_insertion"}  # eval(answer)
    assert refused >= {"countdown", "puzzle24", "simple_integration"}  # sympy's parse_expr evaluates
    assert "number_sorting" not in refused  # evaluates its own entry alone
    assert len(refused) < 15
    # What is let through calls no evaluator on an answer anywhere in its class.
    for name in set(DATASETS) - refused:
        for _, method in inspect.getmembers(DATASETS[name][0], inspect.isfunction):
            assert not re.search(r"(eval|parse_expr|exec)\((predicted|answer|user)", inspect.getsource(method)), name


def test_majority_answer() -> None:
    rows = [Problem(str(i), "q", answer=answer) for i, answer in enumerate("1221")]
    assert majority_answer(rows) == ("1", 0.5)
    assert majority_answer([*rows, Problem("x", "q", answer="2")]) == ("2", 0.6)
    with pytest.raises(OpdError, match="no majority answer"):
        majority_answer([*rows, Problem("x", "q")])
    with pytest.raises(OpdError, match="no majority answer"):
        majority_answer([])


@given(size=st.integers(0, 60), seed=st.integers())
@settings(max_examples=50)
def test_shuffled_is_a_permutation(size: int, seed: int) -> None:
    import random

    assert sorted(shuffled(size, random.Random(seed))) == list(range(size))


@pytest.mark.parametrize("task", ["products", "sums", "three_term_sums", "gcd", "letter_counting"])
def test_stated_solutions_say_the_answer_in_the_sentence_and_in_the_box(task: str) -> None:
    source = TaskSource(name="task", task=task, num_problems=20, options={"solution_style": "stated"})
    for problem in load_problems(source).problems:
        assert problem.solution is not None
        sentence, box = problem.solution.split(". The answer is ")
        assert sentence.endswith(str(problem.answer))
        assert box == f"\\boxed{{{problem.answer}}}."
