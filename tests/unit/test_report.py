"""The page of a run: whole, honest about what is missing, and safe whatever a model wrote."""

from __future__ import annotations

import base64
import json
import math
import random
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from opd.config.load import load_recipe
from opd.diagnose.curves import demo_picture
from opd.diagnose.figures import Line, curve_svg, running_mean
from opd.diagnose.report import write_report
from opd.diagnose.transcripts import visible
from opd.errors import OpdError
from opd.eval.result import Checkpoint
from opd.eval.samples import Manifest, Question, Sample
from opd.eval.score import score
from opd.eval.verdict import compare_results
from opd.log import RunLog, write_json
from opd.types import StepRecord

EVIL = (
    '</pre><script>alert(1)</script><img src="http://evil.example/x.png" onerror=alert(2)>{{ 7*7 }}&amp;$x$\u202e\u2028'
)
VOID = {"meta", "br", "img", "link", "input", "hr"}
RECIPE: dict[str, Any] = {
    "name": "products",
    "student": {"model": "tiny"},
    "context": {"name": "reference_solution", "num_demonstrations": 3},
    "data": {"train": {"name": "task", "task": "products"}},
    "rollout": {"max_new_tokens": 24},
    "train": {"num_steps": 12, "num_problems_per_step": 12, "learning_rate": 1e-3},
    "eval": {"data": {"name": "task", "task": "products", "split": "heldout"}},
}


# ---- a run folder, written with the code that writes real ones -------------------------------------------------------


def build_run(folder: Path, *, num_steps: int = 12, completion: str = "8 * 3 = \\boxed{24}<|im_end|>") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    load_recipe(RECIPE, [f"train.num_steps={num_steps}"]).write(folder / "resolved.yaml")
    environment = {
        "command": "opd train recipes/demo.yaml",
        "python": "3.11.9",
        "cuda": [],
        "versions": {"torch": "2.13.0", "peft": None},
    }
    write_json(folder / "environment.json", environment)
    log = RunLog(folder, from_step=0)
    for step in range(1, num_steps + 1):
        log.write(_step(step, completion))
    check = {"name": "positions", "figure": 0.0004, "tolerance": 0.01, "status": "pass", "detail": "KL", "advice": ""}
    warned = {**check, "name": "signal", "status": "warn", "figure": "weak", "tolerance": None, "advice": "look"}
    write_json(folder / "doctor.json", {"summary": "doctor: 1 passed", "checks": [check, warned]})
    arms = {"before": 0.05, "after": 0.7, "teacher": 0.55, "placebo": 0.3}
    for number, (arm, chance) in enumerate(arms.items()):
        build_arm(folder / "eval" / arm, chance, number, view="teacher" if arm == "teacher" else "student")
    return folder


def _step(step: int, completion: str) -> StepRecord:
    loss = 0.3 / step**0.5
    metrics = {"unclipped": loss, "forward_kl": loss, "entropy_student": 0.6 + 0.5 / step, "entropy_teacher": math.nan}
    sample = {
        "problem": "products:8*3",
        "prompt": "<|im_start|>user\nWhat is 8 * 3?<|im_end|>\n<|im_start|>assistant\n",
        "completion": completion,
        "completion_ids": [3, 4, 5],
        "finish_reason": "stop",
        "policy_version": step - 1,
    }
    return StepRecord(
        step=step, loss=loss, metrics=metrics, num_completions=12, num_supervised_tokens=200, num_sampled_tokens=200,
        num_prompt_tokens=500, num_truncated=2, grad_norm=0.6, learning_rate=1e-3 * min(1, step / 4), skipped=step == 3,
        rollout_s=5.4, teacher_s=2.5, update_s=5.8, samples=(sample, sample),
    )  # fmt: skip


