"""Plots of speed and memory by context and batch."""

from collections.abc import Iterator
from typing import Any

from .numbers import Json, count_words
from .panels import LENGTH, Drawer, Group, Panel
from .plots import Axis, Line

PANELS = (
    ("latency", "time per token", Axis("milliseconds", log=True), 1e3),
    ("first_token", "time to first token", Axis("seconds", log=True), 1.0),
    ("cache", "cache or state", Axis("", log=True, kind="bytes"), 1.0),
    ("peak", "peak memory", Axis("", log=True, kind="bytes"), 1.0),
)
SPREAD = {"latency": "quartiles", "first_token": "first_token_quartiles"}
CROSSING = {"latency": "decode_cross_over", "first_token": "prefill_cross_over"}


def speed_groups(draw: Drawer) -> Iterator[Group]:
    """For each precision, by context for the smallest batch; by batch where there are several."""
    precisions = dict.fromkeys(p for run in draw.runs if run["speed"] for p in run["speed"]["precisions"])
    for precision in precisions:
        parts = [
            (run, run["speed"]["precisions"][precision])
            for run in draw.runs
            if run["speed"] and precision in run["speed"]["precisions"]
        ]
        batch = min((row["batch"] for _, part in parts for row in part["rows"]), default=1)
        panels = [panel for spec in PANELS for panel in _by_context(draw, parts, batch, *spec)]
        panels += _by_batch(draw, parts)
        yield _group(draw, parts, precision, batch, panels)


def _group(draw: Drawer, parts: list[tuple[Json, Json]], precision: str, batch: int, panels: list[Panel]) -> Group:
    machines = {_machine(run["speed"]["machine"]) for run, _ in parts}
    repeats = [row["first_token"]["n"] for _, part in parts for row in part["rows"]]
    sources = [f"{precision}, {count_words(repeats)} repeats", *sorted(machines)]
    sources += sorted({f"peak memory is {run['speed']['peak_is']}" for run, _ in parts if run["speed"]["peak_is"]})
    text = (
        f"Batch of {batch}. Medians; bars reach from the first to the third quartile. Dotted upright lines: the "
        "context from which the student takes less than its teacher."
    )
    legend = draw.legend([(run, row["role"]) for run, part in parts for row in part["rows"]])
    commands = list(dict.fromkeys(str(run["speed"]["command"]) for run, _ in parts))
    return Group(f"Speed and memory, {precision}", panels, text, legend, sources, commands)


def _machine(machine: Any) -> str:
    known = machine or {}
    words = [
        known.get("name"),
        f"{known['threads']} thread{'s' if known['threads'] > 1 else ''}" if known.get("threads") else "",
        known.get("device"),
    ]
    return ", ".join(str(x) for x in words if x)


def _by_context(
    draw: Drawer, parts: list[tuple[Json, Json]], batch: int, key: str, title: str, axis: Axis, factor: float
) -> list[Panel]:
    series, marks = [], []
    for run, part in parts:  # a teacher that runs share was timed beside each: it has a line for each
        for role in ("teacher", "student"):
            rows = [r for r in part["rows"] if (r["role"], r["batch"]) == (role, batch) and r[key]["measured"]]
            low, high = _quartiles(rows, SPREAD.get(key), factor)
            values = [row[key]["value"] * factor for row in rows]
            series.append(Line(draw.subjects.style(run, role), [row["context"] for row in rows], values, low, high))
        marks += _marks(part, batch, key, max((row["context"] for row in part["rows"]), default=0))
    return draw.curves(title, series, LENGTH, axis, marks)


def _quartiles(rows: list[Json], key: str | None, factor: float) -> tuple[list[float], list[float]]:
    pairs = [row[key] for row in rows] if key else []
    if not pairs or any(x is None for pair in pairs for x in pair or [None]):
        return [], []
    return [low * factor for low, _ in pairs], [high * factor for _, high in pairs]


def _marks(part: Json, batch: int, key: str, longest: int) -> list[float]:
    """Cross-overs within the contexts measured."""
    if key == "cache":
        meeting = part["memory"].get("measured_cross_over")
        return [meeting] if meeting and meeting <= longest else []
    found = [b[CROSSING[key]]["value"] for b in part["by_batch"] if b["batch"] == batch] if key in CROSSING else []
    return [x for x in found if x and x <= longest]


def _by_batch(draw: Drawer, parts: list[tuple[Json, Json]]) -> list[Panel]:
    """Decode throughput over the batch, at the longest context that was measured for more than one batch."""
    batches: dict[int, set[int]] = {}
    for _, part in parts:
        for row in part["rows"]:
            batches.setdefault(row["context"], set()).add(row["batch"])
    several = [context for context, found in batches.items() if len(found) > 1]
    if not several:
        return []
    context, series = max(several), []
    for run, part in parts:
        for role in ("teacher", "student"):
            rows = sorted(
                (r for r in part["rows"] if (r["role"], r["context"]) == (role, context)), key=lambda r: r["batch"]
            )
            places, values = [row["batch"] for row in rows], [row["decode"]["value"] for row in rows]
            series.append(Line(draw.subjects.style(run, role), places, values))
    title = f"decode throughput after {context:,} tokens"
    return draw.curves(title, series, Axis("batch", log=True, kind="tokens"), Axis("tokens/s", log=True))
