"""The Triton kernel, without a GPU: interpreted, and compiled for GPUs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CASES = Path(__file__).parents[1] / "triton_cases.py"

pytestmark = [pytest.mark.triton, pytest.mark.timeout(600)]


def run(what: str, tmp_path: Path) -> int:
    # Triton keeps what it compiled in a folder: a fresh one, so that it compiles here and now.
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "TRITON_DEFAULT_FP_FUSION": "1"}
    done = subprocess.run(
        [sys.executable, str(CASES), what], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout.split()[-1])


def test_equals_the_other_path_in_the_interpreter(tmp_path: Path) -> None:
    assert run("interpret", tmp_path) == 6 * 3 * 2 * 2


def test_compiles_for_gpus(tmp_path: Path) -> None:
    assert run("compile", tmp_path) == 2 * 2 * 6
