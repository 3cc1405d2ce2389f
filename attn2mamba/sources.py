"""DATA strings -> documents: files, directories, globs, a hub id or a built-in name as a stream of texts."""

import glob
import io
import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from attn2mamba.errors import UserError

BUILT_IN = ("python-docs",)
FORMATS = ".txt, .raw, .jsonl or .parquet (also .gz and .zst of the first three)"
PLAIN = (".txt", ".raw")
HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?(:[\w.-]+)?")


@dataclass(frozen=True)
class Source:
    """One DATA string, resolved.

    name is the string without its weight; weight is None where none was given. identity tells one content
    from another (paths with sizes and times, or names with versions) and goes into JSON. read yields texts.
    """

    name: str
    weight: float | None
    identity: list[Any]
    read: Callable[[], Iterator[str]]

    def documents(self) -> Iterator[str]:
        """The texts that hold more than white space; UserError if there are none or they cannot be read."""
        empty = True
        for text in self.read():
            if text.strip():
                empty = False
                yield text
        if empty:
            raise UserError(f"DATA '{self.name}' holds no text; give files that do")


def load_texts(data: str) -> Iterator[str]:
    """The documents of one DATA string, one text each, in a fixed order; a weight is ignored.

    Raises UserError where the string names nothing, or something that is not readable text.
    """
    return parse_source(data).documents()


def check_text(names: Iterable[str]) -> None:
    """Raise UserError where these DATA strings hold no text, or cannot be read."""
    names = list(names)
    if not any(text.strip() for name in names for text in load_texts(name)):
        raise UserError(f"DATA {', '.join(names)} holds no text; give text that is not empty")


def parse_source(data: str) -> Source:
    """Resolve a DATA string such as `corpus/`, `a/*.jsonl=0.7`, `python-docs` or `owner/name:config`.

    A hub id is resolved when it is read. Raises UserError for a path that does not exist or has no known
    format, and for a weight that is not a positive number.
    """
    name, weight = _split_weight(data)
    if name in BUILT_IN:
        return Source(name, weight, ["built-in", name, sys.version], _read_python_docs)
    files = _find_files(name)
    if files is None:
        return Source(name, weight, ["hub", name], lambda: _read_hub(name))
    stats = [(path, path.stat()) for path in files]
    identity = ["files", *([str(path.resolve()), stat.st_size, stat.st_mtime_ns] for path, stat in stats)]
    return Source(name, weight, identity, lambda: (text for path in files for text in _read_file(path)))


def _split_weight(data: str) -> tuple[str, float | None]:
    name, equals, suffix = data.rpartition("=")
    if not equals or "/" in suffix or Path(data).exists():
        return data, None
    try:
        weight = float(suffix)
    except ValueError:
        weight = math.nan
    if not (weight > 0 and math.isfinite(weight)):
        raise UserError(f"DATA '{data}': the weight '{suffix}' must be a number above 0, such as {name}=0.3")
    return name, weight


def _find_files(name: str) -> list[Path] | None:
    """The files that name stands for, sorted, or None where it can only be a hub id."""
    path = Path(name).expanduser()
    if path.is_file():
        if _format(path) is None:
            raise UserError(f"DATA '{name}': unsupported file type; use {FORMATS}")
        return [path]
    pattern = glob.has_magic(name) and not path.exists()
    if pattern:
        found = [Path(match) for match in glob.glob(str(path), recursive=True)]
    elif path.is_dir():
        visible = (file for file in path.rglob("*") if not _is_hidden(file.relative_to(path)))
        found = list(visible)
    elif HUB_ID.fullmatch(name) and not name.startswith(".") and _format(path) is None:
        return None
    else:
        raise UserError(f"DATA '{name}': no such file or directory, nor a built-in name ({', '.join(BUILT_IN)})")
    files = sorted(file for file in found if file.is_file() and _format(file))
    if not files:
        place = "matches" if pattern else "holds"
        raise UserError(f"DATA '{name}' {place} no file that is {FORMATS}")
    return files


