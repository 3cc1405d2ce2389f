"""Recall, measured: questions about long contexts, associative recall and copying, by length, depth and distance.

Contexts are read one at a time, so batch size and padding do not enter."""

import math
import re
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from random import Random

from ..errors import UserError
from .measure import Difference, Figure, Json, Measure, Subject, mean_figure
from .options import SuiteOptions
from .reading import Reading, beyond_training, check_context, continuation_ids, first_ids, token_ids
from .recall import Question, make_item, usable_words
from .token_strings import Vocabulary, associative, copying

DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
ITEMS = {"needle": 4, "multikey": 4, "multivalue": 4, "tracking": 4, "commonwords": 8, "distractors": 4}
"""Contexts of each length, of the needle of each length and depth; each has one to eight questions."""
STRINGS, NEAREST = 4, 64
"""Strings of each size and distance; the smallest distance, which doubles up to the context."""
PAIRS, COPIED = (8, 32), (32,)
"""Sizes of strings."""


class ByLength(Measure):
    """Accuracies by length or distance."""

    kind = "recall"


class Recall(ByLength):
    """One task of `recall.TASKS`. Scores of a question: `greedy`, the share of its answers in the greedy continuation;
    `likelihood`, the share of its k answers among the k likeliest candidates, which needs no obedience to a question
    and so shows what a small model recalls."""

    def __init__(self, task: str, context: Sequence[int], items: int, seed: int) -> None:
        self.name = task
        self.context, self.items, self.seed = sorted(context), items, seed

    def options(self) -> Json:
        return {"context": self.context, "items": self.items, "seed": self.seed}

    def units(self, subject: Subject) -> list[str]:
        """LENGTH/INDEX, of the needle LENGTH/INDEX/DEPTH. Raises UserError for a context that does not fit."""
        words = (continuation_ids(subject.tokenizer, "the", f" {word}") for word in usable_words(subject.tokenizer))
        copies = 1 + any(len(ids) > 1 for ids in words)  # for a question, and for a candidate that takes a forward
        check_context(subject.model, self.context[-1], 1 + copies)
        depths = [f"/{depth}" for depth in DEPTHS] if self.name == "needle" else [""]
        return [f"{n}/{i}{depth}" for n in self.context for i in range(self.items) for depth in depths]

    def run(self, subject: Subject, unit: str) -> Json:
        tokens, index, *rest = unit.split("/")
        depth = float(rest[0]) if rest else None
        item = make_item(self.name, subject.tokenizer, int(tokens), self.seed, int(index), depth)
        ids = first_ids(subject.tokenizer) + token_ids(subject.tokenizer, item.context)
        reading = Reading(subject.model).read(ids)
        scores = [answer(reading.copy(), subject, question) for question in item.questions]
        return {
            "scores": {f"{form}@{tokens}": [score[form] for score in scores] for form in scores[0]},
            "depths": [question.depth for question in item.questions],
            "answers": len(item.questions[0].answers),
            "chance": item.questions[0].chance,
            "beyond_training": beyond_training(subject.model, int(tokens)),
        }

    def figures(self, results: dict[str, Json]) -> dict[str, Figure]:
        """An item is a context: the questions about one depend on each other."""
        return super().figures(_by_context(results))

    def differences(self, results: dict[str, Json], teacher: dict[str, Json]) -> dict[str, Difference]:
        return super().differences(_by_context(results), _by_context(teacher))

    def cells(self, results: dict[str, Json]) -> list[Json]:
        """{"task", "form", "tokens", "depth" (None: spread), "accuracy", "n" (answers), "items" (contexts), "stderr"
        (over contexts; None of one), "chance", "beyond_training"}"""
        scores: dict[tuple, list[list[float]]] = defaultdict(list)
        for result in results.values():
            for metric, values in result["scores"].items():
                form, tokens = metric.split("@")
                chance = result["chance"] if form == "likelihood" else 0.0
                by_depth: dict[float | None, list[float]] = defaultdict(list)
                for depth, score in zip(result["depths"], values, strict=True):
                    by_depth[depth] += [score] * result["answers"]
                for depth, answers in by_depth.items():
                    scores[self.name, form, int(tokens), depth, chance, result["beyond_training"]].append(answers)
        names = ("task", "form", "tokens", "depth", "chance", "beyond_training")
        return [
            {
                **dict(zip(names, place, strict=True)),
                **over_items(statistics.fmean(answers) for answers in found),
                "n": sum(len(answers) for answers in found),
            }
            for place, found in scores.items()
        ]


def over_items(scores: Iterable[float]) -> Json:
    """accuracy, its standard error (None of one item) and the number of items, which are independent of one another."""
    figure = mean_figure(list(scores))
    return {"accuracy": figure.value, "stderr": figure.stderr, "items": figure.n}


