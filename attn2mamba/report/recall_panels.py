"""Plots of recall, length and generation, from the cells of measures."""

from collections.abc import Iterator
from typing import Any

from ..evaluate.measure import TEACHER
from .numbers import Json, count_words
from .panels import LENGTH, Drawer, Group, Panel, length_words
from .plots import Axis, Line, heat

SHARE = Axis("share right", kind="share")
Key = tuple[Any, ...]


def recall_groups(draw: Drawer) -> Iterator[Group]:
    """Heat maps of what has lengths and depths; curves of what has distances, or lengths alone."""
    for name in draw.measures("recall"):
        forms = dict.fromkeys(c.get("form", "") for _, _, rows in draw.roles(name) for c in rows)
        panels = [panel for form in forms for panel in _recall_panels(draw, name, form)]
        precisions, commands = draw.cell_sources([name])
        text = _notes(draw, name)
        curves = not any(c.get("depth") is not None for _, _, rows in draw.roles(name) for c in rows)
        legend = draw.legend([(run, role) for run, role, _ in draw.roles(name)]) if curves else []
        yield Group(name, panels, text, legend, [f"{_count(draw, name)}, {', '.join(precisions)}"], commands)


def _count(draw: Drawer, name: str) -> str:
    """Of what a point or a field is a mean: the items, which are independent, where the cells know them."""
    cells = [c for _, _, rows in draw.roles(name) for c in rows]
    if not all("items" in c for c in cells):
        return f"{count_words([c['n'] for c in cells])} answers each"
    words = f"{count_words([c['items'] for c in cells])} {'strings' if 'distance' in cells[0] else 'contexts'} each"
    return words + ("; bars are one standard error over them" if any(_drawn_bar(c) for c in cells) else "")


def _drawn_bar(cell: Json) -> bool:
    return cell.get("depth") is None and cell.get("stderr") is not None


def _notes(draw: Drawer, name: str) -> str:
    cells = [c for _, _, rows in draw.roles(name) for c in rows]
    notes = []
    if any(c.get("depth") is not None for c in cells):
        notes.append("Depth 0 is the start of the context.")
    if any(c.get("teacher_fails") for c in cells):
        marks = "Hatched" if any(c.get("depth") is not None for c in cells) else "Left out"
        notes.append(
            f"{marks}: at that length the teacher does no better than guessing, so nothing is said about the student."
        )
    if any(c.get("beyond_training") for c in cells):
        first = min(_length(c) for c in cells if c.get("beyond_training"))
        notes.append(f"From {first:,} tokens on this is beyond the length that the model was trained for.")
    return " ".join(notes)


def _length(cell: Json) -> int:
    """Tokens that a cell is about, by whatever name."""
    return next(cell[key] for key in ("tokens", "distance", "position_from", "context") if key in cell)


def _recall_panels(draw: Drawer, name: str, form: str) -> Iterator[Panel]:
    chosen = [(run, role, [c for c in rows if c.get("form", "") == form]) for run, role, rows in draw.roles(name)]
    if any(c.get("depth") is not None for _, _, rows in chosen for c in rows):
        for run, role, rows in chosen:
            label = draw.subjects.label(run, role)
            yield Panel(": ".join(x for x in (form, label) if x), _heat_map(draw, rows, f"{name} {form}, {label}"))
        return
    for size in dict.fromkeys(c.get("size") for _, _, rows in chosen for c in rows):
        key = "distance" if any("distance" in c for _, _, rows in chosen for c in rows) else "tokens"
        series = []
        for run, role, rows in chosen:
            cells = sorted((c for c in rows if c.get("size") == size), key=lambda c: c[key])
            if role != TEACHER:
                cells = [c for c in cells if not c.get("teacher_fails")]
            style = draw.subjects.style(run, role)
            series.append(Line(style, [c[key] for c in cells], [c["accuracy"] for c in cells], *_bars(cells)))
        title = ", ".join(x for x in (form, f"size {size}" if size is not None else "") if x) or name
        axis = Axis("distance, tokens", True, "tokens") if key == "distance" else LENGTH
        yield from draw.curves(title, series, axis, SHARE)


