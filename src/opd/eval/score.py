"""From samples on disk to a result: grading and counting, repeatable without a model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from opd.data.tasks import majority_answer
from opd.errors import OpdError
from opd.eval.checker import MathChecker
from opd.eval.grade import GRADER_VERSION, TIME_LIMIT_S, Grade, contains, grade, normalize
from opd.eval.majority import maj_at_k
from opd.eval.result import RESULT_FILE, EvalResult, ProblemResult, Score, hash_of
from opd.eval.samples import Manifest, Question, Sample, SampleId, load_manifest, read_samples
from opd.eval.stats import summarize
from opd.types import Problem


def regrade(folder: str | Path) -> EvalResult:
    """Grade the samples of a finished evaluation again and replace its result.json.

    Raises:
        OpdError: the folder holds no evaluation, or samples are missing.
    """
    place = Path(folder)
    manifest = load_manifest(place)
    result = score(manifest, read_samples(place, manifest))
    result.save(place / RESULT_FILE)
    return result


def score(
    manifest: Manifest,
    samples: Mapping[SampleId, Sample],
    *,
    notes: Sequence[str] = (),
    checker: MathChecker | None = None,
) -> EvalResult:
    """Grade every sample and sum up.

    Args:
        manifest: what was asked.
        samples: all of its samples, by (problem id, sample index).
        notes: kept in the result.
        checker: for answers that need mathematics; by default the one that the process shares.
    """
    names = [(q.id, index) for q in manifest.questions for index in range(manifest.num_samples)]
    missing = [name for name in names if name not in samples]
    if missing:
        raise OpdError(
            "the evaluation is not finished",
            why=f"{len(missing)} of {len(names)} samples are missing, the first is {missing[0]}",
            fix="run the same `opd eval` command again: it goes on where it stopped",
        )
    rows = [
        _grade_problem(question, [samples[question.id, index] for index in range(manifest.num_samples)], checker)
        for question in manifest.questions
    ]
    return _sum_up(manifest, rows, notes)


def _grade_problem(question: Question, samples: Sequence[Sample], checker: MathChecker | None) -> ProblemResult:
    grades: list[Grade] = [
        grade(sample.text, question.answer, starts_thinking=question.starts_thinking, checker=checker)
        for sample in samples
    ]
    return ProblemResult(
        id=question.id,
        cluster=question.cluster,
        answer=question.answer,
        prompt_sha256=hash_of(question.prompt),
        correct=tuple(mark.correct for mark in grades),
        contains=tuple(contains(sample.text, question.answer) for sample in samples),
        verdicts=tuple(mark.verdict for mark in grades),
        answers=tuple(mark.answer for mark in grades),
        num_tokens=tuple(len(sample.ids) for sample in samples),
        truncated=tuple(sample.finish_reason == "length" for sample in samples),
    )


def _sum_up(manifest: Manifest, rows: Sequence[ProblemResult], notes: Sequence[str]) -> EvalResult:
    correct = [row.correct for row in rows]
    clusters = [row.cluster for row in rows]
    summary = summarize(correct, clusters=clusters)
    contained = summarize([row.contains for row in rows], clusters=clusters)
    total = len(rows) * manifest.num_samples
    verdicts = Counter(verdict for row in rows for verdict in row.verdicts)
    voted = [[None if answer is None else normalize(answer) for answer in row.answers] for row in rows]
    # One spelling for equal answers, so that 07 and 7 count together.
    constant, constant_share = majority_answer(
        [Problem(q.id, q.problem, answer=normalize(q.answer)) for q in manifest.questions]
    )
    settings = {**manifest.settings, "grader": {"version": GRADER_VERSION, "time_limit_s": TIME_LIMIT_S}}
    return EvalResult(
        benchmark=manifest.benchmark,
        metric=f"avg@{manifest.num_samples}",
        average_at_n_pct=100 * summary.avg,
        pass_at_n_pct=100 * summary.pass_at[manifest.num_samples],
        maj_at_n_pct=100 * maj_at_k(voted, correct),
        score=Score.of(summary),
        contains_rate_pct=100 * contained.avg,
        contains=Score.of(contained),
        format_rate_pct=100 * (total - verdicts["no_answer"]) / total,
        no_answer_rate_pct=100 * verdicts["no_answer"] / total,
        unparsed_rate_pct=100 * (verdicts["unparsed"] + verdicts["timeout"]) / total,
        truncation_rate_pct=100 * sum(sum(row.truncated) for row in rows) / total,
        mean_tokens=sum(sum(row.num_tokens) for row in rows) / total,
        majority_answer=constant,
        majority_answer_pct=100 * constant_share,
        num_problems=len(rows),
        num_samples=manifest.num_samples,
        num_dropped=manifest.num_dropped,
        total_solutions=total,
        total_correct=verdicts["correct"],
        checkpoint_path=manifest.checkpoint.path,
        checkpoint_kind=manifest.checkpoint.kind,
        checkpoint=manifest.checkpoint,
        seed=manifest.seed,
        data_parallel_size=manifest.data_parallel_size,
        frozen_settings=settings,
        settings_hash=hash_of(settings),
        dataset_hash=hash_of([[q.id, q.problem, q.answer] for q in manifest.questions]),
        prompt_hash=hash_of([q.prompt for q in manifest.questions]),
        notes=tuple(notes),
        results=tuple(rows),
    )
