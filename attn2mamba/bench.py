"""Speed and memory of a converted model beside its teacher, by context, batch and precision: `attn2mamba bench`.

Each model is in a process of its own. Repeats alternate (teacher, student, teacher, student ...), so that a machine
whose speed drifts is as unfair to one as to the other.
"""

from collections.abc import Callable
from typing import Any

from . import __version__
from .benchmarking.cells import CellRunner, Options
from .benchmarking.memory import PEAK_IS
from .benchmarking.side import Side, check_fit, choose_device, machine, open_sides
from .benchmarking.summary import make_cells, memory_summary, scaling
from .benchmarking.worker import Unfinished, Worker
from .errors import UserError
from .evaluate.results import Results
from .precision import NOTES, check_precision
from .progress import Steps
from .sources import check_text, parse_source
from .teachers import position_table

Json = dict[str, Any]

VERSION = 2
"""Goes up when results that are kept on disk would come out differently."""

QUALITY_CONTEXT = 1024
PERPLEXITY = "perplexity"


def bench(
    model: str,
    teacher: str | None,
    options: Options,
    results: Results,
    steps: Steps,
    command: str,
    open_worker: Callable[..., Any] = Worker,
) -> Json:
    """Returns what bench.json holds; see docs/evaluation.md. Cells known to `results` are not run again. Raises
    UserError for what cannot work, before any weights are read."""
    device = choose_device(options.device)
    for precision in options.precisions:
        check_precision(precision, device)
    if options.quality_tokens:
        check_text([options.data])
    sides = open_sides(model, teacher, options.allow_pickle)
    for precision in options.precisions:
        check_fit(sides, max(options.all_contexts()) + options.new_tokens, precision, device)
    report: Json = {"format": 1, "attn2mamba": __version__, "command": command, "machine": machine(device)}
    report["options"] = {
        name: getattr(options, name)
        for name in ("new_tokens", "repeats", "max_seconds", "state", "contexts", "batches")
    }
    report |= {"peak_is": PEAK_IS[device], "precisions": {}}
    for precision in options.precisions:
        workers = {
            role: open_worker(side.path, precision, device, _state(side, options), options.allow_pickle)
            for role, side in sides.items()
        }
        try:
            found = _bench_precision(sides, workers, precision, report["machine"], options, results, steps)
        finally:
            for worker in workers.values():
                worker.close()
        report["precisions"][precision] = found
    return report


def _state(side: Side, options: Options) -> str:
    return options.state if side.role == "student" else "fp32"


def _bench_precision(
    sides: dict[str, Side],
    workers: dict[str, Any],
    precision: str,
    place: Json,
    options: Options,
    results: Results,
    steps: Steps,
) -> Json:
    steps.note(f"{precision}: loading {' and '.join(sides)}")
    try:
        models = {role: worker.call("describe") for role, worker in workers.items()}
        bandwidth = max(worker.call("bandwidth") for worker in workers.values())
    except Unfinished as error:
        raise UserError(f"a model cannot be loaded in {precision}: {error}; choose a smaller --dtype") from None
    key = {
        "measure": "bench",
        "version": VERSION,
        "attn2mamba": __version__,
        "machine": place,
        "models": {role: _identity(described) for role, described in models.items()},
        "precision": precision,
        "options": {"new_tokens": options.new_tokens, "repeats": options.repeats, "state": options.state},
    }
    runner = CellRunner(sides, workers, precision, options)
    known = results.units(key)
    cells = [(batch, context) for batch in options.batches for context in options.all_contexts()]
    done = [cell for cell in cells if not runner.unfinished(known.get(_name(*cell), {}))]
    steps.start(f"{precision}: contexts and batches", len(cells), len(done))
    for batch, context in (cell for cell in cells if cell not in done):
        earlier = [known[_name(batch, c)] for c in options.all_contexts() if c < context]
        results.save(
            key, _name(batch, context), runner.run(batch, context, known.get(_name(batch, context), {}), earlier)
        )
        steps.advance()
    steps.stop()
    measured = {cell: known[_name(*cell)] for cell in cells}
    found = {"models": models, "bandwidth": bandwidth, "note": NOTES.get((precision, place["device"]))}
    found["cells"] = make_cells(measured, sides, precision, options.new_tokens, options.state)
    found["scaling"] = [scaling(batch, found["cells"], models, bandwidth) for batch in options.batches]
    found["memory"] = memory_summary(sides, found["cells"], precision, options.state)
    found["quality"] = None
    if options.quality_tokens:
        context = _quality_context(sides)
        keys = {role: _quality_key(models[role], sides[role], context, precision, place, options) for role in models}
        found["quality"] = _quality(workers, keys, precision, options, results, steps)
    return found


def _name(batch: int, context: int) -> str:
    return f"batch {batch}, context {context}"


def _identity(described: Json) -> Json:
    """What of a model decides its speed and its answers."""
    return {name: described[name] for name in ("fingerprint", "attention")}


def _quality_context(sides: dict[str, Side]) -> int:
    """Tokens of a window: QUALITY_CONTEXT, or as many as all models have positions for."""
    limits = [position_table(side.model) for side in sides.values()]
    return min([QUALITY_CONTEXT, *(limit for limit in limits if limit is not None)])


def _quality_key(described: Json, side: Side, context: int, precision: str, place: Json, options: Options) -> Json:
    """What one model's perplexity depends on: neither the other model nor the machine's speed."""
    return {
        "measure": "bench quality",
        "version": VERSION,
        "software": [__version__, *(place[name] for name in ("torch", "transformers", "torchao"))],
        "device": place["device"],
        "model": _identity(described),
        "precision": precision,
        "state": _state(side, options),
        "data": parse_source(options.data).identity,
        "context": context,
        "tokens": options.quality_tokens,
    }


def _quality(
    workers: dict[str, Any], keys: dict[str, Json], precision: str, options: Options, results: Results, steps: Steps
) -> Json:
    """Perplexity of each model; what could not be measured is not kept."""
    known = {role: results.units(key).get(PERPLEXITY) for role, key in keys.items()}
    scores = {role: score for role, score in known.items() if score is not None}
    steps.start(f"{precision}: perplexity", len(workers), len(scores))
    for role in (role for role in workers if role not in scores):
        try:
            scores[role] = workers[role].call("quality", options.data, keys[role]["context"], options.quality_tokens)
            results.save(keys[role], PERPLEXITY, scores[role])
        except Unfinished as error:
            scores[role] = {"skipped": str(error)}
        steps.advance()
    steps.stop()
    return {
        "data": options.data,
        "context": next(iter(keys.values()))["context"],
        "models": {role: scores[role] for role in workers},
    }
