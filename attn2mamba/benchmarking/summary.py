"""What the measured cells say: figures of each, what grows with the context and what does not, and where lines meet."""

import math
import statistics
from typing import Any

from ..precision import PRECISIONS
from ..sizes import cross_over
from .side import Side
from .statistics import Line, crossing, fit_line, interpolated_crossing, percentile, spread

Json = dict[str, Any]

K = 1024
LONG = 32 * K
"""Context, in tokens, at which the summary says memory and speed."""

UNCERTAIN = 0.25
"""Relative standard error beyond which a reckoned speed-up is not said."""


def make_cells(
    measured: dict[tuple[int, int], Json], sides: dict[str, Side], precision: str, new_tokens: int, state: str
) -> list[Json]:
    """One row for each (batch, context), with each role's figures or why it was skipped."""
    rows = []
    for (batch, context), result in measured.items():
        row: Json = {"batch": batch, "context": context}
        for role, side in sides.items():
            row[role] = result[role]
            if "runs" in result[role]:
                sizes = (PRECISIONS[precision].itemsize, PRECISIONS[state].itemsize)
                computed = side.cache_bytes(context + new_tokens, batch, *sizes)
                row[role] = _figures(result[role], batch, context, new_tokens, computed)
                trained = side.trained_length()
                row[role]["beyond_training_length"] = trained is not None and context + new_tokens > trained
        rows.append(row)
    return rows


def _figures(result: Json, batch: int, context: int, new_tokens: int, computed: int) -> Json:
    runs = result["runs"]
    first = spread([run["first"] for run in runs])
    steps = [seconds for run in runs for seconds in run["steps"]]
    held = result["cache_bytes"]
    return {
        "repeats": len(runs),
        **({"max_seconds": result["max_seconds"]} if "max_seconds" in result else {}),
        "others_busy": max((run["others"] for run in runs if run["others"] is not None), default=None),
        "interleaved": result["interleaved"],
        "time_to_first_token": first,
        "prefill_tokens_per_second": batch * context / first["median"],
        "token_latency": {**spread(steps), "p95": percentile(steps, 0.95)},
        "latency_by_repeat": [statistics.median(run["steps"]) for run in runs],
        "decode_tokens_per_second": spread([batch * new_tokens / sum(run["steps"]) for run in runs]),
        "peak_bytes": result["peak_bytes"],
        "cache": {"tokens": context + new_tokens, "bytes": held, "computed": computed, "ratio": held / computed},
    }


def scaling(batch: int, cells: list[Json], models: Json, bandwidth: float) -> Json:
    """Of one batch size: each role's line of decode latency over context, and what follows from both. drifted: a line
    clearly falls, which more context cannot do to it, so nothing follows from the lines."""
    rows = [row for row in cells if row["batch"] == batch]
    lines = {role: _line(rows, role) for role in models}
    found: Json = {"batch": batch, "drifted": any(line is not None and line.falls() for line in lines.values())}
    for role, line in lines.items():
        found[role] = None if line is None else _split(line, rows, role, models[role], bandwidth)
    if len(models) == 2:
        if found["drifted"]:
            lines = dict.fromkeys(lines)
        both = [row for row in rows if all("token_latency" in row[role] for role in models)]
        found["decode_cross_over"] = _decode_cross_over(lines["teacher"], lines["student"], both)
        found["prefill_cross_over"] = _prefill_cross_over(both)
        found["gain"] = [_gain(row, both[0]) for row in both]
        found["speed_up_at_32k"] = _speed_up(lines["teacher"], lines["student"], both)
    return found


def _line(rows: list[Json], role: str) -> Line | None:
    """Through the median latency of each context, at the middle of its new tokens. Repeats of one context are no points
    of their own: a machine that was slow for a while was so for all of them."""
    measured = [row for row in rows if "token_latency" in row[role]]
    return fit_line(
        [
            ((row["context"] + row[role]["cache"]["tokens"]) / 2, row[role]["token_latency"]["median"])
            for row in measured
        ]
    )


def _split(line: Line, rows: list[Json], role: str, model: Json, bandwidth: float) -> Json:
    """Latency = weights / bandwidth + overhead + cache / bandwidth; the first two do not depend on the context."""
    near_zero = rows[0][role].get("token_latency")
    weights = model["weights_read_bytes"] / bandwidth
    return {
        "near_zero_context": rows[0]["context"] if near_zero else None,
        "near_zero_latency": near_zero["median"] if near_zero else None,
        "intercept": line.intercept,
        "intercept_stderr": line.intercept_stderr,
        "slope_per_1k": line.slope * K,
        "slope_per_1k_stderr": None if line.slope_stderr is None else line.slope_stderr * K,
        "points": line.n,
        "weights_seconds": weights,
        "overhead_seconds": line.intercept - weights,
    }


