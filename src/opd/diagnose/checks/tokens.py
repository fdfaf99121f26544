"""Checks on prompts, vocabularies and ids: everything that can be wrong before a number is computed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from opd import forward
from opd.diagnose.diagnosis import CheckResult, Status
from opd.diagnose.probe import Probe
from opd.training.batch import realised_tokens, supervised_rows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_NUM_TAIL_TOKENS = 8


def template(probe: Probe) -> CheckResult:
    """Both prompts end where their model starts to answer; BOS once; both agree about `<think>`."""
    rollout = probe.rollouts[0]
    pair, facts = rollout.pair, probe.parts.renderer.facts
    sides = (
        ("student", probe.student.loaded.tokenizer, pair.student_ids, pair.student_text, facts.student),
        ("teacher", probe.teacher_loaded.tokenizer, pair.teacher_ids, pair.teacher_text, facts.teacher),
    )
    faults: list[str] = []
    seen: list[str] = []
    for side, tokenizer, ids, text, boundary in sides:
        if _starts_with_two_bos(tokenizer, ids):
            faults.append(f"the {side}'s prompt starts with BOS twice")
        if not text.endswith(boundary.generation_prompt):
            faults.append(f"the {side}'s prompt does not end with {boundary.generation_prompt!r}")
        seen.append(f"{side} ...{_decode(tokenizer, ids[-_NUM_TAIL_TOKENS:])!r}")
    seen.append(f"first token after the student's prompt {_decode(sides[0][1], rollout.completion.ids[:1])!r}")
    detail = "; ".join(seen)
    if faults:
        advice = "Render with the model's own chat template, ask for the assistant's turn, and write BOS once."
        return CheckResult("template", (4,), "; ".join(faults), None, "fail", detail, advice)
    if not facts.same_thinking:
        figure = f"<think>: {facts.student.thinking} for the student, {facts.teacher.thinking} for the teacher"
        advice = (
            "The teacher reads the student's thoughts as an answer, or the other way round: set "
            "prompt.student_thinking and prompt.teacher_thinking to the same value."
        )
        return CheckResult("template", (4,), figure, None, "warn", detail, advice)
    figure = (
        f"both end with {facts.student.generation_prompt!r}" if facts.student.generation_prompt else "nothing prefilled"
    )
    return CheckResult("template", (4,), figure, None, "pass", detail)


def round_trip(probe: Probe) -> CheckResult:
    """Prompt text and prompt ids are the same thing, special tokens included.

    Completions are only counted: ids that another encoding of their text would split otherwise are the reason why no
    text is ever encoded again.
    """
    tokenizers = (probe.student.loaded.tokenizer, probe.teacher_loaded.tokenizer)
    sides = [(side, pair) for pair in probe.pairs for side in ("student", "teacher")]
    differing: list[str] = []
    for side, pair in sides:
        student = side == "student"
        text, ids = (pair.student_text, pair.student_ids) if student else (pair.teacher_text, pair.teacher_ids)
        if tuple(tokenizers[not student].encode(text, add_special_tokens=False)) != tuple(ids):
            differing.append(f"{side} of {pair.problem.id}")
    merged = sum(
        tokenizers[0].encode(_decode(tokenizers[0], r.completion.ids), add_special_tokens=False)
        != list(r.completion.ids)
        for r in probe.rollouts
    )
    detail = (
        f"prompts of {len(sides)} whose text encodes to other ids; {merged} of {len(probe.rollouts)} completions would "
        "encode to other ids than were sampled (harmless: none is encoded again)"
    )
    status: Status = "fail" if differing else "pass"
    advice = (
        f"Text and ids differ for the {', the '.join(differing[:2])}: special tokens of the template were lost or "
        "added to. Use the tokenizer that belongs to the model."
        if differing
        else ""
    )
    return CheckResult("tokenizer round trip", (1, 4), float(len(differing)), 0.0, status, detail, advice)


def vocabulary(probe: Probe) -> CheckResult:
    """Ids have rows on both sides, rows that no token owns are left out, and an id means the same token to both."""
    student, teacher = probe.student.loaded, probe.teacher_loaded
    num_rows = probe.student.head.weight.shape[0]
    head = probe.scores.head
    num_student, num_teacher = probe.student.head.num_tokens, 0 if head is None else head.num_tokens
    top = max(max((*pair.student_ids, *pair.teacher_ids)) for pair in probe.pairs)
    top_sampled = int(probe.ids_N.max())
    owners = student.tokenizer.get_vocab()
    faults: list[str] = []
    if num_student != student.vocab_size or num_student > max(owners.values()) + 1:
        faults.append(f"the head keeps {num_student:,} rows for a tokenizer of {max(owners.values()) + 1:,}")
    if num_teacher != num_student:
        faults.append(f"the teacher's head keeps {num_teacher:,} rows, the student's {num_student:,}")
    if top_sampled >= student.vocab_size:
        faults.append(f"id {top_sampled} was sampled, which no token owns")
    if top >= min(_num_embeddings(student.model), _num_embeddings(teacher.model)):
        faults.append(f"a prompt holds id {top}, for which there is no embedding")
    if teacher is not student and owners != teacher.tokenizer.get_vocab():
        faults.append("student and teacher give different ids to their tokens")
    detail = (
        f"{len(owners):,} tokens, {num_rows:,} rows: {num_rows - num_student:,} padded rows are never sampled or "
        f"compared; largest id in prompts {top}, in samples {top_sampled}"
    )
    if faults:
        advice = "Use the tokenizer that belongs to the model, and a teacher of the same family."
        return CheckResult("vocabulary", (7,), "; ".join(faults), None, "fail", detail, advice)
    return CheckResult("vocabulary", (7,), f"{num_student:,} outcomes", None, "pass", detail)


def stop_ids(probe: Probe) -> CheckResult:
    """Every way a completion can end is known; pad equal to EOS is said and harmless."""
    loaded = probe.student.loaded
    tokenizer = loaded.tokenizer
    generation: Any = loaded.model.generation_config
    listed: Any = None if generation is None else generation.eos_token_id
    generation_ids = set(listed) if isinstance(listed, (list, tuple)) else {listed} - {None}
    eos: Any = tokenizer.eos_token_id
    detail = ", ".join(f"{token} {_decode(tokenizer, [token])!r}" for token in sorted(loaded.stop_ids))
    if loaded.pad_id in loaded.stop_ids:
        detail += f"; padding is {loaded.pad_id}, a stop id: harmless, masks come from lengths"
    missing = (generation_ids | ({eos} - {None})) - loaded.stop_ids
    if missing or not loaded.stop_ids:
        advice = "Completions will run into the length limit: list every end-of-sequence id in generation_config.json."
        figure = f"{sorted(missing)} would not stop a completion" if missing else "no stop id"
        return CheckResult("stop ids", (6,), figure, None, "fail", detail, advice)
    unowned = sorted(token for token in loaded.stop_ids if token >= loaded.vocab_size)
    if unowned:
        advice = "generation_config names ids that cannot be sampled; does it belong to this tokenizer?"
        return CheckResult("stop ids", (6,), f"{unowned} are outside the vocabulary", None, "warn", detail, advice)
    if eos is not None and generation_ids and eos not in generation_ids:
        detail += f"; the tokenizer's EOS {eos} is not in generation_config {sorted(generation_ids)}: both stop here"
    return CheckResult("stop ids", (6,), f"{len(loaded.stop_ids)} stop ids", None, "pass", detail)


def scored_ids(probe: Probe) -> CheckResult:
    """What the learner scores is what was sampled, token by token.

    The ids are read back out of the batch that the learner would build: before each row that is read stands the token
    that it continues. Without a mask the first completion token is supervised, the prompt's last is not, and a stop
    token exactly once; a mask leaves out what it says, and shifts nothing.
    """
    rollouts = probe.rollouts
    device = torch.device("cpu")
    ids_BT, rows_N = forward.pad_right(
        [r.pair.student_ids for r in rollouts],
        [r.completion.ids for r in rollouts],
        probe.student.loaded.pad_id,
        device,
    )
    alignments = [probe.parts.align(rollout) for rollout in rollouts]
    group = range(len(rollouts))
    rows = rows_N[torch.tensor(supervised_rows(group, rollouts, alignments), dtype=torch.int64)]
    read = ids_BT.flatten()[rows].tolist()
    scored = realised_tokens(group, rollouts, alignments, device)
    targets = scored.ids_N.tolist()
    sequences = [] if scored.sequence_N is None else scored.sequence_N.tolist()

    wrong = 0
    start = 0
    for index, rollout in enumerate(rollouts):
        positions = alignments[index].student_positions
        before = [rollout.pair.student_ids[-1], *rollout.completion.ids]
        stop = start + len(positions)
        sampled, contexts = [before[p + 1] for p in positions], [before[p] for p in positions]
        wrong += _num_differing(targets[start:stop], sampled) + _num_differing(read[start:stop], contexts)
        wrong += _num_differing(sequences[start:stop], [index] * len(sampled))
        start = stop
    wrong += abs(len(targets) - start) + abs(len(read) - start)
    stopped = [index for index, rollout in enumerate(rollouts) if rollout.completion.finish_reason == "stop"]
    stops = sum(len(rollouts[i].completion.ids) - 1 in alignments[i].student_positions for i in stopped)
    badly_stopped = [r.pair.problem.id for r in rollouts if not _stops_once(r, probe.student.loaded.stop_ids)]
    detail = (
        f"{len(targets)} supervised tokens of {probe.num_tokens} sampled; {len(stopped)} of {len(rollouts)} completions"
        f" stopped, {stops} with the stop token supervised, once (limit here: {probe.sampling.max_new_tokens} tokens)"
    )
    if badly_stopped:
        detail += f"; stop tokens are not where the finish reason says for {', '.join(badly_stopped)}"
    status: Status = "fail" if wrong or badly_stopped else "pass"
    advice = "" if status == "pass" else "The batch is built wrongly: this is a bug in the trainer, please report it."
    return CheckResult(
        "scored ids = sampled ids", (1, 3, 6), float(wrong + len(badly_stopped)), 0.0, status, detail, advice
    )


def _num_differing(found: Sequence[int], expected: Sequence[int]) -> int:
    return sum(a != b for a, b in zip(found, expected, strict=False)) + abs(len(found) - len(expected))


def _stops_once(rollout: Any, stops: frozenset[int]) -> bool:
    """A stop id stands at the very end of a completion that stopped, and nowhere in one that was cut."""
    places = [place for place, token in enumerate(rollout.completion.ids) if token in stops]
    last = len(rollout.completion.ids) - 1
    return places == ([last] if rollout.completion.finish_reason == "stop" else [])


def _starts_with_two_bos(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> bool:
    bos: Any = tokenizer.bos_token_id
    return bos is not None and len(ids) > 1 and ids[0] == ids[1] == bos


def _num_embeddings(model: Any) -> int:
    return int(model.get_input_embeddings().weight.shape[0])


def _decode(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    return str(tokenizer.decode(list(ids), skip_special_tokens=False))
