"""What the files of a run must look like to be read: damaged ones are left out, and told of, before anything is drawn
from them."""

from dataclasses import dataclass
from typing import Any

NUMBER = (int, float)
MAYBE = (*NUMBER, type(None))


@dataclass(frozen=True)
class Map:
    """An object whose values all have one shape."""

    of: Any


@dataclass(frozen=True)
class Record:
    """An object that has `required`, and may have `optional` and any other keys."""

    required: dict[str, Any]
    optional: dict[str, Any]


SPREAD = Record({"median": NUMBER, "n": NUMBER, "quartiles": [MAYBE]}, {})
SKIPPED = Record({"skipped": str}, {})
MEASURED = Record(
    {
        "repeats": NUMBER,
        "token_latency": Record({**SPREAD.required, "p95": NUMBER}, {}),
        "time_to_first_token": SPREAD,
        "decode_tokens_per_second": SPREAD,
        "prefill_tokens_per_second": NUMBER,
        "cache": Record({"tokens": NUMBER, "bytes": NUMBER}, {}),
    },
    {"peak_bytes": MAYBE, "others_busy": MAYBE},
)
SIDE = (SKIPPED, MEASURED)
CROSSING = Record({}, {"tokens": MAYBE, "stderr": MAYBE})
SCALING = Record(
    {"batch": NUMBER},
    {
        "gain": [Record({name: NUMBER for name in ("context", "seconds", "fixed", "from_state")}, {})],
        "decode_cross_over": (CROSSING, type(None)),
        "prefill_cross_over": (CROSSING, type(None)),
        "speed_up_at_32k": (Record({"ratio": NUMBER}, {"stderr": MAYBE}), type(None)),
        "teacher": (Record({}, {"points": NUMBER}), type(None)),
        "student": (Record({}, {"points": NUMBER}), type(None)),
    },
)
PRECISION = Record(
    {"cells": [Record({"batch": NUMBER, "context": NUMBER}, {"teacher": SIDE, "student": SIDE})]},
    {
        "scaling": [SCALING],
        "models": Map(dict),
        "memory": dict,
        "quality": (Record({"data": str, "context": NUMBER, "models": Map(dict)}, {}), type(None)),
        "note": (str, type(None)),
    },
)
FIGURE = Record({"value": MAYBE, "n": NUMBER}, {"stderr": MAYBE})
DIFFERENCE = Record({"difference": MAYBE, "n": NUMBER}, {"stderr": MAYBE, "p": MAYBE, "verdict": (str, type(None))})
CELL = Map((*MAYBE, str, bool))
MEASURE = Record(
    {"kind": str, "figures": Map(Map(FIGURE))},
    {"differences": Map(Map(DIFFERENCE)), "cells": Map([CELL]), "headline": [str], "command": str},
)
SHAPES: dict[str, Any] = {
    "evaluation.json": Record({"models": Map(Record({"fingerprint": str}, {})), "measures": Map(MEASURE)}, {}),
    "bench.json": Record({"precisions": Map(PRECISION)}, {"options": dict, "machine": dict, "command": str}),
    "figures.json": Map(Record({}, {"perplexity": MAYBE, "tokens": NUMBER})),
    "metrics.jsonl": Record(
        {"stage": int, "step": int},
        {
            "kind": str,
            "layers": [MAYBE],
            **dict.fromkeys(("tokens", "loss", "held_out_loss", "seconds", "skipped"), MAYBE),
        },
    ),
}
"""By file; of metrics.jsonl, of a line."""


def misfit(value: Any, shape: Any, where: str) -> str | None:
    """The first place where `value` has not that shape, in words; None where it has."""
    if isinstance(shape, Map | Record):
        return _misfit_of_object(value, shape, where)
    if isinstance(shape, list):
        if not isinstance(value, list):
            return f"{where} is no list"
        return next((x for i, v in enumerate(value) if (x := misfit(v, shape[0], f"{where}[{i}]"))), None)
    kinds = shape if isinstance(shape, tuple) else (shape,)
    found = [misfit(value, kind, where) for kind in kinds if isinstance(kind, Map | Record)]
    plain = tuple(kind for kind in kinds if isinstance(kind, type))
    if isinstance(value, plain) and not (isinstance(value, bool) and bool not in plain):
        return None
    if None in found:
        return None
    if found and isinstance(value, dict):
        return found[-1]
    return f"{where} is {value!r:.30}"


def _misfit_of_object(value: Any, shape: Map | Record, where: str) -> str | None:
    if not isinstance(value, dict):
        return f"{where} is no object"
    if isinstance(shape, Map):
        return next((x for k, v in value.items() if (x := misfit(v, shape.of, f"{where}.{k}"))), None)
    missing = next((name for name in shape.required if name not in value), None)
    if missing is not None:
        return f"{where} lacks {missing}"
    known = shape.required | shape.optional
    return next((x for k, v in value.items() if k in known and (x := misfit(v, known[k], f"{where}.{k}"))), None)
