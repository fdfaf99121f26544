"""Evaluation: problems x samples under frozen settings, kept on disk as they come, graded at the end."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from opd.config.schema import ContextConfig, EvalConfig, FileSource, ModelConfig, PromptConfig, Source, TaskSource
from opd.data.sources import load_problems, question_key
from opd.errors import OpdError
from opd.eval.progress import SampleProgress
from opd.eval.result import RESULT_FILE, Checkpoint, EvalResult, View
from opd.eval.samples import Manifest, Question, Sample, SampleStore
from opd.eval.score import score
from opd.files import file_sha256
from opd.rollout.base import Sampler
from opd.seeds import derive_seed
from opd.types import Completion, Problem

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from opd.data.render import Renderer
    from opd.models import LoadedModel

ADAPTER_WEIGHTS = "adapter_model.safetensors"


@dataclass(frozen=True)
class Asked:
    """A problem as one side is shown it: the prompt's ids, and its text."""

    problem: Problem
    ids: tuple[int, ...]
    text: str


def evaluate(
    model: str | ModelConfig,
    task: EvalConfig,
    *,
    folder: str | Path,
    adapter: str | Path | None = None,
    view: View = "student",
    prompt: PromptConfig | None = None,
    context: ContextConfig | None = None,
    demonstrations: Source | None = None,
    prompt_seed: int = 0,
    picked_by: str | None = None,
    device: str | None = None,
    show_progress: bool = True,
) -> EvalResult:
    """Load a model, sample the task's problems, grade them, and write `result.json` into the folder.

    A folder that holds part of the same evaluation is completed; one that holds another evaluation is refused.

    Args:
        model: model reference, or a config with revision and dtype.
        task: problems, samples a problem, seed and sampling settings.
        folder: where manifest, samples and result go.
        adapter: folder of an adapter to put on the model.
        view: `student` shows the student's prompt; `teacher` the teacher's, context included: its score is the ceiling.
        prompt: the recipe's prompts; default: the problem as one user message.
        context: what the teacher's prompt holds; used by the teacher's view alone.
        demonstrations: problems that demonstrations and placebo solutions are taken from, usually the training data;
            default: the task's own problems.
        prompt_seed: chooses demonstrations and placebo solutions; a training run uses the recipe's seed.
        picked_by: the benchmark by which this checkpoint was chosen among several, for `opd compare` to warn about.
        device: "cpu" to stay off an available GPU; default: the best that there is.
        show_progress: a bar with the time left, or plain lines where there is no terminal.

    Raises:
        OpdError: for everything that model, adapter, data, prompts or the folder can get wrong.
    """
    from opd.data.render import Renderer
    from opd.models import load, load_adapter, pick_device

    config = ModelConfig(model=model) if isinstance(model, str) else model
    prompt, context = prompt or PromptConfig(), context or ContextConfig()
    problems = load_problems(task.data).problems
    needs_pool = view == "teacher" and (context.num_demonstrations > 0 or context.name == "placebo")
    pool = load_problems(demonstrations).problems if needs_pool and demonstrations is not None else problems
    loaded = load(config, device=device or pick_device())
    base = loaded.reference
    if adapter is not None:
        loaded = load_adapter(loaded, adapter)
    checkpoint = Checkpoint(
        path=base if adapter is None else str(adapter),
        kind="base" if adapter is None else "adapter",
        fingerprint=loaded.fingerprint,
        base=None if adapter is None else base,
        adapter_sha256=None if adapter is None else file_sha256(Path(adapter) / ADAPTER_WEIGHTS),
        picked_by=picked_by,
    )
    tokenizer = loaded.tokenizer
    return evaluate_with(
        _sampler(loaded, config),
        tokenizer,
        Renderer(prompt, context, tokenizer, tokenizer, pool, prompt_seed),
        problems,
        task,
        folder,
        checkpoint=checkpoint,
        view=view,
        on_long_prompt=prompt.on_long_prompt,
        show_progress=show_progress,
    )


def evaluate_with(
    sampler: Sampler,
    tokenizer: PreTrainedTokenizerBase,
    renderer: Renderer,
    problems: Sequence[Problem],
    config: EvalConfig,
    folder: str | Path,
    *,
    checkpoint: Checkpoint,
    view: View = "student",
    on_long_prompt: Literal["error", "drop"] = "error",
    show_progress: bool = True,
) -> EvalResult:
    """Evaluate a model that is already in memory; see `evaluate`.

    The seed of each sample comes from (config.seed, problem id, sample index) alone, so that it depends neither on
    order nor on batch size, and two checkpoints draw the same random numbers for the same sample.

    Args:
        sampler: draws from the weights to evaluate.
        tokenizer: decodes what was sampled.
        renderer: makes the prompts.
        problems: each with a reference answer.
        config: samples a problem, seed, sampling settings, batch size.
        folder: where manifest, samples and result go.
        checkpoint: which weights these are; part of what an interrupted evaluation is recognised by.
        view: whose prompt is shown.
        on_long_prompt: whether a prompt above the recipe's limit stops the evaluation, or is left out and counted.
        show_progress: a bar with the time left, or plain lines where there is no terminal.
    """
    place = Path(folder)
    _refuse_ungradable(problems)
    asked, num_long = _ask(renderer, problems, view, on_long_prompt)
    manifest = Manifest(
        benchmark=benchmark_name(config.data),
        settings=_frozen_settings(config, view, tokenizer),
        checkpoint=checkpoint,
        num_samples=config.num_samples,
        seed=config.seed,
        data_parallel_size=1,
        num_dropped={f"the {view}'s prompt is too long": num_long} if num_long else {},
        questions=tuple(map(_question, asked)),
    )
    store = SampleStore(place, manifest)
    _fill(store, sampler, tokenizer, asked, config, show_progress=show_progress)
    result = score(manifest, store.samples, notes=store.notes)
    result.save(place / RESULT_FILE)
    return result


