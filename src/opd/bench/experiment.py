"""Before, training, after, verdict: one recipe measured on held-out problems, with the controls that say what it means.

The controls train the same student for the same steps under other contexts: another problem's solution (`placebo`),
solved examples alone (`demonstrations`), the solution without examples (`solution-only`). If one of them does as well,
the solution was not what taught.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from opd.config.load import load_recipe
from opd.config.schema import EvalConfig, Recipe
from opd.data import load_problems
from opd.diagnose.doctor import examine, refuse_if_failed
from opd.diagnose.report import write_report
from opd.errors import OpdError
from opd.eval.result import Checkpoint, EvalResult, View
from opd.eval.runner import evaluate_with
from opd.eval.verdict import compare_results
from opd.files import file_sha256
from opd.log import write_json
from opd.teacher import ModelTeacher
from opd.training.assemble import Parts, assemble
from opd.training.loop import RunResult, fit
from opd.training.run import begin


@dataclass(frozen=True)
class Change:
    """A held-out score before and after training, in percent; the difference and its 95% interval in points.

    The interval is paired by problem and clustered where problems share a cluster.
    """

    before: float
    after: float
    difference: float
    low: float
    high: float


@dataclass(frozen=True)
class Verdict:
    """What one experiment found.

    Args:
        correct: right answer in the box.
        contains: right answer anywhere in the text: what is left of the gain when format does not count.
        num_problems, num_samples: held-out problems and samples of each.
        train_seconds: wall time of the training steps alone.
        seed: of the run.
        majority_answer_pct: what always giving the most frequent answer would score.
        controls: name -> change under that control; empty unless asked for.
        untrained_pct: scores of the untrained model under prompts that the student does not see: `teacher`, with
            examples and the solution (the ceiling), and `few-shot`, with the examples alone; empty unless asked for.
    """

    correct: Change
    contains: Change
    num_problems: int
    num_samples: int
    train_seconds: float
    seed: int
    majority_answer_pct: float
    controls: Mapping[str, Mapping[str, Change]]
    untrained_pct: Mapping[str, Mapping[str, float]]

    def line(self) -> str:
        """The line that `make demo` ends with."""
        change = self.correct
        return (
            f"verdict: {change.before:.1f}% -> {change.after:.1f}% "
            f"({change.difference:+.1f} points, 95% interval {change.low:+.1f} to {change.high:+.1f}, "
            f"n = {self.num_problems} problems x {self.num_samples} samples, {self.train_seconds:.0f} s of training)"
        )

    def to_json(self) -> dict[str, Any]:
        """As written to `verdict.json`: the change of the boxed answer at the top level, percent and points."""
        fields = asdict(self)
        return {"unit": "percent", **fields.pop("correct"), **fields}


CONTROLS: Mapping[str, tuple[str, ...]] = {
    "placebo": ("context.name=placebo",),
    "demonstrations": ("context.name=demonstrations",),
    "solution-only": ("context.num_demonstrations=0", "prompt.demonstration=null"),
}


def experiment(
    recipe: str | Path | Mapping[str, Any],
    overrides: tuple[str, ...] = (),
    *,
    full: bool = False,
    device: str | None = None,
    command: str,
) -> Verdict:
    """Evaluate, train, evaluate again, and write `verdict.json` and `report.html` into the run's folder.

    Args:
        recipe: a recipe with an `eval` section.
        overrides: `key.sub=value`.
        full: also measure the teacher's own score and train the controls.
        device: "cpu" to stay off an available GPU.
        command: how to repeat this, for the model card.

    Raises:
        OpdError: as `opd.train` and `opd.evaluate` do; also when the recipe has no eval section.
    """
    loaded = load_recipe(recipe, overrides)
    config = _eval_config(loaded.recipe)
    folder, ranks = begin(loaded, resume=False, device=device)
    if ranks.num_ranks > 1:
        raise OpdError(
            "An experiment runs in one process.",
            why=f"{ranks.num_ranks} were started, and each would evaluate into the same folder.",
            fix="Train with several processes (opd train), then evaluate and compare with opd eval and opd compare.",
        )
    parts = assemble(loaded.recipe, ranks.device)
    refuse_if_failed(examine(parts, folder=folder))

    before = _evaluate(parts, config, folder / "eval" / "before")
    untrained: dict[str, dict[str, float]] = {}
    if full:
        # Before training: where every weight trains, there is no untrained student afterwards.
        untrained["teacher"] = _scores(_evaluate(parts, config, folder / "eval" / "teacher", view="teacher"))
    run = fit(parts, loaded, folder, ranks, resume=False, command=command)
    after = _evaluate(parts, config, folder / "eval" / "after", trained=_finished(run))
    controls: dict[str, dict[str, Change]] = {}
    if full:
        for name in CONTROLS:
            few_shot, controls[name] = _control(name, recipe, overrides, folder, before, device)
            if few_shot is not None:
                untrained["few-shot"] = _scores(few_shot)
    verdict = Verdict(
        correct=_change(before, after, "correct"),
        contains=_change(before, after, "contains"),
        num_problems=after.num_problems,
        num_samples=after.num_samples,
        train_seconds=run.metrics["train_s"],
        seed=loaded.recipe.seed,
        majority_answer_pct=after.majority_answer_pct,
        controls=controls,
        untrained_pct=untrained,
    )
    write_json(folder / "verdict.json", verdict.to_json())
    write_report(folder)
    return verdict


def _control(
    name: str,
    recipe: str | Path | Mapping[str, Any],
    overrides: tuple[str, ...],
    folder: Path,
    before: EvalResult,
    device: str | None,
) -> tuple[EvalResult | None, dict[str, Change]]:
    """How the student changes under a control; with examples alone, also the untrained student shown them."""
    print(f"\ncontrol: {name}")
    arm = folder / "controls" / name
    own = (*CONTROLS[name], f"folder={arm}")
    keys = {override.split("=")[0] for override in own}
    loaded = load_recipe(recipe, [*(other for other in overrides if other.split("=")[0] not in keys), *own])
    _, ranks = begin(loaded, resume=False, device=device)
    parts = assemble(loaded.recipe, ranks.device)
    config = _eval_config(loaded.recipe)
    few_shot = None
    if name == "demonstrations":
        few_shot = _evaluate(parts, config, folder / "eval" / "few-shot", view="teacher")
    run = fit(parts, loaded, arm, ranks, resume=False)
    after = _evaluate(parts, config, folder / "eval" / name, trained=_finished(run))
    return few_shot, {metric: _change(before, after, metric) for metric in ("correct", "contains")}


def _finished(run: RunResult) -> Path:
    """The trained weights; an interrupted run, the control's too, has none and must not be scored as if it had."""
    if run.final is None:
        raise OpdError(
            "The experiment was interrupted, so there is no verdict.",
            why=f"Training stopped after step {run.metrics['num_steps']} of {run.loaded.recipe.train.num_steps}.",
            fix="Run it again; evaluation before training is quick to repeat.",
        )
    return run.final


