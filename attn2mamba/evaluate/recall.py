"""Recall tasks in the manner of RULER (arXiv 2404.06654), written anew: a context of a given number of tokens, and
questions about it whose answers are single words. Everything is a pure function of task, seed, index and tokenizer."""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, cycle
from random import Random

from transformers import PreTrainedTokenizerBase

from ..errors import UserError
from .reading import continuation_ids, first_ids, token_ids
from .recall_text import WORDS, names, passage, sentences

NEEDLES = 8
"""Needles of a multi-key context, and questions over passages."""
VALUES = 4
"""Needles of the one key of a multi-value context."""
CHAINS, LENGTH = 3, 4
"""Chains of variables, and variables of each."""
COMMON, RARE, TIMES = 5, 35, 6
"""Words of a word list that are common and rare, and how much more often a common one occurs."""
CANDIDATES = 16
SLACK = 2
"""Tokens of a greedy continuation beyond those of the answers."""


@dataclass(frozen=True)
class Question:
    """`text` follows the context, and the answers, in any order, follow it. candidates: the answers among wrong ones.
    depth: where in the context the answer stands, 0 (start) to 1; None where it is spread over it."""

    text: str
    answers: tuple[str, ...]
    candidates: tuple[str, ...]
    depth: float | None = None

    @property
    def chance(self) -> float:
        """Share of the answers that guessing among the candidates finds."""
        return len(self.answers) / len(self.candidates)

    def answer_tokens(self, tokenizer: PreTrainedTokenizerBase) -> int:
        """Length of a greedy continuation that has room for the answers."""
        return len(continuation_ids(tokenizer, self.text, " " + ", ".join(self.answers))) + SLACK


@dataclass(frozen=True)
class Item:
    context: str
    questions: tuple[Question, ...]


def make_item(
    task: str, tokenizer: PreTrainedTokenizerBase, tokens: int, seed: int, index: int, depth: float | None = None
) -> Item:
    """One context with its questions. Start token, context, any one question and its continuation take `tokens` tokens
    at most, and fewer by no more than a word's. depth is for the needle alone. Raises UserError where so many tokens
    are too few.
    """
    draw = Random(f"{task} {seed} {tokens} {index} {depth}")
    words = usable_words(tokenizer)
    draw.shuffle(words)
    questions, needles, filler, joint = TASKS[task](draw, words, depth)
    asked = max(len(token_ids(tokenizer, q.text)) + q.answer_tokens(tokenizer) for q in questions)
    room = tokens - len(first_ids(tokenizer)) - asked
    context = hide(needles, list(of_words(filler, tokens)), joint, room, lambda text: len(token_ids(tokenizer, text)))
    if context is None:
        raise UserError(f"{tokens} tokens are too few for a context of {task}; use a longer context")
    return Item(context, tuple(questions))


