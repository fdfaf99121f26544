"""Which pictures a run gets: curves from steps.jsonl, bars from its evaluations, and the one picture for a README."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from opd.diagnose.figures import (
    Bar,
    Line,
    bars_svg,
    curve_svg,
    draw_bars,
    draw_curves,
    phases_svg,
    require_matplotlib,
    standalone,
    style,
)
from opd.diagnose.run_folder import Arm, Json, RunFolder, read_run
from opd.errors import OpdError
from opd.eval.result import Metric
from opd.files import write_aside

PHASES = {"sampling": "rollout_s", "teacher": "teacher_s", "update": "update_s"}
METRIC_TITLES: dict[Metric, str] = {"correct": "Correct in the box", "contains": "Contains the answer"}
# Drawn together with others, or the same as `unclipped` under the loss's own name.
_DRAWN = ("unclipped", "entropy_student", "entropy_teacher", "teacher_top1_agreement")
_UNITS = {
    "clipped": ("Tokens that the clip acted on", "%", 100.0),
    "grad_removed_frac": ("Gradient norm that the clip removed", "%", 100.0),
    "importance_ratio": ("Importance ratio", "q / behavior", 1.0),
    "supervised": ("Tokens that the entropy gates left", "%", 100.0),
    "sft": ("Cross-entropy of the problems' own solutions", "nats per token", 1.0),
    "kept_mass_student": ("Student's mass on the support", "%", 100.0),
    "kept_mass_teacher": ("Teacher's mass on the support", "%", 100.0),
}


def run_figures(run: RunFolder) -> list[str]:
    """SVGs of the training curves, in reading order; empty for a run without steps."""
    if not run.steps:
        return []
    numbers = [int(row["step"]) for row in run.steps]
    figures: list[str] = []

    def add(title: str, unit: str, *lines: Line, from_zero: bool = True) -> None:
        shown = [line for line in lines if any(not math.isnan(value) for value in line.values)]
        if shown:
            prefix = f"c{len(figures)}"
            figures.append(curve_svg(numbers, shown, title=title, unit=unit, prefix=prefix, from_zero=from_zero))

    loss, unclipped = column(run.steps, "loss"), metric(run.steps, "unclipped")
    if _differ(loss, unclipped):
        per_completion = run.recipe is not None and run.recipe.loss.reduction == "sequence"
        label = "before the clip, mean over tokens" if per_completion else "before the clip"
        before_clip = Line(label, unclipped, "purple")
        add("Loss", "nats per token", Line("minimised", loss), before_clip)
    else:
        add("Loss", "nats per token", Line("loss", loss))
    entropies = (metric(run.steps, "entropy_student"), metric(run.steps, "entropy_teacher"))
    add("Entropy", "nats", Line("student", entropies[0]), Line("teacher", entropies[1], "orange"))
    agreement = [100 * value for value in metric(run.steps, "teacher_top1_agreement")]
    add("Teacher's favourite token is the student's too", "%", Line("agreement", agreement, "green"))
    add("Gradient norm, before clipping", "L2", Line("norm", column(run.steps, "grad_norm")))
    add("Learning rate", "per step", Line("rate", column(run.steps, "learning_rate"), "grey", smooth=False))
    for title, unit, line in _lengths(run):
        add(title, unit, line)
    add("Speed", "sampled tokens / s", *_speeds(run.steps))
    figures.append(phases_svg(numbers, _phases(run.steps), prefix="phases"))
    loss_name = None if run.recipe is None else run.recipe.loss.name
    for name in sorted({name for row in run.steps for name in row.get("metrics", {})} - {*_DRAWN, loss_name}):
        title, unit, factor = _UNITS.get(name, (name, "mean over tokens", 1.0))
        add(title, unit, Line(name, [factor * value for value in metric(run.steps, name)], "purple"), from_zero=False)
    return figures


def eval_figures(run: RunFolder) -> list[str]:
    """SVGs of the held-out scores: correct in the box, and contains the answer."""
    if not run.arms:
        return []
    majority = next(iter(run.arms.values())).result.majority_answer_pct
    return [
        bars_svg(
            arm_bars(run.arms, name),
            title=title,
            prefix=f"eval-{name}",
            reference=("always the most frequent answer", majority),
        )
        for name, title in METRIC_TITLES.items()
    ]


def arm_bars(arms: Mapping[str, Arm], name: Metric) -> list[Bar]:
    """One bar an evaluation: the student in blue (hollow before training), the teacher in orange, the rest in grey."""
    bars: list[Bar] = []
    for arm in arms.values():
        score = arm.result.score if name == "correct" else arm.result.contains
        shade = {"before": "blue", "after": "blue", "teacher": "orange"}.get(arm.name, "grey")
        low, high = (math.nan if bound is None else bound for bound in (score.low_pct, score.high_pct))
        bars.append(Bar(arm.label, score.average_pct, low, high, shade, hollow=arm.name == "before"))
    return bars


def demo_picture(run_folder: str | Path, out_svg: str | Path) -> Path:
    """One standalone SVG for a README: held-out scores of student, teacher and placebos with intervals, and the loss.

    Args:
        run_folder: of a run with evaluations `before` and `after`, and optionally others.
        out_svg: the file to write.

    Raises:
        OpdError: the folder is no run, an evaluation or the steps are missing, or matplotlib is.
    """
    require_matplotlib()
    run, out = read_run(Path(run_folder)), Path(out_svg)
    missing = [f"eval/{name}/result.json" for name in ("before", "after") if name not in run.arms]
    missing += [] if run.steps else ["steps.jsonl"]
    if missing:
        raise OpdError(
            f"{run_folder} is not enough for the picture",
            why=f"{', '.join(missing)} is missing",
            fix="train, and evaluate before and after: `opd report` names the commands",
        )
    from matplotlib.figure import Figure

    with style():
        bars = {name: arm_bars(run.arms, name) for name in METRIC_TITLES}
        figure = Figure(figsize=(9.6, max(2.3, 0.8 + 0.36 * len(run.arms))))
        left, middle, right = figure.subplots(1, 3, width_ratios=(1.0, 1.0, 1.1))
        for axes, (name, title), labels in ((left, _item(0), True), (middle, _item(1), False)):
            draw_bars(axes, bars[name], labels=labels)
            axes.set_title(f"{title}  (%)", loc="left")
        draw_curves(right, [int(row["step"]) for row in run.steps], [Line("loss", column(run.steps, "loss"))])
        right.set_ylim(bottom=min(0.0, right.get_ylim()[0]))
        right.set_title("Loss  (nats per token)", loc="left")
        scores = "; ".join(f"{bar.label} {bar.value:.1f}%" for bar in bars["correct"])
        text = standalone(figure, f"Held-out problems, correct in the box: {scores}. Loss over training steps.")
    return write_aside(out, text)


def column(rows: Sequence[Json], name: str) -> list[float]:
    """One field of every step; NaN where it is missing."""
    return [math.nan if row.get(name) is None else float(row[name]) for row in rows]


def metric(rows: Sequence[Json], name: str) -> list[float]:
    """One of the loss's metrics of every step; NaN where it is missing."""
    return column([row.get("metrics") or {} for row in rows], name)


