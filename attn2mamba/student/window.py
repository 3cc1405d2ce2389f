"""Exact softmax over the last `window` tokens, and the hand-over of older tokens to the recurrent state."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .cache import StateLayer, close_gaps

BLOCK = 64


class ScoreRule(NamedTuple):
    """How the teacher's softmax weighs tokens: the scale of query-key products, the bound that soft-capping puts on
    them (Gemma 2), sinks (H,) that take weight and give no value (gpt-oss), and the tokens that a sliding window shows.
    None where the teacher has no such thing."""

    scaling: float
    softcap: float | None = None
    sinks: Tensor | None = None
    sliding_window: int | None = None

    def scores(self, scaled_query: Tensor, key: Tensor) -> Tensor:
        """fp32 scores of a query that is scaled already: fp16 products of an unscaled one would overflow."""
        scores = (scaled_query @ key).float()
        return scores if self.softcap is None else self.softcap * torch.tanh(scores / self.softcap)

    def drain(self, output: Tensor, log_weight: Tensor) -> tuple[Tensor, Tensor]:
        """Softmax output (B, H, T, v) and log-sum-exp of its scores (B, H, T, 1), with the sinks counted in."""
        if self.sinks is None:
            return output, log_weight
        total = torch.logaddexp(log_weight, self.sinks.float()[:, None, None])
        return output * (log_weight - total).exp(), total


class OlderWeight(nn.Module):
    """query (B, H, T, d) -> log-weight (B, H, T, 1) of the state's read-out against the window's softmax weights.

    Starts at log(2 d): features sum to 1, so phi(q)^T phi(k) is about 1 / 2d where exp(q^T k) is about 1.
    """

    def __init__(self, num_heads: int, head_dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(num_heads, head_dim))
        self.bias = nn.Parameter(torch.full((num_heads,), math.log(2 * head_dim)))

    def forward(self, query: Tensor) -> Tensor:
        return query.float() @ self.weight.float().unsqueeze(-1) + self.bias.float()[:, None, None]


class WindowSpan(NamedTuple):
    """The `window` slots before this call's T tokens, then the tokens: key, value (B, G, window + T, .), step size and
    log-decay (B, G, window + T) or None, and ids (B or 1, window + T), where -1 is padding or an empty slot."""

    window: int
    key: Tensor
    value: Tensor
    dt: Tensor | None
    log_decay: Tensor | None
    ids: Tensor

    @classmethod
    def extend(
        cls,
        window: int,
        key: Tensor,
        value: Tensor,
        dt: Tensor | None,
        log_decay: Tensor | None,
        ids: Tensor,
        pads: Tensor | None,
        state: StateLayer | None,
    ) -> "WindowSpan":
        """Put the cached slots of `state` (empty ones without it) before the new tokens, and cache the last ones."""
        new = {"key": key, "value": value, "dt": dt, "log_decay": log_decay, "ids": ids.expand(len(key), -1)}
        if state is None:
            new["ids"] = ids
        spans: dict[str, Any] = {}
        for name, tensor in new.items():
            if tensor is None:
                spans[name] = None
                continue
            dim = 1 if name == "ids" else 2
            held = state.get(f"window_{name}") if state is not None else None
            if held is None:
                held = tensor.new_full((*tensor.shape[:dim], window, *tensor.shape[dim + 1 :]), -1 if dim == 1 else 0)
            spans[name] = close_gaps(torch.cat([held, tensor], dim=dim), pads, window, dim)
        if state is not None:
            length = key.shape[2]
            kept = {
                f"window_{n}": x.narrow(1 if n == "ids" else 2, length, window)
                for n, x in spans.items()
                if x is not None
            }
            state.set(**{name: x.clone() for name, x in kept.items()})  # a view would keep all of x
        return cls(window, **spans)

    def leaving(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor]:
        """Key, value, dt, log-decay and ids of the T slots that leave the window as the T tokens come."""
        length = self.key.shape[2] - self.window
        dt, log_decay = (x[:, :, :length] if x is not None else None for x in (self.dt, self.log_decay))
        return self.key[:, :, :length], self.value[:, :, :length], dt, log_decay, self.ids[:, :length]

    def attend(self, query: Tensor, rule: ScoreRule) -> tuple[Tensor, Tensor]:
        """Softmax output (B, H, T, v) of each query over its last `window` tokens, itself included, and the
        log-sum-exp of its scores (B, H, T, 1); both fp32. Banded: memory is T * (window + 64), never T * T."""
        batch, heads, length, head_dim = query.shape
        groups = self.key.shape[1]
        query = query * rule.scaling
        if length == 1:
            return rule.drain(*self._attend_last(query.view(batch, groups, heads // groups, head_dim), rule))
        block = min(BLOCK, length)
        blocks = -(-length // block)
        fill = blocks * block - length
        size = self.window + block
        key, value = (F.pad(x, (0, 0, 0, fill)).unfold(2, size, block) for x in (self.key, self.value))
        rows = F.pad(query, (0, 0, 0, fill)).view(batch, groups, heads // groups, blocks, block, head_dim)
        rows = rows.transpose(2, 3).reshape(batch, groups, blocks, -1, head_dim)
        scores = rule.scores(rows, key).unflatten(3, (heads // groups, block))
        scores = scores.masked_fill(~self._visible(block, fill), -torch.inf)
        log_weight = scores.logsumexp(dim=-1, keepdim=True)
        weights = (scores - log_weight).exp()
        output = (weights.flatten(3, 4) @ value.mT.float()).unflatten(3, (heads // groups, block))
        output, log_weight = (x.transpose(2, 3).reshape(batch, heads, -1, x.shape[-1]) for x in (output, log_weight))
        return rule.drain(output[:, :, :length], log_weight[:, :, :length])

    def _attend_last(self, query: Tensor, rule: ScoreRule) -> tuple[Tensor, Tensor]:
        """`attend` for one token, its scaled query as (B, G, H / G, d): no blocks and no band."""
        scores = rule.scores(query, self.key[:, :, 1:].mT)
        scores = scores.masked_fill((self.ids[:, 1:] != self.ids[:, -1:])[:, None, None], -torch.inf)
        log_weight = scores.logsumexp(dim=-1, keepdim=True)
        output = (scores - log_weight).exp() @ self.value[:, :, 1:].float()
        output, log_weight = (x.flatten(1, 2).unsqueeze(2) for x in (output, log_weight))
        return output, log_weight

    def _visible(self, block: int, fill: int) -> Tensor:
        """(B or 1, 1, n, 1, block, window + block) bool. A padding query sees padding, so that no row is empty."""
        ids = F.pad(self.ids, (0, fill), value=-1)
        key_ids = ids.unfold(1, self.window + block, block)
        query_ids = ids[:, self.window :].unflatten(1, (-1, block))
        ahead = torch.arange(self.window + block, device=ids.device) - torch.arange(block, device=ids.device)[:, None]
        band = (ahead > 0) & (ahead <= self.window)
        return ((query_ids.unsqueeze(-1) == key_ids.unsqueeze(2)) & band)[:, None, :, None]
