"""Associative recall and copying: strings of word tokens of a model's own vocabulary, in which the second occurrence of
something can be predicted from the first, a given number of tokens before."""

import re
from dataclasses import dataclass
from random import Random

from transformers import PreTrainedTokenizerBase

from .reading import continuation_ids

WORD = re.compile(r"[Ġ▁][a-z]{3,}")
ENOUGH = 512


@dataclass(frozen=True)
class Vocabulary:
    """Ids of words, of what stands between a key and its value, and of what ends a pair."""

    words: tuple[int, ...]
    between: tuple[int, ...]
    after: tuple[int, ...]

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> "Vocabulary":
        """Words are tokens of a blank and lower-case letters, or any that are not special where those are few."""
        tokens = sorted((index, token) for token, index in tokenizer.get_vocab().items())
        words = [index for index, token in tokens if WORD.fullmatch(token)]
        if len(words) < ENOUGH:
            words = [index for index, _ in tokens if index not in tokenizer.all_special_ids]
        between, after = (tuple(continuation_ids(tokenizer, "a", text)) for text in (":", "\n"))
        return cls(tuple(index for index in words if index not in between + after), between, after)

    @property
    def pair(self) -> int:
        """Tokens of a pair."""
        return 2 + len(self.between) + len(self.after)


@dataclass(frozen=True)
class String:
    """ids of a string, and the positions in it of the tokens to be predicted."""

    ids: tuple[int, ...]
    scored: tuple[int, ...]


def associative(draw: Random, vocabulary: Vocabulary, pairs: int, distance: int) -> String:
    """Pairs `key: value`, a line each, all words different; other words; the pairs again in another order. Each value
    is scored. A key's first occurrence is `distance` tokens before its second on average, give or take all pairs."""
    drawn = draw.sample(vocabulary.words, 2 * pairs)
    table = list(zip(drawn[:pairs], drawn[pairs:], strict=True))
    again = draw.sample(table, pairs)
    between, after = vocabulary.between, vocabulary.after
    first, second = ([x for k, v in order for x in (k, *between, v, *after)] for order in (table, again))
    count = distance - len(first)
    gap = [*_others(draw, vocabulary, drawn, max(0, count - len(after))), *after]
    ids = [*first, *gap[len(gap) - count :], *second]
    start = len(ids) - len(second) + 1 + len(between)
    return String(tuple(ids), tuple(range(start, len(ids), vocabulary.pair)))


def copying(draw: Random, vocabulary: Vocabulary, length: int, distance: int) -> String:
    """`length` different words; other words; the first words again, `distance` tokens behind. All of them are scored
    but the first, which nothing announces."""
    text = draw.sample(vocabulary.words, length)
    ids = [*text, *_others(draw, vocabulary, text, distance - length), *text]
    return String(tuple(ids), tuple(range(len(ids) - length + 1, len(ids))))


def _others(draw: Random, vocabulary: Vocabulary, chosen: list[int], count: int) -> list[int]:
    assert count >= 0
    rest = sorted(set(vocabulary.words).difference(chosen))
    return draw.choices(rest, k=count)
