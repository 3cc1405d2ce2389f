"""What `attn2mamba eval` does: models and measures by name, every result kept, one JSON file."""

import json
import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from ..errors import UserError
from ..precision import load_model
from ..progress import Steps
from ..run import disk_errors, write_text
from ..sources import check_text, load_texts
from ..teachers import DTYPES, load_teacher
from ..vocabulary import tokenizer_of
from .gate import gate_measures, hardly_better
from .measure import TEACHER, Json, Subject
from .options import SuiteOptions
from .perplexity import text_perplexity
from .reading import check_context
from .results import Results, default_results_dir, model_fingerprint
from .runner import Candidate, evaluate
from .suites import make_measures


@dataclass(frozen=True)
class Loading:
    """How every model of an evaluation is loaded; dtype also int8 or int4."""

    dtype: str = "fp32"
    device_map: str | None = None
    allow_pickle: bool = False


def run_evaluation(
    model: str,
    tasks: Sequence[str],
    options: SuiteOptions,
    given: Sequence[str],
    *,
    teacher: str | None = None,
    also: Sequence[str] = (),
    loading: Loading = Loading(),
    output: Path | None = None,
    fresh: bool = False,
    command: str = "",
) -> Json:
    """Measure MODEL, or what a run holds, beside its teacher; the result is also written to `output`, and of a run to
    RUN/evaluation.json, which keeps what it has of the same models. `given`: the options that are the user's own.

    Raises UserError for what the user can mend, names and data before a model is loaded.
    """
    run = Path(model) if (Path(model) / "final").is_dir() else None
    models = model_paths(model, teacher, also)
    outputs = [path for path in (output, run / "evaluation.json" if run else None) if path]
    for path in outputs:
        check_writable(path)
    if options.data_root is not None and not options.data_root.is_dir():
        raise UserError(f"--data-root {options.data_root} is no directory; give the folder that holds the data sets")
    measures = make_measures(tasks, options, given)
    if not measures:
        raise UserError("--tasks names nothing; give names of measures or suites, such as quick")
    gates = gate_measures(options) if TEACHER in models else []
    for measure in (*gates, *measures):
        measure.options()  # reads its data
    candidates = [Candidate(role, partial(load_subject, role, path, loading)) for role, path in models.items()]
    results = Results(default_results_dir(), fresh)
    found = evaluate(candidates, measures, results, Steps(), command, gates)
    for path in outputs:
        write_text(path, json.dumps(found if path == output else merged(path, found), indent=1))
    return found


def score_text(
    models: Sequence[str], data: Sequence[str], context: int, max_tokens: int | None, loading: Loading
) -> Json:
    """Perplexity of each model, by name, on all of DATA up to max_tokens. A run stands for its final model."""
    check_text(data)
    found: Json = {"data": ", ".join(data), "context": context, "precision": loading.dtype, "models": {}}
    steps = Steps()
    for name in models:
        final = Path(name) / "final"
        subject = load_subject("", str(final) if final.is_dir() else name, loading)
        check_context(subject.model, context, 1)
        texts = (text for source in data for text in load_texts(source))
        steps.note(f"scoring {name}")
        result = text_perplexity(subject.model, subject.tokenizer, texts, context, max_tokens)
        reason = hardly_better(result.per_token, subject.model.config.vocab_size)
        if reason and name == models[0] and len(models) > 1:
            raise UserError(f"{name} cannot be right ({reason}); no model was compared with it")
        found["models"][name] = result.to_dict()
    return found


def model_paths(model: str, teacher: str | None, also: Sequence[str]) -> dict[str, str]:
    """Role -> what to load. Of a run: its teacher, unless another is given, its base, hedgehog/ and final/."""
    path, found = Path(model), dict[str, str]()
    if (path / "final").is_dir():
        header = read_header(path)
        teacher = teacher or header.get("--teacher")
        found |= {"base": header["--base"]} if "--base" in header else {}
        found |= {"hedgehog": str(path / "hedgehog")} if (path / "hedgehog").is_dir() else {}
        found["student"] = str(path / "final")
    else:
        found["student" if is_converted(path) else "model"] = model
    for name in also:
        role, equals, place = name.partition("=")
        if not equals or not role or not place or role in (TEACHER, *found):
            raise UserError(
                f"--also {name}: write NAME=DIR, with a NAME of its own (not {', '.join((TEACHER, *found))})"
            )
        final = Path(place) / "final"
        found[role] = str(final) if final.is_dir() else place
    return {**({TEACHER: teacher} if teacher else {}), **found}


def read_header(run: Path) -> dict[str, str]:
    """The options in the first line of RUN/recipe.yaml; {} where there is none."""
    try:
        words = shlex.split((run / "recipe.yaml").read_text().partition("\n")[0])
    except (OSError, ValueError):
        return {}
    return {a: b for a, b in pairwise(words) if a.startswith("--")}


def is_converted(path: Path) -> bool:
    try:
        return json.loads((path / "config.json").read_text()).get("model_type") == "attn2mamba"
    except (OSError, ValueError, AttributeError):
        return False


def load_subject(role: str, path: str, loading: Loading) -> Subject:
    if loading.dtype in DTYPES:
        dtype = DTYPES[loading.dtype]
        loaded = load_teacher(path, dtype=dtype, device_map=loading.device_map, allow_pickle=loading.allow_pickle)
    else:
        device = "cuda" if loading.device_map and torch.cuda.is_available() else "cpu"
        loaded = load_model(path, loading.dtype, device=device, allow_pickle=loading.allow_pickle)
    tokenizer = tokenizer_of(loaded)
    check_finite(role, loaded.model, loading.dtype)
    fingerprint = model_fingerprint(loaded.model, tokenizer)
    return Subject(role, loaded.name, loaded.model, tokenizer, loading.dtype, fingerprint)


@torch.no_grad()
def check_finite(role: str, model: PreTrainedModel, precision: str) -> None:
    """Raise UserError for a model that is broken, or overflows, on its very first tokens."""
    ids = torch.arange(min(8, model.config.vocab_size), device=model.device)[None]
    if not model(input_ids=ids, use_cache=False).logits.isfinite().all():
        raise UserError(
            f"the {role or 'model'}'s logits are no numbers in {precision}: its weights are broken, or overflow; "
            "mend them, or choose another --dtype"
        )


def check_writable(path: Path) -> None:
    """Before hours of work: UserError where `path` could not be written at their end."""
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise UserError(f"cannot write {path}; choose another --output")


def merged(path: Path, found: Json) -> Json:
    """`found` with the measures that the file has of the very same models."""
    try:
        before: Any = json.loads(path.read_text())
        same = before["format"] == found["format"] and before["models"] == found["models"]
    except (OSError, ValueError, KeyError, TypeError):
        return found
    return {**found, "measures": {**before["measures"], **found["measures"]}} if same else found