def _bars(cells: list[Json]) -> tuple[list[float], list[float]]:
    """One standard error over independent items on either side; nothing where there is none."""
    pairs = [(c["accuracy"], c.get("stderr") or 0.0) for c in cells]
    return [max(0.0, share - error) for share, error in pairs], [min(1.0, share + error) for share, error in pairs]


def _heat_map(draw: Drawer, rows: list[Json], label: str) -> Any:
    lengths = sorted({c["tokens"] for c in rows})
    depths = sorted({c["depth"] for c in rows if c.get("depth") is not None})
    known: dict[Key, Json] = {(c.get("depth"), c["tokens"]): c for c in rows}
    table = [[known.get((d, n)) for n in lengths] for d in depths]
    shares = [[None if c is None else c["accuracy"] for c in row] for row in table]
    texts = [["" if c is None else f"{100 * c['accuracy']:.0f}" for c in row] for row in table]
    failed = [
        (i, j) for i, row in enumerate(table) for j, c in enumerate(row) if c is not None and c.get("teacher_fails")
    ]
    columns, names = [length_words(n) for n in lengths], [f"{d:g}" for d in depths]
    labels = ("context, tokens", "depth")
    return heat(draw.name(), f"{label}, % right", shares, columns, names, texts, frozenset(failed), labels)


def position_groups(draw: Drawer) -> Iterator[Group]:
    """Perplexity by position within a text and by length of the context."""
    for name in draw.measures("positions"):
        place, context = [], []
        for run, role, rows in draw.roles(name):
            style = draw.subjects.style(run, role)
            rows = [c for c in rows if c["perplexity"] is not None]
            buckets = sorted((c for c in rows if "position_to" in c), key=lambda c: c["position_to"])
            lengths = sorted((c for c in rows if "context" in c), key=lambda c: c["context"])
            place.append(Line(style, [c["position_to"] for c in buckets], [c["perplexity"] for c in buckets]))
            context.append(Line(style, [c["context"] for c in lengths], [c["perplexity"] for c in lengths]))
        height = Axis("perplexity", log=True)
        panels = draw.curves("by position", place, Axis("up to position, tokens", True, "tokens"), height)
        panels += draw.curves("by length of the context", context, LENGTH, height)
        precisions, commands = draw.cell_sources([name])
        counts = [c["n"] for _, _, rows in draw.roles(name) for c in rows]
        source = f"{count_words(counts)} tokens a point, {', '.join(precisions)}"
        legend = draw.legend([(run, role) for run, role, _ in draw.roles(name)])
        yield Group("Perplexity by position", panels, _notes(draw, name), legend, [source], commands)


def generation_groups(draw: Drawer) -> Iterator[Group]:
    """Loops by length of a continuation; validity of answers by turn."""
    for name in draw.measures("generation"):
        panels: list[Panel] = []
        cells = [c for _, _, rows in draw.roles(name) for c in rows]
        if all("loop" in c for c in cells):
            for mode in dict.fromkeys(c["mode"] for c in cells):
                axis = Axis("tokens written", kind="count")
                panels += _by(draw, name, {"mode": mode}, "tokens", "loop", f"{mode}: texts in a loop", axis)
        elif all("turn" in c for c in cells):
            for kind in dict.fromkeys(c["kind"] for c in cells):
                for metric in ("valid", "right", "recalled", "arguments"):
                    panels += _by(
                        draw, name, {"kind": kind}, "turn", metric, f"{kind}: {metric}", Axis("turn", kind="whole")
                    )
        precisions, commands = draw.cell_sources([name])
        counts = [c["n"] for c in cells]
        legend = draw.legend([(run, role) for run, role, _ in draw.roles(name)])
        source = f"{count_words(counts)} a point, {', '.join(precisions)}"
        if panels:
            yield Group(name, panels, "", legend, [source], commands)


def _by(draw: Drawer, name: str, chosen: Json, x: str, y: str, title: str, axis: Axis) -> list[Panel]:
    series = []
    for run, role, rows in draw.roles(name):
        cells = [c for c in rows if all(c.get(k) == v for k, v in chosen.items()) and c.get(y) is not None]
        series.append(Line(draw.subjects.style(run, role), [c[x] for c in cells], [c[y] for c in cells]))
    return draw.curves(title, series, axis, Axis("share", kind="share"))
