"""The RUN directory: recipe, metrics and checkpoints, written so that a kill at any moment loses nothing before it."""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from .errors import UserError

MANIFEST = "manifest.json"


class Run:
    """RUN/recipe.yaml, RUN/metrics.jsonl and RUN/checkpoints/. Raises UserError when the directory holds another
    run, or another process is using it."""

    def __init__(self, path: Path, recipe: str, resume: bool) -> None:
        self.path = path
        self.metrics_path = path / "metrics.jsonl"
        self.checkpoints = path / "checkpoints"
        if path.exists() and not path.is_dir():
            raise UserError(f"{path} is a file; --output needs a directory")
        in_use = path.is_dir() and any(entry.name != ".lock" for entry in path.iterdir())
        if in_use and not resume:
            raise UserError(f"{path} is in use; continue it with --resume, or choose another --output")
        if in_use and not (path / "recipe.yaml").is_file():
            raise UserError(f"{path} is not a run of attn2mamba (no recipe.yaml); choose another --output")
        if in_use and (path / "recipe.yaml").read_text() != recipe:
            raise UserError(
                f"{path} has another recipe, teacher or data; resume with the same, or choose another --output"
            )
        path.mkdir(parents=True, exist_ok=True)
        self._lock = (path / ".lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(
                f"{path} is being written by another process; wait for it or choose another --output"
            ) from None
        if not in_use:
            write_text(path / "recipe.yaml", recipe)
        for left in self.checkpoints.glob(".partial-*"):
            shutil.rmtree(left)

    def log(self, entry: dict[str, Any]) -> None:
        """Append one line to metrics.jsonl."""
        with disk_errors(self.metrics_path), self.metrics_path.open("a") as file:
            file.write(json.dumps(entry) + "\n")

    def entries(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl; a last line cut short by a kill is left out."""
        found = []
        for line in self.metrics_path.read_text().splitlines() if self.metrics_path.exists() else []:
            with contextlib.suppress(json.JSONDecodeError):
                found.append(json.loads(line))
        return found

    def rewind(self, stage: int, step: int) -> None:
        """Drop logged steps after the checkpoint that a resumed run starts from: they will be logged again."""
        kept = [e for e in self.entries() if (e["stage"], e["step"]) <= (stage, step)]
        write_text(self.metrics_path, "".join(json.dumps(e) + "\n" for e in kept))

    def save(self, tag: str, write: Callable[[Path], None], keep: int) -> Path:
        """Write a checkpoint beside, then rename; older ones than the newest `keep` are removed afterwards."""
        final = self.checkpoints / tag
        with write_beside(final) as partial:
            write(partial)
            sums = {f.name: {"bytes": f.stat().st_size, "sha256": digest(f)} for f in sorted(partial.iterdir())}
            write_text(partial / MANIFEST, json.dumps(sums))
        for old in sorted(self.checkpoints.iterdir())[:-keep]:
            shutil.rmtree(old)
        return final

    def latest(self, warn: Callable[[str], None]) -> Path | None:
        """The newest whole checkpoint; damaged ones are passed over with a warning."""
        for path in sorted(self.checkpoints.glob("[!.]*"), reverse=True):
            if is_whole(path):
                return path
            warn(f"checkpoint {path.name} is damaged or incomplete; using the one before")
        return None


def is_whole(checkpoint: Path) -> bool:
    """Whether every file is there, byte for byte."""
    try:
        sums = json.loads((checkpoint / MANIFEST).read_text())
        files = [(checkpoint / name, known) for name, known in sums.items()]
        return all(f.stat().st_size == k["bytes"] and digest(f) == k["sha256"] for f, k in files)
    except (OSError, ValueError, KeyError):
        return False


def digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def write_beside(final: Path) -> Iterator[Path]:
    """A new directory that becomes `final` when the block ends well, and vanishes when it does not."""
    partial = final.parent / f".partial-{final.name}"
    with disk_errors(final):
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        try:
            yield partial
            for file in partial.rglob("*"):
                if file.is_file():
                    with file.open("rb") as handle:
                        os.fsync(handle.fileno())
            if final.exists():
                shutil.rmtree(final)
            partial.rename(final)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise


@contextlib.contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn a full disk or a missing permission into one line."""
    try:
        yield
    except (OSError, RuntimeError) as error:  # torch and safetensors wrap the operating system's error
        full = (
            getattr(error, "errno", None) == errno.ENOSPC
            or "No space left" in str(error)
            or "os error 28" in str(error)
        )
        full = full or (
            "PytorchStreamWriter" in str(error) or "inline_container" in str(error) or "unexpected pos" in str(error)
        )
        if full:
            raise UserError(f"no space left while writing {path}; free some and continue with --resume") from error
        if isinstance(error, PermissionError):
            raise UserError(f"cannot write {path}: permission denied") from error
        raise


def write_text(path: Path, text: str) -> None:
    """Replace a small file in one move."""
    partial = path.with_name(f".partial-{path.name}")
    with disk_errors(path):
        partial.write_text(text)
        partial.replace(path)


def load_tensors(path: Path) -> Any:
    """A file written by torch.save, without executing anything in it."""
    return torch.load(path, map_location="cpu", weights_only=True)
