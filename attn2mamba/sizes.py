"""Bytes per sequence: a KV cache grows with the context, a state does not. From shapes alone."""

from transformers import DynamicCache

from .student.configuration_attn2mamba import Attn2MambaConfig

CONTEXTS = (1024, 8192, 65536)
"""Context lengths, in tokens, at which sizes are shown."""


def state_bytes(config: Attn2MambaConfig, element: int = 4) -> int:
    """Bytes that one sequence's mixers keep at any context length.

    Per layer: G states of 2d x (v + 1) in fp32; with a window, its keys, values and ids (and step size and log-decay,
    fp32); with a convolution, its last inputs. `element` is the bytes of one activation (4 for fp32, 2 for bf16).
    """
    mixer, total = config.mixer, 0
    for layer in config.layers:
        if layer is None:
            continue
        _, kv_heads, head_dim, value_dim, hidden_size = layer
        total += kv_heads * 2 * head_dim * (value_dim + 1) * 4
        total += mixer["window"] * (kv_heads * (head_dim + value_dim) * element + 8)
        total += mixer["window"] * kv_heads * 2 * 4 if mixer["decay"] else 0
        total += (mixer["conv_width"] - 1) * hidden_size * element if mixer["conv"] else 0
    return total


def kv_bytes(config: Attn2MambaConfig, context: int, element: int = 4, kept_only: bool = False) -> int:
    """Bytes of one sequence's KV cache after `context` tokens: the teacher's, or, with kept_only, what a hybrid
    student still keeps. Of a sliding window transformers keeps all tokens but the one that leaves next."""
    windows = [getattr(layer, "sliding_window", None) for layer in DynamicCache(config=config.base()).layers]
    total = 0
    for index, (kv_heads, head_dim, value_dim) in enumerate(_kv_shapes(config)):
        if kept_only and config.layers[index] is not None:
            continue
        window = windows[index]
        length = context if window is None else min(context, window - 1)
        total += kv_heads * (head_dim + value_dim) * length * element
    return total


def _kv_shapes(config: Attn2MambaConfig) -> list[tuple[int, int, int]]:
    known = next(layer for layer in config.layers if layer is not None)  # a kept layer is shaped like the others
    return [(g, d, v) for _, g, d, v, _ in (layer or known for layer in config.layers)]


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
