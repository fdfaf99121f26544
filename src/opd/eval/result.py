"""What an evaluation says: one JSON file that can be read, checked and compared without the model.

Percentages are in [0, 100]; what cannot be known is null, never 0.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import Field, ValidationError, model_validator

from opd.config.base import Config
from opd.errors import OpdError
from opd.eval.grade import Verdict
from opd.eval.stats import Bools, Summary
from opd.files import write_aside

FORMAT = 1
RESULT_FILE = "result.json"
CheckpointKind = Literal["base", "adapter", "full"]
Metric = Literal["correct", "contains"]
View = Literal["student", "teacher"]


class Checkpoint(Config):
    """Which weights were evaluated.

    Args:
        path: model reference or folder.
        kind: `base` as published, `adapter` on a base model, or `full` weights of a training run.
        fingerprint: changes when the weights change, adapter included.
        base: the base model's reference, for an adapter.
        adapter_sha256: of the adapter's weight file, for an adapter.
        picked_by: the benchmark by which this checkpoint was chosen among several, if it was.
    """

    path: str
    kind: CheckpointKind
    fingerprint: str
    base: str | None = None
    adapter_sha256: str | None = None
    picked_by: str | None = None


class ProblemResult(Config):
    """All samples of one problem; the tuples have one entry a sample.

    Args:
        cluster: problems with the same label are not independent evidence.
        answer: the reference.
        prompt_sha256: of the prompt's text.
        verdicts: correct, wrong, no_answer, unparsed or timeout.
        contains: whether the reference stands anywhere in the text.
        answers: what the last box holds, null without one.
        num_tokens: sampled tokens, the stop token included.
        truncated: whether the length limit ended the sample.
    """

    id: str
    cluster: str
    answer: str
    prompt_sha256: str
    correct: tuple[bool, ...]
    contains: tuple[bool, ...]
    verdicts: tuple[Verdict, ...]
    answers: tuple[str | None, ...]
    num_tokens: tuple[int, ...]
    truncated: tuple[bool, ...]

    @model_validator(mode="after")
    def _check(self) -> ProblemResult:
        columns = (self.correct, self.contains, self.verdicts, self.answers, self.num_tokens, self.truncated)
        if len({len(column) for column in columns}) != 1 or not self.correct:
            raise ValueError(f"problem {self.id}: its lists must have one entry for each sample, at least one")
        if any(right != (verdict == "correct") for right, verdict in zip(self.correct, self.verdicts, strict=True)):
            raise ValueError(f"problem {self.id}: `correct` and `verdicts` disagree")
        return self


class Score(Config):
    """A `Summary` in percent: average, 95% interval over new problems, both standard errors, pass@k by k."""

    average_pct: float
    low_pct: float | None
    high_pct: float | None
    sampling_se_pct: float | None
    problem_se_pct: float | None
    pass_at_pct: dict[int, float]

    @classmethod
    def of(cls, summary: Summary) -> Score:
        """From shares in [0, 1]; NaN becomes null."""
        return cls(
            average_pct=100 * summary.avg,
            low_pct=_pct(summary.low),
            high_pct=_pct(summary.high),
            sampling_se_pct=_pct(summary.sampling_se),
            problem_se_pct=_pct(summary.problem_se),
            pass_at_pct={k: 100 * value for k, value in summary.pass_at.items()},
        )


class EvalResult(Config):
    """One evaluation: N problems x n samples of one checkpoint under frozen settings.

    Args:
        metric: `avg@n`, the share of samples whose boxed answer is right, averaged over problems.
        average_at_n_pct, pass_at_n_pct, maj_at_n_pct: avg@n, unbiased pass@n, majority vote of n (ties split).
        score: the same with intervals and pass@k. `contains`: for the answer standing anywhere in the text.
        format_rate_pct: samples with a boxed answer. `no_answer_rate_pct` is the rest; `unparsed_rate_pct` are boxes
            that could not be read or took too long; `truncation_rate_pct` samples that the length limit ended.
        majority_answer, majority_answer_pct: what always giving the most frequent reference answer would score.
        mean_tokens: of the sampled completions.
        frozen_settings, settings_hash: everything about prompt, sampling and grading that two results must share.
        dataset_hash, prompt_hash: of ids, questions and answers; of the prompts' texts.
        num_dropped: problems left out by reason, e.g. prompts that were too long.
        notes: what happened on the way, e.g. a torn line that was sampled again.
    """

    format: Literal[1] = FORMAT
    benchmark: str
    metric: str
    average_at_n_pct: float
    pass_at_n_pct: float
    maj_at_n_pct: float
    score: Score
    contains_rate_pct: float
    contains: Score
    format_rate_pct: float
    no_answer_rate_pct: float
    unparsed_rate_pct: float
    truncation_rate_pct: float
    mean_tokens: float
    majority_answer: str
    majority_answer_pct: float
    num_problems: int = Field(ge=1)
    num_samples: int = Field(ge=1)
    num_dropped: dict[str, int]
    total_solutions: int
    total_correct: int
    checkpoint_path: str
    checkpoint_kind: CheckpointKind
    checkpoint: Checkpoint
    seed: int
    data_parallel_size: int = Field(ge=1)
    frozen_settings: dict[str, Any]
    settings_hash: str
    dataset_hash: str
    prompt_hash: str
    notes: tuple[str, ...] = ()
    results: tuple[ProblemResult, ...]

    @model_validator(mode="after")
    def _check(self) -> EvalResult:
        if len({row.id for row in self.results}) != len(self.results):
            raise ValueError("a problem id comes twice in `results`")
        if len(self.results) != self.num_problems or any(len(row.correct) != self.num_samples for row in self.results):
            raise ValueError("`results` does not hold num_problems x num_samples entries")
        total = sum(sum(row.correct) for row in self.results)
        if (total, self.num_problems * self.num_samples) != (self.total_correct, self.total_solutions):
            raise ValueError(f"`results` holds {total} correct samples, total_correct says {self.total_correct}")
        if hash_of(self.frozen_settings) != self.settings_hash:
            raise ValueError("`settings_hash` is not the hash of `frozen_settings`: one of them was changed by hand")
        return self

    def matrix(self, metric: Metric = "correct") -> Bools:
        """bool [N, n]: graded correct, or containing the answer."""
        rows = [row.correct if metric == "correct" else row.contains for row in self.results]
        return np.array(rows, dtype=np.bool_)

    def clusters(self) -> list[str]:
        """The cluster label of each problem [N]."""
        return [row.cluster for row in self.results]

    def save(self, path: Path) -> None:
        """Write the JSON aside, then rename it into place."""
        write_aside(
            path, json.dumps(self.model_dump(mode="json"), indent=1, ensure_ascii=False, allow_nan=False) + "\n"
        )


def load_result(path: str | Path) -> EvalResult:
    """Read and check a result; a folder means the result in it.

    Raises:
        OpdError: there is none, or it is not a whole, consistent result.
    """
    file = Path(path)
    file = file / RESULT_FILE if file.is_dir() else file
    try:
        return EvalResult.model_validate_json(file.read_bytes())
    except OSError as error:
        raise OpdError(
            f"cannot read the result {file}",
            why=error.strerror or str(error),
            fix="give the result.json (or the folder) that `opd eval` wrote",
        ) from error
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise OpdError(
            f"{file} is not a whole evaluation result",
            why=f"{place + ': ' if place else ''}{first['msg']} ({error.error_count()} faults)",
            fix="evaluate again, or repeat the grading from the samples beside it with `opd eval --regrade`",
        ) from error


def hash_of(value: Any) -> str:
    """sha256 of a JSON value in canonical form: keys sorted, no spaces."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def differing(a: Mapping[str, Any], b: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Dotted names of the settings in which two nested mappings differ, with both values."""
    names: list[str] = []
    for key in sorted({*a, *b}):
        mine, other = a.get(key), b.get(key)
        if isinstance(mine, Mapping) and isinstance(other, Mapping):
            names += differing(mine, other, f"{prefix}{key}.")
        elif mine != other:
            names.append(f"{prefix}{key}: {mine!r} against {other!r}")
    return names


def _pct(share: float) -> float | None:
    return None if math.isnan(share) else 100 * share
