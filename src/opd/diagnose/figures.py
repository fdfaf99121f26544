"""Pictures of a run as SVG whose colours follow the page: light, dark and print from the same file.

matplotlib draws with placeholder colours, which are then replaced by CSS variables. Text stays text, so that it takes
the page's font, can be searched and stays sharp. Nothing in the output depends on the clock.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

from opd.errors import OpdError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette, told apart under every common colour blindness; lightened for dark pages.
# name -> (placeholder that matplotlib draws with, light, dark)
PALETTE: dict[str, tuple[str, str, str]] = {
    "ink": ("#010101", "#1c2126", "#e8eaed"),
    "muted": ("#020202", "#5b6570", "#a3abb5"),
    "grid": ("#030303", "#dfe3e8", "#343a42"),
    "paper": ("#040404", "#ffffff", "#15181c"),
    "blue": ("#010111", "#0072b2", "#56b4e9"),
    "orange": ("#110101", "#d55e00", "#f08a3c"),
    "green": ("#011101", "#007a5a", "#2fbf95"),
    "purple": ("#110111", "#a8487e", "#dd93bb"),
    "grey": ("#111111", "#8a929b", "#8a929b"),
}
SMOOTH_FROM_NUM_STEPS = 40
MARKERS_UP_TO_NUM_STEPS = 40


@dataclass(frozen=True)
class Line:
    """One curve; a missing value is NaN and leaves a gap. `smooth` lets a long one be shown by its running mean."""

    label: str
    values: Sequence[float]
    colour: str = "blue"
    smooth: bool = True


@dataclass(frozen=True)
class Bar:
    """One score in percent with its interval; NaN bounds draw no interval."""

    label: str
    value: float
    low: float
    high: float
    colour: str = "blue"
    hollow: bool = False


def colour(name: str) -> str:
    """The placeholder of a palette colour, to draw with."""
    return PALETTE[name][0]


def css_variables(theme: str) -> str:
    """`--ink: #...;` and so on for "light" or "dark"."""
    place = {"light": 1, "dark": 2}[theme]
    return " ".join(f"--{name}: {values[place]};" for name, values in PALETTE.items())


def curve_svg(
    steps: Sequence[int], lines: Sequence[Line], *, title: str, unit: str, prefix: str, from_zero: bool = True
) -> str:
    """Curves over training steps, to be placed in an HTML page.

    Args:
        steps: x of every value.
        lines: one to three curves, labelled when there is more than one. From 40 steps on each is drawn faintly, with
            its running mean over it.
        title: what is drawn.
        unit: of the values, named beside the title.
        prefix: of all ids in the SVG, unique within the page.
        from_zero: the axis starts at zero, unless a value is negative.
    """
    from matplotlib.figure import Figure

    with style():
        figure = Figure(figsize=(4.7, 2.35))
        axes: Axes = figure.add_subplot()
        draw_curves(axes, steps, lines)
        if from_zero and not any(value < 0 for line in lines for value in line.values):
            axes.set_ylim(bottom=0)
        _title(axes, title, unit)
        return inline(figure, prefix, f"{title}, {unit}, over training steps")


def phases_svg(steps: Sequence[int], phases: Mapping[str, Sequence[float]], *, prefix: str) -> str:
    """Seconds of each step, stacked by phase, with each phase's share of the whole run in its label."""
    from matplotlib.figure import Figure

    with style():
        figure = Figure(figsize=(4.7, 2.35))
        axes: Axes = figure.add_subplot()
        total = sum(map(sum, phases.values()))
        floor = [0.0] * len(steps)
        for (name, seconds), shade in zip(phases.items(), ("blue", "orange", "green"), strict=True):
            label = f"{name} {sum(seconds) / total:.0%}" if total else name
            ceiling = [below + height for below, height in zip(floor, seconds, strict=True)]
            if len(steps) <= MARKERS_UP_TO_NUM_STEPS:
                axes.bar(steps, seconds, 0.9, bottom=floor, color=colour(shade), label=label, linewidth=0)
            else:  # bars thinner than a pixel would blur
                axes.fill_between(steps, floor, ceiling, color=colour(shade), label=label, linewidth=0)
            floor = ceiling
        _step_axis(axes, steps)
        axes.set_ylim(bottom=0)
        _legend(axes)
        _title(axes, "Time of a step, by phase", "seconds")
        return inline(figure, prefix, "Seconds of each step: sampling, teacher and update")


