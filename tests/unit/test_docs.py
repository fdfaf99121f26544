"""The documentation is true: commands parse, snippets load, programs print what stands below them, names exist."""

from __future__ import annotations

import ast
import contextlib
import io
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer.main
import yaml

from opd.cli import app
from opd.config.check import check
from opd.config.load import find_recipe, load_recipe
from opd.config.schema import FileSource, Recipe
from opd.config.shape import all_keys
from opd.errors import OpdError
from script_modules import imported

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))

BASE = """
name: base
student: {model: package:smollm2-135m-instruct}
data: {train: {name: file, path: problems.jsonl}}
train: {num_steps: 20, num_problems_per_step: 8, learning_rate: 1e-3}
"""


def fences(*kinds: str) -> list[Any]:
    """(page, text) of every code block whose language is one of these, as pytest parameters."""
    found: list[Any] = []
    for page in PAGES:
        for match in re.finditer(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL):
            if match[1] in kinds:
                line = page.read_text()[: match.start()].count("\n") + 1
                found.append(pytest.param(page, match[2], id=f"{page.name}:{line}"))
    return found


def command_lines(text: str) -> Iterator[list[str]]:
    """The words of every line of a block, without comments."""
    for line in text.splitlines():
        words = shlex.split(line, comments=True)
        if words:
            yield words


# ---- the generated page --------------------------------------------------------------------------------------------


@pytest.fixture
def script() -> Iterator[ModuleType]:
    with imported("docs_options") as module:
        yield module


def test_the_page_of_options_is_up_to_date(script: ModuleType) -> None:
    assert script.PAGE.read_text(encoding="utf-8") == script.page(), "run python scripts/docs_options.py"


def test_every_key_of_the_schema_is_on_it() -> None:
    text = (DOCS / "options.md").read_text()
    sections = {key.rsplit(".", 1)[0] for key in all_keys() if "." in key}
    for key in all_keys():
        named = f"`{key}`" in text or (key.endswith(".name") and f"`{key.removesuffix('.name')}`" in text)
        elsewhere = key.startswith(("eval.data", "eval.sampling", "loss.mask.student_entropy"))  # "Also at"
        assert named or elsewhere or key in sections, key


def test_an_option_without_a_meaning_is_an_error(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(script.MEANINGS, "TrainConfig.num_steps")
    with pytest.raises(ValueError, match=r"TrainConfig\.num_steps has no meaning"):
        script.page()
    monkeypatch.setitem(script.MEANINGS, "TrainConfig.num_steps", "Steps.")
    monkeypatch.setitem(script.MEANINGS, "TrainConfig.gone", "Was here once.")
    with pytest.raises(ValueError, match=r"TrainConfig\.gone"):
        script.page()


# ---- commands ------------------------------------------------------------------------------------------------------


def parse(words: list[str]) -> dict[str, Any]:
    """Parse `opd ...` as the command line would, without running it."""
    command: Any = typer.main.get_command(app)
    rest = words[1:]
    while hasattr(command, "commands"):
        name, *rest = rest
        assert name in command.commands, f"no such command: {name}"
        command = command.commands[name]
    return command.make_context(words[-1], rest).params


@pytest.mark.parametrize(("page", "text"), fences(""))
def test_commands_parse_and_their_overrides_are_options(page: Path, text: str) -> None:
    for words in command_lines(text):
        if words[0] == "accelerate":
            words = words[words.index("-m") + 1 :]
        if words[0] == "make":
            targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
            assert words[1] in targets, words
            continue
        assert words[0] == "opd", f"{page.name}: {words} is no command of this project"
        if ">" in words:
            words = words[: words.index(">")]
        params = parse(words)
        if params.get("recipe") is not None:
            check(load_recipe(params["recipe"], params.get("overrides") or ()).recipe)


@pytest.mark.parametrize("words", [["opd", "trian"], ["opd", "train", "demo", "--resum"], ["opd", "compare", "one"]])
def test_commands_that_do_not_exist_are_noticed(words: list[str]) -> None:
    with pytest.raises(Exception, match=r"(?i)no such|missing"):
        parse(words)


# ---- snippets ------------------------------------------------------------------------------------------------------


def load_layer(text: str, folder: Path) -> Recipe:
    """A snippet as a layer over a small recipe; what it extends itself stays."""
    (folder / "base.yaml").write_text(BASE)
    extends = "" if "extends:" in text else "extends: base.yaml\n"
    (folder / "snippet.yaml").write_text(extends + text)
    return load_recipe(folder / "snippet.yaml").recipe


@pytest.mark.parametrize(("page", "text"), fences("yaml"))
def test_recipe_snippets_load_and_make_sense(page: Path, text: str, tmp_path: Path) -> None:
    assert yaml.safe_load(text), page
    check(load_layer(text, tmp_path))


def test_a_snippet_with_an_unknown_key_is_noticed(tmp_path: Path) -> None:
    with pytest.raises(OpdError, match="unknown key"):
        load_layer("train: {num_stps: 3}\n", tmp_path)


def test_the_smallest_recipe_is_whole(tmp_path: Path) -> None:
    (smallest,) = re.findall(r"```yaml\n(name: first\n.*?)```", (DOCS / "recipes.md").read_text(), re.DOTALL)[:1]
    (tmp_path / "first.yaml").write_text(smallest)
    assert check(load_recipe(tmp_path / "first.yaml").recipe) == []


@pytest.mark.parametrize(("page", "text"), fences("jsonl"))
def test_rows_are_good_rows(page: Path, text: str, tmp_path: Path) -> None:
    from opd.data import load_problems

    (tmp_path / "rows.jsonl").write_text(text)
    found = load_problems(FileSource(name="file", path=tmp_path / "rows.jsonl"))
    assert all(problem.answer and problem.solution for problem in found.problems), page


@pytest.mark.parametrize(("page", "text"), fences("python"))
def test_programs_run_and_print_what_stands_below_them(page: Path, text: str) -> None:
    printed = io.StringIO()
    code = compile(text, str(page), "exec")
    if "opd.train(" in text:  # loads a model: its names and its recipe are looked at instead
        assert names_exist(text)
        (call,) = (
            node
            for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.Call) and "train" in ast.unparse(node.func)
        )
        assert check(load_recipe(*map(ast.literal_eval, call.args)).recipe) == []
        return
    with contextlib.redirect_stdout(printed):
        exec(code, {})
    below = page.read_text().split(text + "```", 1)[1]
    expected = re.match(r"\s*(?:prints\s*)?```text\n(.*?)```", below, re.DOTALL)
    if expected is not None:
        assert printed.getvalue() == expected[1]


