"""The RUN directory: recipe, metrics and checkpoints, written so that a kill at any moment loses nothing before it."""

import contextlib
import errno
import fcntl
import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, Self

import torch

from .errors import UserError

MANIFEST = "manifest.json"
TAG = re.compile(r"stage(\d+)-step(\d+)")
FULL_DISK = ("No space left", "os error 28", "PytorchStreamWriter", "inline_container", "unexpected pos")
USERS_TO_MEND = {
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.EDQUOT,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.EEXIST,
    errno.ENAMETOOLONG,
    errno.EFBIG,
}


def check_output(path: Path, recipe: str, resume: bool) -> bool:
    """Whether `path` holds a run already. Writes nothing; raises UserError when it cannot be used for this one."""
    if path.exists() and not path.is_dir():
        raise UserError(f"{path} is a file; --output needs a directory")
    above = next(parent for parent in (path, *path.absolute().parents) if parent.exists())
    if not (above.is_dir() and os.access(above, os.W_OK)):
        raise UserError(f"cannot write {path}: {above} is not a directory that you may write; choose another --output")
    in_use = path.is_dir() and any(not entry.name.startswith((".lock", ".partial-")) for entry in path.iterdir())
    if in_use and not resume and (path / "final").is_dir():
        raise UserError(f"{path} holds a finished run; choose another --output")
    if in_use and not resume:
        raise UserError(f"{path} is in use; continue it with --resume, or choose another --output")
    if in_use and not (path / "recipe.yaml").is_file():
        raise UserError(f"{path} is not a run of attn2mamba (no recipe.yaml); choose another --output")
    if in_use and (path / "recipe.yaml").read_text() != recipe:
        raise UserError(f"{path} has another recipe, teacher or data; resume with the same, or choose another --output")
    if in_use:
        lock(path).close()
    return in_use


def lock(path: Path) -> IO[str]:
    """Keeps other processes out of the run's directory until the file returned is closed."""
    with disk_errors(path):
        file = (path / ".lock").open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise UserError(f"{path} is being written by another process; wait for it or choose another --output") from None
    return file


class Run:
    """RUN/recipe.yaml, RUN/metrics.jsonl and RUN/checkpoints/; other processes are kept out until `close`. Raises
    UserError when the directory holds another run, or another process is using it."""

    def __init__(self, path: Path, recipe: str, resume: bool) -> None:
        self.path = path
        self.metrics_path = path / "metrics.jsonl"
        self.checkpoints = path / "checkpoints"
        in_use = check_output(path, recipe, resume)
        with disk_errors(path):
            path.mkdir(parents=True, exist_ok=True)
        self._lock = lock(path)
        if not in_use:
            write_text(path / "recipe.yaml", recipe)
        for left in [*self.checkpoints.glob(".partial-*"), *path.glob(".partial-*/")]:
            shutil.rmtree(left, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Let other processes in."""
        self._lock.close()

    def log(self, entry: dict[str, Any]) -> None:
        """Append one line to metrics.jsonl; what is not a finite number becomes null, as JSON has no other word."""
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in entry.items()}
        with disk_errors(self.metrics_path), self.metrics_path.open("a") as file:
            file.write(json.dumps(finite) + "\n")

    def entries(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl; a last line cut short by a kill is left out."""
        found = []
        for line in self.metrics_path.read_text().splitlines() if self.metrics_path.exists() else []:
            with contextlib.suppress(json.JSONDecodeError):
                found.append(json.loads(line))
        return found

    def rewind(self, checkpoint: Path | None) -> None:
        """Drop logged steps after the checkpoint that a resumed run starts from (None: from the start): they will be
        logged again."""
        place = place_of(checkpoint) if checkpoint else (-1, -1)
        kept = [e for e in self.entries() if (e["stage"], e["step"]) <= place]
        write_text(self.metrics_path, "".join(json.dumps(e) + "\n" for e in kept))

    def save(self, tag: str, write: Callable[[Path], None], keep: int) -> Path:
        """Write a checkpoint beside, then rename. Afterwards all but the newest `keep` are removed, and so are later
        ones, which a resumed run has passed over as damaged."""
        final = self.checkpoints / tag
        with write_beside(final) as partial:
            write(partial)
            sums = {f.name: {"bytes": f.stat().st_size, "sha256": digest(f)} for f in sorted(partial.iterdir())}
            write_text(partial / MANIFEST, json.dumps(sums))
        kept = [path for path in self._tags() if place_of(path) <= place_of(final)][-keep:]
        for other in self._tags():
            if other not in kept:
                shutil.rmtree(other)
        return final

    def latest(self, warn: Callable[[str], None]) -> Path | None:
        """The newest whole checkpoint; damaged ones are passed over with a warning."""
        for path in reversed(self._tags()):
            if is_whole(path):
                return path
            warn(f"checkpoint {path.name} is damaged or incomplete; going back before it")
        return None

    def _tags(self) -> list[Path]:
        """The checkpoints, whole or not, in the order of the run."""
        return sorted((p for p in self.checkpoints.glob("*") if TAG.fullmatch(p.name)), key=place_of)


def tag_of(stage: int, step: int) -> str:
    """A checkpoint's name."""
    return f"stage{stage}-step{step:08d}"


def place_of(checkpoint: Path) -> tuple[int, int]:
    """(stage, step) of a checkpoint, by its name."""
    match = TAG.fullmatch(checkpoint.name)
    assert match, checkpoint
    return int(match[1]), int(match[2])


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
            old = final.parent / f".partial-old-{final.name}"
            if final.exists():
                final.rename(old)
            partial.rename(final)
            shutil.rmtree(old, ignore_errors=True)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise


@contextlib.contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn a full disk, a missing permission or a path that leads nowhere into one line."""
    try:
        yield
    except Exception as error:  # torch, safetensors and tokenizers wrap the operating system's error, each its own way
        code = getattr(error, "errno", None)
        if code == errno.ENOSPC or any(sign in str(error) for sign in FULL_DISK):
            raise UserError(
                f"no space left while writing {path}; free some and start again (distill: --resume)"
            ) from error
        if code in USERS_TO_MEND:
            raise UserError(f"cannot write {path}: {os.strerror(code)}; choose another place") from error
        raise


def write_text(path: Path, text: str) -> None:
    """Replace a small file in one move."""
    partial = path.with_name(f".partial-{path.name}")
    with disk_errors(path):
        try:
            partial.write_text(text)
            partial.replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)
            raise


def load_tensors(path: Path) -> Any:
    """A file written by torch.save, without executing anything in it."""
    return torch.load(path, map_location="cpu", weights_only=True)
