"""One call's inputs: padding moved to the left, positions that do not count it, and what the mixers must know."""

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from .cache import StateCache
from .mixers import TokenInfo


@dataclass
class Call:
    """Tensors (B, T), but for inputs_embeds (B, T, hidden). `valid` is None when no token is padding."""

    input_ids: Tensor | None
    inputs_embeds: Tensor | None
    position_ids: Tensor | None
    labels: Tensor | None
    document_ids: Tensor | None
    valid: Tensor | None

    @classmethod
    def check(
        cls,
        input_ids: Tensor | None,
        inputs_embeds: Tensor | None,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        labels: Tensor | None,
        document_ids: Tensor | None,
        cache: StateCache | None,
    ) -> "Call":
        """Raises ValueError for what a mixer cannot honour."""
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds")
        if cache is not None and not isinstance(cache, StateCache):
            raise ValueError(f"this model needs its own cache (model.new_cache()), not a {type(cache).__name__}")
        batch, length = _tokens(input_ids, inputs_embeds).shape[:2]
        valid = None
        if attention_mask is not None:
            if attention_mask.dim() != 2:
                raise ValueError("attention_mask must be 2-D (batch, tokens): a mixer is causal and has no other mask")
            if attention_mask.shape[1] < length:
                raise ValueError(f"attention_mask covers {attention_mask.shape[1]} of {length} tokens")
            valid = attention_mask[:, -length:].bool()
            valid = None if bool(valid.all()) else valid
        if document_ids is not None and (cache is not None or valid is not None):
            raise ValueError("document_ids cannot be combined with a cache or with padding")
        if document_ids is not None and position_ids is not None:
            raise ValueError(
                "document_ids already say the positions: each document starts at 0; leave position_ids out"
            )
        if position_ids is not None:
            position_ids = position_ids.expand(batch, -1)
        return cls(input_ids, inputs_embeds, position_ids, labels, document_ids, valid)

    @property
    def shape(self) -> tuple[int, int]:
        batch, length = _tokens(self.input_ids, self.inputs_embeds).shape[:2]
        return batch, length

    @property
    def device(self) -> torch.device:
        return _tokens(self.input_ids, self.inputs_embeds).device

    def map(self, function) -> "Call":
        present = {f.name: getattr(self, f.name) for f in fields(self)}
        return replace(self, **{name: function(x) for name, x in present.items() if x is not None})

    def slice(self, start: int, stop: int) -> "Call":
        return self.map(lambda x: x[:, start:stop])

    def pads_to_the_left(self) -> tuple["Call", Tensor | None]:
        """Padding first, then the tokens in order; and the permutation (B, T) if anything moved. Mixers need each
        row's tokens side by side and last: then padding can be told by its count alone."""
        if self.valid is None or not bool((self.valid[:, 1:] < self.valid[:, :-1]).any()):
            return self, None
        order = self.valid.long().argsort(dim=1, stable=True)
        return self.map(lambda x: permute(x, order)), order

    def mask_labels(self) -> "Call":
        """No loss on padding, nor on the first token of a row or document, which nothing before it would predict."""
        if self.labels is None or (self.valid is None and self.document_ids is None):
            return self
        if self.document_ids is not None:
            predicted = F.pad(self.document_ids[:, 1:] == self.document_ids[:, :-1], (1, 0), value=False)
        else:
            assert self.valid is not None
            predicted = F.pad(self.valid[:, :-1], (1, 0), value=False) & self.valid
        return replace(self, labels=self.labels.masked_fill(~predicted, -100))

    def prepare(self, cache: StateCache | None) -> tuple[TokenInfo, Tensor | None, Tensor | None]:
        """TokenInfo, position_ids and 2-D mask for the family's code; counts the tokens into `cache`."""
        batch, length = self.shape
        past = cache.get_seq_length() if cache is not None else 0
        seen = self.valid
        if cache is not None:
            seen = cache.append(self.valid, batch, length, self.device)
        positions = self.position_ids
        if positions is None and seen is not None:
            positions = (seen.long().cumsum(1) - 1).clamp_min(0)[:, past:]
        if positions is None and self.document_ids is not None:
            positions = positions_within(self.document_ids)
        pads = cache.pads if cache is not None else None
        return TokenInfo(self.valid, self.document_ids, pads), positions, seen


def _tokens(input_ids: Tensor | None, inputs_embeds: Tensor | None) -> Tensor:
    tokens = input_ids if input_ids is not None else inputs_embeds
    assert tokens is not None
    return tokens


def positions_within(document_ids: Tensor) -> Tensor:
    """(B, T) document ids, each document's tokens side by side -> position of each token in its document."""
    index = torch.arange(document_ids.shape[1], device=document_ids.device).expand_as(document_ids)
    starts = F.pad(document_ids[:, 1:] != document_ids[:, :-1], (1, 0), value=True)
    return index - torch.where(starts, index, 0).cummax(dim=1).values


def permute(x: Tensor, order: Tensor) -> Tensor:
    """x (B, T, ...) with row b's entries taken in the order order[b]."""
    return x.gather(1, order.view(*order.shape, *[1] * (x.dim() - 2)).expand(*order.shape, *x.shape[2:]))
