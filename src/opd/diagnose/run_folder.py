"""What a run left in its folder, read for people: missing pieces stay None, and nothing is guessed.

resolved.yaml  environment.json  steps.jsonl  samples.jsonl  doctor.json  verdict.json
eval/<arm>/{result.json, manifest.json, samples.jsonl}   arms: before, after, and optionally teacher and controls
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opd.errors import OpdError

if TYPE_CHECKING:
    from opd.config.schema import Recipe
    from opd.eval.result import EvalResult
    from opd.eval.samples import Manifest, Sample

Json = Mapping[str, Any]
FIRST_ARMS = ("before", "after", "teacher")


@dataclass(frozen=True)
class Arm:
    """One evaluation of the run: `before`, `after`, `teacher` (the ceiling), or a control such as `placebo`.

    Args:
        name: of its folder.
        result: the scores.
        manifest: the questions as they were asked; None without its file.
        samples: (problem id, sample index) -> sample; empty without its file.
    """

    name: str
    result: EvalResult
    manifest: Manifest | None
    samples: Mapping[tuple[str, int], Sample]

    @property
    def view(self) -> str:
        """Whose prompt was shown: `student` or `teacher`."""
        return str(self.result.frozen_settings.get("view", "student"))

    @property
    def label(self) -> str:
        """How pictures and tables call it."""
        known = {"before": "student before", "after": "student after", "teacher": "teacher"}
        return known.get(self.name, f"{'teacher' if self.view == 'teacher' else 'control'}: {self.name}")

    @property
    def is_control(self) -> bool:
        """Whether this is a student that learned from a teacher shown something else."""
        return self.name not in FIRST_ARMS and self.view == "student"


@dataclass(frozen=True)
class RunFolder:
    """A run as it was read; what is not there is None or empty.

    Args:
        folder: where it is.
        recipe, recipe_text: the resolved recipe, checked and as text with the source of every value. The text may be
            there without the recipe, when this version cannot read it.
        environment: command, versions, hardware.
        steps, samples: the lines of steps.jsonl and samples.jsonl.
        doctor, verdict: as their files say.
        arms: evaluations: before, after, teacher, then the others by name.
        notes: what could not be read, for the reader of the page.
    """

    folder: Path
    recipe: Recipe | None
    recipe_text: str | None
    environment: Json | None
    steps: list[Json]
    samples: list[Json]
    doctor: Json | None
    verdict: Json | None
    arms: dict[str, Arm]
    notes: list[str] = field(default_factory=list[str])


def read_run(folder: Path) -> RunFolder:
    """Read a run's folder.

    Raises:
        OpdError: the folder is no run, or a file in it is damaged.
    """
    if not any((folder / name).is_file() for name in ("resolved.yaml", "steps.jsonl")):
        raise OpdError(
            f"{folder} is not a run",
            why="it holds neither resolved.yaml nor steps.jsonl" if folder.is_dir() else "there is no such folder",
            fix="give the folder that `opd train` wrote, e.g. runs/demo",
        )
    notes: list[str] = []
    text = _text(folder / "resolved.yaml")
    return RunFolder(
        folder=folder,
        recipe=None if text is None else _recipe(text, notes),
        recipe_text=text,
        environment=_json(folder / "environment.json"),
        steps=_lines(folder / "steps.jsonl", notes),
        samples=_lines(folder / "samples.jsonl", notes),
        doctor=_json(folder / "doctor.json"),
        verdict=_json(folder / "verdict.json"),
        arms=_arms(folder / "eval"),
        notes=notes,
    )


def _arms(folder: Path) -> dict[str, Arm]:
    from opd.eval.result import RESULT_FILE, load_result
    from opd.eval.samples import MANIFEST_FILE, load_manifest, read_samples

    names = [path.parent.name for path in folder.glob(f"*/{RESULT_FILE}")]
    ordered = [name for name in FIRST_ARMS if name in names] + sorted(set(names) - set(FIRST_ARMS))
    arms: dict[str, Arm] = {}
    for name in ordered:
        place = folder / name
        manifest = load_manifest(place) if (place / MANIFEST_FILE).is_file() else None
        samples = {} if manifest is None else read_samples(place, manifest)
        arms[name] = Arm(name, load_result(place), manifest, samples)
    return arms


def _recipe(text: str, notes: list[str]) -> Recipe | None:
    import yaml
    from pydantic import ValidationError

    from opd.config.schema import Recipe

    try:
        return Recipe.model_validate(yaml.safe_load(text))
    except (yaml.YAMLError, ValidationError) as error:
        notes.append(f"resolved.yaml cannot be read by this version ({str(error).splitlines()[0]}); its text is below.")
        return None


def _text(path: Path) -> str | None:
    return path.read_text(encoding="utf-8") if path.is_file() else None


def _json(path: Path) -> Json | None:
    text = _text(path)
    if text is None:
        return None
    try:
        value: object = json.loads(text)
    except json.JSONDecodeError as error:
        raise _damaged(path, str(error)) from error
    if not isinstance(value, dict):
        raise _damaged(path, "it does not hold a JSON object")
    return value  # pyright: ignore[reportUnknownVariableType]


def _lines(path: Path, notes: list[str]) -> list[Json]:
    """Objects, one a line. A torn last line is what a killed run leaves, so it is named and left out."""
    rows: list[Json] = []
    # By newlines alone: a completion may hold any of the other characters that str.splitlines breaks lines at.
    # A kill can tear the last line within a character.
    text = path.read_bytes().decode("utf-8", errors="replace") if path.is_file() else ""
    lines = text.rstrip("\n").split("\n")
    if lines == [""]:
        return rows
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError as error:
            if number < len(lines):
                raise _damaged(path, f"line {number}: {error}") from error
            notes.append(f"the last line of {path.name} is torn and left out")
    return rows


def _damaged(path: Path, why: str) -> OpdError:
    return OpdError(f"{path} is damaged", why=why, fix="restore it, or move it away: the page then says it is missing")
