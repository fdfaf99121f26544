"""What a step minimises, against a computation written out sequence by sequence; and that no split changes it."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import opd
from opd.config.load import load_recipe
from opd.errors import OpdError
from opd.loss import RolloutTokens
from opd.training.assemble import Parts, assemble
from opd.training.batch import Solution
from opd.training.distributed import Ranks
from opd.training.learner import Learner, Update
from opd.training.loop import train_step
from opd.types import Rollout

CPU = torch.device("cpu")
LENGTHS = (6, 1, 3, 2, 5, 4)

GATE = {"teacher_entropy": {"min": 3.9, "max": 4.6}}
MIX = {
    "name": "mix",
    "parts": [
        {"loss": {"name": "forward_kl"}, "weight": 0.7},
        {"loss": {"name": "sft"}, "weight": 0.2},
        {"loss": {"name": "reverse_kl"}, "weight": 0.1},
    ],
}
LOSSES: dict[str, dict[str, Any]] = {
    "plain": {"name": "forward_kl"},
    "sequence": {"name": "forward_kl", "reduction": "sequence"},
    "gate": {"name": "forward_kl", "mask": GATE},
    "sequence and gate": {"name": "forward_kl", "reduction": "sequence", "mask": GATE},
    "places and gates": {
        "name": "reverse_kl",
        "mask": {"first": 4, "skip_boundary": True, **GATE, "student_entropy": {"max": 4.5}},
    },
    "solutions": MIX,
    "solutions and gate": {**MIX, "mask": GATE},
    "solutions, sequence and gate": {**MIX, "reduction": "sequence", "mask": {"skip_boundary": True, **GATE}},
    "baseline": {"name": "sampled_reverse_kl", "group_baseline": True, "discount": 0.5},
    "baseline, last and sequence": {
        "name": "sampled_reverse_kl",
        "group_baseline": True,
        "reduction": "sequence",
        "mask": {"last": 2, "skip_boundary": True},
    },
}


def recipe(model: Path, folder: Path, loss: dict[str, Any], **changes: Any) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "name": "tiny",
        "folder": str(folder),
        "seed": 3,
        "student": {"model": str(model), "dtype": "float32", "adapter": {"name": "lora", "r": 4, "alpha": 8}},
        "data": {"train": {"name": "task", "task": "products"}},
        "rollout": {"max_new_tokens": 6, "num_samples": 2},
        "loss": loss,
        "train": {"num_steps": 3, "num_problems_per_step": 3, "learning_rate": 0.01, "max_grad_norm": None},
    }
    for name, value in changes.items():
        fields[name] = {**fields.get(name, {}), **value}
    return fields


def assembled(fields: dict[str, Any]) -> Parts:
    """Parts in float64 (but for the model's norms), with completions of different lengths and an adapter that moved."""
    parts = assemble(load_recipe(fields).recipe, CPU)
    parts.student.model.double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in parts.student.trained().values():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.02)
    own = parts.sampler.generate

    def ragged(*arguments: Any, **options: Any) -> Any:
        completions = own(*arguments, **options)
        return [
            replace(c, ids=c.ids[:n], behavior_logp=c.behavior_logp[:n], kept_logp=c.kept_logp[:n])
            for c, n in zip(completions, LENGTHS, strict=True)
        ]

    parts.sampler.generate = ragged  # pyright: ignore[reportAttributeAccessIssue]
    return parts


@dataclass
class Step:
    """One step of the learner, with what went in and the gradients that came out."""

    parts: Parts
    rollouts: list[Rollout]
    update: Update
    gradients: dict[str, Tensor]
    baselines: list[float]


