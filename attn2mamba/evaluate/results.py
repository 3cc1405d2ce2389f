"""Unit results on disk, by model, measure, version and options: what was run is never run again."""

import hashlib
import json
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..precision import inner_tensors
from ..run import disk_errors, write_text
from ..store import default_cache_dir, tokenizer_fingerprint
from .measure import Json


def default_results_dir() -> Path:
    """Beside the token store: $ATTN2MAMBA_CACHE/results, else ~/.cache/attn2mamba/tokens/results."""
    return default_cache_dir() / "results"


class Results:
    """One file of JSON lines for each key: the key, then a line for each unit, written as soon as it is known."""

    def __init__(self, directory: Path, fresh: bool = False) -> None:
        """With `fresh`, what is on disk counts for nothing and is written anew."""
        self.directory = directory
        self.fresh = fresh
        self._held: dict[str, dict[str, Json]] = {}
        self._whole: set[str] = set()

    def units(self, key: Json) -> dict[str, Json]:
        """The known units of `key`, by name."""
        path = self._path(key)
        if path.name not in self._held:
            self._held[path.name] = {} if self.fresh else _read(path, key)
        return self._held[path.name]

    def save(self, key: Json, unit: str, result: Json) -> None:
        """The first unit of a key writes the file anew, without a line that a kill left half written."""
        self.units(key)[unit] = result
        path = self._path(key)
        if path.name in self._whole:
            with disk_errors(path), path.open("a") as file:
                file.write(_line(unit, result))
            return
        with disk_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        lines = [_line(name, known) for name, known in self.units(key).items()]
        write_text(path, json.dumps(key) + "\n" + "".join(lines))
        self._whole.add(path.name)

    def _path(self, key: Json) -> Path:
        text = json.dumps(key, sort_keys=True)
        return self.directory / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.jsonl"


def _line(unit: str, result: Json) -> str:
    return json.dumps([unit, result]) + "\n"


def _read(path: Path, key: Json) -> dict[str, Json]:
    """The units in `path` up to the first broken line; none where it is missing or another key's."""
    units: dict[str, Json] = {}
    try:
        with path.open() as file:
            if json.loads(file.readline()) != json.loads(json.dumps(key)):
                return {}
            for line in file:
                unit, result = json.loads(line)
                units[unit] = result
    except (OSError, ValueError, TypeError):
        pass
    return units


def model_fingerprint(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> str:
    """sha256 of what decides a model's answers: weights, configuration, tokenizer, chat template, ends."""
    total = hashlib.sha256()
    config = {k: v for k, v in model.config.to_dict().items() if k not in ("_name_or_path", "transformers_version")}
    total.update(json.dumps(config, sort_keys=True, default=str).encode())
    settings = model.generation_config
    said = [tokenizer.chat_template, settings.eos_token_id if settings is not None else None]
    total.update(json.dumps(said, sort_keys=True, default=str).encode())
    total.update(tokenizer_fingerprint(tokenizer).encode())
    for name, tensor in model.state_dict().items():
        total.update(name.encode())
        for plain in inner_tensors(tensor) or [tensor]:
            total.update(_bytes(plain))
    return total.hexdigest()


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
