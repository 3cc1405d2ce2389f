"""Teacher -> Hedgehog -> HedgeMamba, with an account of every tensor.

A student starts as a copy of its teacher with a mixer in each attention; a handover swaps the mixers for larger ones
that start as the same function. Both return a report in which each tensor is copied or initialised.
"""

import copy
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .errors import UserError
from .probe import TOKENS, attention_geometry, differ, first_line, forward, on_meta, probe_tokens, refuse, refuse_window
from .sizes import sliding_windows
from .student.attention import mixer_attentions
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
    Raises UserError when the teacher is of a kind that a mixer cannot follow (see `probe`), or `keep` names a layer
    that is not there.
    """
    if mixer_attentions(teacher):
        raise UserError("this model is converted already; give its teacher")
    if any(hasattr(module, "_hf_hook") for module in teacher.modules()):  # accelerate's, bound to the old forward
        raise UserError(
            "this model is spread over devices; load it on one device, convert and save it, then load the student with "
            "device_map"
        )
    try:
        options = complete_mixer({"name": "hedgehog", **(mixer or {})})
    except ValueError as error:
        raise UserError(str(error)) from None
    geometry: list[list[int] | None] = [*attention_geometry(teacher)]
    if options["window"]:
        refuse_window(teacher, options["window"])
    if keep and getattr(teacher.config, "num_kv_shared_layers", None):
        refuse(teacher, "shares keys and values between layers, so none can be kept beside converted ones", "drop keep")
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
    report = account(student, teacher)
    if not on_meta(teacher):
        verify_student(student.eval(), teacher)
    return student.train(teacher.training), report


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
def verify_student(student: Attn2MambaForCausalLM, teacher: PreTrainedModel) -> None:
    """Raises UserError unless a fresh student reads text at once, in pieces and padded alike: code of the family's own
    that keeps something else in the cache, or counts positions from the tokens, would show here."""
    tokens = probe_tokens(teacher)
    whole = forward(student, tokens)
    try:
        cache, pieces = student.new_cache(), []
        for start, stop, keep in ((0, 5, 1), (5, 6, 1), (6, TOKENS, 0)):
            pieces.append(student(tokens[:, start:stop], past_key_values=cache, logits_to_keep=keep).logits)
        padded = torch.cat([tokens[:, :2], tokens], dim=1)
        mask = torch.ones_like(padded)
        mask[:, :2] = 0
        shifted = student(padded, attention_mask=mask, use_cache=False).logits[:, 2:]
    except Exception as error:  # each family fails in its own way
        refuse(teacher, f"does not read on from a state ({first_line(error)})")
    read = torch.cat(pieces, dim=1)
    if read.shape != whole[:, 4:].shape:
        refuse(teacher, "does not honour logits_to_keep")
    if differ(read, whole[:, 4:]):
        refuse(teacher, "keeps more than keys and values between calls, so that a student would forget")
    if differ(shifted, whole):
        refuse(teacher, "counts positions so that padding would change a student's answers")


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


def kept_indices(model: PreTrainedModel, keep: Sequence[int] | Literal["sliding"], num_layers: int) -> list[int]:
    """Layer indices that `keep` names: a list, or "sliding" for the layers with a sliding window."""
    if keep == "sliding":
        indices = [i for i, window in enumerate(sliding_windows(model.config)) if window]
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