def _is_hidden(relative: Path) -> bool:
    return any(part.startswith(".") for part in relative.parts)


def _format(path: Path) -> str | None:
    """The extension that says how to read a file, without its compression; None if it is not ours to read."""
    compressed = path.suffix in (".gz", ".zst")
    inner = Path(path.stem).suffix if compressed else path.suffix
    known = (*PLAIN, ".jsonl") if compressed else (*PLAIN, ".jsonl", ".parquet")
    return inner if inner in known else None


def _read_file(path: Path) -> Iterator[str]:
    """The documents of one file; UserError names the file if it is broken."""
    readers = {".jsonl": _read_jsonl, ".parquet": _read_parquet}
    try:
        yield from readers.get(_format(path) or "", _read_plain)(path)
    except (OSError, pa.ArrowException) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"cannot read '{path}': {reason}; replace the file or leave it out") from error


def _read_plain(path: Path) -> Iterator[str]:
    with pa.input_stream(str(path), compression="detect") as stream:
        raw = stream.read()
    try:
        yield raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"'{path}' is not valid UTF-8 at byte {error.start}; convert it to UTF-8") from None


def _read_jsonl(path: Path) -> Iterator[str]:
    column = None
    with pa.input_stream(str(path), compression="detect") as stream:
        for number, line in enumerate(io.BufferedReader(stream), start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line.decode("utf-8-sig"))
            except UnicodeDecodeError:
                raise UserError(f"'{path}' line {number} is not valid UTF-8; convert it to UTF-8") from None
            except json.JSONDecodeError as error:
                raise UserError(f"'{path}' line {number} is not JSON ({error.msg}); fix the line") from None
            if not isinstance(row, dict):
                raise UserError(f"'{path}' line {number} is not a JSON object; give one object a line")
            if column is None:
                strings = [key for key, value in row.items() if isinstance(value, str)]
                column = _text_column(str(path), list(row), strings)
            text = row.get(column)
            if not isinstance(text, str | None):
                raise UserError(f"'{path}' line {number}: '{column}' is not a string; give text there")
            yield text or ""


def _read_parquet(path: Path) -> Iterator[str]:
    with pq.ParquetFile(path) as file:
        schema = file.schema_arrow
        strings = [f.name for f in schema if pa.types.is_string(f.type) or pa.types.is_large_string(f.type)]
        column = _text_column(str(path), schema.names, strings)
        for batch in file.iter_batches(batch_size=256, columns=[column]):
            for text in batch.column(0).to_pylist():
                yield text or ""


def _text_column(name: str, columns: list[str], strings: list[str]) -> str:
    """`text`, or the only column of strings; UserError names the columns where neither exists."""
    if "text" in strings:
        return "text"
    if len(strings) == 1:
        return strings[0]
    found = ", ".join(columns) or "no column at all"
    raise UserError(f"'{name}' has no column 'text' and not exactly one of strings (found: {found}); rename one")


def _read_python_docs() -> Iterator[str]:
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise UserError("DATA 'python-docs' is missing from this Python; install the whole library") from None
    yield from topics.values()


def _read_hub(name: str) -> Iterator[str]:
    """The train split of a hub data set `id` or `id:config`."""
    import datasets

    path, _, config = name.partition(":")
    bars_were_on = datasets.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    try:
        rows = datasets.load_dataset(path, config or None, split="train")
    except Exception as error:  # the hub, its cache and its readers share no base class
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise UserError(
            f"DATA '{name}' is no file, directory or built-in name ({', '.join(BUILT_IN)}), and cannot be "
            f"loaded from the hub ({reason}); check the name and the network"
        ) from error
    finally:
        if bars_were_on:
            datasets.enable_progress_bars()
    strings = [key for key, kind in rows.features.items() if getattr(kind, "dtype", "").endswith("string")]
    column = _text_column(name, rows.column_names, strings)
    for batch in rows.select_columns([column]).iter(batch_size=256):
        for text in batch[column]:
            yield text or ""
