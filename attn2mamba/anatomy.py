"""What a Transformer is made of, told from its modules, its configuration and how it calls its attention: positions,
windows, experts, extras. Nothing here knows a family by name; everything works on the meta device."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .probe import probe_tokens, record, silent
from .student.attention import attentions


@dataclass
class Call:
    """How one layer calls the attention function. rotary: whether it used the position embeddings it was given; None
    where it was given none (it has its own, or there are none)."""

    softcap: float | None
    sinks: bool
    rotary: bool | None


@dataclass
class Experts:
    """Layers with the same number of experts. active: those a token is routed to. parameters: of all experts of these
    layers; shared_parameters: of those that every token meets as well."""

    layers: int
    experts: int
    active: int
    parameters: int
    shared_parameters: int


@dataclass
class Positions:
    """kind: rope, learned (a table of `limit` positions) or other (none, or none that is known here). rotary_dims: of
    each head, by kind of layer where kinds differ, as are theta and scaling. trained: positions the configuration
    names (max_position_embeddings). nope_layers: layers that use none of the rotary embeddings they are given."""

    kind: str
    rotary: list[dict[str, Any]]
    nope_layers: list[int]
    limit: int | None
    trained: int | None


class _Watched(Tensor):
    """A tensor that tells `call` when it is computed with."""

    call: Call

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if getattr(func, "__name__", "") != "__get__":  # of shape, dtype, device
            for x in args:
                if isinstance(x, _Watched):
                    x.call.rotary = True
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def attention_calls(model: PreTrainedModel) -> dict[int, Call]:
    """How each layer calls the attention function, in one forward of a model that can be converted."""
    calls = {cast(int, module.layer_idx): Call(None, False, None) for _, module in attentions(model)}

    def watch(module, args, kwargs):
        given, call = kwargs.get("position_embeddings"), calls[module.layer_idx]
        if given is None:
            return None
        call.rotary = False
        tensors = [x.as_subclass(_Watched) for x in (given if isinstance(given, tuple | list) else [given])]
        for x in tensors:
            x.call = call
        watched = tuple(tensors) if isinstance(given, tuple | list) else tensors[0]
        return args, {**kwargs, "position_embeddings": watched}

    handles = [module.register_forward_pre_hook(watch, with_kwargs=True) for _, module in attentions(model)]
    try:
        recording = record(model, probe_tokens(model), silent)
    finally:
        for handle in handles:
            handle.remove()
    for seen in recording.calls:
        call = calls[cast(int, seen.module.layer_idx)]
        call.softcap, call.sinks = seen.options.get("softcap"), seen.options.get("s_aux") is not None
    return calls


def positions(model: PreTrainedModel, calls: dict[int, Call]) -> Positions:
    trained = getattr(model.config, "max_position_embeddings", None)
    nope = [index for index, call in calls.items() if call.rotary is False]
    rotary = _rotary(model)
    if rotary:
        return Positions("rope", rotary, nope, None, trained)
    limit = position_table(model)
    return Positions("other" if limit is None else "learned", [], [], limit, trained)


def position_table(model: PreTrainedModel) -> int | None:
    """Positions in the model's learned table; None without one."""
    limit, tokens = getattr(model.config, "max_position_embeddings", None), model.get_input_embeddings()
    tables = [m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding) and m is not tokens]
    return limit if limit and any(limit <= size <= limit + 8 for size in tables) else None  # OPT's has two more


def _rotary(model: PreTrainedModel) -> list[dict[str, Any]]:
    """One entry for each set of frequencies: which kind of layer (None: all), dimensions turned, theta, scaling."""
    found: dict[str | None, int] = {}
    for name, buffer in model.named_buffers():
        last = name.rpartition(".")[2]
        if last.endswith("inv_freq") and "original" not in last:
            found[last.removesuffix("inv_freq").rstrip("_") or None] = 2 * buffer.numel()
    parameters = getattr(model.config, "rope_parameters", None) or {}
    entries = []
    for kind, dims in found.items():
        own = parameters.get(kind, parameters) if kind else parameters
        scaling = own.get("rope_type", "default")
        entries.append(
            {
                "layers": kind,
                "dims": dims,
                "theta": own.get("rope_theta"),
                "scaling": None if scaling == "default" else scaling,
                "factor": own.get("factor"),
            }
        )
    return entries


def expert_layers(model: nn.Module) -> list[Experts]:
    """The mixture's layers by number of experts: modules with stacked 3-D weights, one or more to a router."""
    found: dict[tuple[int, int], Experts] = {}
    places: set[str] = set()
    for name, module in stacked_modules(model):
        place, block = _routed_block(model, name)
        weights = [p for p in module.parameters(recurse=False) if p.dim() > 1]
        count = weights[0].shape[0]
        key = (count, _top_k(block) or count)
        group = found.setdefault(key, Experts(0, *key, 0, 0))
        group.parameters += sum(p.numel() for p in weights)
        if place not in places:
            places.add(place)
            around = model.get_submodule(place.rpartition(".")[0])  # shared experts may stand beside the router
            group.layers += 1
            group.shared_parameters += sum(p.numel() for n, p in around.named_parameters() if "shared" in n)
    return list(found.values())


def stacked_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules that hold a weight of each expert in one 3-D parameter, by name."""
    for name, module in model.named_modules():
        plain = not isinstance(module, nn.Conv1d | nn.Embedding) and ".mixer." not in f"{name}."
        if plain and any(p.dim() == 3 for p in module.parameters(recurse=False)):
            yield name, module


def active_share(model: nn.Module) -> dict[int, float]:
    """id of each expert weight -> the part of it that a token meets."""
    shares = {}
    for name, module in stacked_modules(model):
        active = _top_k(_routed_block(model, name)[1])
        for parameter in module.parameters(recurse=False):
            if active and parameter.dim() > 1:
                shares[id(parameter)] = active / parameter.shape[0]
    return shares


def active_parameters(model: nn.Module) -> int:
    """Parameters that one token meets: all, but of stacked experts those it is routed to."""
    shares = active_share(model)
    return round(sum(p.numel() * shares.get(id(p), 1.0) for p in model.parameters()))


def _routed_block(model: nn.Module, name: str) -> tuple[str, nn.Module]:
    """The nearest module around `name` that holds a router; the module itself without one."""
    place = name
    while place:
        place = place.rpartition(".")[0]
        if place and _top_k(model.get_submodule(place)):
            return place, model.get_submodule(place)
    return name, model.get_submodule(name)


def _top_k(block: nn.Module) -> int | None:
    values = (module.__dict__.get("top_k") for module in block.modules())
    return next((k for k in values if isinstance(k, int) and k > 0), None)


def attention_parts(model: PreTrainedModel) -> tuple[list[str], list[str]]:
    """Names of norms inside the attention modules (q/k norm), and of their parts that have a bias."""
    norms: dict[str, None] = {}
    biases: dict[str, None] = {}
    for _, module in attentions(model):
        for name, part in module.named_modules():
            if "norm" in type(part).__name__.lower():
                norms[name] = None
            elif name and ".mixer." not in f".{name}." and getattr(part, "bias", None) is not None:
                biases[name] = None
    return list(norms), list(biases)
