"""Whether a model that goes on for long falls into a loop."""

from collections.abc import Sequence
from functools import cached_property

from .decoding import Sampling, continuations, end_ids
from .measure import Json, Measure, Subject
from .openings import OPENING_TOKENS, digest, opening_ids, read_openings
from .options import SuiteOptions

NEW_TOKENS = 512
UNIT = 8
"""Texts in a unit."""
LOOP_TIMES, LOOP_TOKENS, LONGEST_PERIOD = 3, 32, 128
CHECKPOINTS = (128, 256, 384, 512)
MODES = ("greedy", "sampled")


def loop_period(tokens: Sequence[int]) -> int | None:
    """The shortest period p of at most LONGEST_PERIOD with which the text's end repeats itself: its last LOOP_TIMES * p
    tokens, and at least LOOP_TOKENS, are equal to those p places before. None where it ends in no loop."""
    for period in range(1, LONGEST_PERIOD + 1):
        tail = tokens[-max(LOOP_TIMES * period, LOOP_TOKENS) :]
        if len(tail) < max(LOOP_TIMES * period, LOOP_TOKENS):
            return None
        if tail[period:] == tail[:-period]:
            return period
    return None


def distinct(tokens: Sequence[int], n: int) -> float:
    """Share of different n-grams among all n-grams of a text (arXiv 1510.03055); 1 where it has none."""
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return len(set(grams)) / len(grams) if grams else 1.0


class Repetition(Measure):
    """Openings continued by up to 512 tokens, greedily and by nucleus sampling (temperature 0.8, top-p 0.95).

    Of each text: `loop`, 1 where it ends in a loop (see `loop_period`); `repeated_4grams`, the share of 4-grams that
    were there before; `distinct_1` to `distinct_3`; `tokens`, its length, since a model may end a text and shorter
    texts repeat less.
    """

    name = "repetition"
    kind = "generation"

    def __init__(self, options: SuiteOptions) -> None:
        self.suite = options
        self.texts = read_openings(options.data, options.limit)

    @cached_property
    def _options(self) -> Json:
        return {
            "texts": digest(self.texts),
            "opening_tokens": OPENING_TOKENS,
            "new_tokens": NEW_TOKENS,
            "seed": self.suite.seed,
        }

    def options(self) -> Json:
        return self._options

    def units(self, subject: Subject) -> list[str]:
        return [f"{mode}/{start}" for mode in MODES for start in range(0, len(self.texts), UNIT)]

    def run(self, subject: Subject, unit: str) -> Json:
        mode, _, first = unit.partition("/")
        items = range(len(self.texts))[int(first) : int(first) + UNIT]
        prompts = [opening_ids(subject.tokenizer, self.texts[i]) for i in items]
        seeds = [self.suite.seed * 1_000_003 + i for i in items]
        rows = continuations(
            subject.model,
            subject.tokenizer,
            prompts,
            NEW_TOKENS,
            batch_size=self.suite.batch_size,
            sampling=Sampling(seeds) if mode == "sampled" else None,
        )
        ends = end_ids(subject.model, subject.tokenizer)
        rows = [row[:-1] if row and row[-1] in ends else row for row in rows]
        scores = {
            f"{mode}_loop": [float(loop_period(row) is not None) for row in rows],
            f"{mode}_repeated_4grams": [1 - distinct(row, 4) for row in rows],
            **{f"{mode}_distinct_{n}": [distinct(row, n) for row in rows] for n in (1, 2, 3)},
            f"{mode}_tokens": [float(len(row)) for row in rows],
        }
        looping = {str(n): [float(loop_period(row[:n]) is not None) for row in rows] for n in CHECKPOINTS}
        texts = [str(subject.tokenizer.decode(row)) for row in rows]
        return {"scores": scores, "looping": looping, "continuations": texts}

    def cells(self, results: dict[str, Json]) -> list[Json]:
        """Share of texts that are in a loop after so many tokens, or were when they ended before."""
        rows = []
        for mode in MODES:
            units = [result for name, result in results.items() if name.startswith(mode)]
            for n in CHECKPOINTS:
                loops = [x for unit in units for x in unit["looping"][str(n)]]
                rows.append({"mode": mode, "tokens": n, "loop": sum(loops) / len(loops), "n": len(loops)})
        return rows
