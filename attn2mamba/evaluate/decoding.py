"""Continuations of many prompts: greedy or sampled, the same whatever else is in the batch."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import Any, cast

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
)

from ..quiet import quiet
from ..teachers import check_length
from .reading import first_ids, token_ids


@dataclass(frozen=True)
class Sampling:
    """Nucleus sampling (arXiv 1904.09751). seeds: one a prompt; each row draws from a stream of its own."""

    seeds: Sequence[int]
    temperature: float = 0.8
    top_p: float = 0.95


def prompt_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """The text's tokens, the BOS before them where the tokenizer puts one."""
    return [*first_ids(tokenizer), *token_ids(tokenizer, text)]


def padding_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Rows of the output head that no token of the tokenizer belongs to; they must never be generated."""
    rows = cast(Tensor, model.get_output_embeddings().weight).shape[0]
    return sorted(set(range(rows)).difference(tokenizer.get_vocab().values()))


def end_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Tokens that end a text: the model's and the tokenizer's."""
    settings = model.generation_config
    configured = settings.eos_token_id if settings is not None else None
    ids = {*(configured if isinstance(configured, list) else [configured]), tokenizer.eos_token_id}
    return sorted(i for i in ids if i is not None)


def continuations(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[list[int]],
    max_new_tokens: int,
    *,
    batch_size: int,
    sampling: Sampling | None = None,
    stop: re.Pattern[str] | None = None,
) -> list[list[int]]:
    """New tokens of each prompt, up to and with the first that ends a text. Greedy without `sampling`.

    Only prompts of equal length share a batch, so nothing is padded; a row's random numbers are its own: what else is
    in the batch changes a row by no more than the rounding of a matrix product, which shows only where two tokens tie.
    The model's own generation settings (penalties, sampling) do not apply, but for the tokens that end a text. Where
    `stop` is found in a row's text, that row ends; what comes after the match is arbitrary.
    Raises UserError for a length that the model has no positions for.
    """
    for prompt in prompts:
        check_length(model, len(prompt) + max_new_tokens)
    ends, results = end_ids(model, tokenizer), dict[int, list[int]]()
    with quiet(), _plain_settings(model, tokenizer, max_new_tokens, ends):
        for rows in _equal_lengths(prompts, batch_size):
            ids = torch.tensor([prompts[i] for i in rows], device=model.device)
            length, options = ids.shape[1], dict[str, Any]()
            if sampling is not None:
                draws = torch.stack([_uniforms(sampling.seeds[i], max_new_tokens) for i in rows])
                options["logits_processor"] = LogitsProcessorList([_Sampler(sampling, draws, length)])
            if stop is not None:
                options["stopping_criteria"] = StoppingCriteriaList([_Stop(tokenizer, stop, length)])
            output = cast(Any, model).generate(ids, attention_mask=torch.ones_like(ids), **options)
            for i, row in zip(rows, output[:, length:].tolist(), strict=True):
                results[i] = _until_end(row, ends)
    return [results[i] for i in range(len(prompts))]


def answers(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[list[int]],
    max_new_tokens: int,
    stop: re.Pattern[str] | None,
    batch_size: int,
) -> list[str]:
    """Greedy continuations as text, cut where `stop` is found."""
    rows = continuations(model, tokenizer, prompts, max_new_tokens, batch_size=batch_size, stop=stop)
    return [_cut(str(tokenizer.decode(row, skip_special_tokens=True)), stop) for row in rows]


def _cut(text: str, stop: re.Pattern[str] | None) -> str:
    found = stop.search(text) if stop is not None else None
    return text[: found.start()] if found else text


def _equal_lengths(prompts: Sequence[list[int]], batch_size: int) -> Iterator[list[int]]:
    """Indices of the prompts, at most batch_size at a time, all of one length."""
    for _, group in groupby(sorted(range(len(prompts)), key=lambda i: len(prompts[i])), lambda i: len(prompts[i])):
        same = list(group)
        for start in range(0, len(same), batch_size):
            yield same[start : start + batch_size]


def _until_end(row: list[int], ends: list[int]) -> list[int]:
    last = next((i for i, token in enumerate(row) if token in ends), len(row))
    return row[: last + 1]


def _uniforms(seed: int, count: int) -> Tensor:
    return torch.rand(count, generator=torch.Generator().manual_seed(seed))


@contextmanager
def _plain_settings(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, max_new_tokens: int, ends: list[int]
) -> Iterator[None]:
    """Inside, the model generates by argmax, with no penalty, never a padding id. What is passed to `generate` would
    be completed from the model's own settings, so these are replaced."""
    own = model.generation_config
    model.generation_config = GenerationConfig(
        max_new_tokens=max_new_tokens,
        do_sample=False,
        use_cache=True,  # not the default of a configuration made here: every token would read the whole text anew
        eos_token_id=ends or None,
        pad_token_id=ends[0] if ends else 0,
        suppress_tokens=padding_ids(model, tokenizer) or None,
    )
    try:
        yield
    finally:
        model.generation_config = own


class _Sampler(LogitsProcessor):
    """Leaves each row the one token that its next uniform number picks from the nucleus."""

    def __init__(self, sampling: Sampling, draws: Tensor, prompt_length: int) -> None:
        """draws: (B, max_new_tokens) in [0, 1)."""
        self.sampling, self.draws, self.prompt_length = sampling, draws, prompt_length

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:  # type: ignore[override]
        draw = self.draws[:, input_ids.shape[1] - self.prompt_length, None].to(scores.device)
        probabilities = (scores / self.sampling.temperature).softmax(-1)
        ordered, tokens = probabilities.sort(dim=-1, descending=True, stable=True)
        mass = ordered.cumsum(-1)
        inside = mass - ordered < self.sampling.top_p
        kept = torch.where(inside, ordered, 0).sum(-1, keepdim=True)
        place = ((mass <= draw * kept) & inside).sum(-1, keepdim=True)
        place = place.minimum(inside.sum(-1, keepdim=True) - 1).clamp_min(0)  # of no number, nothing is inside
        return torch.full_like(scores, -torch.inf).scatter(-1, tokens.gather(-1, place), 0.0)


class _Stop(StoppingCriteria):
    """Ends a row in whose new text the pattern is found."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, pattern: re.Pattern[str], prompt_length: int) -> None:
        self.tokenizer, self.pattern, self.prompt_length = tokenizer, pattern, prompt_length

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:  # type: ignore[override]
        texts = self.tokenizer.batch_decode(input_ids[:, self.prompt_length :], skip_special_tokens=True)
        found = [self.pattern.search(text) is not None for text in texts]
        return torch.tensor(found, dtype=torch.bool, device=input_ids.device)
