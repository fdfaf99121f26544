"""The recipe's message templates: sandboxed Jinja2 that knows which variables it may see.

A recipe may come from a stranger, so a template can neither reach Python nor stall the run: no attributes beyond data,
no imports, macros or assignments, no multiplication or padding of text, loops of bounded depth, bounded output.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn, cast

from jinja2 import StrictUndefined, TemplateError, TemplateSyntaxError, meta, nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError

from opd.config.schema import MessageTemplate
from opd.data.rows import nearest
from opd.errors import OpdError
from opd.types import Message

STUDENT_VARIABLES = ("problem", "metadata")
TEACHER_VARIABLES = ("problem", "solution", "answer", "demonstrations", "metadata")
DEMONSTRATION_VARIABLES = ("problem", "solution", "answer", "metadata")

MAX_NUM_ITERATIONS = 1_000
MAX_LOOP_DEPTH = 2
MAX_OUTPUT_CHARS = 4_000_000
MAX_POWER_DIGITS = 1_000

DEFAULT_CONTEXT = {
    "reference_solution": "Here is a correct solution to this problem:\n\n{solution}\n\n"
    "Use it to solve the problem in your own words.",
    "answer_only": "The correct final answer is {solution}. Solve the problem in your own words.",
}
"""The last paragraph of the teacher's last user message when the recipe has no teacher template. The placebo's is that
of `reference_solution`, so that the two differ in the solution alone."""
DEFAULT_CONTEXT["placebo"] = DEFAULT_CONTEXT["reference_solution"]


class _Environment(ImmutableSandboxedEnvironment):
    """Jinja2's sandbox, closed further against templates that are small but make much."""

    intercepted_binops = frozenset(["*", "**", "%"])

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Arithmetic on numbers alone: `'a' * 10**9` and `'%999999999d' % 1` make text of any size."""
        if not isinstance(left, int | float) or not isinstance(right, int | float):
            raise SecurityError(f"{operator} is for numbers")
        if operator == "**" and (abs(right) > MAX_POWER_DIGITS or abs(left) > MAX_POWER_DIGITS):
            raise SecurityError("a power that large")
        return super().call_binop(context, operator, left, right)

    def getattr(self, obj: Any, attribute: str) -> Any:
        """No padding or formatting methods of text."""
        return super().getattr(obj, _checked_name(obj, attribute))

    def getitem(self, obj: Any, argument: Any) -> Any:
        """Likewise: `problem['format']` is `problem.format`."""
        return super().getitem(obj, _checked_name(obj, argument))


def _checked_name(obj: Any, name: Any) -> Any:
    """Refuse the methods whose arguments are widths or repeats: they make text of any size."""
    large = {"center", "ljust", "rjust", "zfill", "expandtabs", "format", "format_map", "replace", "join", "translate"}
    if isinstance(obj, str) and name in large:
        raise SecurityError(f"text's {name} is not for messages")
    return name


def _print(value: Any) -> Any:
    """Refuse to write `None` into a prompt: the context does not give that variable."""
    if value is None:
        raise SecurityError("a variable that is printed is None here: guard it, as in {% if solution %}")
    return value


def _range(*bounds: int) -> range:
    numbers = range(*bounds)
    if len(numbers) > MAX_NUM_ITERATIONS:
        raise SecurityError(f"a range of more than {MAX_NUM_ITERATIONS} numbers")
    return numbers


def _join(values: Iterable[Any], separator: str = "") -> str:
    texts = [str(value) for value in values]
    if sum(map(len, texts)) + len(separator) * len(texts) > MAX_OUTPUT_CHARS:
        raise SecurityError(f"a join of more than {MAX_OUTPUT_CHARS} characters")
    return separator.join(texts)


def _environment() -> _Environment:
    environment = _Environment(undefined=StrictUndefined, autoescape=False, finalize=_print)
    environment.globals.clear()
    cast("dict[str, Any]", environment.globals)["range"] = _range
    environment.filters["join"] = _join
    for name in ("center", "indent", "format", "batch", "slice", "wordwrap", "replace", "random", "attr"):
        del environment.filters[name]
    return environment


_ENVIRONMENT = _environment()
_CALLS = (nodes.Macro, nodes.CallBlock, nodes.Import, nodes.FromImport, nodes.Include, nodes.Extends)
_NAMES = (nodes.Assign, nodes.AssignBlock, nodes.With)  # forty lines of {% set x = x ~ x %} make 2**40 characters


class Templates:
    """The compiled messages of one section of the recipe.

    Args:
        messages: the recipe's templates.
        place: where they stand in the recipe, e.g. `prompt.teacher`.
        variables: what they may see.

    Raises:
        OpdError: a template does not parse, is refused, or uses a variable that it may not see.
    """

    def __init__(self, messages: Sequence[MessageTemplate], *, place: str, variables: Sequence[str]) -> None:
        if not messages:
            raise OpdError(
                f"{place} has no message", why="the list is empty", fix="write one, or remove the key for the default"
            )
        self.roles = tuple(message.role for message in messages)
        self._places = tuple(f"{place}[{index}].content" for index in range(len(messages)))
        used: set[str] = set()
        for message, where in zip(messages, self._places, strict=True):
            used |= _check(message.content, where, variables)
        self.used = frozenset(used)
        self._templates = tuple(_ENVIRONMENT.from_string(message.content) for message in messages)

    def render(self, values: Mapping[str, Any], *, problem_id: str) -> list[Message]:
        """The messages for one problem.

        Raises:
            OpdError: a template fails, prints a missing value, or a message comes out empty.
        """
        rendered: list[Message] = []
        for role, place, template in zip(self.roles, self._places, self._templates, strict=True):
            pieces: list[str] = []
            num_chars = 0
            try:
                for piece in template.generate(values):
                    pieces.append(piece)
                    num_chars += len(piece)
                    if num_chars > MAX_OUTPUT_CHARS:
                        raise SecurityError(f"more than {MAX_OUTPUT_CHARS} characters")
            except (TemplateError, ArithmeticError, TypeError, ValueError, LookupError, RecursionError) as error:
                _fail(place, f"{_line_of(error)}(problem {problem_id}) {error}", error)
            content = "".join(pieces)
            if not content.strip():
                _fail(place, f"the message is empty for problem {problem_id}", None)
            rendered.append({"role": role, "content": content})
        return rendered


def _fail(place: str, why: str, cause: Exception | None) -> NoReturn:
    raise OpdError(f"the template {place} cannot be rendered", why=why, fix=f"mend {place} in the recipe") from cause


def _line_of(error: BaseException) -> str:
    """`line 3: `, the template line on which a rendering error arose."""
    line: int | None = None
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == "<template>":
            line = trace.tb_lineno
        trace = trace.tb_next
    return "" if line is None else f"line {line}: "


def _check(content: str, place: str, variables: Sequence[str]) -> set[str]:
    """The variables that a template uses, all of them allowed."""
    try:
        tree = _ENVIRONMENT.parse(content)
        used = meta.find_undeclared_variables(tree) - set(_ENVIRONMENT.globals)
        _ENVIRONMENT.compile(content)
    except TemplateSyntaxError as error:
        _fail(place, f"line {error.lineno}: {error.message}", error)
    except (TemplateError, RecursionError, ArithmeticError) as error:
        _fail(place, str(error), error)
    refused = next(iter(tree.find_all(_CALLS + _NAMES)), None)
    if refused is not None:
        _fail(place, f"line {refused.lineno}: {type(refused).__name__.lower()} is not for messages", None)
    if _loop_depth(tree) > MAX_LOOP_DEPTH:
        _fail(place, f"loops are nested more than {MAX_LOOP_DEPTH} deep", None)
    for name in sorted(used - set(variables)):
        hidden = name in TEACHER_VARIABLES
        raise OpdError(
            f"the template {place} may not use {name!r}",
            why=("what the context gives is shown to the teacher alone" if hidden else "there is no such variable")
            + f"; it sees {', '.join(variables)}",
            fix=f"move it to prompt.teacher, or remove it from {place}"
            if hidden
            else f"{nearest(name, variables)}use one of these",
        )
    return used


def _loop_depth(node: nodes.Node) -> int:
    deepest = max((_loop_depth(child) for child in node.iter_child_nodes()), default=0)
    if isinstance(node, nodes.For):
        return deepest + (MAX_LOOP_DEPTH + 1 if node.recursive else 1)
    return deepest
