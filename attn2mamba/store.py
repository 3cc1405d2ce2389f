"""The token store: each source tokenised once into a memory-mapped Arrow file."""

import errno
import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from transformers import PreTrainedTokenizerBase

from attn2mamba.errors import UserError
from attn2mamba.sources import Source

logger = logging.getLogger(__name__)

FORMAT_VERSION = 1
SCHEMA = pa.schema([("input_ids", pa.list_(pa.int32())), ("hash", pa.uint64())])
BATCH_CHARACTERS = 4_000_000
# A tokenizer needs about 100 bytes a token while it works, so a file of gigabytes is fed to it in pieces.
PIECE_CHARACTERS = 1_000_000


class Documents:
    """Tokenised documents, memory-mapped: `documents[i]` is an int32 array, its last element the EOS, its first the BOS
    where the tokenizer puts one.

    lengths: (n,) int64, tokens of each document. hashes: (n,) uint64, equal for equal documents.
    """

    def __init__(self, table: pa.Table):
        chunks = table.column("input_ids").chunks
        offsets = [chunk.offsets.to_numpy() for chunk in chunks]
        self._values = [chunk.values.to_numpy(zero_copy_only=True) for chunk in chunks]
        self._chunk = np.repeat(np.arange(len(chunks)), [len(chunk) for chunk in chunks])
        self._begin = np.concatenate([chunk_offsets[:-1] for chunk_offsets in offsets])
        self.lengths = np.concatenate([np.diff(chunk_offsets) for chunk_offsets in offsets]).astype(np.int64)
        self.hashes = table.column("hash").to_numpy()

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> np.ndarray:
        begin = int(self._begin[index])
        return self._values[self._chunk[index]][begin : begin + int(self.lengths[index])]


def default_cache_dir() -> Path:
    """$ATTN2MAMBA_CACHE, else ~/.cache/attn2mamba/tokens."""
    return Path(os.environ.get("ATTN2MAMBA_CACHE") or "~/.cache/attn2mamba/tokens").expanduser()


def open_store(source: Source, tokenizer: PreTrainedTokenizerBase, cache_dir: Path) -> pa.Table:
    """A source's table of input_ids (list of int32, EOS last, BOS first if any) and hash (uint64), one row a document.

    Tokenised on first use, and again where the file in cache_dir turns out broken. Raises UserError where the
    source has no text, the tokenizer no EOS, or the store cannot be written.
    """
    if tokenizer.eos_token_id is None:
        raise UserError(f"tokenizer '{tokenizer.name_or_path}' has no EOS token to end documents; set eos_token")
    key = json.dumps([FORMAT_VERSION, source.identity, tokenizer_fingerprint(tokenizer), start_token(tokenizer)])
    path = cache_dir / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.arrow"
    try:
        try:
            return _read_store(path)
        except (FileNotFoundError, pa.ArrowInvalid):
            logger.info("tokenising %s", source.name)
        _write_store(path, _tokenize(source.documents(), tokenizer))
        return _read_store(path)
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        cure = "free some space" if error.errno == errno.ENOSPC else "make it writable"
        raise UserError(
            f"cannot keep tokens in '{cache_dir}' ({reason}); {cure} or set ATTN2MAMBA_CACHE to another place"
        ) from error


def start_token(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The BOS that the tokenizer itself puts before a text, without which some models (Gemma) are not themselves."""
    bos = tokenizer.bos_token_id
    ids = tokenizer("a", return_attention_mask=False)["input_ids"]
    return bos if bos is not None and ids[:1] == [bos] else None


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """sha256 over what decides a tokenizer's output, its EOS id included."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        state: Any = [type(tokenizer).__name__, sorted(tokenizer.get_vocab().items())]
    else:
        state = json.loads(backend.to_str())
        # Set by whoever called the tokenizer last; nothing here pads or truncates.
        del state["truncation"], state["padding"]
    return hashlib.sha256(json.dumps([state, tokenizer.eos_token_id]).encode()).hexdigest()


def _read_store(path: Path) -> pa.Table:
    with pa.memory_map(str(path)) as source:
        table = pa.ipc.open_file(source).read_all()
    if table.schema != SCHEMA:
        raise pa.ArrowInvalid(f"{path} is not a token store")
    return table


def _write_store(path: Path, batches: Iterator[pa.RecordBatch]) -> None:
    """Write to a sibling file and rename it: a killed run leaves no half store under the final name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=path.stem, suffix=".tmp", delete=False) as file:
        temporary = Path(file.name)
        try:
            with pa.ipc.new_file(file, SCHEMA) as writer:
                for batch in batches:
                    writer.write_batch(batch)
            file.flush()
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)


def _tokenize(texts: Iterator[str], tokenizer: PreTrainedTokenizerBase) -> Iterator[pa.RecordBatch]:
    start = start_token(tokenizer)
    for batch in _batches(texts):
        pieces = [_pieces(text) for text in batch]
        ids = tokenizer(
            [piece for document in pieces for piece in document],
            add_special_tokens=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )["input_ids"]
        stream = iter(ids)
        documents = [_join(start, [next(stream) for _ in document], tokenizer.eos_token_id) for document in pieces]
        lengths = [len(document) for document in documents]
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        rows = pa.ListArray.from_arrays(offsets, np.concatenate(documents))
        hashes = pa.array([_hash(document) for document in documents], pa.uint64())
        yield pa.RecordBatch.from_arrays([rows, hashes], schema=SCHEMA)


def _batches(texts: Iterator[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    size = 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size >= BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _pieces(text: str) -> list[str]:
    """A long document in pieces, cut before a line end where there is one: few tokens would span that."""
    pieces, begin = [], 0
    while len(text) - begin > PIECE_CHARACTERS:
        end = begin + PIECE_CHARACTERS
        line_end = text.rfind("\n", begin + 1, end)
        end = line_end if line_end > 0 else end
        pieces.append(text[begin:end])
        begin = end
    return [*pieces, text[begin:]]


def _join(start: int | None, pieces: list[list[int]], eos: int) -> np.ndarray:
    before = [] if start is None else [start]
    return np.concatenate([np.asarray(ids, np.int32) for ids in (before, *pieces, [eos])])


def _hash(ids: np.ndarray) -> int:
    return int.from_bytes(hashlib.blake2b(ids.tobytes(), digest_size=8).digest(), "little")
