"""Rules about prompts: templates that parse, name what exists, and show the teacher what the context promises."""

from __future__ import annotations

from collections.abc import Iterator

from opd.config.faults import Fault
from opd.config.findings import Rule, Warning_
from opd.config.schema import MessageTemplate, Recipe
from opd.errors import OpdError

GIVES_SOLUTION = ("reference_solution", "answer_only", "placebo")
"""The contexts that give the teacher's templates a `solution` and an `answer`; to the others both are None."""


def demonstrations_fit_context(recipe: Recipe) -> Iterator[Fault | Warning_]:
    """The number of solved examples agrees with the context, and templates for them have some to render."""
    number = recipe.context.num_demonstrations
    if recipe.context.name == "none" and number:
        yield Fault(
            "`context.num_demonstrations` is not used",
            f"context.name=none shows the teacher nothing, and num_demonstrations is {number}",
            "set context.num_demonstrations=0, or context.name=demonstrations",
        )
    if recipe.context.name == "demonstrations" and not number:
        yield Fault(
            "context `demonstrations` shows no demonstration",
            "context.num_demonstrations is 0",
            "set context.num_demonstrations=3, or context.name=none",
        )
    if recipe.prompt.demonstration is None:
        return
    if not number:
        yield Fault(
            "`prompt.demonstration` is not used",
            "context.num_demonstrations is 0, so there is no solved example to render",
            "set prompt.demonstration=null, or context.num_demonstrations=3",
        )
    elif "demonstrations" in _used(recipe.prompt.teacher):
        yield Fault(
            "`prompt.demonstration` is not used",
            "prompt.teacher places `demonstrations` itself",
            "set prompt.demonstration=null, or take `demonstrations` out of prompt.teacher",
        )


def templates_are_sound(recipe: Recipe) -> Iterator[Fault | Warning_]:
    """Every template is valid and names what its reader may see; roles make a conversation that can be answered."""
    from opd.data.templates import DEMONSTRATION_VARIABLES, STUDENT_VARIABLES, TEACHER_VARIABLES, Templates

    sides = (
        ("student", recipe.prompt.student, STUDENT_VARIABLES, "user"),
        ("teacher", recipe.prompt.teacher, TEACHER_VARIABLES, "user"),
        ("demonstration", recipe.prompt.demonstration, DEMONSTRATION_VARIABLES, "assistant"),
    )
    for side, messages, variables, last in sides:
        if messages is None:
            continue
        try:
            templates = Templates(messages, place=f"prompt.{side}", variables=variables)
        except OpdError as error:
            yield Fault(error.what, error.why, error.fix)
            continue
        if templates.roles[-1] != last or "system" in templates.roles[1:]:
            yield Fault(
                f"`prompt.{side}` is not a conversation that ends with the {last}",
                f"its roles are {', '.join(templates.roles)}",
                f"put the system message first and the {last}'s message last",
            )
        if side == "demonstration" and "solution" not in templates.used:
            yield Fault(
                "`prompt.demonstration` shows no solution",
                "none of its messages uses `solution`",
                "write {{ solution }} in the assistant's message",
            )


def teacher_shows_context(recipe: Recipe) -> Iterator[Fault | Warning_]:
    """A teacher prompt of one's own shows what the context promises, and nothing that it does not give."""
    messages, context = recipe.prompt.teacher, recipe.context
    used = _used(messages)
    if messages is None or not used:
        return
    if context.name in GIVES_SOLUTION:
        if not used & {"solution", "answer"}:
            yield Fault(
                f"the teacher is never shown the context `{context.name}`",
                "prompt.teacher is set and uses neither `solution` nor `answer`",
                "write {{ solution }} where the teacher shall see it, or set prompt.teacher=null, or context.name=none",
            )
    else:
        for number, message in enumerate(messages):
            for name in sorted(_unguarded(message.content) & {"solution", "answer"}):
                yield Fault(
                    f"`prompt.teacher.{number}.content` uses `{name}`",
                    f"context.name={context.name} does not give it",
                    f"write it as {{% if {name} %}}...{{% endif %}}, or choose another context.name",
                )
    if "demonstrations" in used and not context.num_demonstrations:
        yield Warning_(
            "prompt.teacher uses `demonstrations`",
            "context.num_demonstrations is 0, so the list is empty",
            "Set context.num_demonstrations=3, or take it out of the template",
        )


def thinking_agrees(recipe: Recipe) -> Iterator[Fault | Warning_]:
    """Thinking switched on one side only moves the boundary at which the teacher starts to score."""
    student, teacher = recipe.prompt.student_thinking, recipe.prompt.teacher_thinking
    if student != teacher:
        yield Warning_(
            f"prompt.student_thinking is {student} and prompt.teacher_thinking is {teacher}".replace("None", "null"),
            "the teacher scores the student's tokens after a prompt that may open or close <think> otherwise",
            "Set both alike unless this is what you study",
        )
    if student and recipe.rollout.max_new_tokens < 1024:
        yield Warning_(
            f"prompt.student_thinking with rollout.max_new_tokens={recipe.rollout.max_new_tokens}",
            "most completions will be cut while the student still thinks",
            "Raise rollout.max_new_tokens, or set prompt.student_thinking=false",
        )


def same_prompts(recipe: Recipe) -> bool:
    """Whether student and teacher see the same prompt for every problem."""
    prompt = recipe.prompt
    same_messages = prompt.teacher is None or prompt.teacher == prompt.student
    return recipe.context.name == "none" and same_messages and prompt.student_thinking == prompt.teacher_thinking


RULES: tuple[Rule, ...] = (demonstrations_fit_context, templates_are_sound, teacher_shows_context, thinking_agrees)


# ---- Jinja2 ---------------------------------------------------------------------------------------------------------


def _used(messages: tuple[MessageTemplate, ...] | None) -> frozenset[str]:
    """The variables that the teacher's templates read; none when there are no templates or they are not sound."""
    from opd.data.templates import TEACHER_VARIABLES, Templates

    try:
        return (
            Templates(messages, place="prompt.teacher", variables=TEACHER_VARIABLES).used if messages else frozenset()
        )
    except OpdError:
        return frozenset()


def _unguarded(template: str) -> frozenset[str]:
    """The variables that a sound template reads outside every `{% if %}` that asks for them."""
    from jinja2 import nodes
    from jinja2.sandbox import SandboxedEnvironment

    def asked(node: nodes.Node) -> frozenset[str]:
        return frozenset(name.name for name in [node, *node.find_all(nodes.Name)] if isinstance(name, nodes.Name))

    def read(node: nodes.Node, guarded: frozenset[str]) -> frozenset[str]:
        if isinstance(node, nodes.Name):
            return frozenset({node.name}) - guarded
        if isinstance(node, nodes.If | nodes.CondExpr):
            guarded |= asked(node.test)
        return frozenset[str]().union(*(read(child, guarded) for child in node.iter_child_nodes()))

    return read(SandboxedEnvironment().parse(template), frozenset())