def bars_svg(bars: Sequence[Bar], *, title: str, prefix: str, reference: tuple[str, float] | None = None) -> str:
    """Scores in percent with 95% intervals, one row each, to be placed in an HTML page.

    Args:
        bars: from top to bottom.
        title: of the metric.
        prefix: of all ids in the SVG.
        reference: (label, percent) of a vertical line, e.g. always giving the most frequent answer.
    """
    from matplotlib.figure import Figure

    with style():
        figure = Figure(figsize=(4.7, 0.85 + 0.36 * len(bars)))
        draw_bars(figure.add_subplot(), bars, reference=reference)
        # From the picture's edge, not from the axes': row names leave little room to the right of them.
        figure.suptitle(f"{title}  (%, with 95% interval)", x=0.0, ha="left")
        return inline(figure, prefix, "; ".join(f"{bar.label}: {bar.value:.1f}%" for bar in bars))


# ---- drawing into axes -----------------------------------------------------------------------------------------------


def draw_curves(axes: Axes, steps: Sequence[int], lines: Sequence[Line]) -> None:
    """See `curve_svg`."""
    width = smoothing_width(len(steps))
    marker = "o" if len(steps) <= MARKERS_UP_TO_NUM_STEPS else ""
    for line, style in zip(lines, ("-", "--", ":"), strict=False):
        shade = colour(line.colour)
        if line.smooth and width:
            axes.plot(steps, line.values, color=shade, linewidth=0.8, alpha=0.3)
            means = running_mean(line.values, width)
            axes.plot(steps, means, color=shade, linewidth=1.8, linestyle=style, label=line.label)
        else:
            axes.plot(
                steps, line.values, color=shade, linewidth=1.6, linestyle=style, marker=marker, markersize=3,
                label=line.label,
            )  # fmt: skip
    _step_axis(axes, steps)
    if len(lines) > 1:
        _legend(axes)


def draw_bars(
    axes: Axes, bars: Sequence[Bar], *, reference: tuple[str, float] | None = None, labels: bool = True
) -> None:
    """See `bars_svg`; `labels` off leaves the row names to the axes beside it."""
    rows = list(range(len(bars)))[::-1]
    for row, bar in zip(rows, bars, strict=True):
        shade = colour(bar.colour)
        axes.barh(
            row, bar.value, 0.56, facecolor="none" if bar.hollow else shade, edgecolor=shade,
            linewidth=1.4 if bar.hollow else 0,
        )  # fmt: skip
        if math.isfinite(bar.low) and math.isfinite(bar.high):
            axes.plot([bar.low, bar.high], [row, row], color=colour("ink"), linewidth=1.3, solid_capstyle="butt")
            for end in (bar.low, bar.high):
                axes.plot([end, end], [row - 0.13, row + 0.13], color=colour("ink"), linewidth=1.3)
        # The figures stand in a column of their own, where no interval can run through them.
        axes.text(
            1.02, row, f"{bar.value:.1f}", transform=axes.get_yaxis_transform(), va="center", ha="left",
            color=colour("ink"), fontweight="bold",
        )  # fmt: skip
    if reference is not None:
        axes.axvline(reference[1], color=colour("muted"), linewidth=1, linestyle=(0, (3, 2)), label=reference[0])
        _legend(axes)
    axes.set_xlim(0, 100)
    axes.set_ylim(-0.6, len(bars) - 0.4)
    axes.set_yticks(rows, [bar.label for bar in bars] if labels else [""] * len(bars))
    axes.tick_params(axis="y", length=0, labelcolor=colour("ink"))
    axes.grid(visible=False, axis="y")
    axes.spines["left"].set_visible(False)


def smoothing_width(num_steps: int) -> int:
    """Over how many steps the running mean goes; 0 for a run short enough to be drawn as it is."""
    return max(3, num_steps // 20) if num_steps >= SMOOTH_FROM_NUM_STEPS else 0


def running_mean(values: Sequence[float], width: int) -> list[float]:
    """Mean of the last `width` values up to each, missing ones left out; NaN where all of them are missing."""
    means: list[float] = []
    for end in range(1, len(values) + 1):
        known = [value for value in values[max(0, end - width) : end] if not math.isnan(value)]
        means.append(sum(known) / len(known) if known else math.nan)
    return means


def _step_axis(axes: Axes, steps: Sequence[int]) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(5))
    axes.margins(y=0.1)
    axes.grid(visible=False, axis="x")
    axes.set_xlabel("step", loc="right")
    if len(steps) > 1:
        axes.margins(x=0.02)