def answer(reading: Reading, subject: Subject, question: Question) -> dict[str, float]:
    """Scores of one question; the reading goes on."""
    tokenizer = subject.tokenizer
    reading.read(token_ids(tokenizer, question.text))
    candidates = [continuation_ids(tokenizer, question.text, f" {word}") for word in question.candidates]
    likelihoods = dict(zip(question.candidates, reading.log_likelihoods(candidates), strict=True))
    text, count = str(tokenizer.decode(reading.greedy(question.answer_tokens(tokenizer)))), len(question.answers)
    if any(map(math.isnan, likelihoods.values())):  # a model that overflows recalls nothing, but has no score either
        return {"greedy": math.nan, "likelihood": math.nan}
    return {
        "greedy": statistics.fmean(bool(re.search(rf"\b{word}\b", text)) for word in question.answers),
        "likelihood": statistics.fmean(among_best(likelihoods, word, count) for word in question.answers),
    }


def among_best(likelihoods: dict[str, float], word: str, count: int) -> bool:
    """Whether fewer than `count` others are at least as likely: a tie is no recall, nor is what is not a number."""
    others = (value for name, value in likelihoods.items() if name != word)
    return sum(not value < likelihoods[word] for value in others) < count


def _by_context(results: dict[str, Json]) -> dict[str, Json]:
    """Each unit, which is one context, with the mean of its questions as its only score."""
    return {
        unit: {**result, "scores": {name: [statistics.fmean(found)] for name, found in result["scores"].items()}}
        for unit, result in results.items()
    }


class Strings(ByLength):
    """Associative recall or copying: accuracy of the likeliest token where the string itself decides it. One item is a
    string, since its tokens are not independent."""

    def __init__(self, name: str, context: Sequence[int], items: int, seed: int) -> None:
        """name: associative (recall) or copying. Distances double up to the longest context."""
        self.name, self.context, self.items, self.seed = name, max(context), items, seed
        self.sizes: tuple[int, ...] = PAIRS if name == "associative" else COPIED
        self.make = associative if name == "associative" else copying

    def options(self) -> Json:
        return {"context": self.context, "items": self.items, "seed": self.seed}

    def units(self, subject: Subject) -> list[str]:
        """SIZE/DISTANCE/INDEX; size: pairs, or tokens copied. Raises UserError for a context that is too short, or does
        not fit."""
        check_context(subject.model, self.context)
        room = self.context - len(first_ids(subject.tokenizer))
        each = Vocabulary.of(subject.tokenizer).pair if self.name == "associative" else 1
        shapes = [
            (size, distance)
            for distance in (NEAREST << i for i in range(32))
            for size in self.sizes
            if size * each <= distance <= room - size * each
        ]
        if not shapes:
            raise UserError(f"a context of {self.context} tokens is too short for {self.name}; use a longer one")
        return [f"{size}/{distance}/{i}" for size, distance in shapes for i in range(self.items)]

    def run(self, subject: Subject, unit: str) -> Json:
        size, distance, _ = map(int, unit.split("/"))
        draw = Random(f"{self.name} {self.seed} {unit}")
        string = self.make(draw, Vocabulary.of(subject.tokenizer), size, distance)
        ids, start = [*first_ids(subject.tokenizer), *string.ids[: string.scored[0]]], string.scored[0]
        likelihoods, predicted = Reading(subject.model).read(ids).follow(string.ids[start:])
        right = [float(predicted[i - start] == string.ids[i]) for i in string.scored]
        right = [math.nan] * len(right) if likelihoods.isnan().any() else right
        return {
            "scores": {f"accuracy@{distance}": [statistics.fmean(right)]},
            "size": size,
            "tokens": len(right),
            "beyond_training": beyond_training(subject.model, len(ids) + len(string.ids) - start),
        }

    def cells(self, results: dict[str, Json]) -> list[Json]:
        """{"task", "size", "distance", "accuracy" (by token), "n" (tokens), "items" (strings), "stderr" (over strings),
        "chance", "beyond_training"}; chance: of guessing among the words that the string holds twice."""
        found: dict[tuple, list[tuple[float, int]]] = defaultdict(list)
        for result in results.values():
            [(metric, [score])] = result["scores"].items()
            place = result["size"], int(metric.split("@")[1]), result["beyond_training"]
            found[place].append((score, result["tokens"]))
        return [
            {
                "task": self.name,
                "size": size,
                "distance": distance,
                **over_items(score for score, _ in scores),
                "n": sum(tokens for _, tokens in scores),
                "chance": 1 / size,
                "beyond_training": beyond,
            }
            for (size, distance, beyond), scores in found.items()
        ]


def make_recall(task: str, options: SuiteOptions) -> Recall:
    return Recall(task, options.context, options.limit or ITEMS[task], options.seed)


def make_strings(name: str, options: SuiteOptions) -> Strings:
    return Strings(name, options.context, options.limit or STRINGS, options.seed)


MEASURES: dict[str, Callable[[SuiteOptions], Measure]] = {
    **{task: partial(make_recall, task) for task in ITEMS},
    **{name: partial(make_strings, name) for name in ("associative", "copying")},
}