def names_exist(text: str) -> bool:
    """Whether every `opd.NAME` that a program uses is there."""
    import opd

    used = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Attribute)]
    names = [node.attr for node in used if isinstance(node.value, ast.Name) and node.value.id == "opd"]
    return bool(names) and all(hasattr(opd, name) for name in names)


# ---- names ---------------------------------------------------------------------------------------------------------


def inline(page: Path) -> list[str]:
    """What stands between single backticks, outside code blocks."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    return re.findall(r"`([^`\n]+)`", text)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_paths_and_tests_that_are_named_exist(page: Path) -> None:
    for word in inline(page):
        if re.match(r"(?:src|docs|recipes|examples|scripts|tests|benchmarks)/", word) and " " not in word:
            file, _, test = word.partition("::")
            assert (ROOT / file).exists(), word
            if test:
                assert f"def {test}(" in (ROOT / file).read_text(), word
    for link in re.findall(r"\]\(([\w-]+\.md)(?:#[\w-]+)?\)", page.read_text()):
        assert (DOCS / link).exists(), link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_options_that_are_named_exist(page: Path) -> None:
    keys = set(all_keys())
    sections = {key for key in Recipe.model_fields if key not in ("name", "folder", "seed")}
    endings = {"jsonl", "json", "yaml", "md", "html", "safetensors"}  # `eval/...`, `samples.jsonl`
    for word in inline(page):
        match = re.fullmatch(r"([a-z_]+(?:\.[a-z_]+|\.\d+)+)(?:=.*)?", word)
        if match and match[1].split(".")[0] in sections and match[1].rsplit(".", 1)[1] not in endings:
            key = re.sub(r"^prompt\.(\w+)\.0(\.role|\.content)?$", r"prompt.\1", match[1])
            key = re.sub(r"^loss\.parts\.\d+\.loss\b", "loss", key)
            key = re.sub(r"^loss\.parts\.\d+(\.weight)?$", "loss.parts", key)
            assert key in keys, f"{page.name}: `{word}`"


def test_every_contract_line_is_there_with_a_test() -> None:
    text = (DOCS / "correctness.md").read_text()
    lines = re.split(r"^\*\*(\d+)\.\*\*", text, flags=re.MULTILINE)
    assert [int(number) for number in lines[1::2]] == list(range(1, 25))
    for number, body in zip(lines[1::2], lines[2::2], strict=True):
        assert "::test_" in body, number


def test_every_check_of_the_doctor_is_described_with_its_lines() -> None:
    table = (DOCS / "doctor.md").read_text().split("## Tolerances")[0]
    described = dict(re.findall(r"^\| `([^`]+)` \| ([^|]+) \|", table, re.MULTILINE))
    coded: dict[str, tuple[int, ...]] = {}
    for file in (ROOT / "src/opd/diagnose/checks").glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "CheckResult":
                name, lines = node.args[0], node.args[1]
                coded[ast.literal_eval(name)] = ast.literal_eval(lines)
    assert {name: tuple(map(int, re.findall(r"\d+", lines))) for name, lines in described.items()} == coded


def test_the_checks_of_the_doctor_are_counted() -> None:
    from opd.diagnose.checks import CHECKS

    assert f"{len(CHECKS)} [checks](doctor.md)" in (DOCS / "quickstart.md").read_text()


def test_the_tolerances_of_the_doctor_are_those_of_the_code() -> None:
    from opd.diagnose.probe import BFLOAT16, FLOAT32

    text = (DOCS / "doctor.md").read_text()
    for name, limits in (("float32", FLOAT32), ("bfloat16", BFLOAT16)):
        figures = (limits.kl, limits.mean_kl, limits.logp, limits.mean_logp)
        assert f"| `{name}` | {' | '.join(f'{figure:g}' for figure in figures)} |" in text


def test_every_page_is_in_the_navigation() -> None:
    text = (ROOT / "mkdocs.yml").read_text()
    assert all(f"- {page.name}" in text for page in PAGES)


def test_the_recipe_that_the_pages_name_is_the_packaged_one() -> None:
    assert find_recipe("demo", ROOT) == ROOT / "recipes" / "demo.yaml"