def _decode_cross_over(teacher: Line | None, student: Line | None, rows: list[Json]) -> Json:
    """tokens: where the fitted lines meet; None where they do not, or not clearly, or with fewer than three contexts.
    measured: within the contexts."""
    if teacher is None or student is None or None in (teacher.slope_stderr, student.slope_stderr):
        return {"tokens": None, "stderr": None, "measured": False}
    tokens, error = crossing(teacher, student)
    longest = max((row["context"] for row in rows), default=0)
    return {"tokens": tokens, "stderr": error, "measured": tokens is not None and tokens <= longest}


def _prefill_cross_over(rows: list[Json]) -> Json:
    """tokens: between measured contexts, None where the times do not meet there; student_faster: at the longest."""
    if not rows:
        return {"tokens": None, "student_faster": None}
    teacher, student = (
        [(row["context"], row[role]["time_to_first_token"]["median"]) for row in rows]
        for role in ("teacher", "student")
    )
    return {"tokens": interpolated_crossing(teacher, student), "student_faster": student[-1][1] < teacher[-1][1]}


def _gain(row: Json, near_zero: Json) -> Json:
    """Seconds a token that the student saves, of which `fixed` are saved near no context too (bytes of weights, and
    overhead), and the rest comes from a state that does not grow. Negative: it loses them."""
    saved, fixed = (
        r["teacher"]["token_latency"]["median"] - r["student"]["token_latency"]["median"] for r in (row, near_zero)
    )
    return {"context": row["context"], "seconds": saved, "fixed": fixed, "from_state": saved - fixed}


def _speed_up(teacher: Line | None, student: Line | None, rows: list[Json]) -> Json | None:
    """Teacher's latency over the student's at LONG tokens. measured is False where it is reckoned from the lines; None
    where they are too uncertain for that."""
    for row in rows:
        if row["context"] == LONG:
            medians = [row[role]["token_latency"]["median"] for role in ("teacher", "student")]
            return {"ratio": medians[0] / medians[1], "stderr": _paired_stderr(row), "measured": True}
    if teacher is None or student is None:
        return None
    error = math.hypot(*(line.relative_stderr(LONG) for line in (teacher, student)))
    if error > UNCERTAIN:
        return None
    ratio = teacher.at(LONG) / student.at(LONG)
    return {"ratio": ratio, "stderr": ratio * error, "measured": False}


def _paired_stderr(row: Json) -> float | None:
    """Standard error of the mean of teacher's latency over the student's in each round, which shares the machine's
    drift; None where they did not run in turn at least twice."""
    if not all(row[role]["interleaved"] for role in ("teacher", "student")):
        return None
    pairs = zip(row["teacher"]["latency_by_repeat"], row["student"]["latency_by_repeat"], strict=True)
    ratios = [teacher / student for teacher, student in pairs]
    return statistics.stdev(ratios) / math.sqrt(len(ratios)) if len(ratios) > 1 else None


def memory_summary(sides: dict[str, Side], cells: list[Json], precision: str, state: str) -> Json:
    """Bytes of one sequence at LONG tokens, and the context from which the student holds less: computed as `inspect`
    does it, and from the bytes that were measured."""
    sizes = (PRECISIONS[precision].itemsize, PRECISIONS[state].itemsize)
    found: Json = {"bytes_at_32k": {role: side.cache_bytes(LONG, 1, *sizes) for role, side in sides.items()}}
    found["ratios"] = sorted({row[r]["cache"]["ratio"] for row in cells for r in sides if "cache" in row[r]})
    if len(sides) == 2:
        config = sides["student"].config
        found["cross_over"] = cross_over(config, sizes[0]) if state == "fp32" else None
        found["measured_cross_over"] = _measured_cross_over(cells)
    return found


def _measured_cross_over(cells: list[Json]) -> int | None:
    """From the lines through the bytes held; None where they are no lines (sliding windows) or do not cross."""
    lines = []
    for role in ("teacher", "student"):
        caches = [(row[role]["cache"], row["batch"]) for row in cells if "cache" in row[role]]
        points = [(cache["tokens"], cache["bytes"] / batch) for cache, batch in caches]
        line = fit_line(points)
        if line is None or any(abs(line.at(x) - y) > 0.5 for x, y in points):
            return None
        lines.append(line)
    teacher, student = lines
    rise = teacher.slope - student.slope
    if rise <= 0:
        return None
    # The first whole number of tokens beyond the place where both hold the same.
    return math.floor(round((student.intercept - teacher.intercept) / rise, 6)) + 1
