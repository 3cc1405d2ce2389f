"""Tasks whose answers are generated: LAMBADA's last word and GSM8K's number; and all measures of generation by name."""

import re
from abc import abstractmethod
from collections.abc import Callable
from decimal import Decimal, InvalidOperation
from functools import cached_property
from statistics import fmean
from typing import Any, ClassVar

from .agreement import Agreement
from .decoding import answers, prompt_ids
from .json_records import JsonRecords
from .measure import Difference, Json, Measure, Subject
from .options import SuiteOptions
from .reading import beyond_training
from .repetition import Repetition
from .task_data import read_rows, rows_digest
from .tool_calls import ToolCalls

UNIT = 32
"""Items in a unit."""


class GenerativeTask(Measure):
    """Questions with right answers, each answered greedily.

    Items are taken by the length of their prompts in tokens, so that many of one length meet in a batch; results carry
    the items' numbers, by which differences are paired.
    """

    kind = "generation"
    any_tokenizer = True
    max_new_tokens: int
    stop: ClassVar[re.Pattern[str]]
    data: ClassVar[tuple[str, str]]
    """Name and configuration of the hub data set; its test split is used."""

    def __init__(self, options: SuiteOptions) -> None:
        self.suite = options
        self.rows = read_rows(options.data_root, *self.data, "test", options.limit)
        self._ordered: tuple[str, list[tuple[int, list[int]]]] = "", []

    @abstractmethod
    def prompt(self, row: Any) -> str:
        """What the model is to continue."""

    @abstractmethod
    def score(self, row: Any, answer: str) -> dict[str, float]:
        """metric -> 0 or 1."""

    @cached_property
    def _options(self) -> Json:
        return {"rows": rows_digest(self.rows), "items": len(self.rows), "new_tokens": self.max_new_tokens}

    def options(self) -> Json:
        return self._options

    def units(self, subject: Subject) -> list[str]:
        return [str(start) for start in range(0, len(self.rows), UNIT)]

    def run(self, subject: Subject, unit: str) -> Json:
        items, prompts = zip(*self._by_length(subject)[int(unit) : int(unit) + UNIT], strict=True)
        model, tokenizer = subject.model, subject.tokenizer
        texts = answers(model, tokenizer, prompts, self.max_new_tokens, self.stop, self.suite.batch_size)
        scored = [self.score(self.rows[i], text) for i, text in zip(items, texts, strict=True)]
        beyond = [beyond_training(model, len(prompt) + self.max_new_tokens) for prompt in prompts]
        scores = {metric: [score[metric] for score in scored] for metric in scored[0]}
        return {"items": list(items), "scores": scores, "answers": texts, "beyond_training": beyond}

    def _by_length(self, subject: Subject) -> list[tuple[int, list[int]]]:
        """Number and prompt of every item, the shortest first; kept for the last subject that was asked for."""
        if self._ordered[0] != subject.fingerprint:
            prompts = [prompt_ids(subject.tokenizer, self.prompt(row)) for row in self.rows]
            order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
            self._ordered = subject.fingerprint, [(i, prompts[i]) for i in order]
        return self._ordered[1]

    def differences(self, results: dict[str, Json], teacher: dict[str, Json]) -> dict[str, Difference]:
        """Paired by item: another tokenizer may have taken them in another order."""
        return super().differences(_in_order(results), _in_order(teacher))

    def cells(self, results: dict[str, Json]) -> list[Json]:
        """One row for the items within the model's training length and one for those beyond it, where there are any."""
        rows = []
        for beyond in (False, True):
            chosen: dict[str, list[float]] = {}
            for unit in results.values():
                for metric, scores in unit["scores"].items():
                    here = [x for x, y in zip(scores, unit["beyond_training"], strict=True) if y == beyond]
                    chosen.setdefault(metric, []).extend(here)
            count = len(next(iter(chosen.values()), []))
            if count:
                means = {metric: fmean(scores) for metric, scores in chosen.items()}
                rows.append({"beyond_training": beyond, **means, "n": count})
        return rows


def _in_order(results: dict[str, Json]) -> dict[str, Json]:
    """The same as one unit with the items in order."""
    numbers = [i for unit in results.values() for i in unit["items"]]
    order = sorted(range(len(numbers)), key=lambda place: numbers[place])
    metrics = {metric for unit in results.values() for metric in unit["scores"]}
    joined = {metric: [x for unit in results.values() for x in unit["scores"][metric]] for metric in metrics}
    return {"all": {"scores": {metric: [scores[place] for place in order] for metric, scores in joined.items()}}}


class LambadaGenerate(GenerativeTask):
    """The last word of a passage (arXiv 1606.06031, OpenAI's version), generated greedily: `exact_match` is 1 where the
    continuation begins with that word and the word ends there."""

    name = "lambada_generate"
    data = "EleutherAI/lambada_openai", "default"
    max_new_tokens = 16
    stop = re.compile(r"(?<=\S) ")

    def prompt(self, row: Any) -> str:
        return str(row["text"]).rpartition(" ")[0]

    def score(self, row: Any, answer: str) -> dict[str, float]:
        word = re.escape(str(row["text"]).rpartition(" ")[2])
        return {"exact_match": float(re.match(rf" *{word}(?![-'’]*\w)", answer) is not None)}


class Gsm8k(GenerativeTask):
    """Grade-school mathematics (arXiv 2110.14168) after the first five training questions with their worked answers.

    `exact_match` takes the number after the answer's first `####`, `flexible_match` the last number that the answer
    has; both compare values, so that 1,200 is 1200.00.
    """

    name = "gsm8k"
    data = "openai/gsm8k", "main"
    max_new_tokens = 256
    stop = re.compile("Question:")
    shots = 5

    def __init__(self, options: SuiteOptions) -> None:
        super().__init__(options)
        examples = read_rows(options.data_root, *self.data, "train", self.shots)
        self.examples = "".join(f"Question: {row['question']}\nAnswer: {row['answer']}\n\n" for row in examples)

    @cached_property
    def _options(self) -> Json:
        return {**super()._options, "shots": self.shots, "examples": rows_digest([self.examples])}

    def prompt(self, row: Any) -> str:
        return f"{self.examples}Question: {row['question']}\nAnswer:"

    def score(self, row: Any, answer: str) -> dict[str, float]:
        wanted = marked_number(row["answer"])
        return {
            "exact_match": float(wanted is not None and marked_number(answer) == wanted),
            "flexible_match": float(wanted is not None and last_number(answer) == wanted),
        }


NUMBER = r"-?\$?(?:\d[\d,]*(?:\.\d+)?|\.\d+)"


def marked_number(answer: str) -> Decimal | None:
    """The number after the first `####`."""
    found = re.search(rf"####\s*({NUMBER})", answer)
    return _decimal(found[1]) if found else None


def last_number(answer: str) -> Decimal | None:
    found = re.findall(NUMBER, answer)
    return _decimal(found[-1]) if found else None


def _decimal(text: str) -> Decimal | None:
    try:
        return Decimal(text.replace(",", "").replace("$", ""))
    except InvalidOperation:
        return None


MEASURES: dict[str, Callable[[SuiteOptions], Measure]] = {
    measure.name: measure for measure in (Repetition, LambadaGenerate, Gsm8k, ToolCalls, JsonRecords, Agreement)
}
