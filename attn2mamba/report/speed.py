"""What bench.json says, and the headline figures of speed and memory; sizes that were not measured are reckoned."""

import shlex
from collections.abc import Iterator
from typing import Any

from ..precision import PRECISIONS
from ..sizes import cross_over, kv_bytes, state_bytes
from .data import RunData
from .numbers import MEASURED, Json, Number, missing

LONG = 32 * 1024
"""Context, in tokens, of the headlines."""

ELEMENT, ELEMENT_NAME = 2, "bf16"
"""Bytes of an activation where sizes are reckoned, as `inspect` does."""

ROLES = ("teacher", "student")


def speed(run: RunData) -> Json | None:
    """By precision: `rows` of figures, `skipped` cells, cross-overs by batch, the gain split in two, and quality. None
    without a bench.json."""
    precisions = run.bench.get("precisions")
    if not precisions:
        return None
    found = {name: _precision(run, name, part) for name, part in precisions.items()}
    notes = {name: run.bench.get(name) for name in ("machine", "options", "peak_is", "command")}
    return {**notes, "precisions": found}


def _precision(run: RunData, name: str, part: Json) -> Json:
    command = str(run.bench.get("command", ""))
    cells = part.get("cells", [])
    skipped = [
        {"batch": cell["batch"], "context": cell["context"], "role": role, "why": cell[role]["skipped"]}
        for cell in cells
        for role in ROLES
        if "skipped" in cell.get(role, {})
    ]
    return {
        "note": part.get("note"),
        "rows": list(_rows(cells, name, command)),
        "skipped": skipped,
        "by_batch": [_scaling(run, scaling, cells, name, command) for scaling in part.get("scaling", [])],
        "memory": part.get("memory", {}),
        "weights": {role: m.get("weights_bytes") for role, m in part.get("models", {}).items()},
        "quality": _quality(part.get("quality"), name, command),
    }


def _rows(cells: list[Json], precision: str, command: str) -> Iterator[Json]:
    for cell in cells:
        for role in ROLES:
            found = cell.get(role, {})
            if "token_latency" in found:
                yield {"batch": cell["batch"], "context": cell["context"], "role": role} | _figures(
                    found, precision, command
                )


def _figures(cell: Json, precision: str, command: str) -> Json:
    """Numbers of one cell; `quartiles` of the token latency, in seconds, are its spread."""
    latency, first, decode = cell["token_latency"], cell["time_to_first_token"], cell["decode_tokens_per_second"]
    repeats = cell["repeats"]

    def number(value: float | None, unit: str, n: int, of: str) -> Number:
        return missing(unit, command) if value is None else Number(value, unit, n, of, precision, command)

    return {
        "first_token": number(first["median"], "seconds", repeats, "repeats"),
        "first_token_quartiles": first["quartiles"],
        "latency": number(latency["median"], "seconds", latency["n"], "tokens"),
        "quartiles": latency["quartiles"],
        "p95": number(latency["p95"], "seconds", latency["n"], "tokens"),
        "decode": number(decode["median"], "rate", repeats, "repeats"),
        "prefill": number(cell["prefill_tokens_per_second"], "rate", repeats, "repeats"),
        "peak": number(cell.get("peak_bytes"), "bytes", 1, "warm-up"),
        "cache": number(cell["cache"]["bytes"], "bytes", 1, "sequence or batch"),
        "cache_tokens": cell["cache"]["tokens"],
        "beyond_training": bool(cell.get("beyond_training_length")),
        "others_busy": cell.get("others_busy"),
    }


