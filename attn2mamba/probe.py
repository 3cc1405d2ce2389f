"""What a teacher's attention is, found by running it on a few tokens rather than by its name.

A mixer can stand for causal softmax attention whose queries, keys and values depend on their own token alone. Whatever
else a model does with earlier tokens would be lost or wrong in a student, so it is refused here, by name.
"""

import copy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MASKED_LM_MAPPING_NAMES

from .errors import UserError
from .student.attention import MASKED, MASKLESS, attentions, documents_apart, softmax_attention

TOKENS = 8
"""Tokens of a probe; few enough to be quick on any model, enough to prefill, continue and pad."""

UNDERSTOOD = {
    *("dropout", "scaling", "sliding_window", "is_causal", "softcap", "s_aux", "output_attentions", "use_cache"),
    *("position_ids", "deterministic", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"),
}
"""What a family may hand to its attention function without a mixer missing anything."""

KEYS_AND_VALUES = ("DynamicLayer", "DynamicSlidingWindowLayer", "DummyLayer")
"""Cache layers of softmax attention; the last one where a layer keeps nothing or uses another's."""

FEATURES = {
    "position_bias": "adds a position bias to its attention scores",
    "indices": "picks the tokens that each query attends to (sparse attention)",
    "block_indices": "picks the blocks that each query attends to (sparse attention)",
}


@dataclass
class Call:
    """One call of an attention function. query (B, H, T, d), key (B, G, T, d), value (B, G, T, v)."""

    module: nn.Module
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    hidden_size: int
    options: dict[str, Any]


@dataclass
class Recording:
    calls: list[Call] = field(default_factory=list)
    logits: Tensor = field(default_factory=lambda: torch.empty(0))


def attention_geometry(model: PreTrainedModel) -> list[list[int]]:
    """[num_heads, num_kv_heads, head_dim, value_dim, hidden_size] of each decoder layer's attention, as its own code
    calls the attention function (after RoPE and QK-norm, before any repetition of heads).

    Runs a few forwards of TOKENS tokens; on the meta device one, from which only shapes can be told. Raises UserError
    with the family, the feature and what to do for a model that a mixer cannot follow.
    """
    refuse_by_configuration(model)
    meta, tokens = on_meta(model), probe_tokens(model)
    if meta or model.dtype != torch.float32:
        # 16 bits hide what differs; on the meta device grouped products of experts exist in bf16 alone
        model = cast(Any, copy.deepcopy(model)).to(torch.bfloat16 if meta else torch.float32)
    blank = record(model, tokens, silent)
    geometry = _shapes(model, blank.calls)
    if not meta:
        _refuse_by_behaviour(model, tokens, blank)
    return geometry


def refuse_window(model: PreTrainedModel, window: int) -> None:
    """Raise UserError where the teacher's softmax sees less than a mixer's window of `window` tokens, and does not say
    so in the call of its attention function."""
    if "chunked_attention" in (getattr(model.config, "layer_types", None) or []):
        refuse(model, "attends within chunks, which a softmax window in the mixer would cross", "set window to 0")
    layers = DynamicCache(config=copy.deepcopy(model.config)).layers
    for call in record(model, probe_tokens(model), silent).calls:
        index = cast(int, call.module.layer_idx)
        reach = getattr(layers[index], "sliding_window", None) if index < len(layers) else None
        if reach is not None and window > reach and call.options.get("sliding_window") is None:
            refuse(model, f"masks all but the last {reach} tokens by itself", f"set window to {reach} or less")


@torch.no_grad()
def refuse_packing(model: PreTrainedModel) -> None:
    """Raise UserError where packed documents would see each other in the teacher although they are to be apart."""
    tokens, half = probe_tokens(model), TOKENS // 2
    positions = torch.arange(TOKENS, device=model.device)[None] % half
    with documents_apart(model, torch.arange(TOKENS, device=model.device)[None] // half):
        packed = model(input_ids=tokens, position_ids=positions, use_cache=False).logits
    with _implementation(model, "eager"):
        alone = forward(model, tokens[:, half:])
    if differ(packed[:, half:], alone):
        refuse(model, "does not keep packed documents apart", "set reset_documents to false")


def refuse(model: PreTrainedModel, reason: str, advice: str = "give another teacher") -> NoReturn:
    raise UserError(f"{type(model).__name__} ({model.config.model_type}) cannot be converted: it {reason}; {advice}")


def refuse_own_attention(model: PreTrainedModel) -> NoReturn:
    kinds = sorted({type(m).__name__ for m in model.modules() if "Att" in type(m).__name__}) or ["no attention"]
    refuse(model, f"does not go through transformers' attention interface ({', '.join(kinds)})")


def on_meta(model: PreTrainedModel) -> bool:
    """Whether the model has shapes but no weights (an offloaded one has them elsewhere)."""
    return model.device.type == "meta" and not hasattr(model, "hf_device_map")


def refuse_by_configuration(model: PreTrainedModel) -> None:
    """Raise UserError for what the configuration alone rules out."""
    config = model.config
    if config.is_encoder_decoder or getattr(config, "add_cross_attention", False):
        refuse(model, "attends to an encoder (cross-attention)", "give a decoder-only language model")
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        refuse(model, f"cannot be built from its own {type(config).__name__} by AutoModelForCausalLM")
    if config.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES and not getattr(config, "is_decoder", False):
        refuse(model, "reads text in both directions", "give a decoder-only language model")
    if model.get_output_embeddings() is None:
        refuse(model, "has no language-model head", "load it with AutoModelForCausalLM")
    if config.get_text_config(decoder=True) is not config:
        inner = config.get_text_config(decoder=True).model_type
        refuse(model, f"wraps a language model ({inner}) in other parts", "save the language model alone and give that")
    if getattr(config, "alibi", True) and any("alibi" in name for name in vars(sys.modules[type(model).__module__])):
        refuse(model, "adds ALiBi position biases to its attention scores")
    names = (name for name, _ in model.named_modules())
    part = next((n for n in names if "vision" in n.rsplit(".", 1)[-1] or "audio" in n.rsplit(".", 1)[-1]), None)
    if part:
        refuse(model, f"has vision or audio parts ({part})", "give a language model alone")
    try:
        layers = DynamicCache(config=copy.deepcopy(config)).layers
    except AttributeError as error:
        refuse(model, f"is not one stack of layers ({first_line(error)})")
    for index, layer in enumerate(layers):
        kind = type(layer).__name__
        if "Linear" in kind:
            refuse(model, f"mixes tokens by a recurrence or a convolution already (layer {index})")
        if "Indexed" in kind:
            refuse(model, f"{FEATURES['indices']} in layer {index}")
        if kind not in KEYS_AND_VALUES:
            refuse(model, f"keeps something else than keys and values in layer {index} ({kind})")


def probe_tokens(model: PreTrainedModel) -> Tensor:
    """(1, TOKENS) ids spread over the vocabulary, all different where it is large enough."""
    size = cast(nn.Embedding, model.get_input_embeddings()).num_embeddings
    ids = (torch.arange(TOKENS) * (size // (TOKENS + 1) | 1) + size // 3) % size
    return ids[None].to(model.device)


def silent(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any) -> Tensor:
    """An attention output of zeros, (B, T, H, v)."""
    return query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[-1])


def softmax(module: nn.Module, *arguments: Any, **options: Any) -> Tensor:
    return softmax_attention(module, *arguments, **options)[0]


@torch.no_grad()
def record(model: PreTrainedModel, tokens: Tensor, attend: Callable[..., Tensor]) -> Recording:
    """One forward in which `attend` stands for every attention function. Raises UserError when it fails."""
    found, hidden = Recording(), dict[nn.Module, int]()

    def capture(module, args, kwargs):
        x = kwargs.get("hidden_states", args[0] if args else None)
        hidden[module] = x.shape[-1]

    def observe(module, query, key, value, mask, **options):
        found.calls.append(Call(module, query, key, value, mask, hidden[module], options))
        return attend(module, query, key, value, mask, **options)

    with _observed(model, observe, capture, MASKLESS if attend is silent else MASKED):
        found.logits = forward(model, tokens)
    return found


def forward(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    """Logits (B, T, V) in eval mode, without a cache."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        return model(input_ids=tokens, attention_mask=torch.ones_like(tokens), use_cache=False).logits
    except UserError:
        raise
    except Exception as error:  # each family fails in its own way
        if not any("ALL_ATTENTION_FUNCTIONS" in vars(sys.modules[type(m).__module__]) for _, m in attentions(model)):
            refuse_own_attention(model)
        if on_meta(model):
            reason = f"its configuration alone does not tell ({first_line(error)})"
            raise UserError(f"{type(model).__name__} cannot be probed without weights: {reason}; load them") from error
        refuse(model, f"fails when its attention is probed ({first_line(error)})")
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def _implementation(model: PreTrainedModel, name: str) -> Iterator[None]:
    before = model.config._attn_implementation
    model.config._attn_implementation = name
    try:
        yield
    finally:
        model.config._attn_implementation = before


@contextmanager
def _observed(model: PreTrainedModel, observe: Callable, capture: Callable, implementation: str) -> Iterator[None]:
    modules = [module for _, module in attentions(model)]
    handles = [m.register_forward_pre_hook(capture, with_kwargs=True) for m in modules]
    try:
        for module in modules:
            module.__dict__["call"] = partial(observe, module)
        with _implementation(model, implementation):
            yield
    finally:
        for handle in handles:
            handle.remove()
        for module in modules:
            del module.__dict__["call"]


def _shapes(model: PreTrainedModel, calls: list[Call]) -> list[list[int]]:
    """The geometry that `calls` show. Raises UserError unless every layer attends once, over the probe's own tokens."""
    found = dict(attentions(model))
    called = {call.module for call in calls}
    if not calls:
        refuse_own_attention(model)
    for name, module in found.items():
        if module not in called:
            refuse(model, f"has an attention that its text does not go through ({name}, perhaps cross-attention)")
    if len(calls) > len(called):
        refuse(model, "calls its attention function more than once a layer (differential attention or looped layers)")
    geometry: dict[int, list[int]] = {}
    for call in calls:
        _refuse_options(model, call)
        (_, heads, length, head_dim), kv_heads = call.query.shape, call.key.shape[1]
        index = cast(int, call.module.layer_idx)
        if heads % kv_heads:
            refuse(model, f"has {heads} query heads on {kv_heads} key/value heads, which do not divide them")
        if length != TOKENS or call.key.shape[2] != TOKENS or index in geometry:
            refuse(model, f"calls its attention in an unknown way in layer {index}")
        geometry[index] = [heads, kv_heads, head_dim, call.value.shape[-1], call.hidden_size]
    missing = [str(i) for i in range(max(model.config.num_hidden_layers, len(geometry))) if i not in geometry]
    if missing:
        refuse(model, f"has layers without softmax attention ({', '.join(missing)})")
    return [geometry[i] for i in range(len(geometry))]


def _refuse_options(model: PreTrainedModel, call: Call) -> None:
    for name, value in call.options.items():
        if not (value is None or isinstance(value, bool) or name in UNDERSTOOD):  # bools are flags for others
            refuse(model, FEATURES.get(name, f"gives its attention function '{name}', which a mixer does not know"))
    sinks = call.options.get("s_aux")
    if sinks is not None and sinks.shape != call.query.shape[1:2]:
        refuse(model, f"has attention sinks of an unknown shape {tuple(sinks.shape)}")


def _refuse_by_behaviour(model: PreTrainedModel, tokens: Tensor, blank: Recording) -> None:
    """Raises UserError unless tokens mix by attention alone, causally, and as its attention function computes it."""
    first, last = tokens.clone(), tokens.clone()
    first[0, 0] = last[0, -1] = tokens[0, TOKENS // 2]
    with torch.no_grad(), _implementation(model, "eager"):  # sdpa leaves out what some families need
        own, changed = forward(model, tokens), forward(model, last)
    if not bool(own.isfinite().all()):
        refuse(model, "gives logits that are not finite", "fetch its weights again")
    if differ(own[:, :-1], changed[:, :-1]):
        refuse(model, "sees later tokens", "give a causal language model")
    other = record(model, first, silent)
    pairs = [(blank.logits, other.logits)]
    for a, b in zip(blank.calls, other.calls, strict=True):
        pairs += [
            (x.transpose(1, 2), y.transpose(1, 2)) for x, y in ((a.query, b.query), (a.key, b.key), (a.value, b.value))
        ]
    if any(differ(x[:, 1:], y[:, 1:]) for x, y in pairs):
        refuse(model, "mixes tokens by something besides attention (a convolution, a recurrence)")
    attending = record(model, tokens, softmax)
    if any(call.mask is not None and call.mask.dtype != torch.bool for call in attending.calls):
        refuse(model, "adds a bias of its own to its attention scores")
    if differ(attending.logits, own):
        refuse(model, "changes what its attention function returns (it is not plain softmax attention)")


def first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def differ(actual: Tensor, expected: Tensor) -> bool:
    """Whether two tensors differ by more than their precision explains (as a share of the norm)."""
    error = (actual.float() - expected.float()).norm() / expected.float().norm().clamp_min(1e-12)
    return not float(error) < (1e-3 if expected.dtype == torch.float32 else 0.2)
