"""The samples of an evaluation on disk: `manifest.json` says what is asked, `samples.jsonl` grows batch by batch.

Grading reads these two files alone, so that it can be repeated without a model; sampling goes on where they end.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from opd.config.base import Config
from opd.errors import OpdError
from opd.eval.result import Checkpoint, differing, hash_of
from opd.files import write_aside
from opd.types import FinishReason

MANIFEST_FILE = "manifest.json"
SAMPLES_FILE = "samples.jsonl"


class Question(Config):
    """One problem as it was asked; `starts_thinking` says that the prompt already opened the thinking part."""

    id: str
    cluster: str
    problem: str
    answer: str
    prompt: str
    starts_thinking: bool


class Manifest(Config):
    """Everything that decides which samples are drawn; `key` is its hash and stands in every line of the samples."""

    format: Literal[1] = 1
    benchmark: str
    settings: dict[str, Any]
    checkpoint: Checkpoint
    num_samples: int = Field(ge=1)
    seed: int
    data_parallel_size: int = Field(ge=1)
    num_dropped: dict[str, int]
    questions: tuple[Question, ...]

    @property
    def key(self) -> str:
        """The settings hash of the samples: another prompt, setting, checkpoint or problem gives another key."""
        return hash_of(self.model_dump(mode="json"))


class Sample(Config):
    """One line of samples.jsonl: the sampled ids themselves, and their text for people and graders."""

    key: str
    problem_id: str
    sample: int = Field(ge=0)
    seed: int
    finish_reason: FinishReason
    text: str
    ids: tuple[int, ...]


SampleId = tuple[str, int]


class SampleStore:
    """The folder of one evaluation, opened to be filled.

    Complete lines of the same key are reused; a torn last line, left by a kill, is cut off and sampled again.

    Args:
        folder: made if missing.
        manifest: what is asked now.

    Raises:
        OpdError: the folder cannot be made, or holds samples of other settings, of a training run, or a broken line
            that no interruption explains.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.manifest = manifest
        self.notes: list[str] = []
        self.path = folder / SAMPLES_FILE
        file = folder / MANIFEST_FILE
        _make(folder)
        if self.path.exists() and not file.exists():
            raise OpdError(
                f"{folder} holds samples, and not of an evaluation",
                why=f"there is a {SAMPLES_FILE} without a {MANIFEST_FILE}, as in the folder of a training run",
                fix="evaluate into another folder (--out)",
            )
        if file.exists():
            _refuse_other(folder, load_manifest(folder), manifest)
        else:
            write_aside(file, json.dumps(manifest.model_dump(mode="json"), indent=1, ensure_ascii=False) + "\n")
        self._cut_torn_line()
        self.samples = read_samples(folder, manifest)
        if self.samples:
            total = len(manifest.questions) * manifest.num_samples
            self.notes.append(f"{len(self.samples)} of {total} samples were already in {SAMPLES_FILE} and are reused")

    def append(self, samples: Iterable[Sample]) -> None:
        """Write a finished batch; once this returns, a kill does not lose it."""
        new = list(samples)
        with self.path.open("a", encoding="utf-8") as file:
            file.writelines(f"{sample.model_dump_json()}\n" for sample in new)
            file.flush()
            os.fsync(file.fileno())
        self.samples.update({(sample.problem_id, sample.sample): sample for sample in new})

    def _cut_torn_line(self) -> None:
        if not self.path.exists():
            return
        content = self.path.read_bytes()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            os.truncate(self.path, whole)
            self.notes.append(
                f"the last line of {SAMPLES_FILE} was torn ({len(content) - whole} bytes): dropped and sampled again"
            )


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OpdError(
            f"there can be no evaluation in {folder}", why=str(error), fix="evaluate into another folder (--out)"
        ) from error


def load_manifest(folder: Path) -> Manifest:
    """The manifest of an evaluation's folder.

    Raises:
        OpdError: there is none, or it cannot be read.
    """
    try:
        return Manifest.model_validate_json((folder / MANIFEST_FILE).read_bytes())
    except (OSError, ValidationError) as error:
        raise OpdError(
            f"{folder} does not hold an evaluation",
            why=f"{MANIFEST_FILE} cannot be read: {str(error).splitlines()[0]}",
            fix="give the folder that `opd eval` wrote, or evaluate into a new one with --out",
        ) from error


def read_samples(folder: Path, manifest: Manifest) -> dict[SampleId, Sample]:
    """All complete samples by (problem id, sample index). Of a sample that stands twice the first counts.

    Raises:
        OpdError: a line that ends cannot be read or belongs to another manifest.
    """
    path = folder / SAMPLES_FILE
    samples: dict[SampleId, Sample] = {}
    if not path.exists():
        return samples
    key = manifest.key
    wanted = {(q.id, index) for q in manifest.questions for index in range(manifest.num_samples)}
    # A torn last line may end within a character; it is left out below.
    with path.open(encoding="utf-8", errors="replace", newline="\n") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith("\n"):
                break
            try:
                sample = Sample.model_validate_json(line)
            except ValidationError as error:
                raise _bad_line(path, number, "it cannot be read as a sample") from error
            name = (sample.problem_id, sample.sample)
            if sample.key != key or name not in wanted:
                raise _bad_line(path, number, "it was sampled under other settings: its key is not the manifest's")
            samples.setdefault(name, sample)
    return samples


def _bad_line(path: Path, number: int, why: str) -> OpdError:
    return OpdError(
        f"line {number} of {path} cannot be used",
        why=why,
        fix="delete that line to have it sampled again, or evaluate into a new folder with --out",
    )


def _refuse_other(folder: Path, old: Manifest, new: Manifest) -> None:
    if old.key == new.key:
        return
    names = differing(_settings(old), _settings(new)) or ["the problems or their prompts"]
    raise OpdError(
        f"{folder} holds samples of another evaluation",
        why=f"they differ in {'; '.join(names[:3])}" + (f" and {len(names) - 3} more" if len(names) > 3 else ""),
        fix="evaluate into a new folder (--out), or delete this one if its samples are not needed",
    )


def _settings(manifest: Manifest) -> Mapping[str, Any]:
    return manifest.model_dump(mode="json", exclude={"questions"})
