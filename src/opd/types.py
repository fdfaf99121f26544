"""One frozen dataclass per arrow of the training step: what flows between data, sampler, aligner, teacher and learner.

Tensor suffixes: N supervised tokens of a batch, K top-k, V vocabulary, D hidden size.

Importing this module does not import torch, so that data and configuration stay light.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from torch import Tensor

    from opd.loss.head import Head

FinishReason = Literal["stop", "length"]
Message = Mapping[str, str]  # {"role": "system" | "user" | "assistant", "content": ...}


@dataclass(frozen=True)
class Problem:
    """One thing to solve, from a file, a hub data set or a generated task.

    Args:
        id: unique within its source and stable across runs, e.g. ``"gsm8k.jsonl:17"``.
        problem: the question as text (the last user message when the row came as messages).
        solution: a worked solution, or None.
        answer: the final answer as text, or None.
        messages: the conversation as given, or None when the row had only text.
        metadata: whatever the source adds (a task's own record, for its scorer).
    """

    id: str
    problem: str
    solution: str | None = None
    answer: str | None = None
    messages: tuple[Message, ...] | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True)
class PromptPair:
    """The same problem as the student and as the teacher see it: token ids, and the text they came from.

    The student samples from ``student_ids``; the teacher scores the sampled ids after ``teacher_ids``.
    """

    problem: Problem
    student_ids: tuple[int, ...]
    teacher_ids: tuple[int, ...]
    student_text: str
    teacher_text: str


@dataclass(frozen=True)
class Completion:
    """What a sampler returns for one prompt.

    Args:
        ids: the sampled token ids themselves, never re-encoded text. Ends with the stop id when ``finish_reason`` is
            ``"stop"``.
        behavior_logp: [len(ids)] nats, log-probability under the distribution that was sampled from: after temperature
            and after top-k, top-p and min-p.
        kept_logp: [len(ids)] nats, log of the probability mass that top-k, top-p and min-p kept (0.0 when nothing was
            cut), so that ``behavior_logp + kept_logp`` is the untruncated log-probability at the sampling temperature.
        finish_reason: ``"stop"`` when a stop id was sampled, ``"length"`` when the limit was reached.
    """

    ids: tuple[int, ...]
    behavior_logp: tuple[float, ...]
    kept_logp: tuple[float, ...]
    finish_reason: FinishReason


@dataclass(frozen=True)
class Rollout:
    """A completion, with the prompts it belongs to and the version of the weights that sampled it."""

    pair: PromptPair
    completion: Completion
    seed: int
    policy_version: int


@dataclass(frozen=True)
class Alignment:
    """Which student positions meet which teacher positions in one completion.

    For one tokenizer this is the identity. Positions count completion tokens from 0.

    Args:
        student_positions: supervised positions of the student's completion tokens.
        teacher_positions: the teacher's position of the same event, one for each student position.
        drop_reasons: position -> reason, for every student position that is left out.
    """

    student_positions: tuple[int, ...]
    teacher_positions: tuple[int, ...]
    drop_reasons: Mapping[int, str] = field(default_factory=dict[int, str])


@dataclass(frozen=True)
class Sampled:
    """Teacher log-probabilities of the realised tokens only: ``logp_N`` [N] nats."""

    logp_N: Tensor


@dataclass(frozen=True)
class TopK:
    """The teacher's K likeliest tokens: ``ids_NK`` [N, K] int64, ``logp_NK`` [N, K] nats; the tail mass is the rest."""

    ids_NK: Tensor
    logp_NK: Tensor


@dataclass(frozen=True)
class Full:
    """The whole distribution of the teacher, as hidden states and a head, so that logits exist only chunk by chunk.

    Args:
        hidden_ND: [N, D] the teacher's last hidden states at the positions that predict the supervised tokens.
        head: the teacher's output head; None when ``hidden_ND`` already holds logits [N, V].
    """

    hidden_ND: Tensor
    head: Head | None

    @classmethod
    def from_logits(cls, logits_NV: Tensor) -> Full:
        """Wrap teacher logits [N, V] that already exist."""
        return cls(logits_NV, None)

    def rows(self, rows: slice | Tensor) -> Full:
        """The same scores for a subset of the N rows."""
        return Full(self.hidden_ND[rows], self.head)


TeacherScores = Sampled | TopK | Full


@dataclass(frozen=True)
class TokenLoss:
    """An unreduced loss.

    Args:
        values: [N] nats, differentiable; one value per supervised token.
        metrics: detached [N] tensors by name (``kl``, ``clipped``, ``entropy_student`` ...), for logs.
    """

    values: Tensor
    metrics: Mapping[str, Tensor]


@dataclass(frozen=True)
class StepRecord:
    """What one optimizer step did: one line of ``steps.jsonl``. Missing values are NaN, never 0.0."""

    step: int
    loss: float
    metrics: Mapping[str, float]
    num_completions: int
    num_supervised_tokens: int
    num_sampled_tokens: int
    num_prompt_tokens: int
    num_truncated: int
    grad_norm: float
    learning_rate: float
    skipped: bool
    rollout_s: float
    teacher_s: float
    update_s: float
    samples: Sequence[Mapping[str, Any]] = ()
    num_given_tokens: int = 0  # of solutions, where the loss has a part for them