def _evaluate(
    parts: Parts, config: EvalConfig, folder: Path, *, trained: Path | None = None, view: View = "student"
) -> EvalResult:
    """The student with its trained weights, or, when none are given, before training or with its adapter off."""
    student = parts.student
    print(f"\nevaluating: {folder.name}")
    if view == "teacher" and isinstance(parts.teacher, ModelTeacher):
        sampler, loaded = parts.teacher.sampler(), parts.teacher.loaded
    else:
        initial = trained is None and student.has_adapter
        sampler, loaded = parts.sampler_with(student.adapter_off) if initial else parts.sampler, student.loaded
    digest = None if trained is None else file_sha256(next(trained.glob("*.safetensors")))
    return evaluate_with(
        sampler,
        loaded.tokenizer,
        parts.renderer,
        load_problems(config.data).problems,
        config,
        folder,
        checkpoint=Checkpoint(
            path=loaded.reference if trained is None else str(trained),
            kind="base" if trained is None else "adapter" if student.has_adapter else "full",
            fingerprint=loaded.fingerprint if digest is None else digest[:16],
            base=None if trained is None else student.loaded.reference,
            adapter_sha256=digest if student.has_adapter else None,
        ),
        view=view,
        on_long_prompt=parts.recipe.prompt.on_long_prompt,
    )


def _scores(result: EvalResult) -> dict[str, float]:
    return {"correct": result.average_at_n_pct, "contains": result.contains_rate_pct}


def _change(before: EvalResult, after: EvalResult, metric: Any) -> Change:
    found = compare_results(before, after, metric=metric).comparison
    return Change(*(100 * share for share in (found.avg_a, found.avg_b, found.difference, found.low, found.high)))


def _eval_config(recipe: Recipe) -> EvalConfig:
    if recipe.eval is None:
        raise OpdError(
            f"The recipe {recipe.name} has no eval section.",
            why="A verdict needs held-out problems to score before and after training.",
            fix="Add eval.data, for example eval.data.name=task eval.data.task=products eval.data.split=heldout.",
        )
    return recipe.eval
