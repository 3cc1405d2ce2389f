"""Continuing a prompt, and how fast a model decodes."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TextStreamer

from ..errors import UserError
from ..quiet import quiet
from ..teachers import check_length
from .decoding import padding_ids


class _Printer(TextStreamer):
    def __init__(self, tokenizer: PreTrainedTokenizerBase, write: Callable[[str], None]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.write = write

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self.write(text)


@torch.inference_mode()
def continue_text(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt: str,
    max_new_tokens: int,
    temperature: float = 0.0,
    write: Callable[[str], None] = lambda text: None,
) -> str:
    """The continuation of `prompt`, greedy at temperature 0; `write` is handed the text as it comes.

    An empty prompt starts from the tokenizer's BOS (or EOS) token. Rows that pad the vocabulary are never generated.
    """
    ids = torch.tensor([tokenizer(prompt).input_ids], dtype=torch.long)
    if not ids.shape[1]:
        start = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
        if start is None:
            raise UserError("this tokenizer has no BOS or EOS token to start from; give a prompt")
        ids = torch.tensor([[start]])
    check_length(model, ids.shape[1] + max_new_tokens)
    sampling = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
    own = getattr(model.generation_config, "suppress_tokens", None) or ()
    generate: Callable[..., Tensor] = model.generate  # type: ignore[assignment]
    with quiet():
        output = generate(
            ids.to(model.device),
            attention_mask=torch.ones_like(ids).to(model.device),
            max_new_tokens=max_new_tokens,
            streamer=_Printer(tokenizer, write),
            suppress_tokens=sorted({*padding_ids(model, tokenizer), *own}) or None,
            **sampling,
        )
    return str(tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True))


class Decoder:
    """A model in the middle of greedy decoding: calling it decodes one token more for each sequence of the batch.

    cache holds the tokens read, and those decoded but for the last; next_token (B, 1)."""

    def __init__(self, model: PreTrainedModel, ids: Tensor) -> None:
        self.model = model
        self._forward(ids, {})

    def __call__(self) -> None:
        self._forward(self.next_token, {self._name: self.cache})

    def _forward(self, ids: Tensor, cache: dict[str, Any]) -> None:
        output = self.model(input_ids=ids, use_cache=True, logits_to_keep=1, **cache)
        self._name = "cache" if "cache" in output else "past_key_values"
        self.cache = output[self._name]
        self.next_token = output.logits[:, -1:].argmax(-1)


def read_context(model: PreTrainedModel, context: int, batch: int = 1, vocab_size: int | None = None) -> Decoder:
    """Prefill `batch` sequences of `context` tokens and pick the first new token; each call of what is returned decodes
    one more.

    The tokens are arbitrary, since speed does not depend on them; they are the same for all models of one vocabulary,
    or for equal `vocab_size`."""
    ids = torch.arange(context, device=model.device).remainder(vocab_size or model.config.vocab_size)
    return Decoder(model, ids.expand(batch, -1))


@torch.inference_mode()
def decode_rate(model: PreTrainedModel, context: int, steps: int = 24) -> float:
    """Tokens per second of greedy decoding, one sequence, after `context` tokens: the median step's rate."""
    step = read_context(model, context)
    seconds = []
    for number in range(steps + 2):
        began = time.perf_counter()
        step()
        if number >= 2:  # the first steps pay for allocations
            seconds.append(time.perf_counter() - began)
    return 1 / statistics.median(seconds)
