"""Continuing a prompt, and how fast a model decodes."""

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TextStreamer

from ..errors import UserError
from ..quiet import quiet
from ..teachers import check_length


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

    An empty prompt starts from the tokenizer's BOS (or EOS) token.
    """
    ids = torch.tensor([tokenizer(prompt).input_ids], dtype=torch.long)
    if not ids.shape[1]:
        start = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
        if start is None:
            raise UserError("this tokenizer has no BOS or EOS token to start from; give a prompt")
        ids = torch.tensor([[start]])
    check_length(model, ids.shape[1] + max_new_tokens)
    sampling = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
    generate: Callable[..., Tensor] = model.generate  # type: ignore[assignment]
    with quiet():
        output = generate(
            ids.to(model.device),
            attention_mask=torch.ones_like(ids).to(model.device),
            max_new_tokens=max_new_tokens,
            streamer=_Printer(tokenizer, write),
            **sampling,
        )
    return str(tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True))


def read_context(model: PreTrainedModel, context: int) -> Callable[[], None]:
    """Prefill `context` tokens and return a function that decodes one more, greedily, each time it is called.

    The tokens are arbitrary, since speed does not depend on them."""
    ids = torch.arange(context, device=model.device).remainder(model.config.vocab_size).unsqueeze(0)
    output = model(input_ids=ids, use_cache=True, logits_to_keep=1)
    name = "cache" if "cache" in output else "past_key_values"

    def step() -> None:
        nonlocal output
        token = output.logits[:, -1:].argmax(-1)
        output = model(input_ids=token, use_cache=True, logits_to_keep=1, **{name: output[name]})

    return step


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
