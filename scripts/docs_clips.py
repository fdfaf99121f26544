"""Draw docs/assets/clips.svg: what each clip leaves of a gradient.

    python scripts/docs_clips.py           # write the picture
    python scripts/docs_clips.py --check   # exit with 1 when it is not up to date

The example is that of docs/losses.md: forward KL between two distributions over four tokens. Bars are the step that
gradient descent takes on the student's logits, from `opd.loss` in float64; coordinates are rounded to a tenth, so that
the picture is the same on every machine. Text stays text, and the card brings its own background: it can be read on any
page, whatever the page's theme and the system's are.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from opd.loss import Full, build

PICTURE = Path(__file__).parents[1] / "docs" / "assets" / "clips.svg"

TEACHER = (0.60, 0.30, 0.07, 0.03)
STUDENT = (0.20, 0.60, 0.15, 0.05)
CLIPS: tuple[dict[str, Any], ...] = (
    {"name": "none"},
    {"name": "per_token", "max": 0.2},
    {"name": "weight", "max": 0.2},
    {"name": "per_entry", "max": 0.05},
)
VERDICTS = {
    "none": "as it is",
    "per_token": "no gradient above max",
    "weight": "direction kept, size bounded",
    "per_entry": "the favourite goes down",
}

WIDTH, HEIGHT, MARGIN, PANEL = 760, 345, 20, 180
ZERO, SCALE = 164.0, 190.0  # y of a step of zero; pixels of a step of one
BAR, STRIDE = 26.0, 40.0

STYLE = (
    "svg { --ink: #1c2126; --muted: #56606a; --paper: #ffffff; --rule: #c3c9d0; "
    "--same: #0072b2; --turned: #c04a00; --ghost: #8a929b; } "
    "@media (prefers-color-scheme: dark) { svg { --ink: #e8eaed; --muted: #a9b1bb; --paper: #15181c; --rule: #434a53; "
    "--same: #56b4e9; --turned: #f08a3c; --ghost: #8a929b; } } "
    'text { font-family: system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; fill: var(--ink); '
    "font-size: 12px; text-anchor: middle; } "
    ".name { font-size: 15px; font-weight: 600; } .quiet { fill: var(--muted); } "
    ".same { fill: var(--same); } .turned { fill: var(--turned); } "
    ".ghost { fill: none; stroke: var(--ghost); stroke-dasharray: 3 2; } .rule { stroke: var(--rule); }"
)


@dataclass(frozen=True)
class Step:
    """A descent step on the four logits, the loss it comes from in nats, and the norm of the gradient."""

    logits: tuple[float, ...]
    value: float
    norm: float


def step(clip: dict[str, Any]) -> Step:
    """The step under one clip, by the library itself."""
    logits = torch.tensor([STUDENT], dtype=torch.float64).log().requires_grad_()
    teacher = Full.from_logits(torch.tensor([TEACHER], dtype=torch.float64).log())
    value = build({"name": "forward_kl", "clip": clip}).tokens(logits, teacher).values.sum()
    value.backward()
    assert logits.grad is not None
    down = [-slope for slope in logits.grad[0].tolist()]
    return Step(tuple(down), value.item(), sum(slope * slope for slope in down) ** 0.5)


def picture() -> str:
    """The text of docs/assets/clips.svg."""
    steps = [step(clip) for clip in CLIPS]
    unclipped = steps[0]
    says = "; ".join(
        f"{clip['name']}: {', '.join(_signed(x) for x in made.logits)}" for clip, made in zip(CLIPS, steps, strict=True)
    )
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">',
        f"<title>Step on the student's four logits under each clip. {says}.</title>",
        f"<style>{STYLE}</style>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" rx="6" style="fill: var(--paper); stroke: var(--rule)"/>',
    ]
    for number, (clip, made) in enumerate(zip(CLIPS, steps, strict=True)):
        lines += _panel(MARGIN + number * PANEL, clip, made, unclipped)
    legend = (
        "step on each logit (minus the gradient); dashed: without a clip; orange: turned round; p teacher, q student"
    )
    lines += [f'<text class="quiet" x="{WIDTH / 2:.1f}" y="{HEIGHT - 12}">{legend}</text>', "</svg>", ""]
    return "\n".join(lines)


def _panel(left: float, clip: dict[str, Any], made: Step, unclipped: Step) -> Iterator[str]:
    middle = left + PANEL / 2
    bound = f", max {clip['max']:g}" if "max" in clip else ""
    yield f'<text class="name" x="{middle:.1f}" y="32">{clip["name"]}{bound}</text>'
    yield f'<text class="quiet" x="{middle:.1f}" y="50">{VERDICTS[clip["name"]]}</text>'
    first = middle - 1.5 * STRIDE
    for number, (now, before) in enumerate(zip(made.logits, unclipped.logits, strict=True)):
        x = first + number * STRIDE
        yield _bar("ghost", x, before)
        yield _bar("turned" if now * before < 0 else "same", x, now)
        label_y = ZERO - SCALE * max(now, before, 0.0) - 5
        yield f'<text x="{x:.1f}" y="{label_y:.1f}">{_signed(now)}</text>'
        yield f'<text class="quiet" x="{x:.1f}" y="250">{TEACHER[number]:.2f}</text>'
        yield f'<text class="quiet" x="{x:.1f}" y="266">{STUDENT[number]:.2f}</text>'
    yield f'<line class="rule" x1="{left + 4:.1f}" x2="{left + PANEL - 4:.1f}" y1="{ZERO}" y2="{ZERO}"/>'
    for side, y in (("p", 250), ("q", 266)):
        yield f'<text class="quiet" x="{first - 30:.1f}" y="{y}">{side}</text>'
    yield f'<text x="{middle:.1f}" y="290">loss {_plain(made.value)} nats</text>'
    yield f'<text x="{middle:.1f}" y="306">gradient norm {_plain(made.norm)}</text>'


def _bar(kind: str, x: float, height: float) -> str:
    top = ZERO - SCALE * max(height, 0.0)
    return (
        f'<rect class="{kind}" x="{x - BAR / 2:.1f}" y="{top:.1f}" width="{BAR:.1f}" '
        f'height="{SCALE * abs(height):.1f}"/>'
    )


def _signed(value: float) -> str:
    return f"{value:+.2f}".replace("-", "\u2212") if round(value, 2) else "0"


def _plain(value: float) -> str:
    return f"{value:.2f}".replace("-", "\u2212") if round(value, 2) else "0"


def main() -> None:
    """Write or check the picture."""
    text = picture()
    if "--check" in sys.argv[1:]:
        if not PICTURE.exists() or PICTURE.read_text(encoding="utf-8") != text:
            sys.exit(f"{PICTURE} is not up to date: run python scripts/docs_clips.py")
        return
    PICTURE.parent.mkdir(exist_ok=True)
    PICTURE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
