"""The runner, its files and the two commands, with a sampler that looks answers up and counts what it is asked."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from typer.testing import CliRunner

from opd.config.schema import ContextConfig, EvalConfig, MessageTemplate, PromptConfig, SamplingConfig, TaskSource
from opd.data.render import Renderer
from opd.errors import OpdError
from opd.eval import Checkpoint, evaluate, evaluate_with, load_result, regrade
from opd.eval.verdict import compare_results
from opd.types import Completion, Problem

BASE = Checkpoint(path="tiny", kind="base", fingerprint="a")
TRAINED = Checkpoint(path="out", kind="adapter", fingerprint="b", base="tiny", adapter_sha256="c")
PROBLEMS = [
    Problem(
        f"p{i}", f"What is {i} + {i}?", solution=f"It is {2 * i}.", answer=str(2 * i), metadata={"question_key": i // 2}
    )
    for i in range(6)
]


class Killed(BaseException):
    """Stands for a kill: nothing in the package may catch it."""


@dataclass
class LookupSampler:
    """Answers in the box when `is_right(prompt, seed)`; else with a cut-off sentence."""

    tokenizer: object
    every: int = 2
    kill_after: int | None = None
    policy_version: int = 0
    asked: list[tuple[str, int]] = field(default_factory=list)

    def generate(self, prompts: Sequence[Sequence[int]], seeds, sampling, *, batch_size=64, on_batch=None):
        done = [self._complete(prompt, seed) for prompt, seed in zip(prompts, seeds, strict=True)]
        order = list(range(len(prompts)))[::-1]  # batches may come in any order
        for number, start in enumerate(range(0, len(order), batch_size)):
            if number == self.kill_after:
                raise Killed
            batch = order[start : start + batch_size]
            on_batch(batch, [done[i] for i in batch])
        return done

    def _complete(self, prompt: Sequence[int], seed: int) -> Completion:
        text = self.tokenizer.decode(prompt)
        self.asked.append((text, seed))
        number = int(text.split("What is ")[1].split(" ")[0])
        right = seed % self.every == 0
        said = f"It is \\boxed{{{2 * number}}}." if right else f"I think {2 * number} or"
        ids = [*self.tokenizer.encode(said), *([2] if right else [])]
        return Completion(tuple(ids), (0.0,) * len(ids), (0.0,) * len(ids), "stop" if right else "length")


def config(**changes) -> EvalConfig:
    values = {
        "data": TaskSource(name="task", task="sums", split="heldout"),
        "num_samples": 3,
        "batch_size": 4,
        "sampling": SamplingConfig(max_new_tokens=32),
    }
    return EvalConfig(**values | changes)


@pytest.fixture
def renderer(tiny_tokenizer):
    return Renderer(PromptConfig(), ContextConfig(), tiny_tokenizer, tiny_tokenizer, PROBLEMS, 0)


@pytest.fixture
def run(tiny_tokenizer, renderer, tmp_path):
    def run(
        sampler=None, problems=PROBLEMS, folder="eval", checkpoint=BASE, renderer=renderer, view="student", **changes
    ):
        sampler = sampler or LookupSampler(tiny_tokenizer)
        return evaluate_with(
            sampler,
            tiny_tokenizer,
            renderer,
            problems,
            config(**changes),
            tmp_path / folder,
            checkpoint=checkpoint,
            view=view,
            show_progress=False,
        )

    return run


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in (path / "samples.jsonl").read_text().splitlines()]


# ---- results -------------------------------------------------------------------------------------------------------


def test_result_counts_what_was_sampled(run, tmp_path, tiny_tokenizer):
    sampler = LookupSampler(tiny_tokenizer)
    result = run(sampler)
    right = sum(seed % 2 == 0 for _, seed in sampler.asked)
    assert 0 < right < 18
    assert (result.num_problems, result.num_samples, result.total_solutions) == (6, 3, 18)
    assert result.total_correct == right
    assert result.average_at_n_pct == pytest.approx(100 * right / 18)
    assert result.format_rate_pct == pytest.approx(100 * right / 18)
    assert result.no_answer_rate_pct == result.truncation_rate_pct == pytest.approx(100 * (18 - right) / 18)
    assert result.contains_rate_pct == 100
    assert result.majority_answer_pct == pytest.approx(100 / 6)
    assert (result.benchmark, result.metric, result.data_parallel_size) == ("sums/heldout", "avg@3", 1)
    assert [row.cluster for row in result.results] == ["0", "0", "1", "1", "2", "2"]
    assert result.results[0].answers.count("0") == sum(result.results[0].correct)
    assert result == load_result(tmp_path / "eval") == load_result(tmp_path / "eval" / "result.json")


def test_completions_are_kept_as_ids_and_text_without_the_stop_token(run, tmp_path):
    run()
    for line in lines(tmp_path / "eval"):
        stopped = line["finish_reason"] == "stop"
        assert (line["ids"][-1] == 2) == stopped
        assert ("<|im_end|>" in line["text"]) is False


def test_seeds_depend_on_problem_and_sample_alone(run, tmp_path):
    run(folder="a")
    run(folder="b", problems=PROBLEMS[::-1], batch_size=1)
    run(folder="c", seed=99)
    a, b, c = (
        {(line["problem_id"], line["sample"]): line["seed"] for line in lines(tmp_path / name)} for name in "abc"
    )
    assert a == b
    assert len(set(a.values())) == len(a)
    assert not set(a.values()) & set(c.values())
    assert a["p0", 0] == 9123436230614922195  # stable across machines and versions: a published seed means something


def test_teacher_view_shows_the_context(run, tiny_tokenizer):
    student, teacher = LookupSampler(tiny_tokenizer), LookupSampler(tiny_tokenizer)
    run(student, folder="student")
    result = run(teacher, folder="teacher", view="teacher")
    assert not any("It is 4." in text for text, _ in student.asked)
    assert any("It is 4." in text for text, _ in teacher.asked)
    assert result.frozen_settings["view"] == "teacher"


def test_student_view_needs_no_solutions(run):
    bare = [Problem(p.id, p.problem, answer=p.answer) for p in PROBLEMS]
    assert run(problems=bare).num_problems == 6
    with pytest.raises(OpdError, match="has no solution"):
        run(problems=bare, folder="teacher", view="teacher")


def test_prompt_that_opens_the_thinking_is_noticed(run, tiny_tokenizer, monkeypatch):
    template = tiny_tokenizer.chat_template.replace("assistant\n' }}", "assistant\n<think>\n' }}")
    assert template != tiny_tokenizer.chat_template
    monkeypatch.setattr(tiny_tokenizer, "chat_template", template)
    thinking = Renderer(PromptConfig(), ContextConfig(), tiny_tokenizer, tiny_tokenizer, PROBLEMS, 0)
    result = run(renderer=thinking)
    assert result.no_answer_rate_pct == 100  # the boxes are inside a thinking part that never ends


def test_problems_without_answers_are_refused(run):
    with pytest.raises(OpdError, match="cannot be graded"):
        run(problems=[*PROBLEMS, Problem("q", "What is 9 + 9?", solution="18")])


def test_long_prompts_are_refused_or_dropped_and_counted(run, tiny_tokenizer, tmp_path):
    long = Problem("long", "What is 7 + 7? " + "Think. " * 200, solution="14", answer="14")
    prompt = PromptConfig(max_student_prompt_tokens=200)
    renderer = Renderer(prompt, ContextConfig(), tiny_tokenizer, tiny_tokenizer, PROBLEMS, 0)
    with pytest.raises(OpdError, match="too long"):
        run(problems=[*PROBLEMS, long], renderer=renderer)
    sampler = LookupSampler(tiny_tokenizer)
    result = evaluate_with(
        sampler,
        tiny_tokenizer,
        renderer,
        [*PROBLEMS, long],
        config(),
        tmp_path / "dropping",
        checkpoint=BASE,
        on_long_prompt="drop",
        show_progress=False,
    )
    assert result.num_dropped == {"the student's prompt is too long": 1}
    assert result.num_problems == 6


# ---- interruption --------------------------------------------------------------------------------------------------


def test_a_killed_run_goes_on_where_it_stopped(run, tmp_path, tiny_tokenizer, capsys):
    whole = run(folder="whole")
    with pytest.raises(Killed):
        run(LookupSampler(tiny_tokenizer, kill_after=2))
    assert len(lines(tmp_path / "eval")) == 8
    with pytest.raises(OpdError, match="not finished"):
        regrade(tmp_path / "eval")
    rest = LookupSampler(tiny_tokenizer)
    result = run(rest)
    assert len(rest.asked) == 10
    assert result.results == whole.results
    assert any("8 of 18 samples" in note for note in result.notes)
    assert "8 of 18 samples" in capsys.readouterr().err


def test_a_torn_last_line_is_dropped_sampled_again_and_said(run, tmp_path, tiny_tokenizer, capsys):
    whole = run()
    path = tmp_path / "eval" / "samples.jsonl"
    content = path.read_bytes()
    path.write_bytes(content[:-40])
    rest = LookupSampler(tiny_tokenizer)
    result = run(rest)
    assert len(rest.asked) == 1
    assert result.results == whole.results
    assert any("torn" in note for note in result.notes)
    assert "torn" in capsys.readouterr().err
    assert path.read_bytes() == content


def test_a_last_line_that_lacks_only_its_end_is_torn_too(run, tmp_path, tiny_tokenizer):
    run()
    path = tmp_path / "eval" / "samples.jsonl"
    path.write_bytes(path.read_bytes()[:-1])
    rest = LookupSampler(tiny_tokenizer)
    run(rest)
    assert len(rest.asked) == 1
    assert len(lines(tmp_path / "eval")) == 18


def test_a_broken_line_in_the_middle_is_an_error_that_names_it(run, tmp_path):
    run()
    path = tmp_path / "eval" / "samples.jsonl"
    broken = path.read_text().splitlines(keepends=True)
    broken[4] = broken[4][:30] + "\n"
    path.write_text("".join(broken))
    with pytest.raises(OpdError, match="line 5 of"):
        run()


def test_samples_with_another_settings_hash_are_not_reused(run, tmp_path):
    run()
    path = tmp_path / "eval" / "samples.jsonl"
    key = lines(tmp_path / "eval")[0]["key"]
    other = key[::-1]
    assert other != key
    path.write_text(path.read_text().replace(key, other, 1))
    with pytest.raises(OpdError, match="line 1 of") as caught:
        run()
    assert "other settings" in caught.value.why
    with pytest.raises(OpdError, match="line 1 of"):
        regrade(tmp_path / "eval")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"seed": 2}, "seed"),
        ({"num_samples": 4}, "num_samples"),
        ({"sampling": SamplingConfig(max_new_tokens=32, temperature=0.5)}, "temperature"),
        ({"checkpoint": TRAINED}, "checkpoint"),
        ({"view": "teacher"}, "view"),
        ({"problems": PROBLEMS[:5]}, "problems"),
    ],
)
def test_a_folder_of_another_evaluation_is_refused(run, changes, named):
    run()
    with pytest.raises(OpdError, match="another evaluation") as caught:
        run(**changes)
    assert named in caught.value.why


def test_a_training_runs_folder_is_left_alone(run, tmp_path):
    folder = tmp_path / "train"
    folder.mkdir()
    (folder / "samples.jsonl").write_text('{"step": 1}\n{"torn')
    with pytest.raises(OpdError, match="not of an evaluation"):
        run(folder="train")
    assert [path.name for path in folder.iterdir()] == ["samples.jsonl"]
    assert (folder / "samples.jsonl").read_text() == '{"step": 1}\n{"torn'


def test_a_folder_that_cannot_be_made_is_named(run, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OpdError, match="there can be no evaluation"):
        run(folder="file/inside")


def test_batch_size_is_no_setting(run, tiny_tokenizer):
    run()
    again = LookupSampler(tiny_tokenizer)
    run(again, batch_size=1)
    assert again.asked == []


def test_grading_is_repeated_from_the_samples_alone(run, tmp_path):
    result = run()
    (tmp_path / "eval" / "result.json").unlink()
    assert regrade(tmp_path / "eval") == result == load_result(tmp_path / "eval")


# ---- reading results back ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda r: r["results"].pop(), "num_problems"),
        (lambda r: r.update(total_correct=r["total_correct"] + 1), "total_correct"),
        (lambda r: r["frozen_settings"].update(seed=7), "settings_hash"),
        (lambda r: r["results"][0]["correct"].reverse(), "disagree"),
        (lambda r: r.update(surprise=1), "surprise"),
        (lambda r: r.pop("benchmark"), "benchmark"),
    ],
)
def test_a_result_changed_by_hand_is_refused(run, tmp_path, tiny_tokenizer, change, why):
    run(LookupSampler(tiny_tokenizer, every=3))
    path = tmp_path / "eval" / "result.json"
    fields = json.loads(path.read_text())
    fields["results"].sort(key=lambda row: row["correct"] == row["correct"][::-1])  # first one that is no palindrome
    change(fields)
    path.write_text(json.dumps(fields))
    with pytest.raises(OpdError, match="not a whole evaluation result") as caught:
        load_result(path)
    assert why in caught.value.why


def test_a_missing_result_is_named(tmp_path):
    with pytest.raises(OpdError, match="cannot read the result"):
        load_result(tmp_path)


# ---- comparing -----------------------------------------------------------------------------------------------------


@pytest.fixture
def before_after(run, tiny_tokenizer):
    before = run(LookupSampler(tiny_tokenizer, every=10**6), folder="before")
    after = run(LookupSampler(tiny_tokenizer, every=1), folder="after", checkpoint=TRAINED)
    return before, after


def test_better_is_said_and_clusters_are_counted(before_after):
    compared = compare_results(*before_after)
    assert compared.comparison.difference == 1
    assert (compared.comparison.num_problems, compared.comparison.num_clusters) == (6, 3)
    assert "better" in compared.verdict
    assert compared.warnings == ()
    assert compare_results(*before_after, metric="contains").comparison.difference == 0


def test_same_weights_are_warned_about(before_after):
    compared = compare_results(before_after[0], before_after[0])
    assert any("same weights" in warning for warning in compared.warnings)
    assert compared.comparison.p_value == 1
    assert "No difference" in compared.verdict


def test_picked_checkpoints_are_warned_about(run, before_after):
    picked = run(folder="picked", checkpoint=TRAINED.model_copy(update={"picked_by": "sums/heldout"}))
    elsewhere = run(folder="elsewhere", checkpoint=TRAINED.model_copy(update={"picked_by": "gsm8k"}))
    assert any("picked by this same benchmark" in text for text in compare_results(before_after[0], picked).warnings)
    assert compare_results(before_after[0], elsewhere).warnings == ()


def test_different_settings_are_refused_unless_allowed(run, before_after):
    hot = run(folder="hot", sampling=SamplingConfig(max_new_tokens=32, temperature=0.5), checkpoint=TRAINED)
    with pytest.raises(OpdError, match="different settings") as caught:
        compare_results(before_after[0], hot)
    assert "sampling.temperature: 1.0 against 0.5" in caught.value.why
    allowed = compare_results(before_after[0], hot, allow_different_settings=True)
    assert any("temperature" in warning for warning in allowed.warnings)


def test_different_prompts_are_different_settings(run, before_after, tiny_tokenizer):
    template = (MessageTemplate(role="user", content="Please: {{ problem }}"),)
    renderer = Renderer(PromptConfig(student=template), ContextConfig(), tiny_tokenizer, tiny_tokenizer, PROBLEMS, 0)
    polite = run(folder="polite", renderer=renderer, checkpoint=TRAINED)
    with pytest.raises(OpdError, match="different settings") as caught:
        compare_results(before_after[0], polite)
    assert "6 of 6 shared problems" in caught.value.why


def test_shared_problems_are_compared_and_strangers_refused(run, before_after):
    part = run(folder="part", problems=PROBLEMS[:4], checkpoint=TRAINED)
    compared = compare_results(before_after[0], part)
    assert compared.comparison.num_problems == 4
    assert any("different problems" in warning for warning in compared.warnings)
    strangers = [Problem(f"q{p.id}", p.problem, p.solution, p.answer) for p in PROBLEMS]
    with pytest.raises(OpdError, match="no problem in common"):
        compare_results(before_after[0], run(folder="strangers", problems=strangers))
    relabelled = [Problem(p.id, p.problem, p.solution, "77") for p in PROBLEMS]
    with pytest.raises(OpdError, match="not of the same problems"):
        compare_results(before_after[0], run(folder="relabelled", problems=relabelled))


def test_compare_command(before_after, tmp_path):
    from opd.cli import app

    shown = CliRunner().invoke(app, ["compare", str(tmp_path / "before"), str(tmp_path / "after")])
    assert shown.exit_code == 0, shown.output
    assert "+100.0" in shown.output
    assert "B is better than A" in shown.output
    printed = CliRunner().invoke(app, ["compare", str(tmp_path / "before"), str(tmp_path / "after"), "--json"])
    fields = json.loads(printed.output)
    assert fields["difference"] == 1
    assert fields["minimum_detectable"] is None  # every sample was the same: no spread to judge the design by
    assert (fields["metric"], fields["num_clusters"], fields["warnings"]) == ("correct", 3, [])


# ---- a real model --------------------------------------------------------------------------------------------------


def test_evaluate_loads_samples_and_grades_a_real_model(tiny_model_folder, tmp_path):
    task = config(
        data=TaskSource(name="task", task="products", split="heldout", num_problems=3),
        num_samples=2,
        sampling=SamplingConfig(max_new_tokens=6),
    )
    result = evaluate(str(tiny_model_folder), task, folder=tmp_path / "a", device="cpu", show_progress=False)
    again = evaluate(str(tiny_model_folder), task, folder=tmp_path / "b", device="cpu", show_progress=False)
    assert (result.num_problems, result.checkpoint_kind) == (3, "base")
    assert 0 < result.mean_tokens <= 6
    assert [line["ids"] for line in lines(tmp_path / "a")] == [line["ids"] for line in lines(tmp_path / "b")]
    assert result == again


def test_a_missing_adapter_is_an_error_not_the_base_model(tiny_model_folder, tmp_path):
    with pytest.raises(OpdError, match="cannot load the adapter"):
        evaluate(
            str(tiny_model_folder),
            config(data=TaskSource(name="task", task="products", split="heldout", num_problems=3)),
            folder=tmp_path / "eval",
            adapter=tmp_path / "nowhere",
            device="cpu",
            show_progress=False,
        )
    assert not (tmp_path / "eval").exists()
