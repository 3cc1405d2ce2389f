"""Is the teacher itself? Figures that a working model cannot have stop an evaluation before it compares anything."""

import math
from dataclasses import replace

from .corpora import WIKITEXT, Corpus, own_text, wikitext2
from .lambada import NAME as LAMBADA
from .lambada import Lambada
from .measure import Json, Measure, Subject
from .options import SuiteOptions

WINDOWS, CONTEXT, PASSAGES = 4, 1024, 64
"""What is measured on the teacher before anything else: seconds of work."""

_SMOLLM2 = {"wikitext2": {"perplexity": 21.7}, "lambada": {"accuracy": 0.3125}, "data": {"perplexity": 15.5}}
KNOWN: dict[str, dict[str, dict[str, float]]] = dict.fromkeys(
    ("smollm2-135m", "HuggingFaceTB/SmolLM2-135M-Instruct", "SmolLM2-135M-Instruct"), _SMOLLM2
)
"""Teacher -> gate -> figure, in fp32, of the very items that the gates have; data: Python's documentation.
`attn2mamba eval smollm2-135m --tasks wikitext2,data --limit 4 --data-root DATA`, and lambada with --limit 64."""
FACTOR, POINTS = 1.25, 0.1
"""Of a known perplexity and accuracy, either way: weights may be stored more finely or coarsely, and documentation
differs by Python's version."""
LEAST_GAIN = 4
"""The factor by which a language model's perplexity is below that of guessing, its vocabulary's size."""


def gate_measures(options: SuiteOptions) -> list[Measure]:
    """The beginning of the user's own text, else of Python's documentation; of WikiText-2 and LAMBADA too, where a data
    root has them."""
    few, root = replace(options, limit=WINDOWS, context=(min(CONTEXT, *options.context),)), options.data_root
    found: list[Measure] = [own_text(few)]
    if root is not None and (root / WIKITEXT).is_dir():
        found.append(wikitext2(few))
    if root is not None and (root / LAMBADA).is_dir():
        found.append(Lambada(root, PASSAGES))
    return found


def unlike_itself(measure: Measure, subject: Subject, units: dict[str, Json]) -> str | None:
    """Why the results of a gate are not those of the model of that name, or None; models that nobody knows pass."""
    known = KNOWN.get(subject.name, {}).get(measure.name, {})
    if isinstance(measure, Corpus) and measure.context != CONTEXT:
        known = {}
    if measure.name == "data" and "python-docs" not in str(measure.options()):
        known = {}
    figures = measure.figures(units)
    for name, expected in known.items():
        value, enough = figures[name].value, figures[name].n >= (WINDOWS if name == "perplexity" else PASSAGES)
        right = expected / FACTOR < value < expected * FACTOR
        if name != "perplexity":
            right = abs(value - expected) < POINTS
        if enough and not right:
            return f"its {name} is {value:.3g}, that of this model is known to be {expected:.3g}"
    return None


def complaint(measure: Measure, subject: Subject, units: dict[str, Json]) -> str | None:
    """Why these results of the teacher cannot be right, whichever model it is, or None."""
    figures = measure.figures(units)
    own = measure.complaint(figures)
    if own:
        return own
    for name, figure in figures.items():
        if math.isnan(figure.value):
            return f"its {name} is no number"
        if name == "perplexity" and isinstance(measure, Corpus):
            reason = hardly_better(figure.value, subject.model.config.vocab_size)
            if reason:
                return reason
    return _below_chance(measure.cells(units))


def hardly_better(perplexity: float, vocabulary: int) -> str | None:
    """Why a model of so many tokens cannot have this perplexity on text of its kind, or None."""
    if perplexity < vocabulary / LEAST_GAIN:
        return None
    return (
        f"its perplexity is {perplexity:,.0f}, hardly better than guessing among {vocabulary:,} tokens (a sound model "
        "of unusual text needs such text as --data)"
    )


def _below_chance(rows: list[Json]) -> str | None:
    """Accuracies far below that of a guess come from answers that were mixed up."""
    for row in rows:
        chance, accuracy = row.get("chance"), row.get("acc")
        if chance and accuracy is not None:
            error = math.sqrt(chance * (1 - chance) / row["n"])
            if accuracy < chance - 5 * error:
                return f"its accuracy on {row['task']} is {accuracy:.3f}, below the {chance:.3f} of a guess"
    return None
