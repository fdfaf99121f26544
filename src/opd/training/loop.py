"""The training loop, readable aloud: sample, score, update, record."""

from __future__ import annotations

import shlex
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from opd.config.load import LoadedRecipe
from opd.errors import OpdError
from opd.log import RunLog, environment, write_json
from opd.seeds import derive_seed
from opd.training import checkpoint as checkpoints
from opd.training.assemble import Parts
from opd.training.batch import Solution
from opd.training.card import save_final
from opd.training.checkpoint import Checkpoint
from opd.training.distributed import Ranks
from opd.training.interrupt import Interruption
from opd.training.learner import Learner, Update
from opd.training.progress import StepProgress
from opd.training.same_run import identity_of, refuse_another
from opd.types import Alignment, PromptPair, Rollout, StepRecord


@dataclass(frozen=True)
class RunResult:
    """What a training run gives back.

    Args:
        folder: everything the run wrote.
        metrics: of the last step: `loss` (nats, as minimised), the loss's own metrics, `num_steps`, `train_s`.
        final: folder of the trained adapter (or full weights) with tokenizer and chat template; None when interrupted.
        interrupted: whether the run stopped early on request, with a checkpoint to go on from.
        loaded: the resolved recipe with the source of every value.
    """

    folder: Path
    metrics: Mapping[str, float]
    final: Path | None
    interrupted: bool
    loaded: LoadedRecipe


def fit(
    parts: Parts, loaded: LoadedRecipe, folder: Path, ranks: Ranks, *, resume: bool, command: str | None = None
) -> RunResult:
    """Train to the last step, or until interrupted.

    Args:
        parts: from `assemble`.
        loaded: the recipe with its provenance, written to `resolved.yaml`.
        folder: where the run writes.
        ranks: devices and processes.
        resume: go on from the newest whole checkpoint in `folder`, if there is one.
        command: the exact command to repeat the run, for the model card; default: this process's own.
    """
    recipe = parts.recipe
    command = command if command is not None else shlex.join(["opd", *sys.argv[1:]])
    learner = Learner(parts.student, parts.loss, recipe, ranks)
    start, train_s, metrics = _restore(parts, learner, folder) if resume else (0, 0.0, {})
    log = RunLog(folder, from_step=start) if ranks.is_main else None
    if ranks.is_main:
        loaded.write(folder / "resolved.yaml")
        write_json(folder / "environment.json", environment(command))
    ranks.start_trackers(recipe.log.project, recipe.model_dump(mode="json"))

    every = recipe.train.checkpoint_every_num_steps
    step = start
    parts.sampler.policy_version = start
    divergence = "unclipped" if recipe.loss.name == "mix" else parts.loss.name
    shown = StepProgress(recipe.train.num_steps, start, divergence, shown=ranks.is_main)
    with Interruption() as interruption, shown as progress:
        for step in range(start + 1, recipe.train.num_steps + 1):
            began = time.perf_counter()
            record = train_step(parts, learner, ranks, step)
            train_s += time.perf_counter() - began
            metrics = {"loss": record.loss, **record.metrics, "grad_norm": record.grad_norm}
            if log is not None:
                log.write(record)
            ranks.track(_scalars(record), step)
            progress.show(record)
            last = step == recipe.train.num_steps
            stopping = ranks.sum([float(interruption.asked)])[0] > 0
            if stopping or last or (every is not None and step % every == 0):
                _save(parts, learner, ranks, folder, step, train_s, metrics)
            if stopping and not last:
                break
    ranks.end()
    interrupted = step < recipe.train.num_steps
    final = None
    if not interrupted and ranks.is_main:
        final = save_final(parts, folder, command, metrics)
    if interrupted and ranks.is_main:
        print(f"\nStopped after step {step}, with a checkpoint. To go on:\n  {_resume_command(command)}")
    return RunResult(folder, {**metrics, "num_steps": step, "train_s": train_s}, final, interrupted, loaded)


def train_step(parts: Parts, learner: Learner, ranks: Ranks, step: int) -> StepRecord:
    """One step: rollout, teacher, update."""
    recipe = parts.recipe
    pairs = step_pairs(parts.pairs, recipe.seed, step, recipe.train.num_problems_per_step)
    jobs = [
        (pair, derive_seed(recipe.seed, "rollout", step, slot, sample))
        for slot, pair in enumerate(pairs)
        for sample in range(recipe.rollout.num_samples)
    ]
    jobs = ranks.mine(jobs)

    clock = _Clock(ranks.device)
    completions = parts.sampler.generate(
        [pair.student_ids for pair, _ in jobs],
        [seed for _, seed in jobs],
        recipe.rollout,
        batch_size=recipe.rollout.batch_size,
    )
    rollouts = [
        Rollout(pair, completion, seed, parts.sampler.policy_version)
        for (pair, seed), completion in zip(jobs, completions, strict=True)
    ]
    aligned = [parts.align(rollout) for rollout in rollouts]
    rollout_s = clock.lap()
    scores = parts.teacher.score(rollouts)
    teacher_s = clock.lap()
    solutions = ranks.mine([Solution(pair, parts.solutions[pair.problem.id]) for pair in pairs if parts.solutions])
    torch.manual_seed(derive_seed(recipe.seed, "dropout", step, ranks.index))
    update = learner.update(step, rollouts, aligned, scores, solutions)
    if not update.skipped:
        parts.teacher.after_update()
    parts.sampler.policy_version = step
    update_s = clock.lap()
    return _record(parts, ranks, step, rollouts, aligned, update, (rollout_s, teacher_s, update_s))