def _scaling(run: RunData, scaling: Json, cells: list[Json], precision: str, command: str) -> Json:
    """Cross-overs of one batch size as numbers; lines and gains as the benchmark gives them."""
    crossing, cells = scaling.get("decode_cross_over") or {}, [c for c in cells if c["batch"] == scaling["batch"]]
    contexts = [cell["context"] for cell in cells]
    where = MEASURED if crossing.get("measured") else f"from fitted lines, beyond the {max(contexts, default=0):,} "
    where += "" if crossing.get("measured") else "tokens measured"
    points = min((scaling.get(role) or {}).get("points", 0) for role in ROLES)
    fitted = (points, "contexts", precision, command)
    never = "the student's latency does not grow clearly slower than its teacher's, so no length is given"
    if scaling.get("drifted"):
        never = "the machine's speed drifted between cells, so no length is given"
    elif len(set(contexts)) < 4:
        never = "too few contexts to tell a length"
    decode = missing("tokens", run.bench_command, never if crossing else "")
    if crossing.get("tokens") is not None:
        decode = Number(crossing["tokens"], "tokens", *fitted, stderr=crossing.get("stderr"), note=where)
    prefill = scaling.get("prefill_cross_over") or {}
    first = missing("tokens", command, "the times do not meet within the contexts measured")
    if prefill.get("tokens") is not None:
        both = sum(all("repeats" in cell.get(role, {}) for role in ROLES) for cell in cells)
        first = Number(prefill["tokens"], "tokens", both, "contexts", precision, command, note="between measured ones")
    ratio = scaling.get("speed_up_at_32k") or {}
    up = missing("speed-up", run.bench_command)
    if ratio.get("ratio") is not None:
        of, note = fitted, "reckoned from lines fitted to other contexts"
        if ratio.get("measured"):
            long = next(cell for cell in cells if cell["context"] == LONG)
            of, note = (min(long[role]["repeats"] for role in ROLES), "repeats", precision, command), MEASURED
        up = Number(ratio["ratio"], "speed-up", *of, stderr=ratio.get("stderr"), note=note)
    return {
        "batch": scaling["batch"],
        "decode_cross_over": decode,
        "prefill_cross_over": first,
        "speed_up_at_32k": up,
        "speed_up_measured": _speed_up_measured(run, cells, precision, command),
        "gain": scaling.get("gain", []),
        "lines": {role: scaling.get(role) for role in ROLES},
    }


def _speed_up_measured(run: RunData, cells: list[Json], precision: str, command: str) -> Number:
    """At the longest context that both models were measured at, which is its note."""
    both = [cell for cell in cells if all("token_latency" in cell.get(role, {}) for role in ROLES)]
    if not both:
        return missing("speed-up", run.bench_command)
    last = max(both, key=lambda cell: cell["context"])
    theirs, ours = (last[role]["token_latency"]["median"] for role in ROLES)
    repeats = min(last[role]["repeats"] for role in ROLES)
    return Number(theirs / ours, "speed-up", repeats, "repeats", precision, command, note=f"{last['context']:,} tokens")


def _quality(quality: Any, precision: str, command: str) -> Json | None:
    """Perplexity of each model in this precision."""
    if not quality:
        return None
    scores = {
        role: Number(s["perplexity"], "perplexity", s["tokens"], "tokens", precision, command)
        for role, s in quality["models"].items()
        if s.get("perplexity") is not None
    }
    return {"data": quality["data"], "context": quality["context"], "models": scores}


def headlines(run: RunData, speeds: Json | None) -> dict[str, Number]:
    """Of one sequence, in the benchmark's first precision: memory_at_32k, memory_factor_at_32k and memory_cross_over,
    reckoned from shapes (without a benchmark in the precision of `inspect`); speed_up_at_32k, speed_up_measured (at the
    longest context) and speed_cross_over."""
    found = _memory(run)
    empty = {name: missing(unit, run.bench_command) for name, unit in SPEED.items()}
    batches = next(iter(speeds["precisions"].values()))["by_batch"] if speeds else []
    one = next((b for b in batches if b["batch"] == 1), None)
    if one is None:
        return found | empty
    speed_up = {"speed_up_at_32k": one["speed_up_at_32k"], "speed_up_measured": one["speed_up_measured"]}
    return found | speed_up | {"speed_cross_over": one["decode_cross_over"]}


SPEED = {"speed_up_at_32k": "speed-up", "speed_up_measured": "speed-up", "speed_cross_over": "tokens"}
MEMORY = {"memory_at_32k": "bytes", "memory_factor_at_32k": "x", "memory_cross_over": "tokens"}


def _memory(run: RunData) -> dict[str, Number]:
    command = shlex.join(["attn2mamba", "inspect", str(run.path)])
    name, element = next(iter(run.bench.get("precisions", {})), None), ELEMENT
    if name in PRECISIONS:
        command, element = str(run.bench.get("command", "")), PRECISIONS[name].itemsize
    if run.config is None or not run.finished:
        return {name: missing(unit, run.distill_command) for name, unit in MEMORY.items()}
    config, note = run.config, "reckoned from shapes"
    ours = state_bytes(config, element) + kv_bytes(config, LONG, element, kept_only=True)
    theirs = kv_bytes(config, LONG, element)
    common = (1, "sequence", name or ELEMENT_NAME, command)
    meeting = cross_over(config, element)
    never = missing("tokens", command, "never: every converted layer had a small sliding window")
    return {
        "memory_at_32k": Number(ours, "bytes", *common, note=f"{note}, recurrent state in fp32"),
        "teacher_memory_at_32k": Number(theirs, "bytes", *common, note=note),
        "memory_factor_at_32k": Number(theirs / ours, "x", *common, note=note),
        "memory_cross_over": never if meeting is None else Number(meeting, "tokens", *common, note=note),
    }
