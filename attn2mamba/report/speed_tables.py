"""Tables of speed and memory: every cell, the gain split in two, and precisions beside each other."""

from collections.abc import Sequence

from ..benchmarking.text import disturbances
from .numbers import Json, count_words, human, minus, plain
from .tables import NONE, Cell, Table

ROLES = ("teacher", "student")


def speeds(run: Json, precision: str) -> Table:
    """Every cell of a benchmark."""
    part, body = run["speed"]["precisions"][precision], []
    for row in part["rows"]:
        latency = Cell(row["latency"]["text"], _spread(row["quartiles"]))
        rates = {k: Cell(plain(row[k]["value"])) for k in ("decode", "prefill")}
        names = ("p95", "decode", "first_token", "prefill", "cache", "peak")
        cells = [rates[k] if k in rates else Cell(row[k]["text"]) for k in names]
        note = f"batch {row['batch']}" + (", beyond training length" if row["beyond_training"] else "")
        count = Cell(f"{row['first_token']['n']:,} repeats", f"{row['latency']['n']:,} tokens timed")
        body.append([Cell(_context(row["context"]), note), Cell(row["role"]), latency, *cells, count])
    columns = ["context", "model", "time per token", "p95", "decode", "first token", "prefill", "cache", "peak", "n"]
    skipped = [f"{s['role']} at {s['context']:,} x {s['batch']}: {s['why']}" for s in part["skipped"]]
    text = (
        "Context: tokens read before the first new one. Time per token and p95 are over all tokens timed, quartiles "
        "below; the rest are medians over repeats. Decode and prefill are tokens per second over the batch. Decode is "
        "all new tokens of a repeat over their whole time, slow ones included: not one over the time per token. "
    )
    text += f"Not run: {'; '.join(skipped)}. " if skipped else ""
    text += part["note"] or ""
    title = f"{run['name']}, {precision}: every context and batch"
    return Table(title, columns, body, text, [precision], [str(run["speed"]["command"])])


def _context(tokens: int) -> str:
    return f"context {tokens:,}"


def disturbed(runs: Sequence[Json]) -> str:
    """What makes all times of a benchmark less sure, tables and plots alike."""
    lines = []
    for run in (run for run in runs if run["speed"]):
        rows = [row for part in run["speed"]["precisions"].values() for row in part["rows"]]
        cells = [{role: _made(row) if role == row["role"] else {} for role in ROLES} for row in rows]
        repeats = (run["speed"]["options"] or {}).get("repeats", 0)
        found = disturbances({"models": ROLES, "cells": cells}, repeats)
        lines += [line if len(runs) == 1 else f"{run['name']}: {line}" for line in found]
    return " ".join(lines)


def _made(row: Json) -> Json:
    return {"repeats": row["first_token"]["n"], "others_busy": row["others_busy"]}


def _spread(quartiles: list[float | None] | None) -> str:
    return " to ".join(human(q, "seconds") for q in quartiles or [] if q is not None)


def gains(run: Json, precision: str) -> Table | None:
    """The time saved at each context, split in two."""
    part, body = run["speed"]["precisions"][precision], []
    for batch in part["by_batch"]:
        for gain in batch["gain"]:
            place = Cell(_context(gain["context"]), f"batch {batch['batch']}")
            seconds = [gain[k] * 1e3 for k in ("seconds", "fixed", "from_state")]
            cells = [r for r in part["rows"] if (r["context"], r["batch"]) == (gain["context"], batch["batch"])]
            body.append(
                [
                    place,
                    *(Cell(f"{minus(plain(x))} ms") for x in seconds),
                    Cell(" / ".join(f"{r['first_token']['n']:,}" for r in cells)),
                ]
            )
    if not body:
        return None
    columns = ["context", "saved a token", "near no context too", "from the fixed state", "n: repeats"]
    text = "Negative: the student takes longer. What it saves near no context comes from bytes of weights and overhead."
    return Table(f"{run['name']}, {precision}: where the gain comes from", columns, body, text, [precision],
                 [str(run["speed"]["command"])])  # fmt: skip


def precisions(run: Json) -> Table | None:
    """What each precision costs in quality and brings in memory and speed, for one sequence at the longest context that
    both models were measured at; None for a single one without perplexities."""
    parts = run["speed"]["precisions"]
    if len(parts) < 2 and not any(part["quality"] for part in parts.values()):
        return None
    body = []
    for precision, part in parts.items():
        scores = part["quality"]["models"] if part["quality"] else {}
        perplexity = [Cell(scores[r]["text"], f"n = {scores[r]['n']:,}") if r in scores else Cell(NONE) for r in ROLES]
        weights = [Cell(human(part["weights"][r], "bytes")) if part["weights"].get(r) else Cell(NONE) for r in ROLES]
        body.append([Cell(precision), *weights, *perplexity, *_longest(part)])
    columns = ["precision", "weights: teacher", "student", "perplexity: teacher", "student"]
    columns += ["time per token: teacher", "student", "speed-up at 32k"]
    data = {f"{q['data']} at {q['context']:,} tokens" for part in parts.values() if (q := part["quality"])}
    text = f"Perplexity on {', '.join(sorted(data))}. " if data else ""
    text += "Time per token with a batch of 1, at the longest context that both models were measured at."
    return Table(f"{run['name']}: precisions", columns, body, text, list(parts), [str(run["speed"]["command"])], True)


def _longest(part: Json) -> list[Cell]:
    rows = {(row["context"], row["role"]): row for row in part["rows"] if row["batch"] == 1}
    both = [context for context, role in rows if role == "teacher" and (context, "student") in rows]
    up = next((b["speed_up_at_32k"] for b in part["by_batch"] if b["batch"] == 1), None)
    last = Cell(up["text"], up["source"]) if up else Cell(NONE)
    if not both:
        return [Cell(NONE), Cell(NONE), last]
    found = [rows[max(both), role] for role in ROLES]
    return [
        *(Cell(row["latency"]["text"], f"{max(both):,} tokens, {_repeats(row)}") for row in found),
        last,
    ]


def _repeats(row: Json) -> str:
    return f"{count_words([row['first_token']['n']])} repeats"
