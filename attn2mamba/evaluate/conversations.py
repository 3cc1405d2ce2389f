"""Conversations of several turns, each answer in JSON: how long a model keeps the format, and what it was told."""

import re
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

from transformers import PreTrainedTokenizerBase

from .decoding import answers, prompt_ids
from .measure import Json, Measure, Subject
from .options import SuiteOptions
from .reading import beyond_training, token_ids

UNIT = 4
"""Conversations in a unit."""
NEXT_TURN = re.compile(r"\n*User:")
Messages = list[dict[str, str]]


@dataclass(frozen=True)
class Turn:
    """What the user says, and how an answer is scored: metric -> 0 or 1."""

    request: str
    score: Callable[[str], dict[str, float]]


class Conversations(Measure):
    """Conversations that the model answers greedily, with its own answers in the history.

    A score is a conversation's mean over its turns (the turns of one depend on each other, so they are no items of
    their own); `all_valid` is 1 where every turn was valid. Cells have the means by kind of conversation and turn.
    """

    kind = "generation"
    any_tokenizer = True
    max_new_tokens: int
    introduction: Sequence[tuple[str, str]]
    """Requests and answers before every conversation, which show the format."""

    def __init__(self, options: SuiteOptions) -> None:
        self.suite = options

    @abstractmethod
    def kinds(self) -> dict[str, int]:
        """Kinds of conversation, and how many there are of each."""

    @abstractmethod
    def conversation(self, kind: str, index: int) -> list[Turn]:
        """One of them."""

    def units(self, subject: Subject) -> list[str]:
        return [f"{kind}/{start}" for kind, count in self.kinds().items() for start in range(0, count, UNIT)]

    def run(self, subject: Subject, unit: str) -> Json:
        kind, _, first = unit.rpartition("/")
        items = range(self.kinds()[kind])[int(first) : int(first) + UNIT]
        talks = [self.conversation(kind, index) for index in items]
        histories: list[Messages] = [messages(self.introduction) for _ in items]
        scored: list[list[dict[str, float]]] = [[] for _ in items]
        longest = 0
        for number in range(max(len(talk) for talk in talks)):
            here = [i for i, talk in enumerate(talks) if number < len(talk)]
            for i in here:
                histories[i].append({"role": "user", "content": talks[i][number].request})
            prompts = [render(subject.tokenizer, histories[i]) for i in here]
            longest = max(longest, *(len(prompt) + self.max_new_tokens for prompt in prompts))
            texts = answers(
                subject.model,
                subject.tokenizer,
                prompts,
                self.max_new_tokens,
                None if subject.tokenizer.chat_template else NEXT_TURN,
                self.suite.batch_size,
            )
            for i, text in zip(here, texts, strict=True):
                histories[i].append({"role": "assistant", "content": text.strip()})
                scored[i].append(talks[i][number].score(text))
        said = [[m["content"] for m in history if m["role"] == "assistant"] for history in histories]
        return {
            "scores": mean_scores(scored),
            "turns": scored,
            "answers": [texts[len(self.introduction) :] for texts in said],
            "beyond_training": beyond_training(subject.model, longest),
        }

    def cells(self, results: dict[str, Json]) -> list[Json]:
        """Means by turn, counted from 1."""
        rows: list[Json] = []
        for kind in self.kinds():
            units = [result for name, result in results.items() if name.rpartition("/")[0] == kind]
            talks = [talk for unit in units for talk in unit["turns"]]
            for turn in range(max((len(talk) for talk in talks), default=0)):
                scores = [talk[turn] for talk in talks if turn < len(talk)]
                # A metric that not every turn has (recall of what was said) is there where it was asked for.
                means = {m: fmean(s[m] for s in scores) for m in scores[0] if all(m in s for s in scores)}
                beyond = any(unit["beyond_training"] for unit in units)
                row = {"kind": kind, "turn": turn + 1, **means, "n": len(scores), "beyond_training": beyond}
                rows.append(row)
        return rows


def messages(exchanges: Sequence[tuple[str, str]]) -> Messages:
    pairs = ((("user", request), ("assistant", answer)) for request, answer in exchanges)
    return [{"role": role, "content": content} for pair in pairs for role, content in pair]


def mean_scores(scored: list[list[dict[str, float]]]) -> dict[str, list[float]]:
    """Of each conversation, the mean of every metric over the turns that have it."""
    metrics = list(dict.fromkeys(metric for talk in scored for turn in talk for metric in turn))
    means = {metric: [fmean(turn[metric] for turn in talk if metric in turn) for talk in scored] for metric in metrics}
    return {**means, "all_valid": [float(all(turn["valid"] for turn in talk)) for talk in scored]}


def render(tokenizer: PreTrainedTokenizerBase, history: Messages) -> list[int]:
    """Tokens of the history up to where the assistant speaks: by the tokenizer's chat template, else as lines that
    begin with User: and Assistant:. No message is the system's, since not every template takes one."""
    if tokenizer.chat_template:
        # Models that think aloud before they answer are asked not to; other templates do not read the argument.
        text = tokenizer.apply_chat_template(history, tokenize=False, add_generation_prompt=True, enable_thinking=False)
        return token_ids(tokenizer, str(text))
    names = {"user": "User", "assistant": "Assistant"}
    lines = [f"{names[message['role']]}: {message['content']}" for message in history]
    return prompt_ids(tokenizer, "\n\n".join([*lines, "Assistant:"]))
