"""What a measure is: units of work that run one by one and are kept, and the figures drawn from them."""

import math
import statistics
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

Json = dict[str, Any]

TEACHER = "teacher"
"""The role of the model that others are compared with."""


@dataclass(frozen=True)
class Subject:
    """A loaded model under test. role: teacher, base, hedgehog, student, or a name of the user's; precision: fp32,
    bf16 ...; fingerprint: of its weights, configuration and tokenizer."""

    role: str
    name: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    precision: str
    fingerprint: str


@dataclass(frozen=True)
class Figure:
    """value, its standard error (None where it has none) and the number of items behind it."""

    value: float
    n: int
    stderr: float | None = None

    def to_dict(self) -> Json:
        return {name: finite(x) for name, x in asdict(self).items()}


@dataclass(frozen=True)
class Difference:
    """Of a model's figure to the teacher's over the same n items: mean, standard error of the paired differences (None
    of one item), and the two-sided p of no difference."""

    difference: float
    stderr: float | None
    p: float
    n: int

    def to_dict(self) -> Json:
        return {name: finite(x) for name, x in asdict(self).items()}


class Measure(ABC):
    """A measure of one kind. `version` goes up whenever results would change; `options` names everything else that
    they depend on, besides the model.

    The default `figures` and `differences` are for units that return {"scores": {metric: [one number an item]}}.
    """

    name: str
    version: int = 1
    kind: str = "likelihood"
    """Or generation, recall (by length or distance), positions: where a report shows it."""
    any_tokenizer: bool = False
    """Whether models of different tokenizers answer the same items and in the same units."""
    headline: tuple[str, ...] = ()
    """The metrics that a table shows; all of them where none is named."""
    reference: str | None = None
    """Names what `learn_from` kept, where the results of models other than the teacher depend on it."""

    def options(self) -> Json:
        """JSON of all that the results depend on: lengths, limits, seeds, data."""
        return {}

    @abstractmethod
    def units(self, subject: Subject) -> list[str]:
        """Names of the pieces that are run and kept one by one, some seconds to a few minutes each."""

    @abstractmethod
    def run(self, subject: Subject, unit: str) -> Json:
        """One piece, as JSON. The same for every batch size; raises UserError for what the user can mend."""

    def learn_from(self, teacher: dict[str, Json]) -> None:  # noqa: B027  (most measures need nothing of it)
        """Called with the results of the teacher's units before any other model is measured."""

    def figures(self, results: dict[str, Json]) -> dict[str, Figure]:
        """Figure of each metric from the results of all units."""
        return {metric: mean_figure(scores) for metric, scores in joined_scores(results).items()}

    def differences(self, results: dict[str, Json], teacher: dict[str, Json]) -> dict[str, Difference]:
        """Paired, item by item, for each metric that both have."""
        ours, theirs = joined_scores(results), joined_scores(teacher)
        return {metric: paired(ours[metric], theirs[metric]) for metric in ours if metric in theirs}

    def cells(self, results: dict[str, Json]) -> list[Json]:
        """Rows for a plot, such as {"tokens": 4096, "depth": 0.5, "accuracy": 0.4, "n": 20}; none by default."""
        return []

    def complaint(self, figures: dict[str, Figure]) -> str | None:
        """Why a teacher with these figures cannot be right (a broken path), or None: nothing is printed then."""
        return None


def joined_scores(results: dict[str, Json]) -> dict[str, list[float]]:
    """The units' scores by metric, one after another."""
    joined: dict[str, list[float]] = {}
    for result in results.values():
        for metric, scores in result["scores"].items():
            joined.setdefault(metric, []).extend(scores)
    return joined


def mean_figure(scores: list[float]) -> Figure:
    if not all(math.isfinite(score) for score in scores):  # a model that overflows
        return Figure(math.nan, len(scores))
    error = statistics.stdev(scores) / math.sqrt(len(scores)) if len(scores) > 1 else None
    return Figure(statistics.fmean(scores), len(scores), error)


