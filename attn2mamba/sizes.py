"""Parameters that mixers add, and bytes per sequence: a KV cache grows with the context, a state does not. From shapes
alone."""

import functools
import json
from collections import Counter
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedConfig

from .probe import attention_geometry
from .student.configuration_attn2mamba import Attn2MambaConfig, complete_mixer
from .student.mixers import Mixer

CONTEXTS = (1024, 8192, 32768, 65536)
"""Context lengths, in tokens, at which sizes are shown."""


PARTS = {
    "feature_q": "feature_maps",
    "feature_k": "feature_maps",
    "decay": "decay",
    "conv": "convolution",
    "gate": "gate",
    "older": "window_weight",
}
"""What a mixer's modules are called where parameters are counted."""


def added_parameters(mixer: dict[str, Any], geometry: list[list[int]]) -> dict[str, int]:
    """Parameters that the mixers of these layers add, by part."""
    options, parts = complete_mixer(mixer), dict.fromkeys(PARTS.values(), 0)
    for shape, count in Counter(map(tuple, geometry)).items():
        with torch.device("meta"):
            module = Mixer(options, list(shape))
        for name, parameter in module.named_parameters():
            parts[PARTS[name.partition(".")[0]]] += count * parameter.numel()
    return parts


def state_bytes(config: Attn2MambaConfig, element: int = 4) -> int:
    """Bytes that one sequence's mixers keep at any context length.

    Per layer: G states of 2d x (v + 1) in fp32; with a window, its keys, values and ids (and step size and log-decay,
    fp32); with a convolution, its last inputs. `element` is the bytes of one activation (4 for fp32, 2 for bf16).
    """
    mixer, total = config.mixer, 0
    sliding = sliding_windows(config.base()) if mixer["window"] else [None] * len(config.layers)
    for layer, limit in zip(config.layers, sliding, strict=True):
        if layer is None:
            continue
        window = min(mixer["window"], limit or mixer["window"])  # never wider than the teacher's
        _, kv_heads, head_dim, value_dim, hidden_size = layer
        total += kv_heads * 2 * head_dim * (value_dim + 1) * 4
        total += window * (kv_heads * (head_dim + value_dim) * element + 8)
        total += window * kv_heads * 2 * 4 if mixer["decay"] else 0
        total += (mixer["conv_width"] - 1) * hidden_size * element if mixer["conv"] else 0
    return total


def kv_bytes(config: Attn2MambaConfig, context: int, element: int = 4, kept_only: bool = False) -> int:
    """Bytes of one sequence's KV cache after `context` tokens: the teacher's, or, with kept_only, what a hybrid
    student still keeps. Of a sliding window transformers keeps all tokens but the one that leaves next."""
    total = 0
    for layer, shape, cache in zip(config.layers, layer_shapes(config), _cache_layers(config.base()), strict=False):
        if (kept_only and layer is not None) or type(cache).__name__ == "DummyLayer":  # reads another layer's cache
            continue
        _, kv_heads, head_dim, value_dim, _ = shape
        window = getattr(cache, "sliding_window", None)
        length = context if window is None else min(context, window - 1)
        total += kv_heads * (head_dim + value_dim) * length * element
    return total


def sliding_windows(config: PreTrainedConfig) -> list[int | None]:
    """The sliding window of each layer, in tokens; None where it sees everything, or none is known."""
    windows = [getattr(layer, "sliding_window", None) for layer in _cache_layers(config)]
    types = getattr(config, "layer_types", None) or []
    for index in range(len(windows), config.num_hidden_layers):  # layers that read another's cache
        slides = index < len(types) and types[index] == "sliding_attention"
        windows.append(config.sliding_window if slides else None)
    return windows


def _cache_layers(config: PreTrainedConfig) -> list[Any]:
    """transformers' own cache; it may end before the layers do, where the last ones read another layer's."""
    return DynamicCache(config=config).layers


def layer_shapes(config: Attn2MambaConfig) -> list[list[int]]:
    """`config.layers` with the shapes of the kept layers, which it does not hold."""
    if all(config.layers):
        return [layer for layer in config.layers if layer]
    return _teacher_shapes(json.dumps(config.base_config))


@functools.lru_cache(maxsize=8)
def _teacher_shapes(base_config: str) -> list[list[int]]:
    config = Attn2MambaConfig(base_config=json.loads(base_config)).base()
    with torch.device("meta"):  # bf16: the only type in which experts' products run there
        return attention_geometry(AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16))


def cross_over(config: Attn2MambaConfig, element: int = 4) -> int | None:
    """Context length, in tokens, from which the student's memory is smaller than the teacher's KV cache; None if it
    never is (every converted layer had a small sliding window)."""
    fixed = state_bytes(config, element)
    low, high = 0, 1
    while fixed + kv_bytes(config, high, element, kept_only=True) >= kv_bytes(config, high, element):
        high *= 2
        if high > 2**40:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        smaller = fixed + kv_bytes(config, middle, element, kept_only=True) < kv_bytes(config, middle, element)
        low, high = (low, middle) if smaller else (middle, high)
    return high


def human_cross_over(tokens: int | None) -> str:
    return "never" if tokens is None else f"{tokens:,} tokens"


def human_bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError
