"""The command line as a user meets it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

import opd
from opd import cli
from opd.config import load_recipe

RUNNER = CliRunner()


def main(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Run `opd` as its entry point does; the exit code."""
    monkeypatch.setattr(sys, "argv", ["opd", *arguments])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    return int(caught.value.code or 0)


def test_help_names_every_command() -> None:
    result = RUNNER.invoke(cli.app, ["--help"])
    assert result.exit_code == 0
    for command in ("train", "doctor", "eval", "compare", "report", "demo", "config", "models"):
        assert command in result.output


def test_version() -> None:
    result = RUNNER.invoke(cli.app, ["--version"])
    assert (result.exit_code, result.output) == (0, f"opd {opd.__version__}\n")


def test_a_users_error_is_three_lines_on_stderr(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(monkeypatch, "config", "show", "demo", "train.learing_rate=1e-3") == 1
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.splitlines() == [
        "error: recipes/demo.yaml: unknown key `train.learing_rate`",
        "  why: `train` has no key `learing_rate`; set in override",
        "  fix: did you mean `train.learning_rate`?",
    ]


def test_long_errors_are_not_wrapped_and_square_brackets_stay(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "[bold]" + "x" * 300 + ".yaml"
    assert main(monkeypatch, "config", "show", name) == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3
    assert name in lines[0]


def test_bad_usage_stays_the_parsers(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(monkeypatch, "config", "nope") == 2
    assert "nope" in capsys.readouterr().err


def test_config_show_prints_a_whole_recipe_with_sources(tmp_path: Path) -> None:
    result = RUNNER.invoke(cli.app, ["config", "show", "demo", "seed=7"])
    assert result.exit_code == 0
    assert "seed: 7  # override" in result.output
    (tmp_path / "resolved.yaml").write_text(result.output)
    assert load_recipe(tmp_path / "resolved.yaml").recipe == load_recipe("demo", ["seed=7"]).recipe
    assert yaml.safe_load(result.output)["train"]["learning_rate"] == load_recipe("demo").recipe.train.learning_rate


def test_config_schema_prints_json_schema() -> None:
    schema = json.loads(RUNNER.invoke(cli.app, ["config", "schema"]).output)
    assert "extends" in schema["properties"]
    assert schema["additionalProperties"] is False


def test_train_dry_run_prints_the_plan_and_makes_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = RUNNER.invoke(cli.app, ["train", "demo", "--dry-run"])
    assert result.exit_code == 0, result.output
    assert "KL(p‖q)" in result.output
    assert list(tmp_path.iterdir()) == []


def test_python_dash_m_is_the_same_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "opd", "--version"], capture_output=True, text=True, check=False, timeout=120
    )
    assert (done.returncode, done.stdout) == (0, f"opd {opd.__version__}\n")
