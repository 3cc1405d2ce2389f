"""One loaded model under the clock. Lives in a process of its own (worker.py), so that its peak memory is its own."""

import time
from collections.abc import Callable
from typing import Any

import torch

from ..data import load_texts
from ..evaluate.generation import Decoder, read_context
from ..evaluate.perplexity import text_perplexity
from ..evaluate.results import model_fingerprint
from ..precision import Stepwise, load_model, quantised_share
from ..vocabulary import tokenizer_of
from .load import Load
from .memory import Peak, cache_bytes, free_bytes, weights_bytes, weights_read_bytes

Json = dict[str, Any]

PROBE_FLOATS = 2**26
"""fp32 numbers summed to measure the device's memory bandwidth; more than any cache holds."""

SYNCHRONISE: dict[str, Callable[[], object]] = {
    "cuda": torch.cuda.synchronize,
    "mps": torch.mps.synchronize,
    "cpu": lambda: None,
}


class Session:
    """A model in a precision on a device; `state` is the precision of a student's states."""

    def __init__(self, name: str, precision: str, device: str, state: str, allow_pickle: bool) -> None:
        self.loaded = load_model(name, precision, device=device, state=state, allow_pickle=allow_pickle)
        self.model, self.device, self.state = self.loaded.model, device, state

    def describe(self) -> Json:
        """What is measured, and the bytes of its weights."""
        model = self.model
        return {
            "name": self.loaded.name,
            "fingerprint": model_fingerprint(model, tokenizer_of(self.loaded)),
            "parameters": sum(p.numel() for p in {id(p): p for p in model.parameters()}.values()),
            "attention": getattr(model, "backbone", model).config._attn_implementation,
            "weights_bytes": weights_bytes(model),
            "weights_read_bytes": weights_read_bytes(model),
            "quantised_share": round(quantised_share(model), 4),
        }

    def free_bytes(self) -> int:
        """Of the device, now."""
        return free_bytes(self.device)

    @torch.inference_mode()
    def repeat(self, context: int, batch: int, new_tokens: int, vocab_size: int) -> Json:
        """Read `context` tokens and decode: seconds until the first new token, and of each of the `new_tokens` after
        it. cache_bytes are those of the whole batch after context + new_tokens tokens; others as `Load.others`."""
        load = Load()
        began = self._now()
        decode = read_context(self.model, context, batch, vocab_size)
        first = self._now() - began
        seconds = [self._time(decode) for _ in range(new_tokens)]
        others = load.others()
        return {"first": first, "steps": seconds, "others": others, "cache_bytes": cache_bytes(decode.cache)}

    @torch.inference_mode()
    def warm_up(self, context: int, batch: int, new_tokens: int, vocab_size: int) -> Json:
        """The same once, for what is paid at the first time; peak_bytes are the step's."""
        peak = Peak(self.device)
        result = self.repeat(context, batch, new_tokens, vocab_size)
        return {**result, "peak_bytes": peak.bytes()}

    def _time(self, decode: Decoder) -> float:
        began = self._now()
        decode()
        return self._now() - began

    def _now(self) -> float:
        SYNCHRONISE[self.device]()
        return time.perf_counter()

    def bandwidth(self) -> float:
        """Bytes per second at which this device reads memory: the best of some sums over a large tensor."""
        x = torch.ones(PROBE_FLOATS, device=self.device)
        seconds = []
        for _ in range(10):
            began = self._now()
            x.sum()
            seconds.append(self._now() - began)
        return x.nbytes / min(seconds)

    def quality(self, data: str, context: int, tokens: int) -> Json:
        """Perplexity on the first `tokens` tokens of `data`. A lowered state shows only where it is stored, so with one
        the model is fed token by token."""
        model: Any = self.model if self.state == "fp32" else Stepwise(self.model)
        return text_perplexity(model, tokenizer_of(self.loaded), load_texts(data), context, tokens).to_dict()
