"""`opd --help` and config errors answer at once: nothing heavy is imported before it is needed."""

from __future__ import annotations

import ast
import os
import subprocess
import sys

import pytest

HEAVY = ("torch", "transformers", "numpy", "scipy", "datasets", "accelerate", "peft", "pandas", "pyarrow", "matplotlib")


def heavy_after(code: str) -> list[str]:
    """The heavy packages that a fresh Python has imported after some code."""
    report = f"import sys; print([name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\n{report}"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONWARNINGS": "ignore"},
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return ast.literal_eval(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("module", ["opd", "opd.errors", "opd.types", "opd.data", "opd.config.check", "opd.cli"])
def test_importing_is_light(module: str) -> None:
    assert heavy_after(f"import {module}") == []


def test_checking_a_recipe_is_light() -> None:
    code = "from opd.config import load_recipe\nfrom opd.config.check import dry_run_summary\n"
    assert heavy_after(code + "dry_run_summary(load_recipe('demo'))") == []


def test_the_probe_sees_a_heavy_import() -> None:
    assert heavy_after("import numpy") == ["numpy"]
