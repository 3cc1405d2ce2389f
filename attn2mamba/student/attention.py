"""The seam: every transformers attention calls a registered function with q, k, v; ours asks the layer's mixer.

A converted attention module keeps its class's own code (fused qkv, biases, norms, rotary, output projection): its
class becomes a subclass of itself with `MixerAttention` in front, and it gains a `mixer`. Parameter names stay the
teacher's. The module hands the mixer what the attention function does not receive.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .cache import StateLayer
from .mixers import Mixer, TokenInfo
from .window import ScoreRule

MASKLESS = "attn2mamba"
"""Attention implementation of a model without softmax attention: no T x T mask is ever built."""
MASKED = "attn2mamba_masked"
"""The same where some layer attends by softmax (kept layers, transfer) and needs the family's masks."""

CACHE_ARGUMENTS = ("cache", "past_key_values", "layer_past")


class MixerAttention(nn.Module):
    """Put before a family's attention class.

    `tokens` describes the model's latest call, so with gradient checkpointing each forward's backward must come before
    the next forward. `observer`, when set, is called in place of the mixer as
    observer(module, mix, query, key, value, mask, **kwargs) and returns what the layer attends to (stage 1).
    """

    mixer: Mixer
    tokens: TokenInfo
    observer: Callable[..., Tensor] | None
    call: Callable[..., Tensor] | None
    layer_idx: int

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        state = None
        for name in CACHE_ARGUMENTS:
            if kwargs.get(name) is not None:
                state = kwargs[name].layers[self.layer_idx]
                kwargs[name] = None  # or the family would append its keys and values
        convolved = hidden_states
        if self.mixer.conv is not None:
            convolved = self.mixer.conv(hidden_states, self.tokens, state)
        self.call = partial(self._attend, hidden_states, convolved, state)
        try:
            output = super().forward(convolved, *args, **kwargs)
            if self.call is not None:
                raise RuntimeError("the mixer was passed over: a converted model has no other attention implementation")
            return output
        finally:
            self.call = None

    def _attend(
        self,
        hidden: Tensor,
        convolved: Tensor,
        state: StateLayer | None,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        **kwargs: Any,
    ) -> Tensor:
        rule, self.call = score_rule(query, kwargs), None

        def mix(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return self.mixer(query, key, value, hidden, convolved, rule, self.tokens, state)

        if self.observer is not None:
            return self.observer(self, mix, query, key, value, mask, **kwargs)
        output = mix(query, key, value)
        if state is not None:
            state.tokens_seen += query.shape[2]
        return output


def score_rule(query: Tensor, options: dict[str, Any]) -> ScoreRule:
    """What a family's call of its attention function says about its softmax."""
    scaling = options.get("scaling")
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    return ScoreRule(scaling, options.get("softcap"), options.get("s_aux"), options.get("sliding_window"))


def install(attention: nn.Module, mixer: Mixer) -> None:
    """Turn a family's attention module into a MixerAttention of the same class."""
    cls = type(attention)
    attention.__class__ = type(f"Mixer{cls.__name__}", (MixerAttention, cls), {"__module__": cls.__module__})
    converted = cast(MixerAttention, attention)
    converted.mixer = mixer
    converted.tokens = TokenInfo()
    converted.observer = converted.call = None


def attentions(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every decoder attention of a transformers model, converted or not, by name, in order."""
    for name, module in model.named_modules():
        if type(module).__name__.endswith("Attention") and isinstance(getattr(module, "layer_idx", None), int):
            yield name, module


def mixer_attentions(model: nn.Module) -> list[MixerAttention]:
    """The converted attentions, in order."""
    return [module for module in model.modules() if isinstance(module, MixerAttention)]


def softmax_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """The family's own attention, (B, T, H, v) and weights if it returns them: sdpa where that is exact, else eager
    (soft-capping and sinks exist only there; `output_attentions` needs the weights)."""
    exact = kwargs.get("softcap") is None and kwargs.get("s_aux") is None and not kwargs.get("output_attentions")
    if exact:
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, mask, **kwargs)
    if mask is None:
        length, total = query.shape[2], key.shape[2]
        mask = torch.ones(length, total, dtype=torch.bool, device=query.device).tril(total - length)[None, None]
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, torch.finfo(query.dtype).min)
    return sys.modules[type(module).__module__].eager_attention_forward(module, query, key, value, mask, **kwargs)


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    call = getattr(module, "call", None)
    if call is None:
        return softmax_attention(module, query, key, value, attention_mask, **kwargs)
    return call(query, key, value, attention_mask, **kwargs).contiguous(), None


_DOCUMENTS: ContextVar[Tensor | None] = ContextVar("documents", default=None)


@contextmanager
def documents_apart(model: PreTrainedModel, document_ids: Tensor | None) -> Iterator[None]:
    """Inside, softmax attention of a transformers model keeps tokens of different document_ids (B, T) apart. Positions
    that start anew would tell transformers so, but some families do not pass them to its masks."""
    config, before = model.config, model.config._attn_implementation
    token = _DOCUMENTS.set(document_ids)
    if document_ids is not None and before != MASKLESS:
        config._attn_implementation = MASKED
    try:
        yield
    finally:
        config._attn_implementation = before
        _DOCUMENTS.reset(token)


def _family_mask(*args: Any, **kwargs: Any) -> Tensor | None:
    documents = _DOCUMENTS.get()
    if documents is None:
        return sdpa_mask(*args, **kwargs)
    mask = cast(Tensor, sdpa_mask(*args, **{**kwargs, "allow_is_causal_skip": False}))
    return mask & (documents[:, :, None] == documents[:, None]).unsqueeze(1)


def _no_mask(*args: Any, **kwargs: Any) -> None:
    return None


AttentionInterface.register(MASKLESS, _attention)
AttentionInterface.register(MASKED, _attention)
AttentionMaskInterface.register(MASKLESS, _no_mask)
AttentionMaskInterface.register(MASKED, _family_mask)
