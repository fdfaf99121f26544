"""What every loss promises.

Tensor suffixes: N supervised tokens of a batch, V vocabulary, D hidden size (V where there is no head).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

from jaxtyping import Float, Int
from torch import Tensor

from opd.config.formula import formula
from opd.config.loss import DivergenceConfig, FullSupport, LossConfig, SupportConfig, TopKSupport
from opd.errors import OpdError
from opd.loss.chunked import Objective, rowwise
from opd.loss.head import Head
from opd.types import Full, TeacherScores, TokenLoss, TopK

# Rounding of half precision, summed over a support, stays below this.
_MOST_MASS = 1.05

Needs = Literal["full", "sampled", "nothing"]


@dataclass(frozen=True)
class RolloutTokens:
    """The sampled tokens themselves, one row for each supervised position, for objectives that look at them.

    Args:
        ids_N: [N] int64, the sampled token of each position.
        behavior_logp_N: [N] nats, its log-probability when it was sampled; needed by `importance`.
        sequence_N: [N] int64, which completion it belongs to; needed by `discount`. The rows of one completion stand
            together and in order.
        baseline_N: [N] nats, what is subtracted from its advantage; needed by `group_baseline`, and made over the whole
            batch by `opd.loss.sampled.group_baseline`.
    """

    ids_N: Tensor
    behavior_logp_N: Tensor | None = None
    sequence_N: Tensor | None = None
    baseline_N: Tensor | None = None


class Loss(ABC):
    """A loss: unreduced, in nats per supervised token, differentiable in the student alone.

    Attributes:
        name: as in a recipe.
        needs: how much of the teacher's distribution it takes: ``"full"``, ``"sampled"`` or ``"nothing"``.
        formula: the quantity that is minimised, as text for a run to print.
    """

    needs: Needs

    def __init__(self, config: LossConfig, chunk_bytes: int | None = None) -> None:
        self.name: str = config.name
        self.formula = formula(config)
        self._chunk_bytes = chunk_bytes
        # A mean over completions weighs tokens by the length of theirs.
        self._uniform = config.reduction == "token"

    def tokens(
        self, student_logits_NV: Float[Tensor, "N V"], teacher: TeacherScores, rollout: RolloutTokens | None = None
    ) -> TokenLoss:
        """The loss of every row of logits that already exist.

        Args:
            student_logits_NV: [N, V], any float dtype; statistics are computed in float32 (float64 stays float64).
            teacher: its scores for the same N positions. Nothing flows back into it.
            rollout: the sampled tokens; only sampled-token objectives read them.

        Raises:
            OpdError: the scores do not hold what the loss needs, or student and teacher differ in N or V.
        """
        return self._rows(student_logits_NV, None, teacher, rollout)

    def linear(
        self,
        student_hidden_ND: Float[Tensor, "N D"],
        student_head: Head,
        teacher: TeacherScores,
        rollout: RolloutTokens | None = None,
    ) -> TokenLoss:
        """The same loss from hidden states and a head: no [N, V] ever exists (`opd.loss.chunked`).

        Args:
            student_hidden_ND: [N, D] last hidden states of the positions that predict the supervised tokens.
            student_head: the student's output head; receives a gradient when its weight requires one.
            teacher: as for `tokens`.
            rollout: as for `tokens`.

        Raises:
            OpdError: as for `tokens`.
        """
        return self._rows(student_hidden_ND, student_head, teacher, rollout)

    @abstractmethod
    def _rows(
        self, hidden_ND: Tensor, head: Head | None, teacher: TeacherScores, rollout: RolloutTokens | None, /
    ) -> TokenLoss: ...


class RowLoss(Loss):
    """A loss whose value at a row depends on nothing but that row: an `Objective` of the kernel."""

    @abstractmethod
    def objective(
        self, hidden_ND: Tensor, head: Head | None, teacher: TeacherScores, rollout: RolloutTokens | None, /
    ) -> Objective:
        """Value and gradient of a chunk of rows.

        Raises:
            OpdError: as for `tokens`.
        """

    def _rows(
        self, hidden_ND: Tensor, head: Head | None, teacher: TeacherScores, rollout: RolloutTokens | None, /
    ) -> TokenLoss:
        objective = self.objective(hidden_ND, head, teacher, rollout)
        return rowwise(objective, hidden_ND, head, self._chunk_bytes, uniform=self._uniform)


def vocabulary(hidden_ND: Float[Tensor, "N D"], head: Head | None) -> int:
    """How many outcomes the rows have: those of the head, or the width of the logits when there is none."""
    return hidden_ND.shape[-1] if head is None else head.num_tokens


def check_full(
    name: str,
    hidden_ND: Float[Tensor, "N D"],
    head: Head | None,
    teacher: TeacherScores,
    support: SupportConfig | None = None,
) -> Full:
    """`teacher` as `Full`, with the same rows and the same vocabulary as the student.

    Raises:
        OpdError: it is not, or the support has more tokens than the vocabulary.
    """
    if not isinstance(teacher, Full):
        fix = "use a teacher that provides Full, or loss.name: sampled_reverse_kl with one that provides Sampled"
        if isinstance(teacher, TopK) and name == "sampled_reverse_kl":
            fix = "use a teacher that provides Sampled or Full"
        elif isinstance(teacher, TopK):
            fix = "use a teacher that provides Full, or loss.support: {name: top_k, of: teacher, k: ...}"
        raise OpdError(
            f"{name} cannot be computed from these teacher scores.",
            why=f"it needs the teacher's whole distribution (Full), and {type(teacher).__name__} was given",
            fix=fix,
        )
    check_rows(name, hidden_ND.shape[0], teacher.hidden_ND.shape[0])
    num_student, num_teacher = vocabulary(hidden_ND, head), vocabulary(teacher.hidden_ND, teacher.head)
    if num_student != num_teacher:
        raise OpdError(
            f"{name} compares distributions over different vocabularies.",
            why=f"the student has {num_student} outcomes and the teacher {num_teacher}",
            fix="cut both heads at the size of their tokenizer: Head.from_model(model, vocab_size=len(tokenizer))",
        )
    if isinstance(support, TopKSupport) and support.k > num_student:
        raise OpdError(
            f"{name} cannot keep the {support.k} likeliest tokens.",
            why=f"loss.support.k is {support.k} and the vocabulary has {num_student} tokens",
            fix="loss.support.name=full, or a smaller loss.support.k",
        )
    return teacher


def check_top_k(
    name: str, hidden_ND: Float[Tensor, "N D"], head: Head | None, teacher: TopK, config: DivergenceConfig
) -> TopK:
    """`teacher`, if its likeliest tokens are all that this config asks for.

    Raises:
        OpdError: they are not, or rows, ids or shapes do not fit.
    """
    support = config.support
    assert not isinstance(support, FullSupport)
    missing = None
    if support.of != "teacher":
        missing = f"loss.support.of is {support.of}, whose tokens the teacher did not score"
    elif config.mask.teacher_entropy is not None:
        missing = "loss.mask.teacher_entropy needs the entropy of the whole distribution"
    elif support.k > teacher.ids_NK.shape[-1]:
        missing = f"loss.support.k is {support.k} and the teacher gave {teacher.ids_NK.shape[-1]} tokens a position"
    if missing is not None:
        raise OpdError(
            f"{name} cannot be computed from the teacher's likeliest tokens.",
            why=missing,
            fix="use a teacher that provides Full, or loss.support: {name: top_k, of: teacher} with a k that it gives",
        )
    if teacher.ids_NK.shape != teacher.logp_NK.shape:
        raise OpdError(
            f"{name} got TopK scores that do not fit together.",
            why=f"ids have shape {tuple(teacher.ids_NK.shape)} and log-probabilities {tuple(teacher.logp_NK.shape)}",
            fix="pass ids_NK and logp_NK of the same shape [N, K]",
        )
    check_rows(name, hidden_ND.shape[0], teacher.ids_NK.shape[0])
    check_ids(name, teacher.ids_NK, vocabulary(hidden_ND, head))
    ordered_NK = teacher.ids_NK.sort(dim=-1).values
    if bool((ordered_NK[:, 1:] == ordered_NK[:, :-1]).any()):
        raise OpdError(
            f"{name} got TopK scores that name a token twice in one row.",
            why="its probability would be counted twice",
            fix="pass K different ids in each row",
        )
    if bool((teacher.logp_NK.double().exp().sum(-1) > _MOST_MASS).any()):
        raise OpdError(
            f"{name} got TopK scores that are no log-probabilities.",
            why="their probabilities sum to more than one in some row, as logits would",
            fix="pass log-probabilities at the loss's temperature: (logits / temperature).log_softmax(-1).topk(k)",
        )
    return teacher


def check_rows(name: str, num_student: int, num_other: int) -> None:
    """Raise OpdError unless both sides have the same number of rows."""
    if num_student != num_other:
        raise OpdError(
            f"{name} got scores for other positions than the student's.",
            why=f"the student has {num_student} rows and the other side {num_other}",
            fix="pass one row of each for every supervised position, in the same order",
        )


def check_vector(name: str, what: str, values_N: Tensor, num_rows: int) -> None:
    """Raise OpdError unless there is one number for each of the student's rows."""
    if values_N.ndim != 1:
        raise OpdError(
            f"{name} got {what} of the wrong shape.",
            why=f"it has shape {tuple(values_N.shape)}, and one number for each supervised position is [{num_rows}]",
            fix="pass a tensor of one dimension",
        )
    check_rows(name, num_rows, len(values_N))


def check_ids(name: str, ids_N: Int[Tensor, "*N"], num_tokens: int) -> None:
    """Raise OpdError unless every id is below `num_tokens`."""
    if ids_N.numel() and not 0 <= int(ids_N.min()) <= int(ids_N.max()) < num_tokens:
        raise OpdError(
            f"{name} got token ids outside the vocabulary.",
            why=f"ids reach from {int(ids_N.min())} to {int(ids_N.max())}, and the head has {num_tokens} rows",
            fix="sample below the size of the tokenizer, and build the head with the same vocab_size",
        )
