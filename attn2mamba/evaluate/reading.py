"""Reading long texts with a model's own cache: in pieces, so that memory is the cache and one piece's logits, and with
copies, so that many questions about one text cost one reading of it."""

import copy
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..benchmarking.memory import free_bytes
from ..errors import UserError
from ..sizes import human_bytes, kv_bytes, state_bytes
from ..store import start_token
from ..student.configuration_attn2mamba import Attn2MambaConfig
from ..teachers import check_length

PIECE_TOKENS = 1024
PIECE_LOGITS = 2**26
"""Most tokens, and most logits, of one forward."""


class Reading:
    """A text that a model has read so far, one sequence at a time: nothing is padded or batched, so no score depends
    on what is scored beside it. `logits` (V,), fp32, predict the token that comes next; None before the first."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.piece = max(64, min(PIECE_TOKENS, PIECE_LOGITS // model.config.vocab_size))
        self.logits: Tensor | None = None
        self._cache: dict[str, Any] = {}

    @property
    def cache(self) -> Any:
        """transformers' cache, or the student's."""
        return next(iter(self._cache.values()))

    def copy(self) -> "Reading":
        """Another reading that goes on from here; this one stays where it is."""
        other = copy.copy(self)
        other._cache = copy.deepcopy(self._cache)
        return other

    def read(self, ids: Sequence[int]) -> "Reading":
        """Read on; returns self. Raises UserError for a model without a cache to read on from."""
        for start in range(0, len(ids), self.piece):
            self.logits = self._forward(ids[start : start + self.piece], keep=1)[-1]
        return self

    def follow(self, ids: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Read on; the log-likelihood in nats (n,) of each of the ids given all before it, and the likeliest id (n,) in
        its place. Something must have been read before."""
        likelihoods, likeliest = [], []
        for start in range(0, len(ids), self.piece):
            part = ids[start : start + self.piece]
            assert self.logits is not None, "nothing predicts the first token"
            after = self._forward(part, keep=0)
            predicting = torch.cat([self.logits.unsqueeze(0), after[:-1]])
            targets = torch.tensor(part, device=predicting.device).unsqueeze(1)
            likelihoods.append((predicting.gather(1, targets).squeeze(1) - predicting.logsumexp(1)).cpu())
            likeliest.append(predicting.argmax(1).cpu())
            self.logits = after[-1].clone()  # not a view, which would keep all of the piece's logits
        return torch.cat(likelihoods), torch.cat(likeliest)

    def greedy(self, count: int) -> list[int]:
        """The next `count` ids, each the likeliest; the last one is not read."""
        found: list[int] = []
        while len(found) < count:
            self.read(found[-1:])
            assert self.logits is not None
            found.append(int(self.logits.argmax()))
        return found

    def log_likelihoods(self, continuations: Sequence[Sequence[int]]) -> list[float]:
        """Of each continuation, in nats, summed over its tokens; this reading stays where it is."""
        assert self.logits is not None
        first = self.logits.log_softmax(0)
        sums = []
        for ids in continuations:
            rest = self.copy().read(ids[:1]).follow(ids[1:])[0].sum() if len(ids) > 1 else 0.0
            sums.append(float(first[ids[0]] + rest))
        return sums

    @torch.no_grad()  # inference mode would leave rotary frequencies that change with length unfit for training
    def _forward(self, ids: Sequence[int], keep: int) -> Tensor:
        inputs = torch.tensor([ids], device=self.model.device)
        output = self.model(input_ids=inputs, use_cache=True, logits_to_keep=keep, **self._cache)
        name = "cache" if "cache" in output else "past_key_values"  # transformers renamed it during 5.x
        if output.get(name) is None:
            raise UserError(f"{type(self.model).__name__} keeps no cache to read on from; leave this measure out")
        self._cache = {name: output[name]}
        return output.logits[0].float()


def token_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Without special tokens."""
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


def continuation_ids(tokenizer: PreTrainedTokenizerBase, text: str, continuation: str) -> list[int]:
    """Ids of `continuation` where it follows `text`."""
    return token_ids(tokenizer, text + continuation)[len(token_ids(tokenizer, text)) :]


def first_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """What stands before a text: the BOS where the tokenizer puts one, else nothing."""
    start = start_token(tokenizer)
    return [] if start is None else [start]


def beyond_training(model: PreTrainedModel, tokens: int) -> bool:
    """Whether `tokens` are more than the model says it was trained on."""
    limit: int | None = getattr(model.config, "max_position_embeddings", None)
    return limit is not None and tokens > limit


def check_context(model: PreTrainedModel, tokens: int, caches: int = 2) -> None:
    """Raises UserError where the model has no positions for so many tokens, or so many caches of them do not fit into
    memory: that of a reading with room to grow, or with copies of it."""
    check_length(model, tokens)
    need, free = caches * cache_bytes(model, tokens), free_bytes(model.device.type)
    if need > free:
        raise UserError(
            f"a context of {tokens:,} tokens takes {human_bytes(need)} for {caches} caches of this model, and "
            f"{human_bytes(free)} are free; use a shorter context"
        )


def cache_bytes(model: PreTrainedModel, tokens: int) -> int:
    """Bytes of one sequence's cache or state after `tokens` tokens."""
    element = model.dtype.itemsize
    if model.config.model_type == Attn2MambaConfig.model_type:
        config = cast(Attn2MambaConfig, model.config)
        return state_bytes(config, element) + kv_bytes(config, tokens, element, kept_only=True)
    total = 0
    for layer in Reading(model).read([0]).cache.layers:
        held = [x for x in (layer.keys, layer.values) if x is not None]
        window = getattr(layer, "sliding_window", None)
        total += sum(x.nbytes for x in held) * (tokens if window is None else min(tokens, window - 1))
    return total