def paired(ours: list[float], theirs: list[float]) -> Difference:
    """Difference of means over the same items. Of right or wrong answers, p is of the exact sign test (McNemar)
    and the standard error has half an item more either way (Agresti and Min, 2005): ten answers alike do not prove that
    all are. Elsewhere p is of Student's t, unless all differences are alike: so they are by chance where items are few
    and scores coarse, and the sign test takes its place."""
    assert len(ours) == len(theirs), "paired scores need the same items"
    if not all(math.isfinite(score) for score in (*ours, *theirs)):
        return Difference(math.nan, None, math.nan, len(ours))
    differences = [a - b for a, b in zip(ours, theirs, strict=True)]
    count, mean = len(differences), statistics.fmean(differences)
    error = statistics.stdev(differences) / math.sqrt(count) if count > 1 else None
    shares = all(0 <= score <= 1 for score in (*ours, *theirs))
    better, worse = sum(d > 0 for d in differences), sum(d < 0 for d in differences)
    if {*ours, *theirs} <= {0.0, 1.0} or (error == 0 and shares):
        p = sign_test(better, worse)
        error = math.sqrt(better + worse + 1 - (better - worse) ** 2 / (count + 2)) / (count + 2)
    else:
        p = two_sided_p(mean, error, count)
    return Difference(mean, error, p, count)


def two_sided_p(mean: float, error: float | None, count: int) -> float:
    """Of a mean of `count` items that is 0 in truth; 1 where one item, or none, says nothing."""
    if not math.isfinite(mean):
        return math.nan
    if error is None or mean == 0:
        return 1.0
    return student_t(abs(mean) / error, count - 1) if error else sign_test(count, 0)


def student_t(t: float, freedom: int) -> float:
    """Probability that |T| exceeds t, T with Student's distribution (Abramowitz and Stegun, 26.7.3 and 26.7.4)."""
    if freedom > 200 or math.isinf(t):
        return math.erfc(t / math.sqrt(2))
    angle = math.atan(t / math.sqrt(freedom))
    odd = freedom % 2
    term = math.cos(angle) if odd else 1.0
    total = term if freedom > 1 else 0.0
    for k in range(2 + odd, freedom - 1, 2):
        term *= (k - 1) / k * math.cos(angle) ** 2
        total += term
    inside = 2 / math.pi * (angle + math.sin(angle) * total) if odd else math.sin(angle) * total
    return max(0.0, 1 - inside)


EQUAL_MARGIN = 0.01
"""What counts as equal: of a score between 0 and 1 or of nats; of the teacher's figure where that is above 1."""
LEAST_ITEMS = 30
"""Fewer prove no equality, however alike."""
NATS = ("nats", "nll", "kl", "log_likelihood")
"""What the names of metrics in nats begin with: 0.01 of them is 1 % of a perplexity, whatever their sum."""


def verdict(metric: str, difference: Difference, teacher: float) -> str:
    """equal: the whole 95 % confidence interval lies within EQUAL_MARGIN. differs: p < 0.05. open: these items cannot
    tell."""
    margin = EQUAL_MARGIN if metric.startswith(NATS) else EQUAL_MARGIN * max(1.0, abs(teacher))
    error = difference.stderr
    near = error is not None and abs(difference.difference) + 2 * error <= margin
    if near and difference.n >= LEAST_ITEMS:
        return "equal"
    return "differs" if difference.p < 0.05 else "open"


def sign_test(better: int, worse: int) -> float:
    """Two-sided p of `better` against `worse` where each has probability one half."""
    count = better + worse
    tail = sum(math.comb(count, k) for k in range(min(better, worse) + 1))
    return min(1.0, 2 * tail / 2**count)


EQUAL_MEANS = (
    f"the 95 % interval of the paired difference lies within {EQUAL_MARGIN} (1 % of the teacher's figure where that is "
    f"above 1 and not in nats), with at least {LEAST_ITEMS} items"
)
"""`equal` in words, for tables."""


def with_error(value: float, error: float, sign: str = "") -> str:
    """Both to the second digit of the error, and no more than four places: 62 ± 17, -0.399 ± 0.018."""
    places = min(4, max(0, 1 - math.floor(math.log10(error)))) if math.isfinite(error) and error > 0 else 2
    return f"{value:{sign},.{places}f} ± {error:,.{places}f}"


def finite(x: Any) -> Any:
    """JSON has no word for what is not a finite number."""
    return None if isinstance(x, float) and not math.isfinite(x) else x