def usable_words(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """WORDS that are one token each, if there are enough, else all: then candidates take a forward each."""
    single = [word for word in WORDS if len(continuation_ids(tokenizer, "the", f" {word}")) == 1]
    return single if len(single) >= COMMON + RARE else list(WORDS)


def of_words(pieces: Iterable[str], count: int) -> Iterator[str]:
    """The first pieces that hold `count` words together."""
    for piece in pieces:
        if count <= 0:
            return
        count -= len(piece.split())
        yield piece


def hide(
    needles: Sequence[tuple[float, str]], filler: Sequence[str], joint: str, room: int, size: Callable[[str], int]
) -> str | None:
    """As much of the filler as has a size up to `room`, the last piece cut between words, with each needle between two
    pieces at its depth (they come in ascending depth); None where not even the needles fit."""
    ends = list(accumulate(len(piece.split()) for piece in filler))

    def build(words: int) -> str:
        whole = bisect_right(ends, words)
        pieces = list(filler[:whole])
        rest = words - (ends[whole - 1] if whole else 0)
        if rest:
            pieces.append(" ".join(filler[whole].split()[:rest]).rstrip(".,") + ".")
        places = [(round(depth * len(pieces)), needle) for depth, needle in needles]
        for place, needle in reversed(places):
            pieces.insert(place, needle)
        return joint.join(pieces)

    low, high = 0, ends[-1]
    below, above = size(build(low)), size(build(high))
    if below > room:
        return None
    assert above > room, "too little filler"
    while high - low > 1:  # sizes grow nearly in proportion to words
        guess = low + (room - below) * (high - low) // (above - below)
        guess = min(max(guess, low + 1), high - 1)
        found = size(build(guess))
        if found <= room:
            low, below = guess, found
        else:
            high, above = guess, found
    return build(low)


Parts = tuple[list[Question], list[tuple[float, str]], Iterable[str], str]
"""Questions, needles by depth, filler without end, and what joins them."""


def needle(draw: Random, words: list[str], depth: float | None) -> Parts:
    """One word hidden in prose, asked for by its key. The wrong candidates are not in the context."""
    assert depth is not None
    key, answer = words[:2]
    question = Question(f"\n\nThe secret word for {key} is", (answer,), tuple(words[1 : CANDIDATES + 1]), depth)
    return [question], [(depth, f"The secret word for {key} is {answer}.")], sentences(draw), " "


def multikey(draw: Random, words: list[str], depth: float | None) -> Parts:
    """Many such needles, each asked for; the candidates are all of their words."""
    keys, answers = words[:NEEDLES], tuple(words[NEEDLES : 2 * NEEDLES])
    questions, needles = [], []
    for key, answer, place in zip(keys, answers, spread(NEEDLES), strict=True):
        questions.append(Question(f"\n\nThe secret word for {key} is", (answer,), answers, place))
        needles.append((place, f"The secret word for {key} is {answer}."))
    return questions, needles, sentences(draw), " "


def multivalue(draw: Random, words: list[str], depth: float | None) -> Parts:
    """Several words for one key, asked for all at once. The wrong candidates are not in the context."""
    key, candidates = words[0], tuple(words[1 : CANDIDATES + 1])
    answers = candidates[:VALUES]
    question = Question(f"\n\nThe secret words for {key} are", answers, candidates)
    texts = [f"One of the secret words for {key} is {answer}." for answer in answers]
    return [question], list(zip(spread(VALUES), texts, strict=True)), sentences(draw), " "


def tracking(draw: Random, words: list[str], depth: float | None) -> Parts:
    """Chains of variables, each set to the one before it, the first of a chain to a number; all variables that have a
    number are asked for."""
    names = tuple(words[: CHAINS * LENGTH])
    chains = [names[i * LENGTH : (i + 1) * LENGTH] for i in range(CHAINS)]
    numbers = draw.sample(range(10_000, 100_000), CHAINS)
    order = [i for i in range(CHAINS) for _ in range(LENGTH)]
    draw.shuffle(order)
    texts, done = [], [0] * CHAINS
    for i in order:
        value = f"the value of {chains[i][done[i] - 1]}" if done[i] else str(numbers[i])
        texts.append(f"The variable {chains[i][done[i]]} is set to {value}.")
        done[i] += 1
    questions = [
        Question(f"\n\nThe variables that have the value {number} are", variables, names)
        for number, variables in zip(numbers, chains, strict=True)
    ]
    return questions, list(zip(spread(len(texts)), texts, strict=True)), sentences(draw), " "


def commonwords(draw: Random, words: list[str], depth: float | None) -> Parts:
    """A list of words of which a few occur much more often than the others."""
    common, rare = words[:COMMON], words[COMMON : COMMON + RARE]

    def block() -> list[str]:
        found = common * TIMES + rare
        draw.shuffle(found)
        return found

    text = "\n\nThe five words that occur most often in this list are"
    question = Question(text, tuple(common), tuple(common + rare[: CANDIDATES - COMMON]))
    more = chain.from_iterable(iter(block, None))
    return [question], [(0.0, "A list of words: " + " ".join(block()))], more, " "


def distractors(draw: Random, words: list[str], depth: float | None) -> Parts:
    """Passages about people, and questions about a few of them; the candidates are the answers to all questions."""
    people, answers, topics = names(draw), tuple(words[:NEEDLES]), words[NEEDLES:]
    questions, needles = [], []
    for name, answer, place in zip(people[:NEEDLES], answers, spread(NEEDLES), strict=True):
        text = f"\n\nQuestion: What is the book by {name} about?\nAnswer: It is about the"
        questions.append(Question(text, (answer,), answers, place))
        needles.append((place, passage(draw, name, answer)))
    others = (passage(draw, name, draw.choice(topics)) for name in cycle(people[NEEDLES:]))
    return questions, needles, others, "\n\n"


def spread(count: int) -> list[float]:
    """Depths at equal distances, half of one from both ends."""
    return [(i + 0.5) / count for i in range(count)]


TASKS: dict[str, Callable[[Random, list[str], float | None], Parts]] = {
    f.__name__: f for f in (needle, multikey, multivalue, tracking, commonwords, distractors)
}
