"""What a model keeps between calls: a fixed-size state for each mixer, a KV cache for each attention that was kept."""

from typing import Any, cast

import torch
from torch import LongTensor, Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


class StateLayer(CacheLayerMixin):
    """The tensors of one mixer, by name; all have the batch as first dimension. Its size does not grow with tokens.

    It counts the tokens it has seen, because transformers derives positions and mask sizes from the cache.
    """

    is_compileable = False
    is_sliding = False
    supports_early_init = False

    def __init__(self) -> None:
        super().__init__()
        self.tensors: dict[str, Tensor] = {}
        self.tokens_seen = 0

    def get(self, name: str) -> Tensor | None:
        return self.tensors.get(name)

    def set(self, **tensors: Tensor) -> None:
        self.tensors.update(tensors)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        raise NotImplementedError("a mixer's state is written by the mixer, not through keys and values")

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        raise NotImplementedError("a mixer's state is written by the mixer, not through keys and values")

    def get_seq_length(self) -> int:
        return self.tokens_seen

    def get_max_length(self) -> int:
        return -1

    def get_max_cache_shape(self) -> int:
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        length = query_length if isinstance(query_length, int) else len(query_length)
        return self.tokens_seen + length, 0

    def reset(self) -> None:
        self.tensors, self.tokens_seen = {}, 0

    def _map(self, function) -> None:
        self.tensors = {name: function(tensor) for name, tensor in self.tensors.items()}

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._map(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._map(lambda x: x.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._map(lambda x: x[indices.to(x.device)])

    def offload(self) -> None:
        pass

    def prefetch(self) -> None:
        pass


class StateCache(Cache):
    """One layer per decoder layer. `valid` (B, tokens seen) marks real tokens, in the order in which they are held:
    all padding first, then each row's tokens side by side.

    `valid` is None until a padded batch is seen. It is a byte a token; nothing else here grows with the context
    unless attention layers were kept.
    """

    layers: list[Any]  # StateLayer, or transformers' own class where attention was kept

    def __init__(self, layers: list[Any]) -> None:
        super().__init__(layers=layers)
        self.valid: Tensor | None = None
        self.pads: Tensor | None = None  # (B,) padding of the current call, where it comes after cached tokens

    def nbytes(self) -> int:
        """Bytes held now, over all layers and the whole batch."""
        tensors: list[Tensor] = []
        for layer in self.layers:
            held = layer.tensors.values() if isinstance(layer, StateLayer) else (layer.keys, layer.values)
            tensors += [x for x in held if x is not None]
        return sum(x.numel() * x.element_size() for x in tensors)

    def reset(self) -> None:
        super().reset()
        self.valid = self.pads = None

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(cast(LongTensor, beam_idx))
        if self.valid is not None:
            self.valid = self.valid.index_select(0, beam_idx.to(self.valid.device))

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        if self.valid is not None:
            self.valid = self.valid.repeat_interleave(repeats, dim=0)

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        if self.valid is not None:
            self.valid = self.valid[indices.to(self.valid.device)]

    def crop(self, tokens_to_remove: int) -> None:
        raise ValueError("a recurrent state cannot be rolled back: assisted decoding is not possible with this model")

    def append(self, valid: Tensor | None, batch: int, length: int, device: torch.device) -> Tensor | None:
        """Record the next `length` tokens; returns all of `valid` (B, seen + length), None without padding."""
        if valid is None and self.valid is None:
            return None
        past = self.valid
        if past is None:
            past = torch.ones(batch, self.get_seq_length(), dtype=torch.bool, device=device)
        new = torch.ones(batch, length, dtype=torch.bool, device=device) if valid is None else valid
        self.pads = (~new).sum(1) if past.shape[1] and valid is not None else None
        self.valid = close_gaps(torch.cat([past, new], dim=1), self.pads, past.shape[1], dim=1)
        return self.valid

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """A kept attention's keys and values, in the order of `valid`: a sliding window counts slots, not tokens."""
        keys, values = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        if self.pads is not None:
            layer, past = self.layers[layer_idx], keys.shape[2] - key_states.shape[2]
            keys, values = (close_gaps(x, self.pads, past, dim=2) for x in (keys, values))
            held = layer.keys.shape[2]
            layer.keys, layer.values = keys[:, :, -held:], values[:, :, -held:]
        return keys, values


def close_gaps(x: Tensor, pads: Tensor | None, past: int, dim: int) -> Tensor:
    """Along `dim`, x holds `past` cached entries, then T of which each row's first `pads` (B,) are padding. Moves the
    cached entries beside the row's tokens, the padding before them."""
    if pads is None:
        return x
    index = torch.arange(x.shape[dim], device=x.device).expand(len(pads), -1)
    pads = pads.to(x.device).unsqueeze(1)  # a kept attention may be on another device than the tokens
    index = torch.where(index < pads, past + index, torch.where(index < past + pads, index - pads, index))
    shape = [len(pads)] + [1] * (x.dim() - 1)
    shape[dim] = x.shape[dim]
    return x.gather(dim, index.view(shape).expand_as(x))
