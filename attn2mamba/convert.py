"""Teacher -> Hedgehog -> HedgeMamba, with an account of every tensor.

A student starts as a copy of its teacher with a mixer in each attention; a handover swaps the mixers for larger ones
that start as the same function. Both return a report in which each tensor is copied or initialised.
"""

import copy
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .errors import UserError
from .student.attention import MASKLESS, attentions, mixer_attentions
from .student.configuration_attn2mamba import Attn2MambaConfig, complete_mixer
from .student.mixers import Mixer
from .student.modeling_attn2mamba import Attn2MambaForCausalLM

Origin = Literal["copied", "initialised"]


@dataclass
class TransferReport:
    """Where each tensor of the new model comes from, and its numbers (0 for another name of a tied tensor).
    `str(report)` is a summary for people."""

    origins: dict[str, Origin] = field(default_factory=dict)
    parameters: dict[str, int] = field(default_factory=dict)
    _storages: set[int] = field(default_factory=set)

    def add(self, name: str, tensor: Tensor, origin: Origin) -> None:
        self.origins[name] = origin
        self.parameters[name] = 0 if tensor.data_ptr() in self._storages else tensor.numel()
        self._storages.add(tensor.data_ptr())

    def __str__(self) -> str:
        count, size = Counter(self.origins.values()), Counter[str]()
        for name, origin in self.origins.items():
            size[origin] += self.parameters[name]
        parts = [f"{count[o]} tensors {o} ({size[o] / 1e6:.2f}M parameters)" for o in ("copied", "initialised")]
        return ", ".join(parts)


def convert(
    teacher: PreTrainedModel, mixer: dict[str, Any] | None = None, keep: Sequence[int] | Literal["sliding"] = ()
) -> tuple[Attn2MambaForCausalLM, TransferReport]:
    """A new model with the teacher's weights and a fresh mixer in each attention that is not kept.

    `teacher` is left as it is; tensors are copied. `mixer` as `complete_mixer` takes it (default: hedgehog).
    Raises UserError when the teacher has no attention to replace or `keep` names a layer that is not there.
    """
    if mixer_attentions(teacher):
        raise UserError("this model is converted already; give its teacher")
    try:
        options = complete_mixer({"name": "hedgehog", **(mixer or {})})
    except ValueError as error:
        raise UserError(str(error)) from None
    geometry = attention_geometry(teacher, options["window"])
    for index in kept_indices(teacher, keep, len(geometry)):
        geometry[index] = None
    if not any(geometry):
        raise UserError("every attention layer is kept: nothing to convert; keep fewer layers")
    config = Attn2MambaConfig(base_config=clean_config(teacher), mixer=options, layers=geometry)
    config.dtype = teacher.config.dtype
    student = Attn2MambaForCausalLM(config, backbone=copy.deepcopy(teacher))
    student.generation_config = copy.deepcopy(teacher.generation_config)
    for attention in mixer_attentions(student):
        attention.mixer.to(teacher.device, teacher.dtype)
    student.train(teacher.training)
    return student, account(student, teacher)


def account(student: Attn2MambaForCausalLM, teacher: PreTrainedModel) -> TransferReport:
    """Raises AssertionError unless every tensor is the teacher's, bit for bit, or a mixer's, and none is missing."""
    report, source = TransferReport(), teacher.state_dict()
    for name, tensor in student.state_dict().items():
        inner = name.removeprefix("backbone.")
        if inner in source:
            assert torch.equal(tensor, source.pop(inner)), f"{name} differs from the teacher's"
            report.add(name, tensor, "copied")
        else:
            assert ".mixer." in name, f"{name} is neither the teacher's nor a mixer's"
            report.add(name, tensor, "initialised")
    assert not source, f"not transferred: {', '.join(source)}"
    return report


@torch.no_grad()
def hand_over(student: Attn2MambaForCausalLM, mixer: dict[str, Any]) -> TransferReport:
    """Give `student` larger mixers, in place, that compute the same function (DESIGN: exact handover).

    Raises UserError when a part that was trained would be lost: another `share` or `window`, or a part taken away.
    """
    options = complete_mixer(mixer)
    for key in ("share", "window"):
        if options[key] != student.config.mixer[key]:
            raise UserError(f"mixer {key} cannot change between stages: {student.config.mixer[key]} -> {options[key]}")
    report = TransferReport()
    copied = dict(student.named_parameters())
    mixers: list[Mixer] = []
    for attention in mixer_attentions(student):
        old, geometry = attention.mixer, student.config.layers[attention.layer_idx]
        assert geometry is not None
        reference = next(old.parameters())
        mixers.append(Mixer(options, geometry).to(reference.device, reference.dtype).train(old.training))
        own = mixers[-1].state_dict()
        for name, tensor in old.state_dict().items():
            if name not in own or own[name].shape != tensor.shape:
                raise UserError(f"mixer {options['name']} has no place for the trained {name}")
            own[name].copy_(tensor)
    for attention, new in zip(mixer_attentions(student), mixers, strict=True):
        attention.mixer = new
    student.config.mixer = options
    for name, tensor in student.named_parameters():
        report.add(name, tensor, "copied" if name in copied else "initialised")
    return report


