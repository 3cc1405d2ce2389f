"""Are a model's weight files whole, safe to read and plain numbers? Told before any of them is loaded."""

import json
import zipfile
from pathlib import Path
from typing import Any

import transformers
from transformers import PreTrainedConfig

from attn2mamba.errors import UserError

SAFE, SAFE_INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLE, PICKLE_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
HOW_TO_ALLOW = "if you trust it, pass --allow-pickle (in Python allow_pickle=True)"
# Quantised, and what turns them into plain floats on loading, without further packages.
UNPACKED_BY = {"fp8": "FineGrainedFP8Config", "mxfp4": "Mxfp4Config"}


def check_weights(path: Path, label: str, allow_pickle: bool) -> bool:
    """Whether the weights of model directory `path` are safetensors; otherwise they are pickles, and allowed.

    Raises UserError, naming the file, where a shard is missing or cut short, where there are no weights, and for
    pickles that were not asked for.
    """
    if any(path.glob("*.safetensors")) or (path / SAFE_INDEX).is_file():
        for shard in _shards(path, SAFE, SAFE_INDEX, label):
            if not is_whole_safetensors(shard):
                raise UserError(f"model '{label}': {shard.name} is cut short or damaged; fetch it again")
        return True
    if not any(path.glob("pytorch_model*.bin")):
        raise UserError(f"model '{label}' has no weights (*.safetensors) beside its config.json; add them")
    if not allow_pickle:
        raise UserError(f"model '{label}' has its weights in a pickle (*.bin), which can run code; {HOW_TO_ALLOW}")
    for shard in _shards(path, PICKLE, PICKLE_INDEX, label):
        if not _is_whole_pickle(shard):
            raise UserError(f"model '{label}': {shard.name} is cut short or damaged; fetch it again")
    return False


def unpacking_options(config: PreTrainedConfig, label: str) -> dict[str, Any]:
    """The keyword of from_pretrained that makes quantised weights plain; UserError where there is no simple way."""
    found = getattr(config, "quantization_config", None)
    if found is None:
        return {}
    settings = found if isinstance(found, dict) else found.to_dict()
    method = settings.get("quant_method", "in an unknown way")
    method = str(getattr(method, "value", method))
    if method not in UNPACKED_BY:
        raise UserError(
            f"model '{label}' has its weights quantised ({method}), and training needs plain ones; "
            "give the model that it was made from"
        )
    return {"quantization_config": getattr(transformers, UNPACKED_BY[method])(dequantize=True)}


def _shards(path: Path, single: str, index: str, label: str) -> list[Path]:
    """The weight files that transformers would read from `path`, all there."""
    if (path / single).is_file():
        return [path / single]
    try:
        names = sorted(set(json.loads((path / index).read_text())["weight_map"].values()))
    except FileNotFoundError:
        raise UserError(f"model '{label}' has neither {single} nor {index} beside its shards; fetch it") from None
    except (ValueError, KeyError, AttributeError, TypeError):
        raise UserError(f"model '{label}': {index} cannot be read; fetch it again") from None
    for name in names:
        if not (path / name).is_file():
            raise UserError(f"model '{label}' lacks {name}, which {index} names; fetch it")
    return [path / name for name in names]


def is_whole_safetensors(path: Path) -> bool:
    """Whether the file is as long as its own header says (https://github.com/huggingface/safetensors#format)."""
    size = path.stat().st_size
    with path.open("rb") as file:
        header_size = int.from_bytes(file.read(8), "little")
        if header_size > size - 8:
            return False
        try:
            header = json.loads(file.read(header_size))
            ends = [tensor["data_offsets"][1] for name, tensor in header.items() if name != "__metadata__"]
        except (ValueError, KeyError, AttributeError, TypeError):
            return False
    return size == 8 + header_size + max(ends, default=0)


def _is_whole_pickle(path: Path) -> bool:
    """False for a zip archive, torch's format since 1.6, without the directory at its end."""
    with path.open("rb") as file:
        is_zip = file.read(2) == b"PK"
    return zipfile.is_zipfile(path) if is_zip else path.stat().st_size > 0
