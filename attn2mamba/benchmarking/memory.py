"""Bytes that are held: of weights, of a cache, at a step's peak; and those that are free."""

import ctypes
import gc
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin

from ..anatomy import active_share
from ..precision import inner_tensors

PEAK_IS = {
    "cuda": "max_memory_allocated, weights included",
    "mps": "driver_allocated_memory after the step, weights included",
    "cpu": "rise of the process's resident memory (VmHWM) over that before the step, weights not included",
}
"""What `peak_bytes` of a cell measures, by kind of device. Of a CPU it is known on Linux alone."""


def tensor_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages behind these tensors, each once and whole: a view keeps all of what it views."""
    held: dict[int, int] = {}
    for tensor in tensors:
        for plain in inner_tensors(tensor) or [tensor]:
            storage = plain.untyped_storage()
            held[storage.data_ptr()] = storage.nbytes()
    return sum(held.values())


def weights_bytes(model: nn.Module) -> int:
    """Bytes of all weights and buffers."""
    return tensor_bytes([*model.parameters(), *model.buffers()])


def weights_read_bytes(model: Any) -> int:
    """Bytes of the weights that one token meets: all, but neither a look-up table that is not the output head as well,
    nor experts to which the token is not routed."""
    shares = active_share(model)
    total = weights_bytes(model)
    for weight in {id(p): p for p in model.parameters()}.values():
        total -= round(tensor_bytes([weight]) * (1 - shares.get(id(weight), 1.0)))
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    if head is not None and head.weight is not table.weight:
        total -= tensor_bytes([table.weight])
    return total


def cache_bytes(cache: object) -> int:
    """Bytes of all tensors that a model's cache holds, found by walking through it."""
    return tensor_bytes(_tensors(cache))


def _tensors(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, Cache | CacheLayerMixin):
        yield from _tensors(vars(value))


class Peak:
    """The most memory taken between its creation and `bytes()`, as PEAK_IS says."""

    def __init__(self, device: str) -> None:
        self.device = device
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        elif device == "mps":
            torch.mps.empty_cache()
        elif sys.platform == "linux":
            ctypes.CDLL(None).malloc_trim(0)  # else freed memory that is kept would hide the step's own
            self.reset = _reset_high_water_mark()
            self.before = _status("VmRSS")

    def bytes(self) -> int | None:
        """None where the system does not say."""
        if self.device == "cuda":
            return torch.cuda.max_memory_allocated()
        if self.device == "mps":
            return torch.mps.driver_allocated_memory()
        if sys.platform == "linux" and self.reset:
            return max(0, _status("VmHWM") - self.before)
        return None


def _reset_high_water_mark() -> bool:
    """Linux forgets the process's peak when 5 is written there (man 5 proc); False where that is not allowed."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _status(name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    return int(found[1]) * 1024 if found else 0


def free_bytes(device: str) -> int:
    """Bytes that may be taken without swapping."""
    if device == "cuda":
        return torch.cuda.mem_get_info()[0]
    if device == "mps":
        return torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory()
    return psutil.virtual_memory().available