def attention_geometry(model: PreTrainedModel, window: int = 0) -> list[list[int] | None]:
    """[num_heads, num_kv_heads, head_dim, value_dim, hidden_size] of each decoder layer's attention, as its own code
    calls the attention function (after RoPE and QK-norm, before any repetition of heads). Runs one forward of
    two tokens, which a model on the meta device can do too. Raises UserError when a layer has no such attention, or one
    that a softmax `window` in its mixer could not follow."""
    found = dict(attentions(model))
    seen: dict[int, list[int]] = {}
    hidden: dict[int, int] = {}

    def capture(module, args, kwargs):
        x = kwargs.get("hidden_states", args[0] if args else None)
        hidden[module.layer_idx] = x.shape[-1]

    def observe(module, query, key, value, mask, **kwargs):
        heads, kv_heads = query.shape[1], key.shape[1]
        refuse_window(module, window, kwargs)
        seen[module.layer_idx] = [heads, kv_heads, query.shape[-1], value.shape[-1], hidden[module.layer_idx]]
        return query.new_zeros(*query.shape[:1], query.shape[2], heads, value.shape[-1])

    handles = [m.register_forward_pre_hook(capture, with_kwargs=True) for m in found.values()]
    before = model.config._attn_implementation
    try:
        for module in found.values():
            module.__dict__["call"] = partial(observe, module)
        model.config._attn_implementation = MASKLESS
        with torch.no_grad():
            ids = torch.zeros(1, 2, dtype=torch.long, device=model.device)
            model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
    except UserError:
        raise
    except Exception as error:  # each family fails in its own way
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(
            f"{type(model).__name__} cannot be converted: its attention fails when probed ({reason})"
        ) from error
    finally:
        model.config._attn_implementation = before
        for handle in handles:
            handle.remove()
        for module in found.values():
            del module.__dict__["call"]
    if not seen:
        raise UserError(
            f"{type(model).__name__}: no attention found that goes through transformers' attention interface; "
            "only decoders whose attention modules do can be converted"
        )
    missing = [i for i in range(model.config.num_hidden_layers) if i not in seen]
    if missing:
        raise UserError(
            f"{type(model).__name__}: layers {', '.join(map(str, missing))} have no softmax attention to convert; "
            "models that are hybrids already are not supported"
        )
    return [seen[i] for i in range(len(seen))]


def refuse_window(module: nn.Module, window: int, options: dict[str, Any]) -> None:
    """Raise UserError where a window of plain softmax would not be the teacher's own attention."""
    reasons = {"softcap": "soft-capped attention scores", "s_aux": "attention sinks"}
    found = [words for name, words in reasons.items() if options.get(name) is not None]
    if window > (options.get("sliding_window") or window):
        found.append(f"a sliding window of {options['sliding_window']} tokens")
    if window and found:
        raise UserError(
            f"{type(module).__name__} has {found[0]}, which mixer window {window} cannot follow; set window to 0"
        )


def kept_indices(model: PreTrainedModel, keep: Sequence[int] | Literal["sliding"], num_layers: int) -> list[int]:
    """Layer indices that `keep` names: a list, or "sliding" for the layers with a sliding window."""
    if keep == "sliding":
        types = getattr(model.config, "layer_types", None) or []
        indices = [i for i, kind in enumerate(types) if kind == "sliding_attention"]
        if not indices:
            raise UserError("keep: sliding, but this teacher has no sliding-window layer; list layers or drop `keep`")
        return indices
    for index in keep:
        if not 0 <= index < num_layers:
            raise UserError(f"keep: layer {index} does not exist; the teacher has layers 0 to {num_layers - 1}")
    return list(keep)


def clean_config(model: PreTrainedModel) -> dict[str, Any]:
    """The teacher's configuration without what belongs to the place it came from (name, quantisation, auto classes)."""
    values = model.config.to_dict()
    for name in ("quantization_config", "_name_or_path", "auto_map", "architectures", "transformers_version"):
        values.pop(name, None)
    values["dtype"] = None
    return values
