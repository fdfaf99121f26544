"""The few samples that all checks share, and the ways to score them that checks compare.

Everything here is read-only for the run: no gradient reaches a parameter, no random state moves, the student's mode and
weights are those of before.

Tensor suffixes: B sequences, T tokens, N completion tokens of all samples, V vocabulary, D hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from opd import forward
from opd.config.schema import ModelTeacherConfig, SamplingConfig
from opd.errors import OpdError
from opd.loss import Full, Head, token_logp
from opd.models import LoadedModel
from opd.seeds import derive_seed
from opd.teacher import ModelTeacher, SelfTeacher
from opd.training.assemble import Parts
from opd.types import PromptPair, Rollout

MAX_NEW_TOKENS = 16
# Nats: a mean teacher-student KL below this is rounding, not a teacher.
MIN_SIGNAL = 1e-6
# Among how many prompts the shortest, the longest and those between are looked for.
_NUM_CANDIDATES = 512


@dataclass(frozen=True)
class Tolerances:
    """What rounding explains between two ways to compute the same thing, in nats over the sampled tokens.

    The limits are several times what SmolLM2-135M shows on a CPU: in bfloat16 KL up to 0.019 (mean 0.0015) and
    log-probabilities up to 0.22 (mean 0.034); in float32 4e-11 and 2e-5.

    Args:
        kl: largest KL of two distributions.
        mean_kl: mean of the same.
        logp: largest difference of the log-probability of a sampled token.
        mean_logp: mean of the same.
    """

    kl: float
    mean_kl: float
    logp: float
    mean_logp: float

    def admit_kl(self, kl_N: Tensor) -> bool:
        """Whether rounding explains these. NaN is never explained."""
        return kl_N.max().item() <= self.kl and kl_N.mean().item() <= self.mean_kl

    def admit_logp(self, difference_N: Tensor) -> bool:
        """Whether rounding explains these absolute differences. NaN is never explained."""
        return difference_N.max().item() <= self.logp and difference_N.mean().item() <= self.mean_logp


FLOAT32 = Tolerances(kl=1e-5, mean_kl=1e-6, logp=1e-2, mean_logp=1e-3)
BFLOAT16 = Tolerances(kl=0.1, mean_kl=0.01, logp=0.75, mean_logp=0.1)


class Probe:
    """A handful of short completions, sampled once, and the parts of the run that they came from.

    Args:
        parts: from `opd.training.assemble.assemble`.
        num_samples: how many prompts, each with one completion.
    """

    def __init__(self, parts: Parts, num_samples: int) -> None:
        if num_samples < 2:
            raise ValueError(f"{num_samples} samples: geometry needs at least two")
        self.parts = parts
        self.student = parts.student
        self.pairs = choose_pairs(parts.pairs, num_samples)
        limit = min(MAX_NEW_TOKENS, parts.recipe.rollout.max_new_tokens)
        self.sampling: SamplingConfig = parts.recipe.rollout.model_copy(update={"max_new_tokens": limit})
        self.rollouts = self.sample()

    def sample(self) -> list[Rollout]:
        """One completion for each prompt, from the sampler of the run and the weights that the student holds now."""
        seeds = [derive_seed(self.parts.recipe.seed, "doctor", index) for index in range(len(self.pairs))]
        completions = self.parts.sampler.generate([pair.student_ids for pair in self.pairs], seeds, self.sampling)
        if any(not completion.ids for completion in completions):
            raise OpdError("The sampler returned an empty completion.", why="it sampled nothing", fix="report a bug")
        version = self.parts.sampler.policy_version
        return [
            Rollout(pair, completion, seed, version)
            for pair, completion, seed in zip(self.pairs, completions, seeds, strict=True)
        ]

    @property
    def num_tokens(self) -> int:
        """Completion tokens of all samples: N."""
        return sum(len(rollout.completion.ids) for rollout in self.rollouts)

    @property
    def tolerances(self) -> Tolerances:
        """Of the coarser of student and teacher."""
        recipe = self.parts.recipe
        dtypes = {recipe.student.dtype}
        if isinstance(recipe.teacher, ModelTeacherConfig):
            dtypes.add(recipe.teacher.dtype)
        return BFLOAT16 if "bfloat16" in dtypes else FLOAT32

    # ---- the student ----

    @cached_property
    def student_alone_ND(self) -> Tensor:
        """The student's hidden states, each sequence alone with explicit positions: what all else must agree with."""
        body = forward.body_of(self.student.model)
        with torch.no_grad(), forward.eval_mode(self.student.model), self.student_dtype():
            return torch.cat(
                [alone(body, r.pair.student_ids, r.completion.ids, self.student.device) for r in self.rollouts]
            )

    @cached_property
    def student_padded_ND(self) -> Tensor:
        """The student's hidden states of the samples by the learner's path."""
        return self.learner_hidden(self.rollouts)

    @torch.no_grad()
    def student_scored(self) -> Tensor:
        """The student's hidden states by the teacher's path: for equal prompts and weights equal to the bit."""
        with forward.eval_mode(self.student.model), self.student_dtype():
            return forward.score_hidden(
                forward.body_of(self.student.model),
                [rollout.pair.student_ids for rollout in self.rollouts],
                [rollout.completion.ids for rollout in self.rollouts],
                pad_id=self.student.loaded.pad_id,
                max_tokens=self.parts.recipe.train.micro_batch_tokens,
                device=self.student.device,
            )

    @torch.no_grad()
    def learner_hidden(self, rollouts: Sequence[Rollout]) -> Tensor:
        """Hidden states [N, D] by the learner's path, dropout off: all sequences in one batch, padded on the right.

        One row more, longer than all others by 64 tokens, makes sure that the samples are padded.
        """
        longest = max((rollout.pair.student_ids for rollout in rollouts), key=len)
        filler = (longest * (64 // len(longest) + 2))[: len(longest) + MAX_NEW_TOKENS + 64]
        ids_BT, rows_N = forward.pad_right(
            [*(rollout.pair.student_ids for rollout in rollouts), filler],
            [*(rollout.completion.ids for rollout in rollouts), filler[:1]],
            self.student.loaded.pad_id,
            self.student.device,
        )
        with forward.eval_mode(self.student.model), self.student_dtype():
            return self.student.module(ids_BT, rows_N[:-1])

    def student_dtype(self) -> AbstractContextManager[None]:
        """Products in the student's compute dtype."""
        return forward.compute_dtype(self.student.device, self.student.dtype)

    @cached_property
    def ids_N(self) -> Tensor:
        """The sampled ids, sample by sample."""
        return completion_ids(self.rollouts, self.student.device)

    @torch.no_grad()
    def learner_logp(self, rollouts: Sequence[Rollout], hidden_ND: Tensor) -> Tensor:
        """The learner's log-probability [N] of each sampled token at the sampling temperature, on the CPU.

        Greedy sampling reports the token's own log-probability, at temperature 1.
        """
        ids_N = completion_ids(rollouts, hidden_ND.device)
        return token_logp(hidden_ND, self.student.head, ids_N, self.sampling.temperature or 1.0).cpu()

    @cached_property
    def moved_weights(self) -> Mapping[str, Tensor]:
        """Trained weights that differ visibly from the student's own: its log-probabilities move by 0.2 to 2 nats.

        Less could hide in rounding, and much more leaves a model whose own rounding is large. The size of the move is
        found by doubling and halving, since it depends on the adapter's rank and on the model's depth. Costs one copy
        of the trained weights while the doctor works, a third of what gradients and AdamW need later.
        """
        own_N = self.learner_logp(self.rollouts, self.student_padded_ND)
        moved: Mapping[str, Tensor] = {}
        size = 0.1
        for _ in range(8):
            moved = self._moved_by(size)
            with self.student.using(moved):
                shift = (self.learner_logp(self.rollouts, self.learner_hidden(self.rollouts)) - own_N).abs().mean()
            if 0.2 <= shift <= 2.0:
                break
            size *= 2.0 if shift < 0.2 else 0.5
        return moved

    def _moved_by(self, size: float) -> Mapping[str, Tensor]:
        """Each tensor plus noise of `size` times its own; of `size` where it is all zero, as LoRA's B at the start."""
        generator = torch.Generator().manual_seed(0)
        moved: dict[str, Tensor] = {}
        for name, parameter in self.student.trained().items():
            scale = parameter.detach().float().square().mean().sqrt().item() or 1.0
            noise = torch.randn(parameter.shape, generator=generator) * (size * scale)
            moved[name] = parameter.detach() + noise.to(parameter)
        return moved

    # ---- the teacher ----

    @cached_property
    def scores(self) -> Full:
        """The teacher's scores of the samples."""
        return self.score(self.rollouts)

    def score(self, rollouts: Sequence[Rollout]) -> Full:
        """The teacher's scores, refused unless they are one finite row for each completion token."""
        scores = self.parts.teacher.score(rollouts)
        if not isinstance(scores, Full):
            raise OpdError(
                "The doctor cannot look at this teacher.",
                why=f"It gives {type(scores).__name__} scores; the checks compare whole distributions (Full).",
                fix="Train with --skip-doctor, knowing that nothing was checked.",
            )
        expected = sum(len(rollout.completion.ids) for rollout in rollouts)
        if scores.hidden_ND.shape[0] != expected:
            raise OpdError(
                "The teacher does not score every completion token.",
                why=f"It gave {scores.hidden_ND.shape[0]} rows for {expected} tokens.",
                fix="Teacher.score returns one row a completion token, rollout by rollout, in order.",
            )
        return scores

    @cached_property
    def teacher_loaded(self) -> LoadedModel:
        """The teacher's model and tokenizer: another model's, or the student's own."""
        teacher = self.parts.teacher
        return teacher.loaded if isinstance(teacher, ModelTeacher) else self.student.loaded

    @torch.no_grad()
    def teacher_alone(self) -> Tensor | None:
        """The teacher's hidden states, each sequence by itself with explicit positions; None when it is not local."""
        teacher, recipe = self.parts.teacher, self.parts.recipe
        if isinstance(teacher, ModelTeacher) and isinstance(recipe.teacher, ModelTeacherConfig):
            model: nn.Module = teacher.loaded.model
            weights: AbstractContextManager[None] = nullcontext()
            dtype = torch.bfloat16 if recipe.teacher.dtype == "bfloat16" else torch.float32
        elif isinstance(teacher, SelfTeacher):
            model, weights, dtype = self.student.model, teacher.weights_in_place(), self.student.dtype
        else:
            return None
        device = self.teacher_loaded.device
        with forward.eval_mode(model), weights, forward.compute_dtype(device, dtype):
            body = forward.body_of(model)
            return torch.cat([alone(body, r.pair.teacher_ids, r.completion.ids, device) for r in self.rollouts])


def choose_pairs(pairs: Sequence[PromptPair], num: int) -> list[PromptPair]:
    """Prompts of different lengths: the shortest, the longest, and evenly between; repeated when there are fewer."""
    by_length = sorted(pairs[:_NUM_CANDIDATES], key=lambda pair: len(pair.student_ids))
    return [by_length[round(index * (len(by_length) - 1) / (num - 1))] for index in range(num)]


def completion_ids(rollouts: Sequence[Rollout], device: torch.device) -> Tensor:
    """The sampled ids [N], sample by sample."""
    return torch.tensor([token for rollout in rollouts for token in rollout.completion.ids], device=device)


def alone(body: nn.Module, prompt: Sequence[int], completion: Sequence[int], device: torch.device) -> Tensor:
    """Hidden states [len(completion), D] of one unpadded sequence, its positions written out.

    Written apart from `opd.forward` on purpose: it is what the padded paths are compared with.
    """
    ids_BT = torch.tensor([[*prompt, *completion]], dtype=torch.int64, device=device)
    positions_BT = torch.arange(ids_BT.shape[1], device=device)[None]
    hidden_BTD: Tensor = body(input_ids=ids_BT, position_ids=positions_BT, use_cache=False).last_hidden_state
    return hidden_BTD[0, len(prompt) - 1 : -1]


def log_probs(hidden_ND: Tensor, head: Head | None, temperature: float = 1.0) -> Tensor:
    """[N, V] float32 nats. The samples are few and short, so that the whole of it may exist."""
    logits_NV = hidden_ND.float() if head is None else head.logits(hidden_ND)
    return (logits_NV / temperature).log_softmax(-1)


def kl(log_p_NV: Tensor, log_q_NV: Tensor) -> Tensor:
    """KL(p‖q) [N] in nats, in float64: differences of rounding size are what is looked for."""
    log_p_NV, log_q_NV = log_p_NV.double().log_softmax(-1), log_q_NV.double().log_softmax(-1)
    terms_NV = log_p_NV.exp() * (log_p_NV - log_q_NV)
    return terms_NV.masked_fill(log_p_NV == -torch.inf, 0.0).sum(-1)
