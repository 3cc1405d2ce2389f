"""The report's plots, each one panel without words of the user's: names stand in the page, around it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullLocator

from .numbers import human_bytes
from .svg import FAINT, HEAT, HEAT_MARGINS, INK, SOFT, drawing, inline, look, panel

COUNTS = (("B", 1e9), ("M", 1e6), ("k", 1e3))
FLOPS = (("E", 1e18), ("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6))


@dataclass(frozen=True)
class Line:
    """style: see `svg.look`. low and high: the ends of error bars, where there are any."""

    style: int
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    faint: bool = False


@dataclass(frozen=True)
class Axis:
    """label; log: logarithmic; kind decides on ticks: tokens (4k is 4,096), count, whole, share (from 0 to
    1), bytes, flops or plain."""

    label: str
    log: bool = False
    kind: str = "plain"


def lines(name: str, label: str, series: Sequence[Line], x: Axis, y: Axis, marks: Sequence[float] = ()) -> Markup:
    """Curves in one panel; `marks` are places on the x axis to be marked by upright lines."""
    with drawing():
        figure, axes = panel(4.4, 3.1)
        for line in series:
            style = look(line.style, len(line.x))
            if line.faint:
                style |= {"linewidth": 0.8, "alpha": 0.55, "linestyle": "-", "marker": ""}
            axes.plot(line.x, line.y, **style)
            if line.low:
                axes.vlines(line.x, line.low, line.high, color=style["color"], linewidth=0.9)
        for mark in marks:
            axes.axvline(mark, color=INK, linewidth=0.9, linestyle=(0, (1, 2)))
        every_x = [v for line in series for v in line.x]
        every_y = [v for line in series for v in (*line.y, *line.low, *line.high)]
        scale(axes, "x", x, every_x)
        scale(axes, "y", y, every_y)
        axes.grid(True, color=FAINT, linewidth=0.5)
        axes.set_axisbelow(True)
        return inline(figure, name, label)


def scale(axes: Axes, which: str, axis: Axis, values: Sequence[float]) -> None:
    """Label, scale and ticks of the x or y axis."""
    ticks = getattr(axes, f"{which}axis")
    if which == "x":
        axes.set_xlabel(axis.label)
    else:  # above the axis, where no tick's label, however wide, can push it out of the picture
        axes.figure.text(0.01, 0.995, axis.label, ha="left", va="top")
    positive = [v for v in values if v > 0]
    if axis.log and positive:
        getattr(axes, f"set_{which}scale")("log", base=2 if axis.kind in ("tokens", "bytes") else 10)
        places = sorted(set(positive)) if axis.kind == "tokens" else log_ticks(min(positive), max(positive), axis.kind)
        ticks.set_major_locator(FixedLocator(thinned(places)))
        ticks.set_minor_locator(NullLocator())
        if axis.kind != "tokens":
            low, high = min(places[0], *positive), max(places[-1], *positive)
            margin = (high / low) ** 0.04
            getattr(axes, f"set_{which}lim")(low / margin, high * margin)
    else:
        ticks.set_major_locator(MaxNLocator(5, integer=axis.kind == "whole"))
    if axis.kind == "share":
        getattr(axes, f"set_{which}lim")(-0.04, 1.04)
    ticks.set_major_formatter(FuncFormatter(lambda value, _: short(value, axis.kind)))


def log_ticks(low: float, high: float, kind: str) -> list[float]:
    """Round numbers of a logarithmic axis, three at least: powers of two for bytes, which reach from below to above all
    values; else as few to a decade as will do, and equal steps where the values lie close together."""
    if kind == "bytes":
        first, last = math.floor(math.log2(low)), math.ceil(math.log2(high))
        first, last = (first, last) if last - first > 1 else (first - 1, first + 1 if last == first else last)
        return [2.0**power for power in range(first, last + 1)]
    if high / low < 1.25:
        low, high = low / 1.25, high * 1.25
    for subs in ((1,), (1, 3), (1, 2, 5)):
        inside = [x for x in LogLocator(base=10, subs=subs, numticks=99).tick_values(low, high) if low <= x <= high]
        if len(inside) >= 3:
            return inside
    return [x for x in MaxNLocator(5).tick_values(low, high) if x > 0]


def thinned(values: list[float], most: int = 7) -> list[float]:
    """At most so many of the values, at equal distances, the last among them."""
    step = -(-len(values) // most)
    return values[::-1][::step][::-1]


def short(value: float, kind: str) -> str:
    """A tick's words."""
    if kind == "bytes":
        return human_bytes(value).replace(".0 ", " ")
    if kind == "tokens" and value >= 1024 and value % 1024 == 0:
        return f"{value / 1024:.0f}k"
    units = {"flops": FLOPS, "count": COUNTS, "tokens": COUNTS}.get(kind, ())
    unit, size = next(((unit, size) for unit, size in units if abs(value) >= size), ("", 1.0))
    return f"{value / size:g}{unit}"


def heat(
    name: str,
    label: str,
    shares: Sequence[Sequence[float | None]],
    columns: Sequence[str],
    rows: Sequence[str],
    texts: Sequence[Sequence[str]] | None = None,
    hatched: frozenset[tuple[int, int]] = frozenset(),
    axes_labels: tuple[str, str] = ("", ""),
) -> Markup:
    """Cells shaded from 0 to 1, the first row on top; None leaves a cell empty. texts: what stands in them."""
    with drawing():
        figure, axes = panel(4.4, 0.6 + (0.3 if texts else 0.11) * max(len(rows), 4), HEAT_MARGINS)
        for i, row in enumerate(shares):
            for j, share in enumerate(row):
                if share is None:
                    continue
                shade = min(1.0, max(0.0, share))
                axes.add_patch(Rectangle((j, i), 1, 1, facecolor=HEAT, alpha=shade, linewidth=0))
                axes.add_patch(Rectangle((j, i), 1, 1, edgecolor=FAINT, fill=False, linewidth=0.5))
                if (i, j) in hatched:
                    axes.add_patch(Rectangle((j, i), 1, 1, edgecolor=SOFT, fill=False, linewidth=0, hatch="////"))
                if texts:
                    axes.text(j + 0.5, i + 0.5, texts[i][j], ha="center", va="center", fontsize=9)
        axes.set_xlim(0, len(columns))
        axes.set_ylim(len(rows), 0)
        for which, names in (("x", columns), ("y", rows)):
            keep = thinned([float(i) for i in range(len(names))], 8)
            getattr(axes, f"set_{which}ticks")([k + 0.5 for k in keep], [names[int(k)] for k in keep])
        axes.tick_params(length=0)
        axes.set_xlabel(axes_labels[0])
        axes.set_ylabel(axes_labels[1])
        for spine in axes.spines.values():
            spine.set_visible(False)
        return inline(figure, name, label)


def swatch(name: str, style: int) -> Markup:
    """A short piece of a series' line, for a legend."""
    with drawing():
        figure, axes = panel(0.45, 0.17, (0.02, 0.02, 0, 0))
        axes.plot([0, 1, 2], [0, 0, 0], **{**look(style, 3), "markevery": [1]})
        axes.axis("off")
        return inline(figure, name, "")


def log_shade(value: float | None, low: float, high: float) -> float:
    """From 0 at low to 1 at high on a logarithmic scale; 1 where the value is None, beyond all bounds."""
    if value is None or high <= low:
        return 1.0
    return (math.log(value) - math.log(low)) / (math.log(high) - math.log(low))
