"""`opd report`: one offline HTML page of a run, that says what happened, how sure it is, and what is missing.

What a model wrote is untrusted: the template escapes everything, and the page holds no script and loads nothing.
"""

from __future__ import annotations

import base64
import json
import math
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from opd.config.formula import objective
from opd.config.schema import EmaWeights, LoraConfig, Recipe, SelfTeacherConfig
from opd.diagnose.curves import METRIC_TITLES, PHASES, column, demo_picture, eval_figures, run_figures
from opd.diagnose.figures import css_variables, require_matplotlib, smoothing_width
from opd.diagnose.run_folder import Arm, RunFolder, read_run
from opd.diagnose.transcripts import before_and_after, samples_over_time
from opd.errors import OpdError
from opd.eval.result import Metric
from opd.eval.verdict import compare_results
from opd.files import write_aside

__all__ = ["demo_picture", "render", "write_report"]

ASSETS = Path(__file__).parent / "assets"
REPORT_FILE = "report.html"
DASH, MINUS = "\u2013", "\u2212"


@dataclass(frozen=True)
class Missing:
    """A part of the page that has nothing to show, and the command that makes it."""

    what: str
    command: str


@dataclass(frozen=True)
class Change:
    """One metric before and after training; scores in percent, the difference in points, NaN where nothing is known."""

    title: str
    before: float
    after: float
    difference: float
    low: float
    high: float

    @property
    def shown(self) -> bool:
        """Whether the interval excludes zero."""
        return self.low > 0 or self.high < 0


def write_report(run: str | Path, out: str | Path | None = None) -> Path:
    """Write the page of a run.

    Args:
        run: the run's folder.
        out: the file to write; default `report.html` in the run's folder.

    Returns:
        The page's path.

    Raises:
        OpdError: the folder is no run, one of its files is damaged, or matplotlib is not installed.
    """
    require_matplotlib()
    folder = Path(run)
    page = render(read_run(folder))
    path = folder / REPORT_FILE if out is None else Path(out)
    if not path.parent.is_dir():
        raise OpdError(
            f"{path} cannot be written", why=f"there is no folder {path.parent}", fix=f"mkdir -p {path.parent}"
        )
    return write_aside(path, page)


