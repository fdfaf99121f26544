"""What a run leaves behind: `steps.jsonl`, `samples.jsonl`, `environment.json` and, with an adapter, a model card."""

from __future__ import annotations

import json
import math
import os
import platform
import subprocess
from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from opd.files import write_aside
from opd.types import StepRecord

LIBRARIES = ("opd", "torch", "transformers", "tokenizers", "peft", "accelerate", "datasets", "math-verify", "numpy")


class RunLog:
    """Appends one line a step; on resume the lines past the checkpoint are cut, since those steps run again.

    NaN is written as null: JSON knows no NaN, and a missing value must not read as a number.
    """

    def __init__(self, folder: Path, *, from_step: int) -> None:
        self.steps_path = folder / "steps.jsonl"
        self.samples_path = folder / "samples.jsonl"
        for path in (self.steps_path, self.samples_path):
            _cut_after(path, from_step)

    def write(self, record: StepRecord) -> None:
        """One step: figures to steps.jsonl, samples to samples.jsonl."""
        fields = asdict(record)
        samples = fields.pop("samples")
        _append(self.steps_path, fields)
        for sample in samples:
            _append(self.samples_path, {"step": record.step, **sample})


def read_steps(folder: Path) -> list[dict[str, Any]]:
    """The lines of steps.jsonl."""
    path = folder / "steps.jsonl"
    return [json.loads(line) for line in _lines(path)] if path.exists() else []


def environment(command: str) -> dict[str, Any]:
    """Start, versions, hardware, git commit and command of this run."""
    import torch

    versions: dict[str, str | None] = {}
    for name in LIBRARIES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    return {
        "command": command,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "system": platform.platform(),
        "processor": _processor(),
        "num_cpus": os.cpu_count(),
        "num_torch_threads": torch.get_num_threads(),
        "cuda": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "versions": versions,
        "git_commit": _git_commit(),
    }


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write aside, then rename: a reader sees the old file or the new one."""
    write_aside(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def _append(path: Path, fields: Mapping[str, Any]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(_without_nan(fields), ensure_ascii=False) + "\n")


def _without_nan(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _cut_after(path: Path, step: int) -> None:
    """Keep the lines of steps up to `step`; a torn last line goes too."""
    if not path.exists():
        return
    kept: list[str] = []
    for line in _lines(path):
        try:
            fields = json.loads(line)
        except json.JSONDecodeError:
            break
        if fields["step"] > step:
            break
        kept.append(line)
    write_aside(path, "".join(f"{line}\n" for line in kept))


def _lines(path: Path) -> list[str]:
    """Lines end at a newline and nowhere else; `splitlines` would also split at the U+2028 of a completion.

    A kill can tear the last line within a character: it is then cut like any other line that is no JSON.
    """
    return [line for line in path.read_bytes().decode("utf-8", errors="replace").split("\n") if line]


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor()


def _git_commit() -> str | None:
    """The commit of the checkout that this package runs from; None for an installed package."""
    here = Path(__file__).parent
    try:
        done = subprocess.run(
            ["git", "-C", str(here), "rev-parse", "HEAD"], capture_output=True, text=True, check=False, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None
