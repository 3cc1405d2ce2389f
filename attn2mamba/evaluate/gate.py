"""Is the teacher itself? Figures that a working model cannot have stop an evaluation before it compares anything."""

import math
from dataclasses import replace

from .corpora import WIKITEXT, Corpus, own_text, wikitext2
from .lambada import Lambada
from .measure import Figure, Json, Measure, Subject
from .options import SuiteOptions

LAMBADA = "EleutherAI/lambada_openai"
WINDOWS, CONTEXT, PASSAGES = 4, 1024, 64
"""What is measured on the teacher before anything else: seconds of work."""

_SMOLLM2 = {"wikitext2": {"perplexity": 23.1}, "lambada": {"accuracy": 0.32}, "data": {"perplexity": 15.5}}
KNOWN: dict[str, dict[str, dict[str, float]]] = dict.fromkeys(
    ("smollm2-135m", "HuggingFaceTB/SmolLM2-135M-Instruct", "SmolLM2-135M-Instruct"), _SMOLLM2
)
"""Teacher -> measure -> figure, of `attn2mamba eval TEACHER --tasks wikitext2,lambada --data-root hub`: fp32, the first
32 windows of 1,024 tokens (standard error 1.5) and the first 256 passages (0.03); data: Python's documentation, the
first 4 windows (2.0)."""
FACTOR = 2.0
"""Of a known perplexity, either way: contexts differ, and few windows are of few texts."""
POINTS = 0.03
"""Of a known accuracy, either way, beside four standard errors of as many items."""
LEAST_GAIN = 4
"""The factor by which a language model's perplexity is below that of guessing, its vocabulary's size."""


def gate_measures(options: SuiteOptions) -> list[Measure]:
    """The beginning of the user's own text, else of Python's documentation; of WikiText-2 and LAMBADA too, where a data
    root has them."""
    few, root = replace(options, limit=WINDOWS, context=(CONTEXT,)), options.data_root
    found: list[Measure] = [own_text(few)]
    if root is not None and (root / WIKITEXT).is_dir():
        found.append(wikitext2(few))
    if root is not None and (root / LAMBADA).is_dir():
        found.append(Lambada(root, PASSAGES))
    return found


def complaint(measure: Measure, subject: Subject, units: dict[str, Json]) -> str | None:
    """Why these results of the teacher cannot be right, or None."""
    figures = measure.figures(units)
    own = measure.complaint(figures)
    if own:
        return own
    known = KNOWN.get(subject.name, {}).get(measure.name, {})
    if measure.name == "data" and "python-docs" not in str(measure.options()):
        known = {}
    for name, figure in figures.items():
        found = _unlike(known, name, figure)
        if math.isnan(figure.value):
            found = f"its {name} is no number"
        elif name == "perplexity" and isinstance(measure, Corpus):
            found = found or hardly_better(figure.value, subject.model.config.vocab_size)
        if found:
            return found
    return _below_chance(measure.cells(units))


def hardly_better(perplexity: float, vocabulary: int) -> str | None:
    """Why a model of so many tokens cannot have this perplexity on text of its kind, or None."""
    if perplexity < vocabulary / LEAST_GAIN:
        return None
    return (
        f"its perplexity is {perplexity:,.0f}, hardly better than guessing among {vocabulary:,} tokens (a sound model "
        "of unusual text needs such text as --data)"
    )


def _unlike(known: dict[str, float], name: str, figure: Figure) -> str | None:
    if name not in known:
        return None
    expected, value = known[name], figure.value
    if name == "perplexity":
        right = expected / FACTOR < value < expected * FACTOR
    else:
        right = abs(value - expected) < POINTS + 4 * math.sqrt(expected * (1 - expected) / figure.n)
    return None if right else f"its {name} is {value:.3g}, that of this model is known to be {expected:.3g}"


def _below_chance(rows: list[Json]) -> str | None:
    """Accuracies far below that of a guess come from answers that were mixed up."""
    for row in rows:
        chance, accuracy = row.get("chance"), row.get("acc")
        if chance and accuracy is not None:
            error = math.sqrt(chance * (1 - chance) / row["n"])
            if accuracy < chance - 5 * error:
                return f"its accuracy on {row['task']} is {accuracy:.3f}, below the {chance:.3f} of a guess"
    return None
