"""docs/losses.md: its pictures are those of the library, and every name of the config stands on it."""

from __future__ import annotations

import re
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import pytest

from opd.config import loss as configs
from opd.config.base import Config
from opd.loss import LOSSES
from opd.loss.clip import CLIPS
from script_modules import imported

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "losses.md"
TEXT = PAGE.read_text(encoding="utf-8")
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def script() -> Iterator[ModuleType]:
    with imported("docs_clips") as module:
        yield module


# ---- pictures ------------------------------------------------------------------------------------------------------


def test_pictures_are_up_to_date(script: ModuleType) -> None:
    assert script.PICTURE.read_text(encoding="utf-8") == script.picture(), "run python scripts/docs_clips.py"


def test_pictures_of_the_page_exist() -> None:
    named = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", TEXT)
    assert named
    assert all((PAGE.parent / name).exists() for name in named)


def test_a_stale_picture_is_noticed(script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(script, "PICTURE", tmp_path / "assets" / "clips.svg")
    monkeypatch.setattr(sys, "argv", ["docs_clips.py", "--check"])
    with pytest.raises(SystemExit, match="not up to date"):
        script.main()
    monkeypatch.setattr(sys, "argv", ["docs_clips.py"])
    script.main()
    monkeypatch.setattr(sys, "argv", ["docs_clips.py", "--check"])
    script.main()
    script.PICTURE.write_text(script.PICTURE.read_text().replace("\N{MINUS SIGN}0.08", "+0.08"))
    with pytest.raises(SystemExit, match="not up to date"):
        script.main()


def test_the_picture_is_well_formed_and_shows_every_clip_as_text(script: ModuleType) -> None:
    root = ET.fromstring(script.picture())
    texts = ["".join(element.itertext()) for element in root.iter(f"{SVG}text")]
    assert {text.split(",")[0] for text in texts} >= set(CLIPS)
    assert root.find(f"{SVG}title") is not None


def test_the_picture_shows_what_it_says(script: ModuleType) -> None:
    """A rectangle that reaches to where the text says: above the line for a step up, below for a step down."""
    root = ET.fromstring(script.picture())
    bars = [bar for bar in root.iter(f"{SVG}rect") if bar.get("class") in ("same", "turned")]
    steps = [x for clip in script.CLIPS for x in script.step(clip).logits]
    assert len(bars) == len(steps) == 4 * len(CLIPS)
    for bar, x in zip(bars, steps, strict=True):
        top, height = float(bar.get("y", "nan")), float(bar.get("height", "nan"))
        reached = top if x > 0 else top + height
        assert abs((script.ZERO - reached) / script.SCALE - x) < 1e-3
        assert height == pytest.approx(script.SCALE * abs(x), abs=0.1)


# ---- names ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_every_loss_has_its_section(name: str) -> None:
    assert re.search(rf"^### .*`{name}`", TEXT, re.MULTILINE), name


def options() -> list[str]:
    """Every option of every config in opd.config.loss but `name`."""
    found: dict[str, None] = {}
    for value in vars(configs).values():
        if isinstance(value, type) and issubclass(value, Config):
            found.update(dict.fromkeys(value.model_fields))
    return [option for option in found if option != "name"]


@pytest.mark.parametrize("option", options())
def test_every_option_is_explained(option: str) -> None:
    assert re.search(rf"`(?:[\w.]+\.)?{option}\b", TEXT), option


def test_the_choices_of_every_option_are_named() -> None:
    for value in vars(configs).values():
        if not (isinstance(value, type) and issubclass(value, Config)):
            continue
        for key, field in value.model_fields.items():
            choices: tuple[Any, ...] = get_args(field.annotation)
            for choice in choices:
                if isinstance(choice, str):
                    assert re.search(rf"`(?:[^`\n]*\W)?{choice}\b", TEXT), f"{value.__name__}.{key}: {choice}"


def test_lines_are_short_outside_tables() -> None:
    long = [line for line in TEXT.splitlines() if len(line) > 120 and not line.startswith("|")]
    assert not long, long
