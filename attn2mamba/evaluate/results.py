"""Unit results on disk, by model, measure, version and options: what was run is never run again."""

import contextlib
import fcntl
import hashlib
import json
import os
from pathlib import Path
from typing import IO

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..precision import inner_tensors
from ..run import disk_errors
from ..store import default_cache_dir, tokenizer_fingerprint
from .measure import Json


def default_results_dir() -> Path:
    """Beside the token store: $ATTN2MAMBA_CACHE/results, else ~/.cache/attn2mamba/tokens/results."""
    return default_cache_dir() / "results"


class Results:
    """One file of JSON lines for each key: the key, then a line for each unit, appended as soon as it is known. Several
    processes may write to one file."""

    def __init__(self, directory: Path, fresh: bool = False) -> None:
        """With `fresh`, what is on disk counts for nothing and is written anew."""
        self.directory = directory
        self.fresh = fresh
        self._held: dict[str, dict[str, Json]] = {}
        self._opened: set[str] = set()

    def units(self, key: Json) -> dict[str, Json]:
        """The known units of `key`, by name."""
        path = self._path(key)
        if path.name not in self._held:
            self._held[path.name] = {} if self.fresh else _read(path, key)
        return self._held[path.name]

    def save(self, key: Json, unit: str, result: Json) -> None:
        self.units(key)[unit] = result
        path = self._path(key)
        with disk_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a+b") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                anew = self.fresh and path.name not in self._opened
                if anew or not _is_of(file, key):
                    file.truncate(0)
                    file.write(json.dumps(key).encode() + b"\n")
                elif not _ends_a_line(file):  # a kill left it half written
                    file.write(b"\n")
                file.write(json.dumps([unit, result]).encode() + b"\n")
        self._opened.add(path.name)

    def _path(self, key: Json) -> Path:
        text = json.dumps(key, sort_keys=True)
        return self.directory / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.jsonl"


def _is_of(file: IO[bytes], key: Json) -> bool:
    file.seek(0)
    try:
        return json.loads(file.readline()) == json.loads(json.dumps(key))
    except ValueError:
        return False


def _ends_a_line(file: IO[bytes]) -> bool:
    file.seek(-1, os.SEEK_END)
    return file.read(1) == b"\n"


def _read(path: Path, key: Json) -> dict[str, Json]:
    """The units in `path`, but for lines that are not whole; none where it is missing or another key's."""
    units: dict[str, Json] = {}
    try:
        with path.open("rb") as file:
            for line in file if _is_of(file, key) else ():
                with contextlib.suppress(ValueError, TypeError):
                    unit, result = json.loads(line)
                    units[unit] = result
    except OSError:
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