def _legend(axes: Axes) -> None:
    """Above the drawing, where it covers nothing."""
    axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=3, handlelength=1.4, columnspacing=1.0)


def _title(axes: Axes, title: str, unit: str) -> None:
    handles, _ = axes.get_legend_handles_labels()
    # One line of room for the legend where there is one.
    axes.set_title(f"{title}  ({unit})", loc="left", pad=20 if len(handles) > 1 or axes.get_legend() else 6)


# ---- from matplotlib to SVG ------------------------------------------------------------------------------------------


def require_matplotlib() -> None:
    """Raise OpdError when there is no matplotlib."""
    try:
        import matplotlib  # noqa: F401 # pyright: ignore[reportUnusedImport]
    except ImportError as error:
        raise OpdError(
            "the report's figures cannot be drawn",
            why="matplotlib is not installed",
            fix="pip install 'opd[report]'",
        ) from error


@contextmanager
def style() -> Generator[None, None, None]:
    """The page's look, for everything that is drawn inside."""
    import matplotlib

    ink, muted, grid = colour("ink"), colour("muted"), colour("grid")
    look: dict[Any, Any] = {
        "axes.edgecolor": grid, "axes.labelcolor": muted, "axes.titlecolor": ink, "axes.grid": True,
        "axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True, "axes.titlesize": 9.5,
        "axes.titleweight": "bold", "figure.titlesize": 9.5, "figure.titleweight": "bold",
        "axes.labelsize": 8.5, "axes.facecolor": "none", "figure.facecolor": "none",
        "grid.color": grid, "grid.linewidth": 0.8, "xtick.color": muted, "ytick.color": muted, "xtick.labelsize": 8.5,
        "ytick.labelsize": 8.5, "xtick.major.size": 0, "ytick.major.size": 0, "font.size": 8.5, "text.color": ink,
        "legend.frameon": False, "legend.fontsize": 8.5, "legend.labelcolor": ink, "axes.formatter.useoffset": False,
        "axes.formatter.limits": (-3, 5), "svg.fonttype": "none", "text.parse_math": False, "svg.hashsalt": "opd",
        "figure.constrained_layout.use": True,
    }  # fmt: skip
    with matplotlib.rc_context(look):
        yield


def inline(figure: Figure, prefix: str, description: str) -> str:
    """An `<svg>` element for an HTML page that defines the palette's CSS variables; ids start with `prefix`."""
    svg = _drawn(figure)
    svg = re.sub(r'\sxmlns(:\w+)?="[^"]*"', "", svg).replace("xlink:href", "href")
    svg = re.sub(r'(\sid="|href="#|url\(#)', rf"\g<1>{prefix}-", svg)
    return svg.replace("<svg", f'<svg class="figure" role="img" aria-label="{escape(description, quote=True)}"', 1)


def standalone(figure: Figure, description: str) -> str:
    """A whole SVG file, with its own style for light and dark pages."""
    light, dark = css_variables("light"), css_variables("dark")
    rules = (
        f"svg {{ {light} }} @media (prefers-color-scheme: dark) {{ svg {{ {dark} }} }} "
        'text { font-family: system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }'
    )
    head, rest = _drawn(figure).split(">", 1)
    return f"{head}>\n<title>{escape(description)}</title>\n<style>{rules}</style>\n{rest.lstrip()}"


def _drawn(figure: Figure) -> str:
    """The figure as an `<svg>` element with CSS variables for colours, without metadata, scaled by its box alone."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>\s*", "", svg, flags=re.DOTALL)
    # A style element would reach beyond the picture when it is part of a page; as attributes it does not.
    svg = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(r" font-family: [^;\"]*;", "", svg)  # the page's own font
    svg = re.sub(r'\s(width|height)="[\d.]+pt"', "", svg, count=2)
    svg = svg.replace("<svg", '<svg stroke-linejoin="round" stroke-linecap="butt"', 1)
    for name, (placeholder, _, _) in PALETTE.items():
        svg = svg.replace(placeholder, f"var(--{name})")
    return svg.strip()
