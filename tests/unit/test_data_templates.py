from __future__ import annotations

import contextlib
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opd.config.schema import MessageTemplate
from opd.data.templates import STUDENT_VARIABLES, TEACHER_VARIABLES, Templates
from opd.errors import OpdError

VALUES: dict[str, Any] = {
    "problem": "What is 2 + 2?",
    "solution": "2 + 2 = 4",
    "answer": None,
    "demonstrations": [{"problem": "a", "solution": "b"}],
    "metadata": {"level": 3, "choices": ["x", "y"]},
}


def render(content: str, **values: Any) -> str:
    templates = Templates(
        [MessageTemplate(role="user", content=content)], place="prompt.teacher", variables=TEACHER_VARIABLES
    )
    return templates.render({**VALUES, **values}, problem_id="p:1")[0]["content"]


def test_what_templates_are_for_works() -> None:
    content = (
        "{% if solution %}Solution: {{ solution }}{% else %}none{% endif %}|{{ metadata.level }}|"
        "{{ metadata['choices'] | join(', ') }}|"
        "{% for d in demonstrations %}{{ loop.index }}{{ d.problem }}{% endfor %}|"
        "{% for i in range(3) %}{{ i * 2 }}{% endfor %}|{{ problem | upper | trim }}"
    )
    assert render(content) == "Solution: 2 + 2 = 4|3|x, y|1a|024|WHAT IS 2 + 2?"
    assert render(content, solution=None).startswith("none|")


def test_text_of_a_row_is_never_read_as_a_template() -> None:
    assert render("{{ problem }}", problem="{{ 7 * 7 }}{% raw %}") == "{{ 7 * 7 }}{% raw %}"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("fine\n\n{% if %}", "line 3"),
        ("fine\n{{ metadata.nothing }}", "line 2: (problem p:1) 'dict object' has no attribute 'nothing'"),
        ("{{ answer }}", "None here"),
        ("{{ problm }}", "did you mean 'problem'"),
        ("{% if false %}x{% endif %}", "the message is empty for problem p:1"),
        ("{{ 1 // 0 }}", "zero"),
        ("{{ metadata.level + problem }}", "unsupported operand"),
    ],
)
def test_errors_name_the_place(content: str, said: str) -> None:
    with pytest.raises(OpdError, match=r"prompt\.teacher(\[0\]\.content)?") as caught:
        render(content)
    assert said in str(caught.value)


@pytest.mark.parametrize("name", ["solution", "answer", "demonstrations"])
def test_the_student_cannot_see_what_the_teacher_is_given(name: str) -> None:
    with pytest.raises(OpdError, match=rf"may not use '{name}'") as caught:
        Templates(
            [MessageTemplate(role="user", content=f"{{{{ problem }}}} {{{{ {name} }}}}")],
            place="prompt.student",
            variables=STUDENT_VARIABLES,
        )
    assert "shown to the teacher alone" in caught.value.why


@pytest.mark.parametrize(
    "content",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ problem.__init__.__globals__ }}",
        "{{ metadata.update({'a': 1}) }}",
        "{{ demonstrations.append(1) }}",
        "{{ problem | attr('__class__') }}",
        "{% include 'x' %}",
        "{% import 'x' as y %}",
    ],
)
def test_templates_reach_nothing_but_their_values(content: str) -> None:
    with pytest.raises(OpdError):
        render(content)


@pytest.mark.parametrize(
    "content",
    [
        "{% for i in range(10**9) %}x{% endfor %}",
        "{{ range(10**9) | list }}",
        "{{ 'a' * 10**10 }}",
        "{{ [0] * 10**10 }}",
        "{{ 10 ** 10 ** 9 }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '%1000000000d' | format(1) }}",
        "{{ '{:1000000000d}'.format(1) }}",
        "{{ problem['for' ~ 'mat'] }}",
        "{{ problem.ljust(10**9) }}",
        "{{ problem | center(10**9) }}",
        "{{ range(1000) | join('x' ~ range(1000) | join(range(1000) | join(problem))) }}",
        "{% set x = 'aaaaaaaaaaaaaaaa' %}" + "{% set x = x ~ x %}" * 40 + "{{ x }}",
        "{% with x = 'aaaaaaaaaaaaaaaa' %}{{ x }}{% endwith %}",
        "{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}",
        "{% for x in demonstrations recursive %}{{ loop([x, x]) }}{% endfor %}",
        "".join("{% for _ in range(1000) %}" for _ in range(6)) + "x" + "{% endfor %}" * 6,
        "{% for i in range(1000) %}{% for j in range(1000) %}{{ problem }}{% endfor %}{% endfor %}",
    ],
)
def test_small_templates_that_make_much_are_stopped(content: str) -> None:
    start = time.process_time()
    with pytest.raises(OpdError):
        render(content)
    assert time.process_time() - start < 2.0


pieces = ["{{ ", " }}", "{% ", " %}", *"{}%# \n|.()[]'\"*+~1", "problem", "if ", "for x in ", "else", "endif", "upper"]


@given(content=st.lists(st.sampled_from(pieces), max_size=12).map("".join))
@settings(max_examples=200, deadline=None)
def test_any_text_is_a_template_or_an_opd_error(content: str) -> None:
    with contextlib.suppress(OpdError):
        assert render(content).strip()


def test_an_empty_list_of_messages_is_an_error() -> None:
    with pytest.raises(OpdError, match=r"prompt\.student has no message"):
        Templates([], place="prompt.student", variables=STUDENT_VARIABLES)
