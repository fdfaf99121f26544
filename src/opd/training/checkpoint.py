"""Checkpoints that are whole or absent: written aside, flushed, renamed; no pickles.

A checkpoint is a folder `step-000012` with safetensors files and `state.json`, which names the sha256 of each and is
written last. Random state needs no saving: every seed derives from (run seed, purpose, step, sample).
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.optim import Optimizer

from opd.errors import OpdError
from opd.files import file_sha256


@dataclass(frozen=True)
class Checkpoint:
    """Everything that a run needs to go on as if it had never stopped."""

    step: int
    trained: Mapping[str, Tensor]
    optimizer: Mapping[str, Tensor]
    teacher: Mapping[str, Tensor]
    facts: Mapping[str, Any]


def optimizer_tensors(optimizer: Optimizer, parameters: Mapping[str, torch.nn.Parameter]) -> dict[str, Tensor]:
    """The optimizer's state as flat tensors named `parameter/key`."""
    tensors: dict[str, Tensor] = {}
    for name, parameter in parameters.items():
        for key, value in optimizer.state.get(parameter, {}).items():
            tensors[f"{name}/{key}"] = torch.as_tensor(value)
    return tensors


def restore_optimizer(
    optimizer: Optimizer, parameters: Mapping[str, torch.nn.Parameter], tensors: Mapping[str, Tensor]
) -> None:
    """Take back what `optimizer_tensors` gave."""
    for flat, tensor in tensors.items():
        name, key = flat.rsplit("/", 1)
        # AdamW keeps its step counter on the CPU, the moments beside their parameter.
        optimizer.state[parameters[name]][key] = tensor if key == "step" else tensor.to(parameters[name].device)


def write(root: Path, checkpoint: Checkpoint, *, num_kept: int) -> Path:
    """Write `root/step-XXXXXX` so that it is whole or absent, then remove all but the newest `num_kept`."""
    root.mkdir(parents=True, exist_ok=True)
    final = root / f"step-{checkpoint.step:06d}"
    aside = root / f".writing-{checkpoint.step:06d}"
    shutil.rmtree(aside, ignore_errors=True)
    try:
        aside.mkdir()
        digests: dict[str, str] = {}
        for name in ("trained", "optimizer", "teacher"):
            tensors = {key: value.detach().cpu().contiguous() for key, value in getattr(checkpoint, name).items()}
            save_file(tensors, aside / f"{name}.safetensors")
            digests[name] = _flush(aside / f"{name}.safetensors")
        state = {"step": checkpoint.step, "sha256": digests, "facts": dict(checkpoint.facts)}
        (aside / "state.json").write_text(json.dumps(state, indent=2))
        _flush(aside / "state.json")
        if final.exists():
            shutil.rmtree(final)
        aside.rename(final)
        _flush_folder(root)
    except OSError as error:
        shutil.rmtree(aside, ignore_errors=True)
        raise OpdError(
            f"The checkpoint of step {checkpoint.step} could not be written to {root}.",
            why=str(error),
            fix="Free disk space, then go on with --resume: earlier checkpoints are untouched.",
        ) from error
    # Later steps than this one are damaged leftovers that were passed over: they must not push out whole checkpoints.
    for old in [folder for folder in _folders(root) if folder.name <= final.name][num_kept:]:
        shutil.rmtree(old)
    return final


def newest(root: Path) -> tuple[Checkpoint | None, list[str]]:
    """The newest whole checkpoint, and a line for each newer one that was passed over because it is damaged."""
    passed_over: list[str] = []
    for folder in _folders(root):
        try:
            return _read(folder), passed_over
        except (OSError, ValueError, KeyError, TypeError) as error:
            passed_over.append(f"{folder.name}: {error}")
    return None, passed_over


def _read(folder: Path) -> Checkpoint:
    state = json.loads((folder / "state.json").read_text())
    parts: dict[str, Mapping[str, Tensor]] = {}
    for name, digest in state["sha256"].items():
        path = folder / f"{name}.safetensors"
        if file_sha256(path) != digest:
            raise ValueError(f"{path.name} does not have the sha256 that state.json names")
        parts[name] = load_file(path)
    return Checkpoint(state["step"], parts["trained"], parts["optimizer"], parts["teacher"], state["facts"])


def _folders(root: Path) -> list[Path]:
    """Checkpoint folders, newest first."""
    return sorted(root.glob("step-*"), reverse=True)


def _flush(path: Path) -> str:
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return file_sha256(path)


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
