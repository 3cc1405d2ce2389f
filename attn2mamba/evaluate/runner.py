"""Runs measures on models, teacher first; keeps every unit; puts figures and paired differences side by side."""

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import transformers
from transformers import PreTrainedTokenizerBase

from .. import __version__
from ..errors import UserError
from ..progress import Steps
from ..store import start_token
from ..vocabulary import tokenizer_difference
from .gate import complaint, unlike_itself
from .measure import TEACHER, Json, Measure, Subject, verdict
from .results import Results

FORMAT = 2
"""Of evaluation.json."""


@dataclass(frozen=True)
class Candidate:
    """A model to be loaded when its turn comes, so that one is in memory at a time."""

    role: str
    load: Callable[[], Subject]


def evaluate(
    candidates: Sequence[Candidate],
    measures: Sequence[Measure],
    results: Results,
    steps: Steps,
    command: str,
    gates: Sequence[Measure] = (),
) -> Json:
    """All measures on all candidates, the teacher before the others. Returns what evaluation.json holds; see
    docs/evaluation.md. Raises UserError, before any other model is measured, when the teacher's own figures, those of
    `gates` first, show that something is broken."""
    found: dict[str, dict[str, dict[str, Json]]] = {measure.name: {} for measure in measures}
    models: Json = {}
    tokenizer: PreTrainedTokenizerBase | None = None
    passed: Json = {}
    for candidate in sorted(candidates, key=lambda c: c.role != TEACHER):
        steps.note(f"loading the {candidate.role}")
        subject = candidate.load()
        tokenizer = tokenizer or subject.tokenizer
        models[subject.role] = describe(subject, tokenizer)
        for measure in gates if subject.role == TEACHER else ():
            units = run_measure(measure, subject, results, steps, ", check")
            gate(measure, complaint(measure, subject, units) or unlike_itself(measure, subject, units))
            passed[measure.name] = {name: figure.to_dict() for name, figure in measure.figures(units).items()}
        for number, measure in enumerate(measures, 1):
            place = f", {number} of {len(measures)}"
            found[measure.name][subject.role] = run_measure(measure, subject, results, steps, place)
            if subject.role == TEACHER:
                gate(measure, complaint(measure, subject, found[measure.name][TEACHER]))
                measure.learn_from(found[measure.name][TEACHER])
        del subject
        gc.collect()
    return {
        "format": FORMAT,
        "attn2mamba": __version__,
        "command": command,
        "models": models,
        "gate": passed,
        "measures": {m.name: {"command": command, **summarise(m, found[m.name], models)} for m in measures},
    }


def describe(subject: Subject, tokenizer: PreTrainedTokenizerBase) -> Json:
    """other_tokenizer: how the subject's differs from the first model's, None where it does not."""
    parameters = sum(p.numel() for p in subject.model.parameters())
    return {
        "name": subject.name,
        "fingerprint": subject.fingerprint,
        "precision": subject.precision,
        "parameters": parameters,
        "other_tokenizer": other_tokenizer(tokenizer, subject.tokenizer),
    }


def other_tokenizer(first: PreTrainedTokenizerBase, own: PreTrainedTokenizerBase) -> str | None:
    """How `own` differs from `first`, so that texts become other tokens; None where they do not."""
    if first is own:
        return None
    found = tokenizer_difference(first, own)
    return found or (None if start_token(first) == start_token(own) else "texts begin with another token")


def key_of(measure: Measure, subject: Subject) -> Json:
    """What a unit's result depends on."""
    learned = {} if subject.role == TEACHER or measure.reference is None else {"reference": measure.reference}
    return {
        **learned,
        "measure": measure.name,
        "version": measure.version,
        "options": measure.options(),
        "model": subject.fingerprint,
        "precision": subject.precision,
        "device": next(subject.model.parameters()).device.type,
        "attention": getattr(getattr(subject.model, "config", None), "_attn_implementation", None),
        "software": [__version__, torch.__version__, transformers.__version__],
    }


def run_measure(measure: Measure, subject: Subject, results: Results, steps: Steps, place: str = "") -> dict[str, Json]:
    """The results of all units, in order; only those not known yet are run. place: which of how many, for display."""
    key, names = key_of(measure, subject), measure.units(subject)
    known = results.units(key)
    missing = [name for name in names if name not in known]
    if not missing:
        steps.note(f"{subject.role}: {measure.name}{place} is known")
        return {name: known[name] for name in names}
    steps.start(f"{subject.role}: {measure.name}{place}", len(names), len(names) - len(missing))
    try:
        for name in missing:
            began = time.monotonic()
            result = measure.run(subject, name)
            results.save(key, name, {**result, "seconds": round(time.monotonic() - began, 3)})
            steps.advance()
    finally:
        steps.stop()
    return {name: results.units(key)[name] for name in names}


def gate(measure: Measure, reason: str | None) -> None:
    if reason:
        raise UserError(f"the teacher's {measure.name} cannot be right: {reason}; no model was compared with it")


def summarise(measure: Measure, by_role: dict[str, dict[str, Json]], models: Json) -> Json:
    """Figures, cells, and differences to the teacher, of the models that can be compared with it."""
    summary: Json = {"version": measure.version, "kind": measure.kind, "options": measure.options()}
    summary["headline"] = [*measure.headline]
    summary |= {"figures": {}, "cells": {}, "differences": {}}
    for role, units in by_role.items():
        summary["figures"][role] = {name: figure.to_dict() for name, figure in measure.figures(units).items()}
        summary["cells"][role] = measure.cells(units)
        alike = measure.any_tokenizer or not models[role]["other_tokenizer"]
        if role != TEACHER and TEACHER in by_role and alike:
            differences, reference = measure.differences(units, by_role[TEACHER]), measure.figures(by_role[TEACHER])
            summary["differences"][role] = {
                name: {**difference.to_dict(), "verdict": verdict(name, difference, reference[name].value)}
                for name, difference in differences.items()
            }
    return summary