def _item(index: Literal[0, 1]) -> tuple[Metric, str]:
    return list(METRIC_TITLES.items())[index]


def _differ(a: Sequence[float], b: Sequence[float]) -> bool:
    return any(abs(x - y) > 1e-6 * max(1.0, abs(x)) for x, y in zip(a, b, strict=True))


def _phases(rows: Sequence[Json]) -> dict[str, list[float]]:
    return {name: [0.0 if math.isnan(s) else s for s in column(rows, key)] for name, key in PHASES.items()}


def _speeds(rows: Sequence[Json]) -> list[Line]:
    tokens, sampling = column(rows, "num_sampled_tokens"), column(rows, "rollout_s")
    whole = [sum(parts) for parts in zip(*(column(rows, key) for key in PHASES.values()), strict=True)]
    return [
        Line("while sampling", [_per(count, seconds) for count, seconds in zip(tokens, sampling, strict=True)]),
        Line(
            "of the whole step", [_per(count, seconds) for count, seconds in zip(tokens, whole, strict=True)], "green"
        ),
    ]


def _per(count: float, seconds: float) -> float:
    return count / seconds if seconds > 0 else math.nan


def _lengths(run: RunFolder) -> list[tuple[str, str, Line]]:
    """Mean completion and share cut at the limit; both need the number of samples, which the recipe knows."""
    if run.recipe is None:
        return []
    count = run.recipe.train.num_problems_per_step * run.recipe.rollout.num_samples
    lengths = [tokens / count for tokens in column(run.steps, "num_sampled_tokens")]
    cut = [100 * number / count for number in column(run.steps, "num_truncated")]
    limit = run.recipe.rollout.max_new_tokens
    return [
        ("Completion length", f"tokens, at most {limit:,}", Line("length", lengths)),
        ("Completions cut at the length limit", "%", Line("cut", cut, "orange")),
    ]
