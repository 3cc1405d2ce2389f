"""matplotlib figures as SVG that lies inside a page: text stays text, colours follow the page's light or dark style."""

import io
import re
from html import escape
from typing import Any

import matplotlib
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure

SERIES = 6
"""Styles to tell series apart: each its colour, dash and marker, so that none is needed alone."""

INK, FAINT, SOFT, HEAT = "#000000", "#010101", "#020202", "#a000f0"
TEACHER = 0
"""Style of the teacher: the page's own text colour, dashed."""

MARKERS = ("x", "o", "s", "^", "D", "v", "P")
DASHES: tuple[Any, ...] = ((0, (4, 2)), "-", (0, (6, 1.5)), (0, (3, 1, 1, 1)), (0, (1, 1)), (0, (8, 2, 1, 2)), "-")

RC: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "attn2mamba",
    "font.size": 10,
    "font.family": "DejaVu Sans",
    "text.parse_math": False,
    "hatch.linewidth": 0.6,
    "axes.linewidth": 0.7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.formatter.use_mathtext": False,
    "xtick.minor.size": 0,
    "ytick.minor.size": 0,
}

COLOURS = {INK: "currentColor", FAINT: "var(--faint)", SOFT: "var(--soft)", HEAT: "var(--heat)"}


def colour(style: int) -> str:
    """The stand-in for a series' colour, which `inline` turns into the page's."""
    return INK if style == TEACHER else f"#a0000{(style - 1) % SERIES + 1}"


COLOURS |= {colour(style): f"var(--series-{style})" for style in range(1, SERIES + 1)}


def look(style: int, points: int) -> dict[str, Any]:
    """How a line of that style is drawn; markers only where points are few."""
    index = 0 if style == TEACHER else (style - 1) % SERIES + 1
    return {
        "color": colour(style),
        "linestyle": DASHES[index],
        "linewidth": 1.6,
        "marker": MARKERS[index] if points <= 20 else "",
        "markersize": 4.5,
    }


MARGINS, HEAT_MARGINS = (0.78, 0.1, 0.48, 0.32), (0.6, 0.1, 0.48, 0.1)
"""Left, right, bottom and top of a panel, in inches: room for 512 MiB, and above it for the label. They are the same
for all curves, so that panels beside each other line up."""


def panel(width: float, height: float, margins: tuple[float, float, float, float] = MARGINS) -> tuple[Figure, Axes]:
    """A figure of one plot, in inches; call within `drawing`."""
    figure = Figure(figsize=(width, height))
    left, right, bottom, top = margins
    place = (left / width, bottom / height, 1 - (left + right) / width, 1 - (bottom + top) / height)
    axes = figure.add_axes(place)
    figure.patch.set_visible(False)
    axes.patch.set_visible(False)
    return figure, axes


def drawing() -> Any:
    """The context that figures are made and written in."""
    return matplotlib.rc_context(RC)


def inline(figure: Figure, name: str, label: str) -> Markup:
    """The figure as an <svg> element. `name` makes its ids unique within the page, `label` tells what it shows to those
    who cannot see it; without one it is an ornament."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->", "", text, flags=re.S)
    text = re.sub(r"<defs>\s*</defs>\s*", "", text)
    used = set(re.findall(r'xlink:href="#([^"]+)"|url\(#([^)]+)\)', text))
    known = {one or other for one, other in used}
    text = re.sub(r' id="([^"]+)"', lambda m: f' id="{name}-{m[1]}"' if m[1] in known else "", text)
    text = re.sub(r'xlink:href="#([^"]+)"', rf'href="#{name}-\1"', text)
    text = re.sub(r"url\(#([^)]+)\)", rf"url(#{name}-\1)", text)
    for stand_in, page in COLOURS.items():
        text = text.replace(stand_in, page)
    view = re.search(r'viewBox="[^"]+"', text)
    assert view
    body = text[text.index(">") + 1 :]
    role = f'role="img" aria-label="{escape(label)}"' if label else 'aria-hidden="true"'
    return Markup(f"<svg {role} {view[0]}>{body.strip()}")
