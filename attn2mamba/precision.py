"""Models in the precisions that they are served in: fp32, bf16, fp16, and int8 or int4 weights by torchao.

Quantised are the linear layers of the decoder, gates included, whose sizes the kernels take: int8 with one scale a
row, int4 with a scale and a zero point for every 32 weights of a row. Embeddings, the output head (often the same
tensor), norms, stacked experts, and the mixers' small maps (features, step size, convolution) are not: they stay bf16,
as do activations. A mixer's state is fp32 under all of them.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput
from transformers.pytorch_utils import Conv1D

from .errors import UserError
from .student.cache import StateCache, StateLayer
from .student.modeling_attn2mamba import Attn2MambaForCausalLM
from .teachers import DTYPES, Teacher, load_teacher

GROUP = 32
"""Weights of a row that share one int4 scale."""

PRECISIONS: dict[str, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "int8": torch.bfloat16,
    "int4": torch.bfloat16,
}
"""The precisions by name, and what activations and all that is not quantised are held in."""

NOTES = {
    ("int8", "cpu"): "int8 weights are unpacked before each product on a CPU: they save memory, not time",
    ("int4", "cpu"): "int4 on a CPU runs torchao's prototype kernel: fast on single tokens, slow on long prompts",
}
"""What a reader must know of a precision on a kind of device."""


def check_precision(precision: str, device: str) -> None:
    """Raise UserError for an unknown name, where torchao is missing, and where the device has no such kernel."""
    if precision not in PRECISIONS:
        raise UserError(f"precision '{precision}' is unknown; choose from {', '.join(PRECISIONS)}")
    if precision not in DTYPES:
        _import_torchao()
    if precision == "int4" and device == "mps":
        raise UserError("int4 weights have no kernel on mps; choose int8, or --device cpu")


def load_model(
    name: str, precision: str = "fp32", *, device: str = "cpu", state: str = "fp32", allow_pickle: bool = False
) -> Teacher:
    """Any model that load_teacher takes, in one of PRECISIONS on `device`, its mixers' states held in `state`.

    Raises UserError as load_teacher and `check_precision` do, and for a model whose layers torchao does not quantise.
    """
    check_precision(precision, device)
    loaded = load_teacher(name, dtype=PRECISIONS[precision], allow_pickle=allow_pickle)
    loaded.model.to(device)  # type: ignore[arg-type]
    if precision not in DTYPES:
        quantise(loaded.model, precision)
    if state != "fp32":
        lower_state(loaded.model, PRECISIONS[state])
    return loaded


def quantise(model: PreTrainedModel, precision: str) -> None:
    """Replace the weights of the model's linear layers by int8 or int4 ones, in place."""
    torchao = _import_torchao()
    if any(isinstance(module, Conv1D) for module in model.modules()):
        raise UserError(f"the layers of a {model.config.model_type} model cannot be quantised to {precision} (Conv1D)")
    if precision == "int8":
        config = torchao.Int8WeightOnlyConfig()
    elif model.device.type == "cpu":
        from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig

        config = PrototypeInt4WeightOnlyConfig(group_size=GROUP, set_inductor_config=False)
    else:
        config = torchao.Int4WeightOnlyConfig(group_size=GROUP, int4_packing_format="tile_packed_to_4d")
    head = model.get_output_embeddings()
    chosen = {id(m) for n, m in model.named_modules() if m is not head and _is_quantised(n, m, precision)}
    if not chosen:
        raise UserError(f"this model has no linear layer that can be quantised to {precision}")
    torchao.quantize_(model, config, filter_fn=lambda module, name: id(module) in chosen)


def _is_quantised(name: str, module: nn.Module, precision: str) -> bool:
    if not isinstance(module, nn.Linear) or ".mixer.decay." in name:
        return False
    return precision != "int4" or (module.in_features % GROUP == 0 and module.out_features % 16 == 0)


def quantised_share(model: nn.Module) -> float:
    """The part of the model's parameters that is held in integers; each tensor counts once."""
    parameters = {id(p): p for p in model.parameters()}.values()
    return sum(p.numel() for p in parameters if inner_tensors(p)) / sum(p.numel() for p in parameters)


def inner_tensors(tensor: Tensor) -> list[Tensor]:
    """The plain tensors inside a quantised one; none of a plain one."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return []
    names, _ = tensor.__tensor_flatten__()
    return [getattr(tensor, name) for name in names]


class LoweredStateLayer(StateLayer):
    """A state that is rounded to `dtype` whenever it is stored. For measuring what that costs, no more."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def set(self, **tensors: Tensor) -> None:
        if "memory" in tensors:
            tensors["memory"] = tensors["memory"].to(self.dtype)
        super().set(**tensors)


class LoweredState(Attn2MambaForCausalLM):
    """A student whose new caches hold LoweredStateLayers."""

    state_dtype: torch.dtype

    def new_cache(self) -> StateCache:
        cache = super().new_cache()
        cache.layers = [
            LoweredStateLayer(self.state_dtype) if isinstance(layer, StateLayer) else layer for layer in cache.layers
        ]
        return cache


def lower_state(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Make a student hold its states in `dtype`; a teacher has none, and is left as it is."""
    if isinstance(model, Attn2MambaForCausalLM):
        model.__class__ = LoweredState
        model.state_dtype = dtype  # type: ignore[assignment]


class Stepwise:
    """A model that reads its input token by token through its cache: what a lowered state does shows only there."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model, self.device = model, model.device

    def __call__(self, input_ids: Tensor, use_cache: bool) -> CausalLMOutput:
        """Logits (B, T, V) for input_ids (B, T); `use_cache` says whether the caller wants one, and gets none."""
        logits: list[Tensor] = []
        cache: dict[str, Any] = {}
        for step in input_ids.split(1, dim=1):
            output = self.model(input_ids=step, use_cache=True, **cache)
            name = "cache" if "cache" in output else "past_key_values"
            cache = {name: output[name]}
            logits.append(output.logits)
        return CausalLMOutput(logits=torch.cat(logits, dim=1))


def _import_torchao() -> Any:
    try:
        import torchao.quantization
    except ImportError:
        raise UserError("int8 and int4 weights need torchao; pip install torchao") from None
    return torchao.quantization
