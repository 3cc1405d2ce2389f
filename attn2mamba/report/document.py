"""All that the report says, as one JSON document; the page is drawn from it alone, so both say the same."""

import dataclasses
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .. import __version__
from ..card import describe
from ..evaluate.side_by_side import side_by_side
from . import quality
from .continuations import continuations
from .data import RunData, gather
from .layers import layers
from .numbers import Json, Number
from .speed import headlines, speed
from .training import same_budget, training
from .verdict import RULES, verdict


def make_document(paths: Sequence[Path], output: Path | None = None) -> Json:
    """output: where the report is to go, if that was said: part of its command. Raises UserError for a directory that
    is not a run."""
    runs = gather(paths)
    command = ["attn2mamba", "report", *map(str, paths), *(["--output", str(output)] if output else [])]
    parts = [run_document(run) for run in runs]
    return plain(
        {
            "format": 1,
            "attn2mamba": __version__,
            "command": shlex.join(command),
            "rules": RULES,
            "same_budget": same_budget(runs, [part["training"] for part in parts]),
            "runs": parts,
        }
    )


def run_document(run: RunData) -> Json:
    """Everything about one run. `problems` comes last: reading finds some of them."""
    rows, speeds = quality.measure_rows(run), speed(run)
    accuracy, difference = quality.task_accuracy(run, rows)
    card = {
        "perplexity_ratio": quality.perplexity_ratio(run, rows),
        "held_out_ratio": quality.held_out_ratio(run),
        "accuracy_kept": accuracy,
        "recall_kept": quality.kept_recall(run),
        **headlines(run, speeds),
    }
    found = {
        "name": run.name,
        "path": str(run.path),
        "teacher": run.teacher,
        "base": next(iter(run.options.get("base", [])), None),
        "data": run.options.get("data", []),
        "validation": run.options.get("validation", []),
        "student": describe(run.config) if run.config is not None else None,
        "finished": run.finished,
        "verdict": verdict(run.name, card, difference),
        "scorecard": card,
        "accuracy_difference": difference,
        "held_out_perplexity": held_out_perplexity(run),
        "models": run.evaluation.get("models", {}),
        "measures": rows,
        "side_by_side": side_by_side(run.evaluation) if run.measures else [],
        "worse_generation": [f"{row['measure']} {row['metric']}" for row in quality.worse_generation(rows)],
        "cells": cells(run),
        "continuations": continuations(run),
        "training": training(run),
        "speed": speeds,
        "layers": layers(run),
        "commands": {"distill": run.distill_command, "eval": run.eval_command("full"), "bench": run.bench_command},
    }
    return {**found, "problems": run.problems}


def held_out_perplexity(run: RunData) -> dict[str, Number]:
    """Measured during the run, by role."""
    return {
        role: Number(f["perplexity"], "perplexity", f.get("tokens", 0), "tokens", "fp32", run.distill_command)
        for role, f in run.figures.items()
        if f.get("perplexity") is not None
    }


def cells(run: RunData) -> Json:
    """Cells of each measure by role, those of recall with the teacher's beside them, and where they come from."""
    found: Json = {}
    for name, measure in run.measures.items():
        if not any(measure.get("cells", {}).values()):
            continue
        kind = measure["kind"]
        by_role = measure["cells"]
        if kind == "recall":
            marked = {role: quality.recall_cells(run, role) for role in by_role}
            by_role = {role: [c for c in rows if c["measure"] == name] for role, rows in marked.items()}
        precision = {role: run.precision_of(role) for role in by_role}
        command = run.command_of(name)
        found[name] = {"kind": kind, "by_role": by_role, "precision": precision, "command": command}
    return found


def plain(value: Any) -> Any:
    """`value` with every Number as a dict."""
    if isinstance(value, Number):
        return value.to_dict()
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return dataclasses.asdict(value) if dataclasses.is_dataclass(value) and not isinstance(value, type) else value
