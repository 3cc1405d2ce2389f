"""A model that takes part in a benchmark, known by its shapes alone: what its cache and a step will take."""

import platform
import re
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from ..convert import clean_config
from ..costs import mixer_floats
from ..errors import UserError
from ..precision import PRECISIONS
from ..probe import attention_geometry
from ..sizes import human_bytes, kv_bytes, layer_shapes, state_bytes
from ..student.configuration_attn2mamba import Attn2MambaConfig
from ..student.modeling_attn2mamba import PREFILL_CHUNK
from ..teachers import check_length, load_teacher
from .memory import free_bytes


@dataclass
class Side:
    """role: teacher or student; path: what load_teacher takes; model: without weights; config: shapes of its attention
    or its mixers."""

    role: str
    path: str
    model: PreTrainedModel
    config: Attn2MambaConfig

    def cache_bytes(self, tokens: int, batch: int, element: int, state: int = 4) -> int:
        """Bytes of KV cache and states after `tokens` tokens, with `element` bytes an activation and `state` bytes a
        number of a state."""
        if self.role == "teacher":
            return batch * kv_bytes(self.config, tokens, element)
        numbers = sum(g * 2 * d * (v + 1) for _, g, d, v, _ in filter(None, self.config.layers))
        kept = kv_bytes(self.config, tokens, element, kept_only=True)
        return batch * (state_bytes(self.config, element) - numbers * (4 - state) + kept)

    def step_bytes(self, context: int, batch: int, new_tokens: int, element: int) -> int:
        """About what reading `context` tokens takes besides the weights: the cache, and one layer's activations, of
        which eight times the widths was measured. A student reads PREFILL_CHUNK tokens at a time,
        a teacher all at once."""
        rows = batch * (context if self.role == "teacher" else min(context, PREFILL_CHUNK))
        shapes = layer_shapes(self.config)
        hidden = max(shape[-1] for shape in shapes)
        floats = rows * element * 8 * (hidden + self._widest())
        if self.role == "student":
            converted = [layer for layer in self.config.layers if layer]
            floats += 4 * rows * round(max(mixer_floats(self.config.mixer, layer) for layer in converted))
        elif self.model.config._attn_implementation == "eager":  # scores and weights of every pair
            floats += 2 * 4 * batch * max(shape[0] for shape in shapes) * context**2
        return floats + self.cache_bytes(context + new_tokens, batch, element)

    def _widest(self) -> int:
        """The most outputs of a layer's matrix, which are the MLP's."""
        vocabulary = self.model.config.vocab_size
        shapes = [p.shape for p in self.model.parameters() if p.dim() == 2]
        return max(max(shape) for shape in shapes if vocabulary not in shape)

    def weights_bytes(self, precision: str) -> int:
        """While it is loaded, before anything is quantised."""
        parameters = {id(p): p.numel() for p in self.model.parameters()}
        return sum(parameters.values()) * PRECISIONS[precision].itemsize

    def trained_length(self) -> int | None:
        """Positions that the model was trained for, as its configuration says."""
        return getattr(self.model.config, "max_position_embeddings", None)


def open_sides(model: str, teacher: str | None, allow_pickle: bool) -> dict[str, Side]:
    """The teacher and the student, by role, from their configurations; a lone model is one or the other. Raises
    UserError for names that lead nowhere, and when a teacher is given for a model that is not converted."""
    last = _open(model, allow_pickle)
    if teacher is None:
        return {last.role: last}
    if last.role == "teacher":
        raise UserError(f"'{model}' is not a converted model, so it has no teacher; leave --teacher out")
    first = _open(teacher, allow_pickle)
    if first.role == "student":
        raise UserError(f"teacher '{teacher}' is a converted model; give the Transformer that it was made from")
    return {"teacher": first, "student": last}


def _open(path: str, allow_pickle: bool) -> Side:
    loaded = load_teacher(path, config_only=True, dtype=torch.bfloat16, allow_pickle=allow_pickle)
    config = loaded.config
    if isinstance(config, Attn2MambaConfig):
        return Side("student", path, loaded.model, config)
    geometry = attention_geometry(loaded.model)
    shapes = Attn2MambaConfig(base_config=clean_config(loaded.model), layers=[*geometry])
    return Side("teacher", path, loaded.model, shapes)


def check_fit(sides: dict[str, Side], longest: int, precision: str, device: str) -> None:
    """Raise UserError where a model has no positions for `longest` tokens, or the models do not fit side by side."""
    for side in sides.values():
        check_length(side.model, longest)
    need, free = sum(side.weights_bytes(precision) for side in sides.values()), free_bytes(device)
    if need > free:
        raise UserError(
            f"{' and '.join(sides)} take {human_bytes(need)} in {precision} while they are loaded, and "
            f"{human_bytes(free)} of {device} memory are free; choose a smaller --dtype or another --device"
        )


def choose_device(name: str) -> str:
    """cpu, cuda or mps; auto is the first accelerator there is. Raises UserError for one that is not there."""
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if name == "auto":
        return next(device for device, available in there.items() if available)
    if not there.get(name):
        known = [device for device, available in there.items() if available]
        raise UserError(f"device '{name}' is not available here; choose from auto, {', '.join(known)}")
    return name


def machine(device: str) -> dict[str, Any]:
    """What speeds depend on besides models and options. threads: of torch on the CPU."""
    return {
        "device": device,
        "name": torch.cuda.get_device_name() if device == "cuda" else _processor(),
        "threads": torch.get_num_threads(),
        "system": platform.system(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "torchao": _version("torchao"),
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:  # there on Linux alone
        found = None
    return found[1].strip() if found else platform.processor() or platform.machine()
