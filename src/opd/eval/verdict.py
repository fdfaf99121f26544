"""Two results side by side: may they be compared, what is the difference, and what does it say in plain words."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from opd.errors import OpdError
from opd.eval.result import EvalResult, Metric, ProblemResult, differing
from opd.eval.stats import Comparison, compare

METRIC_NAMES: dict[Metric, str] = {"correct": "right answer in the box", "contains": "answer anywhere in the text"}


@dataclass(frozen=True)
class ComparedResults:
    """B against A.

    Args:
        comparison: the statistics over the problems that both hold.
        metric: which of the two scores.
        warnings: what a reader must know before believing the difference.
        verdict: one sentence.
    """

    comparison: Comparison
    metric: Metric
    warnings: tuple[str, ...]
    verdict: str

    def to_json(self) -> dict[str, Any]:
        """For `opd compare --json`; shares in [0, 1], null where nothing can be known."""
        fields = {name: None if value != value else value for name, value in asdict(self.comparison).items()}
        return {"metric": self.metric, **fields, "verdict": self.verdict, "warnings": list(self.warnings)}


def compare_results(
    a: EvalResult, b: EvalResult, *, metric: Metric = "correct", allow_different_settings: bool = False
) -> ComparedResults:
    """Compare B with A, paired by problem.

    Args:
        a: the baseline.
        b: what should be better.
        metric: graded answers, or the answer anywhere in the text.
        allow_different_settings: go on, with a warning, when prompt, sampling or grading differ.

    Raises:
        OpdError: they share no problem, a shared id has two reference answers, or the settings differ.
    """
    pairs = _paired(a, b)
    warnings = [*_problem_warnings(a, b, len(pairs)), *_checkpoint_warnings(a, b)]
    differences = differing(a.frozen_settings, b.frozen_settings)
    num_prompts = sum(mine.prompt_sha256 != other.prompt_sha256 for mine, other in pairs)
    if num_prompts:
        differences.append(f"prompts: {num_prompts} of {len(pairs)} shared problems were asked with another text")
    if differences and not allow_different_settings:
        raise OpdError(
            "the two results were measured under different settings",
            why="; ".join(differences),
            fix="evaluate one of them again under the other's settings, or pass --allow-different-settings",
        )
    warnings += [f"different settings: {difference}" for difference in differences]
    comparison = compare(
        [getattr(mine, metric) for mine, _ in pairs],
        [getattr(other, metric) for _, other in pairs],
        clusters=[mine.cluster for mine, _ in pairs],
    )
    return ComparedResults(comparison, metric, tuple(warnings), verdict_of(comparison))


def verdict_of(comparison: Comparison) -> str:
    """One sentence: better, worse, or no difference that this design could show."""
    points = f"{100 * comparison.difference:+.1f} points"
    detectable = f"{100 * comparison.minimum_detectable:.1f} points"
    known = comparison.se == comparison.se
    if not known:
        return f"No verdict: B is {points} against A, but one independent problem gives no interval."
    interval = f"95% interval {100 * comparison.low:+.1f} to {100 * comparison.high:+.1f}"
    if comparison.low > 0 or comparison.high < 0:
        word = "better" if comparison.difference > 0 else "worse"
        doubt = "" if comparison.p_value < 0.05 else ", though the permutation test does not agree: read it with care"
        return f"B is {word} than A by {points} ({interval}, p = {comparison.p_value:.2g}){doubt}."
    if comparison.minimum_detectable != comparison.minimum_detectable:
        return f"No difference at all ({points}): every problem scored the same on both sides."
    return (
        f"No difference shown: {points} ({interval}, p = {comparison.p_value:.2g}); "
        f"with these problems and samples a true difference below {detectable} would often be missed."
    )


def _paired(a: EvalResult, b: EvalResult) -> list[tuple[ProblemResult, ProblemResult]]:
    others = {row.id: row for row in b.results}
    pairs = [(row, others[row.id]) for row in a.results if row.id in others]
    if not pairs:
        raise OpdError(
            "the two results have no problem in common",
            why=f"A is {a.benchmark} ({a.num_problems} problems), B is {b.benchmark} ({b.num_problems})",
            fix="compare results of the same benchmark",
        )
    for mine, other in pairs:
        if mine.answer != other.answer:
            raise OpdError(
                "the two results are not of the same problems",
                why=f"the answer of {mine.id} is {mine.answer!r} in A and {other.answer!r} in B",
                fix="evaluate both on the same version of the data",
            )
    return pairs


def _problem_warnings(a: EvalResult, b: EvalResult, num_shared: int) -> list[str]:
    warnings: list[str] = []
    if num_shared < max(a.num_problems, b.num_problems):
        warnings.append(
            f"different problems: only the {num_shared} that both hold are compared "
            f"(A has {a.num_problems}, B {b.num_problems})"
        )
    elif a.dataset_hash != b.dataset_hash:
        warnings.append("the problems have the same ids and answers, but their order or their texts differ")
    return warnings


def _checkpoint_warnings(a: EvalResult, b: EvalResult) -> list[str]:
    warnings: list[str] = []
    if a.checkpoint.fingerprint == b.checkpoint.fingerprint:
        warnings.append(f"both results are of the same weights ({a.checkpoint_path})")
    for name, result in (("A", a), ("B", b)):
        if result.checkpoint.picked_by == result.benchmark:
            warnings.append(
                f"{name}'s checkpoint was picked by this same benchmark, which flatters it: "
                "the best of 4 equal checkpoints scores about 1.9 points higher for nothing"
            )
    return warnings
