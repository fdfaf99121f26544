"""Majority voting over the samples of a problem: maj@k.

Suffix legend: N problems, n samples a problem.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Hashable, Sequence

import numpy as np
from numpy.typing import ArrayLike

from opd.errors import OpdError
from opd.eval.stats import as_bools, mean

NUM_SUBSETS = 1_000


def maj_at_k(
    answers: Sequence[Sequence[Hashable | None]], correct: ArrayLike, k: int | None = None, *, seed: int = 0
) -> float:
    """maj@k: the share of problems whose most frequent answer among k samples is the right one.

    Tie rule: when t answers are equally frequent, a right one among them counts 1/t, the expectation of drawing one of
    them at random. Samples without an answer (None) do not vote; a problem without any vote counts 0. All correct
    samples are one answer, however they are written.

    Args:
        answers: [N][n] comparable answers (normalised text), None where none was found.
        correct: bool [N, n].
        k: votes; None means all n. For k < n it is averaged over all subsets when there are at most 1,000, else over
            1,000 seeded draws.
        seed: of those draws.
    """
    correct_Nn = as_bools(correct, "correct")
    num_samples = correct_Nn.shape[1]
    if len(answers) != len(correct_Nn) or any(len(row) != num_samples for row in answers):
        raise OpdError(
            "maj@k needs one answer for each sample",
            why=f"correct is {list(correct_Nn.shape)}, answers has {len(answers)} rows",
            fix="pass answers as [problems][samples], with None where no answer was found",
        )
    votes = num_samples if k is None else k
    if not 1 <= votes <= num_samples:
        raise OpdError(
            f"maj@{votes} cannot be computed",
            why=f"k must be between 1 and the number of samples, which is {num_samples}",
            fix="draw more samples for each problem, or ask for a smaller k",
        )
    subsets = _subsets(num_samples, votes, seed)
    return mean(
        [
            mean([_majority([row[i] for i in subset], [bool(right[i]) for i in subset]) for subset in subsets])
            for row, right in zip(answers, correct_Nn, strict=True)
        ]
    )


# ---- pieces --------------------------------------------------------------------------------------------------------


def _subsets(num_samples: int, k: int, seed: int) -> list[tuple[int, ...]]:
    if math.comb(num_samples, k) <= NUM_SUBSETS:
        return list(itertools.combinations(range(num_samples), k))
    generator = np.random.default_rng(seed)
    return [tuple(int(i) for i in generator.choice(num_samples, size=k, replace=False)) for _ in range(NUM_SUBSETS)]


def _majority(answers: Sequence[Hashable | None], correct: Sequence[bool]) -> float:
    # Answers are wrapped in pairs so that no answer can be mistaken for the class of right ones.
    votes = Counter(
        ("right", None) if right else ("wrong", answer)
        for answer, right in zip(answers, correct, strict=True)
        if answer is not None
    )
    if not votes:
        return 0.0
    most = max(votes.values())
    tied = [vote for vote, count in votes.items() if count == most]
    return 1 / len(tied) if ("right", None) in tied else 0.0
