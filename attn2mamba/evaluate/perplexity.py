"""Perplexity by token and by word, and bits per byte, of any causal LM on text or on held-out blocks."""

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..errors import UserError
from ..losses import IGNORE
from ..store import start_token

TOKENS_PER_FORWARD = 2048


@dataclass
class Perplexity:
    """nll: summed negative log-likelihood in nats over `tokens`; words and bytes of the text scored (0: unknown)."""

    nll: float
    tokens: int
    words: int = 0
    bytes: int = 0

    @property
    def per_token(self) -> float:
        return _exp(self.nll / self.tokens)

    @property
    def per_word(self) -> float | None:
        return _exp(self.nll / self.words) if self.words else None

    @property
    def bits_per_byte(self) -> float | None:
        return self.nll / math.log(2) / self.bytes if self.bytes else None

    def to_dict(self) -> dict[str, float | int | None]:
        figures: dict[str, float | int | None] = {
            "perplexity": self.per_token,
            "word_perplexity": self.per_word,
            "bits_per_byte": self.bits_per_byte,
        }
        figures |= asdict(self)
        return {name: x if x is None or math.isfinite(x) else None for name, x in figures.items()}


def _exp(x: float) -> float:
    """e^x; infinity where it overflows, as by word in a script without spaces."""
    return torch.tensor(x, dtype=torch.float64).exp().item()


def text_perplexity(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: Iterable[str],
    context: int,
    max_tokens: int | None = None,
) -> Perplexity:
    """Score every token of each text once, in windows of `context` tokens that do not overlap. A text's first token
    is predicted from the BOS that the tokenizer puts before a text, and every window starts with it; where it puts
    none, from the EOS, which ends the document before it. Stops at max_tokens; words and bytes are then those of the
    part scored. A word is a run of non-space characters.
    Raises UserError where there is nothing to score."""
    if tokenizer.eos_token_id is None:
        raise UserError(f"tokenizer '{tokenizer.name_or_path}' has no EOS token to start a text from; set eos_token")
    result, start = Perplexity(0.0, 0), start_token(tokenizer)
    for text in texts:
        left = None if max_tokens is None else max_tokens - result.tokens
        if left is not None and left <= 0:
            break
        ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        if left is not None and len(ids) > left:
            ids = ids[:left]
            text = str(tokenizer.decode(ids))
        for inputs, targets in batches(windows(ids, tokenizer.eos_token_id, context, start)):
            result.nll += negative_log_likelihood(model, inputs, targets)
        result.tokens += len(ids)
        result.words += len(re.findall(r"\S+", text))
        result.bytes += len(text.encode())
    if not result.tokens:
        raise UserError("no text to score; give text that is not empty")
    return result


def windows(ids: list[int], eos: int, context: int, bos: int | None = None) -> Iterator[tuple[list[int], list[int]]]:
    """(inputs, targets) of at most `context` tokens; each window starts from the token before it, the first from eos.
    With a bos, that comes before every window, and the token before it is not scored again."""
    if bos is None:
        for start in range(0, len(ids), context):
            targets = ids[start : start + context]
            yield [ids[start - 1] if start else eos, *targets[:-1]], targets
        return
    ids = [bos, *ids]
    for start in range(1, len(ids), max(1, context - 1)):
        targets = ids[start : start + max(1, context - 1)]
        head = [] if start == 1 else [bos]
        yield [*head, ids[start - 1], *targets[:-1]], [*(IGNORE for _ in head), *targets]


def batches(items: Iterable[tuple[list[int], list[int]]]) -> Iterator[tuple[Tensor, Tensor]]:
    """Windows of equal length together, up to TOKENS_PER_FORWARD: nothing is padded, so nothing depends on it."""
    held: list[tuple[list[int], list[int]]] = []
    for item in items:
        if held and (len(item[0]) != len(held[0][0]) or (len(held) + 1) * len(item[0]) > TOKENS_PER_FORWARD):
            yield torch.tensor([i for i, _ in held]), torch.tensor([t for _, t in held])
            held = []
        held.append(item)
    if held:
        yield torch.tensor([i for i, _ in held]), torch.tensor([t for _, t in held])


def negative_log_likelihood(model: PreTrainedModel, inputs: Tensor, targets: Tensor) -> float:
    """Sum over all positions of -log p(target), in nats; inputs and targets (B, T)."""
    return float(negative_log_likelihoods(model, inputs, targets).sum())


@torch.no_grad()  # inference mode would leave a model whose rotary frequencies change with length unfit for training
def negative_log_likelihoods(model: PreTrainedModel, inputs: Tensor, targets: Tensor) -> Tensor:
    """-log p(target) in nats (B, T) fp32, 0 where the target is IGNORE; inputs and targets (B, T)."""
    logits = model(input_ids=inputs.to(model.device), use_cache=False).logits.float()
    losses = F.cross_entropy(logits.flatten(0, 1), targets.to(logits.device).flatten(), reduction="none")
    return losses.view(targets.shape)


def block_perplexity(model: PreTrainedModel, blocks, max_tokens: int) -> Perplexity:
    """Of packed held-out blocks (`data.Blocks`), the first ones up to max_tokens, at least one; a block's first token
    is not scored."""
    length = blocks.sequence_length
    count = min(len(blocks), max(1, max_tokens // length))
    result = Perplexity(0.0, 0)
    per_forward = max(1, TOKENS_PER_FORWARD // length)
    for start in range(0, count, per_forward):
        ids = torch.stack([blocks[i]["input_ids"] for i in range(start, min(start + per_forward, count))])
        result.nll += negative_log_likelihood(model, ids[:, :-1], ids[:, 1:])
        result.tokens += ids[:, 1:].numel()
    return result