def benchmark_name(source: Source) -> str:
    """What a data source is called in results: the task, the file's name, or the hub id with subset and split."""
    if isinstance(source, TaskSource):
        return f"{source.task}/{source.split}"
    if isinstance(source, FileSource):
        return source.path.name
    return "/".join(part for part in (source.dataset, source.subset, source.split) if part is not None)


# ---- pieces --------------------------------------------------------------------------------------------------------


def _refuse_ungradable(problems: Sequence[Problem]) -> None:
    if not problems:
        raise OpdError("there is nothing to evaluate", why="there are no problems", fix="look at eval.data")
    without = [problem.id for problem in problems if not (problem.answer or "").strip()]
    if without:
        raise OpdError(
            "these problems cannot be graded",
            why=f"{len(without)} of {len(problems)} have no answer, the first is {without[0]!r}",
            fix="name the answers' column with eval.data.columns.answer, or take data that has answers",
        )


def _ask(
    renderer: Renderer, problems: Sequence[Problem], view: View, on_long_prompt: Literal["error", "drop"]
) -> tuple[list[Asked], int]:
    """One side's prompts, and how many were too long; the other side's may not even exist (no solution to show)."""
    from opd.data.render import LongPromptError

    render = renderer.teacher_ids if view == "teacher" else renderer.student_ids
    asked: list[Asked] = []
    for problem in problems:
        try:
            asked.append(Asked(problem, *render(problem)))
        except LongPromptError:
            if on_long_prompt == "error":
                raise
    if not asked:
        raise OpdError(
            "there is nothing to evaluate",
            why=f"all {len(problems)} prompts are too long",
            fix=f"raise prompt.max_{view}_prompt_tokens",
        )
    return asked, len(problems) - len(asked)


def _question(asked: Asked) -> Question:
    assert asked.problem.answer is not None
    return Question(
        id=asked.problem.id,
        # Questions that give each other away (3 * 8 and 8 * 3) are one piece of evidence, not two.
        cluster=question_key(asked.problem),
        problem=asked.problem.problem,
        answer=asked.problem.answer,
        prompt=asked.text,
        starts_thinking=asked.text.rstrip().endswith("<think>"),
    )


def _fill(
    store: SampleStore,
    sampler: Sampler,
    tokenizer: PreTrainedTokenizerBase,
    asked: Sequence[Asked],
    config: EvalConfig,
    *,
    show_progress: bool,
) -> None:
    """Draw what the store lacks."""
    key = store.manifest.key
    wanted = [
        (one, index)
        for one in asked
        for index in range(config.num_samples)
        if (one.problem.id, index) not in store.samples
    ]
    seeds = [derive_seed(config.seed, "eval", one.problem.id, index) for one, index in wanted]
    with SampleProgress(len(asked) * config.num_samples, len(store.samples), shown=show_progress) as progress:
        for note in store.notes:
            progress.say(note)

        def keep(indices: Sequence[int], completions: Sequence[Completion]) -> None:
            store.append(
                Sample(
                    key=key,
                    problem_id=wanted[index][0].problem.id,
                    sample=wanted[index][1],
                    seed=seeds[index],
                    finish_reason=completion.finish_reason,
                    text=_text(tokenizer, completion),
                    ids=completion.ids,
                )
                for index, completion in zip(indices, completions, strict=True)
            )
            progress.sampled(len(indices))

        if wanted:
            prompts = [one.ids for one, _ in wanted]
            sampler.generate(prompts, seeds, config.sampling, batch_size=config.batch_size, on_batch=keep)


def _text(tokenizer: PreTrainedTokenizerBase, completion: Completion) -> str:
    """Without the stop token, with every other special token: <think> is one of them in some vocabularies."""
    ids = completion.ids[:-1] if completion.finish_reason == "stop" else completion.ids
    decoded: Any = tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return decoded


def _frozen_settings(config: EvalConfig, view: View, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """What two results must share to be compared; the prompts' texts are hashed problem by problem besides."""
    template: Any = tokenizer.chat_template
    return {
        "view": view,
        "num_samples": config.num_samples,
        "seed": config.seed,
        "sampling": config.sampling.model_dump(mode="json"),
        "chat_template_sha256": None if template is None else hashlib.sha256(str(template).encode()).hexdigest(),
    }


def _sampler(loaded: LoadedModel, config: ModelConfig) -> Sampler:
    import torch

    from opd.rollout.hf import HfSampler

    return HfSampler.of(loaded, torch.bfloat16 if config.dtype == "bfloat16" else torch.float32)
