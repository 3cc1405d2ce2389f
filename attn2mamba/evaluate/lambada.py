"""LAMBADA (arXiv 1606.06031): the last word of a passage, which takes the whole passage to guess."""

import math
from collections.abc import Callable
from pathlib import Path

from ..errors import UserError
from .measure import Difference, Figure, Json, Measure, Subject, joined_scores
from .options import SuiteOptions
from .ratios import EXPONENTIAL, ratio_difference, ratio_figure
from .reading import Reading, continuation_ids, first_ids, token_ids
from .task_data import read_texts, rows_digest

NAME = "EleutherAI/lambada_openai"
UNIT = 32
"""Passages of a unit."""
ENOUGH = 100
"""Passages of which a language model gets at least one right."""


class Lambada(Measure):
    """`accuracy`: each token of the last word is the likeliest; `log_likelihood` of the word in nats, and `perplexity`,
    e to the mean of its negative, by word. Passages are read one at a time, unpadded."""

    name = "lambada"
    any_tokenizer = True

    def __init__(self, data_root: Path | None, limit: int | None) -> None:
        """The first `limit` passages of the test split, all if None."""
        self.data_root, self.limit = data_root, limit
        self._passages: list[str] = []

    @property
    def passages(self) -> list[str]:
        if not self._passages:
            self._passages = read_texts(self.data_root, NAME, "default", "test", self.limit)
            if short := [text for text in self._passages if len(text.split()) < 2]:
                raise UserError(f"{NAME} has a passage of less than two words ({short[0]!r}); fetch the data set again")
        return self._passages

    def options(self) -> Json:
        return {"passages": len(self.passages), "data": rows_digest(self.passages)}

    def units(self, subject: Subject) -> list[str]:
        return [str(start) for start in range(0, len(self.passages), UNIT)]

    def run(self, subject: Subject, unit: str) -> Json:
        scores: dict[str, list[float]] = {"accuracy": [], "log_likelihood": []}
        for passage in self.passages[int(unit) : int(unit) + UNIT]:
            text, _, word = passage.rpartition(" ")
            target = continuation_ids(subject.tokenizer, text, f" {word}")
            ids = first_ids(subject.tokenizer) + token_ids(subject.tokenizer, text)
            likelihoods, predicted = Reading(subject.model).read(ids).follow(target)
            total = float(likelihoods.double().sum())
            scores["accuracy"].append(math.nan if math.isnan(total) else float(predicted.tolist() == target))
            scores["log_likelihood"].append(total)
        return {"scores": scores}

    def figures(self, results: dict[str, Json]) -> dict[str, Figure]:
        return {**super().figures(results), "perplexity": ratio_figure(*nats(results), EXPONENTIAL)}

    def differences(self, results: dict[str, Json], teacher: dict[str, Json]) -> dict[str, Difference]:
        difference = ratio_difference(nats(results), nats(teacher), EXPONENTIAL)
        return {**super().differences(results, teacher), "perplexity": difference}

    def complaint(self, figures: dict[str, Figure]) -> str | None:
        accuracy = figures["accuracy"]
        if accuracy.n >= ENOUGH and not accuracy.value:
            return f"not one of {accuracy.n} last words right"
        return None


def nats(results: dict[str, Json]) -> tuple[list[float], list[float]]:
    """Negative log-likelihood of each word, and the number of words."""
    negative = [-x for x in joined_scores(results)["log_likelihood"]]
    return negative, [1.0] * len(negative)


MEASURES: dict[str, Callable[[SuiteOptions], Measure]] = {
    "lambada": lambda options: Lambada(options.data_root, options.limit)
}