def one_step(fields: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Step:
    parts = assembled(fields)
    learner = Learner(parts.student, parts.loss, parts.recipe, Ranks(parts.recipe.log, tmp_path, device="cpu"))
    step = Step(parts, [], Update(0.0, {}, 0, 0, 0.0, 0.0, skipped=True), {}, [])
    update, linear = learner.update, parts.loss.linear

    def watched_update(number: int, rollouts: Sequence[Rollout], *rest: Any) -> Update:
        step.rollouts = list(rollouts)
        step.update = update(number, rollouts, *rest)
        return step.update

    def watched_loss(hidden_ND: Any, head: Any, teacher: Any, tokens: RolloutTokens) -> Any:
        step.baselines += [] if tokens.baseline_N is None else tokens.baseline_N.tolist()
        return linear(hidden_ND, head, teacher, tokens)

    monkeypatch.setattr(learner, "update", watched_update)
    monkeypatch.setattr(parts.loss, "linear", watched_loss)
    weights = parts.student.snapshot()
    learner.optimizer.register_step_pre_hook(
        lambda *_: step.gradients.update({name: p.grad.clone() for name, p in learner.parameters.items()})  # pyright: ignore
    )
    train_step(parts, learner, Ranks(parts.recipe.log, tmp_path, device="cpu"), 1)
    with torch.no_grad():  # as before the step, for whoever computes it again
        for name, parameter in parts.student.trained().items():
            parameter.copy_(weights[name])
    return step


# ---- the same by hand ------------------------------------------------------------------------------------------------


def log_probs(parts: Parts, prompt: Sequence[int], completion: Sequence[int]) -> Tensor:
    """[len(completion), V] of the model as it stands, one sequence alone, by the model's own head."""
    ids_BT = torch.tensor([[*prompt, *completion]])
    logits = parts.student.model(ids_BT).logits[0, len(prompt) - 1 : -1, : parts.student.loaded.vocab_size]
    return logits.log_softmax(-1)


def entropy(log_p: Tensor) -> float:
    return -float((log_p.exp() * log_p).sum())


def places(loss: dict[str, Any], length: int) -> list[int]:
    mask = loss.get("mask", {})
    first, last = mask.get("first", length), mask.get("last", length)
    skipped = int(mask.get("skip_boundary", False))
    return [t for t in range(length) if skipped <= t < first and t >= length - last]


def gates_are_open(loss: dict[str, Any], log_p: Tensor, log_q: Tensor) -> bool:
    mask = loss.get("mask", {})
    for name, value in (("teacher_entropy", entropy(log_p)), ("student_entropy", entropy(log_q.detach()))):
        gate = mask.get(name, {})
        if not gate.get("min", 0.0) <= value <= gate.get("max", math.inf):
            return False
    return True


def divergence(loss: dict[str, Any], log_p: Tensor, log_q: Tensor) -> Tensor:
    if loss["name"] == "mix":
        parts = [part for part in loss["parts"] if part["loss"]["name"] != "sft"]
        return torch.stack([part["weight"] * divergence(part["loss"], log_p, log_q) for part in parts]).sum()
    if loss["name"] == "forward_kl":
        return (log_p.exp() * (log_p - log_q)).sum()
    return (log_q.exp() * (log_q - log_p)).sum()


def mean(sequences: list[list[Tensor]], reduction: str) -> Tensor:
    counted = [torch.stack(values) for values in sequences if values]
    if reduction == "sequence":
        return torch.stack([values.mean() for values in counted]).mean()
    return torch.cat(counted).mean()


def by_hand(step: Step, loss: dict[str, Any]) -> tuple[Tensor, int]:
    """The loss of a divergence, differentiable, and how many tokens it is over."""
    parts, sequences = step.parts, list[list[Tensor]]()
    for rollout in step.rollouts:
        ids = rollout.completion.ids
        log_q = log_probs(parts, rollout.pair.student_ids, ids)
        with torch.no_grad(), parts.student.adapter_off():
            log_p = log_probs(parts, rollout.pair.teacher_ids, ids)
        rows = [t for t in places(loss, len(ids)) if gates_are_open(loss, log_p[t], log_q[t])]
        sequences.append([divergence(loss, log_p[t], log_q[t]) for t in rows])
    total = mean(sequences, loss.get("reduction", "token"))
    weight = sum(part["weight"] for part in loss.get("parts", []) if part["loss"]["name"] == "sft")
    if weight:
        given: list[list[Tensor]] = []
        for pair in {rollout.pair.problem.id: rollout.pair for rollout in step.rollouts}.values():
            ids = parts.solutions[pair.problem.id]
            log_q = log_probs(parts, pair.student_ids, ids)
            given.append([-log_q[t, token] for t, token in enumerate(ids)])
        total = total + weight * mean(given, loss.get("reduction", "token"))
    return total, sum(map(len, sequences))


@pytest.mark.parametrize("name", [name for name in LOSSES if "baseline" not in name])
@pytest.mark.parametrize("micro_batch_tokens", [1, 10_000])
def test_a_step_is_what_its_options_say(
    name: str, micro_batch_tokens: int, tiny_model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loss = LOSSES[name]
    fields = recipe(tiny_model_folder, tmp_path, loss, train={"micro_batch_tokens": micro_batch_tokens})
    step = one_step(fields, tmp_path, monkeypatch)
    expected, num_tokens = by_hand(step, loss)
    expected.backward()
    assert step.update.loss == pytest.approx(expected.item(), rel=1e-7)
    assert step.update.num_supervised_tokens == num_tokens
    if "mask" in loss:  # the masks and gates of this test leave some tokens out and some in
        assert 0 < num_tokens < sum(LENGTHS)
    if "gate" in name:
        masked_in = sum(len(places(loss, length)) for length in LENGTHS)
        assert step.update.metrics["supervised"] == pytest.approx(num_tokens / masked_in)
        assert num_tokens < masked_in
    assert ("sft" in step.update.metrics) == (loss["name"] == "mix")
    largest = max(gradient.abs().max() for gradient in step.gradients.values())
    assert largest > 1e-3
    for parameter_name, parameter in step.parts.student.trained().items():
        assert parameter.grad is not None
        assert (step.gradients[parameter_name] - parameter.grad).abs().max() <= 1e-7 * largest, parameter_name


@pytest.mark.parametrize("adapter", ["lora", "full"])
@pytest.mark.parametrize("name", list(LOSSES))
def test_no_split_into_micro_batches_changes_a_step(
    name: str, adapter: str, tiny_model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = [
        one_step(
            recipe(
                tiny_model_folder,
                tmp_path,
                LOSSES[name],
                student={"adapter": {"name": adapter}},
                teacher={"name": "self", "weights": {"name": "live"}},
                train={"micro_batch_tokens": tokens},
            ),
            tmp_path,
            monkeypatch,
        )
        for tokens in (10_000, 120, 1)
    ]
    whole = steps[0]
    gradient = torch.cat([gradient.flatten() for gradient in whole.gradients.values()]).double()
    assert gradient.norm() > 0.1
    for other in steps[1:]:
        assert other.update.loss == pytest.approx(whole.update.loss, rel=1e-7)
        assert other.update.metrics == pytest.approx(dict(whole.update.metrics), rel=1e-7, abs=1e-7)
        difference = torch.cat([gradient.flatten() for gradient in other.gradients.values()]).double() - gradient
        assert difference.norm() <= 1e-7 * gradient.norm()


# ---- baselines -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["baseline", "baseline, last and sequence"])
def test_a_baseline_is_the_mean_advantage_of_the_problems_other_completions(
    name: str, tiny_model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loss = LOSSES[name]
    discount = loss.get("discount", 0.0)
    step = one_step(recipe(tiny_model_folder, tmp_path, loss, rollout={"top_k": 50}), tmp_path, monkeypatch)
    parts = step.parts
    advantages: list[list[float]] = []
    for rollout in step.rollouts:
        completion = rollout.completion
        assert min(completion.kept_logp) < -0.01  # the sampler was truncated: its kept mass is put back
        with torch.no_grad(), parts.student.adapter_off():
            log_p = log_probs(parts, rollout.pair.teacher_ids, completion.ids)
        rows = places(loss, len(completion.ids))
        values = [
            float(log_p[t, completion.ids[t]]) - completion.behavior_logp[t] - completion.kept_logp[t] for t in rows
        ]
        for t in reversed(range(len(values) - 1)):
            values[t] += discount * values[t + 1]
        advantages.append(values)
    expected: list[float] = []
    for number, rollout in enumerate(step.rollouts):
        others = [
            value
            for other, values in enumerate(advantages)
            if other != number and step.rollouts[other].pair.problem.id == rollout.pair.problem.id
            for value in values
        ]
        expected += [sum(others) / len(others) if others else 0.0] * len(advantages[number])
    # Rollouts come longest sequence first; all fit into one micro-batch.
    order = sorted(
        range(len(step.rollouts)),
        key=lambda i: (-len(step.rollouts[i].pair.student_ids) - len(step.rollouts[i].completion.ids), i),
    )
    starts = [sum(map(len, advantages[:i])) for i in range(len(advantages))]
    in_order = [value for i in order for value in expected[starts[i] : starts[i] + len(advantages[i])]]
    assert step.baselines == pytest.approx(in_order, abs=1e-4)
    assert len(set(in_order)) > 1


# ---- nothing to learn from -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mask", "limit", "supervised"),
    [({"skip_boundary": True, "skip_whitespace": True}, 1, None), ({"student_entropy": {"min": 50.0}}, 6, 0.0)],
    ids=["masks", "gates"],
)
@pytest.mark.parametrize("parts", ["divergence", "mix"])
def test_a_step_without_a_supervised_token_is_skipped_and_says_so(
    mask: dict[str, Any],
    limit: int,
    supervised: float | None,
    parts: str,
    tiny_model_folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from opd.config import loss_rules

    # A rule refuses one-token completions without their boundary; here they only happen to be that short.
    monkeypatch.setattr("opd.config.check.RULES", [rule for rule in loss_rules.RULES if "mask_fits" not in str(rule)])
    loss = {"name": "forward_kl", "mask": mask} if parts == "divergence" else {**MIX, "mask": mask}
    fields = recipe(tiny_model_folder, tmp_path / "run", loss, rollout={"max_new_tokens": limit})
    result = opd.train(fields, skip_doctor=True, device="cpu", command="opd train tiny.yaml")
    lines = [json.loads(line) for line in (result.folder / "steps.jsonl").read_text().splitlines()]
    assert [line["skipped"] for line in lines] == [True] * 3
    assert all(line["loss"] is None and line["num_supervised_tokens"] == 0 for line in lines)
    assert all(line["num_given_tokens"] == 0 for line in lines)
    assert [line["metrics"].get("supervised") for line in lines] == [supervised] * 3
    assert "skipped: no token was supervised" in capsys.readouterr().out
    from safetensors.torch import load_file

    weights = load_file(result.folder / "final" / "adapter_model.safetensors")
    assert all((tensor == 0).all() for name, tensor in weights.items() if "lora_B" in name)
    from opd.diagnose.report import write_report

    page = write_report(result.folder).read_text()
    assert "No token was supervised, and the update was skipped, at step 1, 2, 3." in page
    assert "not finite" not in page


def test_gradients_of_a_skipped_step_are_gone(
    tiny_model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were worked out before anybody knew that the gates leave no token."""
    loss = {"name": "forward_kl", "mask": {"student_entropy": {"min": 50.0}}}
    step = one_step(recipe(tiny_model_folder, tmp_path, loss), tmp_path, monkeypatch)
    assert step.update.skipped
    assert all(parameter.grad is None for parameter in step.parts.student.trained().values())


# ---- solutions -------------------------------------------------------------------------------------------------------


def rows(folder: Path, *given: dict[str, str]) -> dict[str, Any]:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in given))
    return {"train": {"name": "file", "path": str(path)}}


def test_a_solution_is_the_completion_that_the_prompt_asks_for(tiny_model_folder: Path, tmp_path: Path) -> None:
    fields = recipe(tiny_model_folder, tmp_path, MIX)
    parts = assemble(load_recipe(fields).recipe, CPU)
    tokenizer = parts.student.loaded.tokenizer
    assert len(parts.solutions) == len(parts.pairs)
    for pair in parts.pairs:
        ids = parts.solutions[pair.problem.id]
        assert tokenizer.decode(list(ids)) == f"{pair.problem.solution}<|im_end|>"
        assert [token in parts.student.loaded.stop_ids for token in ids] == [False] * (len(ids) - 1) + [True]
    assert assemble(load_recipe(recipe(tiny_model_folder, tmp_path, {"name": "jsd"})).recipe, CPU).solutions == {}


def test_a_problem_without_a_solution_is_named_before_a_model_is_loaded(
    tiny_model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = rows(tmp_path, {"problem": "1+1", "solution": "2", "answer": "2"}, {"problem": "1+2", "answer": "3"})
    fields = recipe(tiny_model_folder, tmp_path, MIX, data=data, context={"name": "answer_only"})
    monkeypatch.setattr("opd.training.assemble.load_student", lambda *_, **__: pytest.fail("a model was loaded"))
    with pytest.raises(OpdError, match=r"rows\.jsonl.2 has no solution") as caught:
        opd.train(fields, skip_doctor=True, device="cpu")
    assert "sft in loss.parts" in caught.value.why


def test_solutions_that_do_not_fit_are_refused_at_the_start(tiny_model_folder: Path, tmp_path: Path) -> None:
    data = rows(tmp_path, {"problem": "1+1", "solution": "so 2 " * 1000, "answer": "2"})
    fields = recipe(tiny_model_folder, tmp_path, MIX, data=data, context={"name": "answer_only"})
    with pytest.raises(OpdError, match="its prompt and solution do not fit") as caught:
        opd.train(fields, skip_doctor=True, device="cpu")
    assert "1024 positions" in caught.value.why


def test_steps_say_what_was_learned_from_solutions(
    tiny_model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = one_step(recipe(tiny_model_folder, tmp_path, MIX), tmp_path, monkeypatch)
    pairs = {rollout.pair.problem.id: rollout.pair for rollout in step.rollouts}
    assert step.update.num_given_tokens == sum(len(step.parts.solutions[name]) for name in pairs)
    metrics = step.update.metrics
    weighted = 0.7 * metrics["forward_kl"] + 0.1 * metrics["reverse_kl"] + 0.2 * metrics["sft"]
    assert metrics["unclipped"] == pytest.approx(weighted, rel=1e-6) == pytest.approx(step.update.loss, rel=1e-6)


def test_a_rank_without_a_solution_adds_nothing(
    tiny_model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More processes than problems: it has samples and no solution, and takes part in the exchange of gradients."""
    parts = assembled(recipe(tiny_model_folder, tmp_path, MIX))
    learner = Learner(parts.student, parts.loss, parts.recipe, Ranks(parts.recipe.log, tmp_path, device="cpu"))
    completions = parts.sampler.generate([pair.student_ids for pair in parts.pairs[:6]], range(6), parts.recipe.rollout)
    stand_in = Rollout(parts.pairs[0], completions[0], 0, 0)
    count = learner._count([5, 7])
    sums = learner._learn_solutions([], count, stand_in)
    assert sums.totals == {"loss": 0.0, "sft": 0.0}
    assert all(
        parameter.grad is not None and not parameter.grad.any() for parameter in parts.student.trained().values()
    )
    given = [Solution(pair, parts.solutions[pair.problem.id]) for pair in parts.pairs[:2]]
    assert learner._learn_solutions(given, count, stand_in).totals["sft"] > 0


# ---- runs ------------------------------------------------------------------------------------------------------------

RESUMED = ["solutions, sequence and gate", "baseline", "places and gates"]


@pytest.mark.parametrize("name", RESUMED)
def test_a_run_with_these_options_resumes_to_the_bit(name: str, tiny_model_folder: Path, tmp_path: Path) -> None:
    train = {"checkpoint_every_num_steps": 1, "num_checkpoints_kept": 9}

    def run(folder: Path, *, resume: bool = False) -> list[dict[str, Any]]:
        fields = recipe(tiny_model_folder, folder, LOSSES[name], train=train)
        opd.train(fields, skip_doctor=True, device="cpu", command="opd train tiny.yaml", resume=resume)
        timed = ("rollout_s", "teacher_s", "update_s")
        lines = [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]
        return [{key: value for key, value in line.items() if key not in timed} for line in lines]

    import shutil

    whole = run(tmp_path / "whole")
    run(tmp_path / "parts")
    for step in (2, 3):
        shutil.rmtree(tmp_path / "parts" / "checkpoints" / f"step-00000{step}")
    assert run(tmp_path / "parts", resume=True) == whole
    assert not any(line["skipped"] for line in whole)


@pytest.mark.parametrize(
    ("key", "changes"),
    [
        ("loss.mask.first", {"loss": {"mask": {"first": 3}}}),
        ("loss.mask.student_entropy.max", {"loss": {"mask": {"student_entropy": {"max": 4.0}}}}),
        ("loss.reduction", {"loss": {"reduction": "sequence"}}),
        ("loss.parts", {"loss": {"parts": MIX["parts"][:2]}}),
        ("training solutions", {}),
    ],
)
def test_going_on_with_another_objective_is_refused(
    key: str, changes: dict[str, Any], tiny_model_folder: Path, tmp_path: Path
) -> None:
    context = {"name": "answer_only"}

    def fields(solution: str, **loss: Any) -> dict[str, Any]:
        data = rows(tmp_path, {"problem": "1+1", "solution": solution, "answer": "2"})
        made = recipe(tiny_model_folder, tmp_path / "run", {**MIX, **loss}, data=data, context=context)
        return {**made, "train": {**made["train"], "num_steps": 1, "num_problems_per_step": 1}}

    opd.train(fields("so 2"), skip_doctor=True, device="cpu", command="x")
    other = fields("so 3" if key == "training solutions" else "so 2", **changes.get("loss", {}))
    with pytest.raises(OpdError, match="another run") as caught:
        opd.train(other, skip_doctor=True, device="cpu", resume=True)
    assert f"{key}: " in caught.value.why


def test_samples_say_how_many_tokens_were_left_out_and_why(tiny_model_folder: Path, tmp_path: Path) -> None:
    loss = {"name": "forward_kl", "mask": {"first": 4, "skip_boundary": True}}
    result = opd.train(recipe(tiny_model_folder, tmp_path / "run", loss), skip_doctor=True, device="cpu", command="x")
    for line in (result.folder / "samples.jsonl").read_text().splitlines():
        sample = json.loads(line)
        beyond = len(sample["completion_ids"]) - 4
        expected = {"boundary": 1, **({"outside first and last": beyond} if beyond > 0 else {})}
        assert sample["num_left_out"] == expected
    assert "where tokens count: the first 4 tokens, without the token after the prompt" in (
        (result.folder / "final" / "README.md").read_text()
    )