def render(run: RunFolder) -> str:
    """The page as text."""
    environment = Environment(
        loader=FileSystemLoader(ASSETS),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["number"] = _number
    changes, warnings = _changes(run)
    samples, num_steps_with_samples = samples_over_time(run)
    return environment.get_template("report.html.jinja").render(
        run=run,
        name=run.folder.resolve().name if run.recipe is None else run.recipe.name,
        facts=_facts(run),
        changes=changes,
        train_time=_duration(_train_seconds(run)),
        before=run.arms.get("before"),
        gains=_gains(run),
        has_controls=any(arm.is_control for arm in run.arms.values()),
        warnings=warnings,
        curves=[Markup(svg) for svg in run_figures(run)],
        smoothed=smoothing_width(len(run.steps)),
        not_finite=[row["step"] for row in run.steps if row.get("skipped") and row["num_supervised_tokens"]],
        unsupervised=[row["step"] for row in run.steps if row.get("skipped") and not row["num_supervised_tokens"]],
        eval_figures=[Markup(svg) for svg in eval_figures(run)],
        pairs=before_and_after(run),
        samples=samples,
        num_steps_with_samples=num_steps_with_samples,
        recipe_lines=_recipe_lines(run.recipe_text),
        missing=_missing(run),
        command=None if run.environment is None else run.environment.get("command"),
        environment=_environment(run),
        download=_download(run, changes),
        css=Markup((ASSETS / "report.css").read_text(encoding="utf-8")),
        light=Markup(css_variables("light")),
        dark=Markup(css_variables("dark")),
    )


# ---- header ----------------------------------------------------------------------------------------------------------


def _changes(run: RunFolder) -> tuple[list[Change], list[str]]:
    """What training did to each metric, with what a reader must know before believing it."""
    before, after = run.arms.get("before"), run.arms.get("after")
    if before is None or after is None:
        return [], []
    found = [_change(before, after, metric) for metric in METRIC_TITLES]
    warnings = dict.fromkeys(warning for _, lines in found for warning in lines)
    return [change for change, _ in found], list(warnings)


def _change(before: Arm, after: Arm, metric: Metric) -> tuple[Change, tuple[str, ...]]:
    compared = compare_results(before.result, after.result, metric=metric, allow_different_settings=True)
    numbers = compared.comparison
    shares = (numbers.avg_a, numbers.avg_b, numbers.difference, numbers.low, numbers.high)
    return Change(METRIC_TITLES[metric], *(100 * share for share in shares)), compared.warnings


def _gains(run: RunFolder) -> dict[str, Change]:
    """What each trained student gained over the student before training, correct in the box, by evaluation."""
    before = run.arms.get("before")
    trained = [arm for arm in run.arms.values() if arm.name == "after" or arm.is_control]
    return {} if before is None else {arm.name: _change(before, arm, "correct")[0] for arm in trained}


def _facts(run: RunFolder) -> list[tuple[str, str]]:
    """What the run was, as (name, value) for the header."""
    facts: list[tuple[str, str]] = []
    if run.recipe is not None:
        facts += _recipe_facts(run.recipe)
    if run.steps:
        tokens = sum(value for value in column(run.steps, "num_sampled_tokens") if not math.isnan(value))
        facts += [
            ("Trained", f"{len(run.steps):,} steps, {tokens:,.0f} sampled tokens, {_duration(_train_seconds(run))}"),
            ("Last step written", _date((run.folder / "steps.jsonl").stat().st_mtime)),
        ]
    return facts


def _recipe_facts(recipe: Recipe) -> list[tuple[str, str]]:
    adapter, train = recipe.student.adapter, recipe.train
    how = f"LoRA r {adapter.r}, alpha {adapter.alpha:g}" if isinstance(adapter, LoraConfig) else "every weight"
    examples = recipe.context.num_demonstrations
    context = recipe.context.name.replace("_", " ") + (f" + {examples} solved examples" if examples else "")
    schedule = f"{train.schedule.name}, {train.schedule.num_warmup_steps} warm-up steps"
    return [
        ("Student", f"{recipe.student.model}, training {how}"),
        ("Teacher", _teacher(recipe)),
        ("The teacher is shown", context),
        ("Minimised", objective(recipe.loss)),
        (
            "A step",
            f"{train.num_problems_per_step} problems x {recipe.rollout.num_samples} samples "
            f"of at most {recipe.rollout.max_new_tokens:,} tokens at temperature {recipe.rollout.temperature:g}",
        ),
        ("Learning rate", f"{train.learning_rate:g}, {schedule}"),
        ("Seed", str(recipe.seed)),
    ]


def _teacher(recipe: Recipe) -> str:
    teacher = recipe.teacher
    if not isinstance(teacher, SelfTeacherConfig):
        return teacher.model
    decay = f", decay {teacher.weights.decay:g}" if isinstance(teacher.weights, EmaWeights) else ""
    return f"the student itself, {teacher.weights.name} weights{decay}"


def _train_seconds(run: RunFolder) -> float:
    """Wall time of the training steps; NaN without steps."""
    if run.verdict is not None and isinstance(run.verdict.get("train_seconds"), int | float):
        return float(run.verdict["train_seconds"])
    if not run.steps:
        return math.nan
    return sum(value for key in PHASES.values() for value in column(run.steps, key) if not math.isnan(value))


# ---- what is missing -------------------------------------------------------------------------------------------------


def _missing(run: RunFolder) -> dict[str, Missing]:
    """By section: what is not there, and how to make it."""
    folder = run.folder
    recipe = shlex.quote(str(folder / "resolved.yaml"))

    def path(name: str) -> str:
        return shlex.quote(str(folder / name))

    table: dict[str, tuple[bool, str, str]] = {
        "steps": (bool(run.steps), "steps.jsonl", f"opd train {recipe} folder={path('')}"),
        "samples": (bool(run.samples), "samples.jsonl", f"opd train {recipe} log.num_samples_per_step=2"),
        "recipe": (run.recipe_text is not None, "resolved.yaml", "opd train RECIPE"),
        "environment": (run.environment is not None, "environment.json", f"opd train {recipe}"),
        "doctor": (run.doctor is not None, "doctor.json", f"opd doctor {recipe} --out {path('')}"),
        "before": ("before" in run.arms, "eval/before", f"opd eval {recipe} --out {path('eval/before')}"),
        "after": (
            "after" in run.arms,
            "eval/after",
            f"opd eval {recipe} --adapter {path('final')} --out {path('eval/after')}",
        ),
        "teacher": (
            "teacher" in run.arms,
            "eval/teacher",
            f"opd eval {recipe} --view teacher --out {path('eval/teacher')}",
        ),
    }
    return {name: Missing(what, command) for name, (there, what, command) in table.items() if not there}


# ---- recipe, environment, download -----------------------------------------------------------------------------------


def _recipe_lines(text: str | None) -> list[tuple[str, str]]:
    """(value, source) of each line of resolved.yaml, to be set apart on the page."""
    lines: list[tuple[str, str]] = []
    for line in (text or "").splitlines():
        value, mark, source = line.rpartition("  # ")
        lines.append((value, mark + source) if mark else (line, ""))
    return lines


def _environment(run: RunFolder) -> list[tuple[str, str]]:
    fields = dict(run.environment or {})
    fields.pop("command", None)
    versions: Mapping[str, Any] = fields.pop("versions", None) or {}
    shown = [(name.replace("_", " "), _plain(value)) for name, value in fields.items()]
    return shown + [(name, "not installed" if version is None else str(version)) for name, version in versions.items()]


def _plain(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"  # pyright: ignore[reportUnknownArgumentType]
    return "unknown" if value is None else str(value)


def _download(run: RunFolder, changes: Sequence[Change]) -> str:
    """Everything behind the page but the samples, as a data: URI."""
    value = {
        "verdict": run.verdict,
        "changes": [{name: _or_null(item) for name, item in vars(change).items()} for change in changes],
        "evaluations": {name: _scores(arm) for name, arm in run.arms.items()},
        "steps": run.steps,
        "doctor": run.doctor,
        "environment": run.environment,
        "recipe": None if run.recipe is None else run.recipe.model_dump(mode="json"),
    }
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return "data:application/json;base64," + base64.b64encode(text.encode()).decode()


def _scores(arm: Arm) -> dict[str, Any]:
    return arm.result.model_dump(mode="json")


def _or_null(value: object) -> object:
    return None if isinstance(value, float) and math.isnan(value) else value


# ---- numbers ---------------------------------------------------------------------------------------------------------


def _number(value: float | None, form: str = ".1f") -> str:
    """A number for people: a dash where there is none, a real minus sign."""
    return DASH if value is None or math.isnan(value) else format(value, form).replace("-", MINUS)


def _duration(seconds: float) -> str:
    if math.isnan(seconds):
        return DASH
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def _date(timestamp: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(timestamp))