def step_pairs(pairs: Sequence[PromptPair], seed: int, step: int, num_pairs: int) -> list[PromptPair]:
    """The prompts of step `step` (from 1): a new permutation of all prompts each epoch, from (seed, step) alone."""
    first, end = (step - 1) * num_pairs, step * num_pairs
    epochs = range(first // len(pairs), (end - 1) // len(pairs) + 1)
    orders = {epoch: _permutation(len(pairs), derive_seed(seed, "epoch", epoch)) for epoch in epochs}
    return [pairs[orders[position // len(pairs)][position % len(pairs)]] for position in range(first, end)]


def _record(
    parts: Parts,
    ranks: Ranks,
    step: int,
    rollouts: Sequence[Rollout],
    aligned: Sequence[Alignment],
    update: Update,
    seconds: tuple[float, float, float],
) -> StepRecord:
    completions, sampled, prompts, truncated = ranks.sum(
        [
            len(rollouts),
            sum(len(rollout.completion.ids) for rollout in rollouts),
            sum(len(rollout.pair.student_ids) for rollout in rollouts),
            sum(rollout.completion.finish_reason == "length" for rollout in rollouts),
        ]
    )
    decode: Callable[[Sequence[int]], str] = parts.student.loaded.tokenizer.decode  # pyright: ignore[reportAssignmentType]
    samples = [
        {
            "problem": rollout.pair.problem.id,
            "prompt": rollout.pair.student_text,
            "completion": decode(list(rollout.completion.ids)),
            "completion_ids": list(rollout.completion.ids),
            "finish_reason": rollout.completion.finish_reason,
            "policy_version": rollout.policy_version,
            "num_left_out": dict(Counter(alignment.drop_reasons.values())),
        }
        for rollout, alignment in list(zip(rollouts, aligned, strict=True))[: parts.recipe.log.num_samples_per_step]
    ]
    return StepRecord(
        step=step,
        loss=update.loss,
        metrics=update.metrics,
        num_completions=int(completions),
        num_supervised_tokens=update.num_supervised_tokens,
        num_sampled_tokens=int(sampled),
        num_prompt_tokens=int(prompts),
        num_truncated=int(truncated),
        grad_norm=update.grad_norm,
        learning_rate=update.learning_rate,
        skipped=update.skipped,
        rollout_s=seconds[0],
        teacher_s=seconds[1],
        update_s=seconds[2],
        samples=samples,
        num_given_tokens=update.num_given_tokens,
    )


def _save(
    parts: Parts,
    learner: Learner,
    ranks: Ranks,
    folder: Path,
    step: int,
    train_s: float,
    metrics: Mapping[str, float],
) -> None:
    if ranks.is_main:
        checkpoints.write(
            folder / "checkpoints",
            Checkpoint(
                step=step,
                trained=parts.student.trained(),
                optimizer=checkpoints.optimizer_tensors(learner.optimizer, learner.parameters),
                teacher=parts.teacher.state(),
                facts={"train_s": train_s, "metrics": dict(metrics), "run": identity_of(parts)},
            ),
            num_kept=parts.recipe.train.num_checkpoints_kept,
        )
    ranks.wait()


def _restore(parts: Parts, learner: Learner, folder: Path) -> tuple[int, float, dict[str, float]]:
    """Load the newest whole checkpoint; returns its step, the seconds trained so far and the step's metrics."""
    found, passed_over = checkpoints.newest(folder / "checkpoints")
    for line in passed_over:
        print(f"Passed over a damaged checkpoint: {line}", file=sys.stderr)
    if found is None:
        print(f"No checkpoint in {folder / 'checkpoints'}: starting from step 1.", file=sys.stderr)
        return 0, 0.0, {}
    refuse_another(found.facts["run"], parts, where=f"The checkpoint of step {found.step} in {folder}")
    if found.trained.keys() != learner.parameters.keys() or found.step > parts.recipe.train.num_steps:
        raise OpdError(
            f"The checkpoint of step {found.step} in {folder} does not fit this recipe.",
            why=f"It holds {len(found.trained)} trained tensors, the recipe trains {len(learner.parameters)}, "
            f"for {parts.recipe.train.num_steps} steps.",
            fix="Resume with the recipe that wrote it (resolved.yaml in the folder), or choose another folder.",
        )
    with torch.no_grad():
        for name, parameter in learner.parameters.items():
            parameter.copy_(found.trained[name])
    checkpoints.restore_optimizer(learner.optimizer, learner.parameters, found.optimizer)
    parts.teacher.load_state(found.teacher)
    return found.step, float(found.facts["train_s"]), dict(found.facts["metrics"])


def _scalars(record: StepRecord) -> dict[str, float]:
    return {
        "loss": record.loss,
        **record.metrics,
        "grad_norm": record.grad_norm,
        "learning_rate": record.learning_rate,
        "num_sampled_tokens": record.num_sampled_tokens,
        "num_supervised_tokens": record.num_supervised_tokens,
        "num_given_tokens": record.num_given_tokens,
        "num_truncated": record.num_truncated,
        "rollout_s": record.rollout_s,
        "teacher_s": record.teacher_s,
        "update_s": record.update_s,
    }


def _permutation(size: int, seed: int) -> list[int]:
    return torch.randperm(size, generator=torch.Generator().manual_seed(seed)).tolist()


def _resume_command(command: str) -> str:
    return command if "--resume" in command else f"{command} --resume"


class _Clock:
    """Seconds since the last lap; on CUDA the work is waited for, so that each phase is charged its own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._last = time.perf_counter()

    def lap(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        now = time.perf_counter()
        seconds, self._last = now - self._last, now
        return seconds