def build_arm(folder: Path, chance: float, seed: int, *, view: str = "student", num_problems: int = 24) -> None:
    rng = random.Random(seed)
    factors = [(2 + i % 5, 3 + i // 5) for i in range(num_problems)]
    questions = [
        Question(
            id=f"products:{a}*{b}",
            cluster=f"{min(a, b)}*{max(a, b)}",
            problem=f"What is {a} * {b}?",
            answer=str(a * b),
            prompt=f"<|im_start|>user\n{view}: What is {a} * {b}?<|im_end|>\n",
            starts_thinking=False,
        )
        for a, b in factors
    ]
    checkpoint = Checkpoint(path="tiny", kind="base", fingerprint=str(seed))
    settings = {"view": view, "num_samples": 2, "seed": 0}
    manifest = Manifest(
        benchmark="products/heldout", settings=settings, checkpoint=checkpoint, num_samples=2, seed=0,
        data_parallel_size=1, num_dropped={}, questions=tuple(questions),
    )  # fmt: skip
    samples: dict[tuple[str, int], Sample] = {}
    for question, (a, b) in zip(questions, factors, strict=True):
        for index in range(2):
            right, number = rng.random() < chance, a * b
            text = (
                f"{a} * {b} = \\boxed{{{number if right else number + 1}}}" if rng.random() < chance + 0.2 else "Hm.\n"
            )
            reason = "stop" if rng.random() < 0.9 else "length"
            samples[question.id, index] = Sample(
                key=manifest.key, problem_id=question.id, sample=index, seed=index, finish_reason=reason, text=text,
                ids=(5, 6),
            )  # fmt: skip
    folder.mkdir(parents=True)
    write_json(folder / "manifest.json", manifest.model_dump(mode="json"))
    (folder / "samples.jsonl").write_text("".join(f"{sample.model_dump_json()}\n" for sample in samples.values()))
    score(manifest, samples).save(folder / "result.json")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_run(tmp_path_factory.mktemp("runs") / "products")


@pytest.fixture(scope="module")
def page(run: Path) -> str:
    return write_report(run).read_text()


class Page(HTMLParser):
    """Tags that open and close in order, all attributes, and the text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.faults: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.text = ""
        self.feed(text)
        self.close()
        self.faults += self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.faults.append(f"</{tag}> at {self.getpos()}")

    def handle_data(self, data: str) -> None:
        self.text += data


# ---- the whole page --------------------------------------------------------------------------------------------------


def test_the_page_is_well_formed_with_unique_ids(page: str) -> None:
    parsed = Page(page)
    assert parsed.faults == []
    ids = [value for _, name, value in parsed.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    links = [value[1:] for _, name, value in parsed.attributes if name == "href" and value.startswith("#")]
    assert set(links) <= set(ids)
    assert set(re.findall(r"url\(#([^)]+)\)", page)) <= set(ids)


def test_the_page_loads_nothing_and_runs_nothing(page: str) -> None:
    parsed = Page(page)
    tags = {tag for tag, _, _ in parsed.attributes} | set(re.findall(r"<(\w+)", page))
    assert not tags & {"script", "img", "link", "iframe", "object", "embed", "base", "form"}
    for _, name, value in parsed.attributes:
        assert not name.startswith("on")
        if name in {"src", "href", "xlink:href", "srcset", "action", "poster", "data"}:
            assert value.startswith(("#", "data:application/json;base64,"))
    assert not re.search(r"https?:|@import|url\((?!#)", page)


def test_the_verdict_is_the_comparison_of_the_results(run: Path, page: str) -> None:
    from opd.eval.result import load_result

    before, after = load_result(run / "eval" / "before"), load_result(run / "eval" / "after")
    numbers = compare_results(before, after).comparison
    text = Page(page).text
    assert f"{100 * numbers.avg_a:.1f}%" in text
    assert (
        f"{100 * numbers.difference:+.1f} points, 95% interval {100 * numbers.low:+.1f} to {100 * numbers.high:+.1f}"
        in (text.replace("\u2212", "-"))
    )
    assert "no difference shown" not in text
    assert "24 problems \u00d7 2 samples of products/heldout" in text
    assert "2 min 44 s of training" in text  # 12 x (5.4 + 2.5 + 5.8) s


def test_controls_are_named_with_what_they_gained(run: Path, page: str) -> None:
    from opd.eval.result import load_result

    results = [load_result(run / "eval" / arm) for arm in ("before", "placebo")]
    gain = compare_results(results[0], results[1]).comparison
    row = next(row for row in re.findall(r"<tr>.*?</tr>", page) if "control: placebo" in row)
    cells = " ".join(Page(row.replace("</td>", " </td>")).text.replace("\u2212", "-").split())
    assert f"{100 * gain.difference:+.1f} {100 * gain.low:+.1f} to {100 * gain.high:+.1f}" in cells
    assert "another problem's solution (placebo)" in Page(page).text


def test_no_difference_is_called_that(tmp_path: Path) -> None:
    folder = build_run(tmp_path / "run")
    for name in ("manifest.json", "samples.jsonl", "result.json"):
        (folder / "eval" / "after" / name).write_bytes((folder / "eval" / "before" / name).read_bytes())
    text = Page(write_report(folder).read_text()).text
    assert text.count("no difference shown") == 2
    assert "both results are of the same weights" in text


def test_every_figure_is_there_and_missing_values_leave_gaps(page: str) -> None:
    labels = [value for tag, name, value in Page(page).attributes if tag == "svg" and name == "aria-label"]
    for title in (
        "Loss",
        "Entropy",
        "Gradient norm",
        "Learning rate",
        "Speed",
        "Completion length",
        "Seconds of each step",
    ):
        assert any(label.startswith(title) for label in labels), title
    assert sum(label.startswith("student before: ") for label in labels) == 2
    text = Page(page).text
    assert "sampling 39%" in text
    assert "teacher 18%" in text
    # All of the teacher's entropies are missing: no curve of zeros stands for them.
    entropy = page[page.index('aria-label="Entropy') :].split("</svg>")[0]
    assert "student" not in Page(entropy).text
    assert "was skipped at step 3" in text


def test_recipe_doctor_environment_and_command_are_shown(page: str) -> None:
    text = Page(page).text
    assert "KL(p‖q)" in text
    assert "reference solution + 3 solved examples" in text
    assert "opd train recipes/demo.yaml" in text
    assert "num_problems_per_step: 12" in text
    assert "✓ pass" in text
    assert "! warn" in text
    assert re.search(r"peft\s*not installed", text)


def test_pairs_come_in_order_and_are_counted(run: Path, page: str) -> None:
    from opd.eval.result import load_result

    before, after = (load_result(run / "eval" / arm).results for arm in ("before", "after"))
    won = sum(not a.correct[0] and b.correct[0] for a, b in zip(before, after, strict=True))
    text = Page(page).text
    assert f"{won} wrong → right" in text
    questions = re.findall(r"<h3>What is (\d+ \* \d+)\?", page)
    assert questions == [f"{2 + i % 5} * {3 + i // 5}" for i in range(24)]
    assert "18 more" in text


def test_the_download_holds_the_figures(run: Path, page: str) -> None:
    data = next(v for _, name, v in Page(page).attributes if name == "href" and v.startswith("data:"))
    value = json.loads(base64.b64decode(data.split(",", 1)[1]))
    assert [row["step"] for row in value["steps"]] == list(range(1, 13))
    assert value["evaluations"]["before"]["num_problems"] == 24
    assert value["recipe"]["train"]["num_steps"] == 12
    assert value["changes"][0]["title"] == "Correct in the box"


def test_the_same_run_gives_the_same_page(run: Path, page: str, tmp_path: Path) -> None:
    assert write_report(run, tmp_path / "again.html").read_text() == page


# ---- untrusted text --------------------------------------------------------------------------------------------------


def test_a_malicious_completion_stays_text(tmp_path: Path) -> None:
    folder = build_run(tmp_path / "run", completion=EVIL)
    for arm in ("before", "after"):
        lines = (folder / "eval" / arm / "samples.jsonl").read_text().splitlines()
        evil = [json.dumps({**json.loads(line), "text": EVIL}, ensure_ascii=False) for line in lines]
        (folder / "eval" / arm / "samples.jsonl").write_text("\n".join(evil) + "\n")
    page = write_report(folder).read_text()
    test_the_page_is_well_formed_with_unique_ids(page)
    parsed = Page(page)
    assert not {"script", "img"} & {tag for tag, _, _ in parsed.attributes}
    assert "<script" not in page
    assert "alert(1)" in parsed.text
    assert "{{ 7*7 }}&amp;$x$" in parsed.text
    assert "\u202e" not in page
    assert "U+202EU+2028" in parsed.text


def test_names_are_escaped_too(tmp_path: Path) -> None:
    folder = build_run(tmp_path / "run")
    load_recipe(RECIPE, ["name='<b>$a$</b>'", "folder=null"]).write(folder / "resolved.yaml")
    (folder / "eval" / "teacher").rename(folder / "eval" / "x<i>$y_")
    write_json(folder / "environment.json", {"command": EVIL, "versions": {EVIL: EVIL}})
    page = write_report(folder).read_text()
    test_the_page_is_well_formed_with_unique_ids(page)
    assert "<h1>&lt;b&gt;" in page
    assert "x&lt;i&gt;$y_" in page


def test_special_tokens_and_line_ends_are_visible() -> None:
    shown = visible("a<b\n<|im_end|></s><think>\t\u00a0")
    assert "a&lt;b" in shown
    assert '<i class="mark">↵</i>\n' in shown
    for token in ("&lt;|im_end|&gt;", "&lt;/s&gt;", "&lt;think&gt;"):
        assert f'<b class="special">{token}</b>' in shown
    assert "U+00A0" in shown


# ---- missing pieces --------------------------------------------------------------------------------------------------


def test_what_is_missing_is_named_with_its_command(tmp_path: Path) -> None:
    folder = tmp_path / "a run"
    folder.mkdir()
    load_recipe(RECIPE).write(folder / "resolved.yaml")
    page = write_report(folder).read_text()
    parsed = Page(page)
    assert parsed.faults == []
    for name in ("steps.jsonl", "samples.jsonl", "doctor.json", "environment.json", "eval/before", "eval/after"):
        assert f"{name} is missing" in parsed.text
    assert f"opd eval '{folder}/resolved.yaml' --adapter '{folder}/final' --out '{folder}/eval/after'" in parsed.text
    assert f"opd doctor '{folder}/resolved.yaml' --out '{folder}'" in parsed.text
    assert "<svg" not in page
    assert "No verdict yet" in parsed.text


@pytest.mark.parametrize(
    "gone",
    [
        ("resolved.yaml", "doctor.json", "eval/before"),
        ("environment.json", "samples.jsonl", "eval/after"),
    ],
)
def test_any_piece_may_be_missing(tmp_path: Path, gone: tuple[str, ...]) -> None:
    folder = build_run(tmp_path / "run", num_steps=2)
    for number, name in enumerate(gone):
        (folder / name).rename(tmp_path / f"gone-{number}")
    parsed = Page(write_report(folder).read_text())
    assert parsed.faults == []
    assert set(re.findall(r"(\S+) is missing", parsed.text)) == set(gone)
    assert "Gradient norm" in parsed.text


def test_scores_without_their_samples_are_scores_all_the_same(tmp_path: Path) -> None:
    folder = build_run(tmp_path / "run", num_steps=2)
    (folder / "eval" / "after" / "samples.jsonl").unlink()
    text = Page(write_report(folder).read_text()).text
    assert "The scores are there, their samples are not" in text
    assert "on held-out problems" in text


def test_a_verdict_file_stands_in_for_missing_evaluations(tmp_path: Path) -> None:
    folder = build_run(tmp_path / "run", num_steps=2)
    (folder / "eval").rename(tmp_path / "gone")
    write_json(folder / "verdict.json", {"before": 0.25, "after": 0.5, "num_problems": 31})
    text = Page(write_report(folder).read_text()).text
    assert "before 0.25, after 0.5, num_problems 31" in " ".join(text.split())


def test_a_torn_last_line_is_named_and_a_broken_one_refused(tmp_path: Path) -> None:
    folder = build_run(tmp_path / "run", num_steps=3)
    steps = folder / "steps.jsonl"
    whole = steps.read_text()
    steps.write_text(whole + '{"step": 4, "lo')
    assert "the last line of steps.jsonl is torn" in write_report(folder).read_text()
    steps.write_text("{broken\n" + whole)
    with pytest.raises(OpdError, match=r"steps\.jsonl is damaged"):
        write_report(folder)


def test_a_line_torn_within_a_character_is_left_out(tmp_path: Path) -> None:
    folder = build_run(tmp_path / "run", num_steps=3)
    with (folder / "samples.jsonl").open("ab") as file:
        file.write('{"step": 9, "completion": "é'.encode()[:-1])
    assert "the last line of samples.jsonl is torn" in write_report(folder).read_text()


def test_a_recipe_of_another_version_is_shown_as_text(tmp_path: Path) -> None:
    folder = build_run(tmp_path / "run", num_steps=2)
    (folder / "resolved.yaml").write_text("name: old\nbeta: 3\n")
    text = Page(write_report(folder).read_text()).text
    assert "cannot be read by this version" in text
    assert "beta: 3" in text


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OpdError, match="is not a run"):
        write_report(tmp_path)
    with pytest.raises(OpdError, match="is not a run"):
        write_report(tmp_path / "nowhere")
    assert list(tmp_path.iterdir()) == []


# ---- pictures and the command ----------------------------------------------------------------------------------------


def test_the_demo_picture_is_one_svg_for_light_and_dark(run: Path, tmp_path: Path) -> None:
    path = demo_picture(run, tmp_path / "demo.svg")
    text = path.read_text()
    root = ElementTree.fromstring(text)
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert "prefers-color-scheme: dark" in text
    words = {"".join(element.itertext()).strip() for element in root.iter("{http://www.w3.org/2000/svg}text")}
    assert {"student before", "student after", "teacher", "control: placebo"} <= words
    assert "#01" not in text, "a placeholder colour is left"
    assert demo_picture(run, tmp_path / "again.svg").read_text() == text


def test_the_demo_picture_names_what_is_missing(tmp_path: Path) -> None:
    folder = build_run(tmp_path / "run", num_steps=2)
    (folder / "eval" / "after").rename(tmp_path / "gone")
    with pytest.raises(OpdError, match="is not enough for the picture"):
        demo_picture(folder, tmp_path / "demo.svg")


def test_long_runs_are_smoothed_and_gaps_stay_gaps() -> None:
    assert running_mean([1.0, math.nan, 3.0, 5.0], 2)[1:] == [1.0, 3.0, 4.0]
    assert math.isnan(running_mean([math.nan], 3)[0])
    steps = list(range(60))
    once = curve_svg(steps[:20], [Line("a", [1.0] * 20)], title="t", unit="u", prefix="p")
    long = curve_svg(steps, [Line("a", [1.0] * 60)], title="t", unit="u", prefix="p")
    assert long.count("stroke: var(--blue)") == 2, "the values and their running mean, without a marker for each step"
    assert "opacity: 0.3" in long
    assert "opacity: 0.3" not in once


def test_the_command_prints_the_page(run: Path, tmp_path: Path) -> None:
    import typer

    from opd.cli.report import report

    app = typer.Typer()
    app.command()(report)
    out = tmp_path / "page.html"
    result = CliRunner().invoke(app, [str(run), "--out", str(out)])
    assert result.exit_code == 0
    assert result.output.strip() == str(out)
    assert out.read_text().startswith("<!doctype html>")
