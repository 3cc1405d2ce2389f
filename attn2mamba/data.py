"""Text -> packed token blocks: an endless shuffled training stream, and held-out blocks."""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
from transformers import PreTrainedTokenizerBase

from attn2mamba.errors import UserError
from attn2mamba.sources import Source, load_texts, parse_source
from attn2mamba.store import Documents, default_cache_dir, open_store, start_token

__all__ = ["BlockStream", "Blocks", "load_texts", "open_data"]

HELD_OUT_SHARE = 0.02
HELD_OUT_BLOCKS = 2
HELD_OUT_TOKENS = 100_000
PAGE = 65_536  # sequence numbers whose sources are drawn together


class Blocks:
    """Documents laid end to end and cut into blocks of sequence_length tokens; a shorter tail is dropped.

    spans: (n, 3) int64 rows of document index, first token, end token, in order. `blocks[i]` gives input_ids
    and document_ids, each (L,) int64; the latter number the documents inside the block from 0 upwards, and an
    EOS belongs to the document it ends.
    """

    def __init__(self, documents: Documents, spans: np.ndarray, sequence_length: int, start: int | None = None):
        self.sequence_length = sequence_length
        self._documents = documents
        self._start = start
        self._spans = spans
        self._ends = np.cumsum(spans[:, 2] - spans[:, 1])

    @property
    def tokens(self) -> int:
        """Tokens in all, those of the dropped tail included."""
        return int(self._ends[-1]) if len(self._ends) else 0

    def __len__(self) -> int:
        return self.tokens // self.sequence_length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"block {index} of {len(self)}")
        position, end = index * self.sequence_length, (index + 1) * self.sequence_length
        row = int(np.searchsorted(self._ends, position, side="right"))
        parts = []
        while position < end:
            document, _, stop = (int(value) for value in self._spans[row])
            first = stop - (int(self._ends[row]) - position)
            parts.append(self._documents[document][first : min(stop, first + end - position)])
            position += len(parts[-1])
            row += 1
        numbers = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
        ids = np.concatenate(parts).astype(np.int64)
        if self._start is not None:
            ids[0] = self._start
        return {"input_ids": torch.from_numpy(ids), "document_ids": torch.from_numpy(numbers)}


class BlockStream:
    """An endless shuffled stream of blocks in which sequence number n is always the same block.

    `batch(start, count)` depends on the seed, start and count alone: a resumed run needs a counter and no
    saved loader state, and ranks read their share by number. Each sequence number draws its source by weight;
    each source is visited in a new permutation every epoch, without replacement.
    """

    def __init__(self, blocks: list[Blocks], weights: Sequence[float], seed: int):
        self.blocks = blocks
        self.weights = [weight / sum(weights) for weight in weights]
        self._seed = seed
        self._drawn_before = [np.zeros(len(blocks), dtype=np.int64)]  # by page: draws of each source before it
        self._page: tuple[int, np.ndarray] = (-1, np.empty(0, dtype=np.int64))
        self._order: dict[int, tuple[int, np.ndarray]] = {}

    def batch(self, start: int, count: int) -> dict[str, torch.Tensor]:
        """Sequences start ... start + count - 1: input_ids and document_ids, each (count, L) int64."""
        rows = [self._block(number) for number in range(start, start + count)]
        return {key: torch.stack([row[key] for row in rows]) for key in rows[0]}

    def _block(self, number: int) -> dict[str, torch.Tensor]:
        page, offset = divmod(number, PAGE)
        sources = self._sources(page)
        source = int(sources[offset])
        visit = int(self._before(page)[source]) + int(np.count_nonzero(sources[:offset] == source))
        blocks = self.blocks[source]
        epoch, place = divmod(visit, len(blocks))
        if self._order.get(source, (-1,))[0] != epoch:
            order = np.random.default_rng([self._seed, 1 + source, epoch]).permutation(len(blocks))
            self._order[source] = (epoch, order)
        return blocks[int(self._order[source][1][place])]

    def _sources(self, page: int) -> np.ndarray:
        """(PAGE,) the source of each sequence number of a page."""
        if self._page[0] != page:
            draws = np.random.default_rng([self._seed, 0, page]).random(PAGE)
            self._page = (page, np.searchsorted(np.cumsum(self.weights)[:-1], draws, side="right"))
        return self._page[1]

    def _before(self, page: int) -> np.ndarray:
        """(sources,) how often each source was drawn before a page."""
        while len(self._drawn_before) <= page:
            drawn = np.bincount(self._sources(len(self._drawn_before) - 1), minlength=len(self.blocks))
            self._drawn_before.append(self._drawn_before[-1] + drawn)
        return self._drawn_before[page]


def open_data(
    data: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    sequence_length: int,
    *,
    seed: int = 0,
    validation: Sequence[str] | None = None,
    cache_dir: Path | None = None,
) -> tuple[BlockStream, Blocks]:
    """The training stream of some DATA strings, and held-out blocks.

    Without weights every block is as likely as any other; with them every source needs one. Where validation
    is None, about 2 % of the tokens (2 blocks to 100k tokens in all) are held out, from each source in
    proportion, chosen by a hash of the documents whatever the seed and the order of files. Neither they nor
    copies of them are trained on. Raises UserError for data that cannot be read, or is too short for one
    block of training and the held-out ones.
    """
    cache_dir = cache_dir or default_cache_dir()
    sources = [parse_source(string) for string in data]
    documents, source_of = _open_all(sources, tokenizer, cache_dir)
    if validation is None:
        held_documents, held = documents, _hold_out(documents, source_of, sequence_length)
        ends = _training_ends(documents, held)
    else:
        held_documents, _ = _open_all([parse_source(string) for string in validation], tokenizer, cache_dir)
        held, ends = _spans(held_documents.lengths), documents.lengths
    spans, start = _spans(ends), start_token(tokenizer)
    parts = [
        Blocks(documents, spans[(source_of == i) & (ends > 0)], sequence_length, start) for i in range(len(sources))
    ]
    held_out = Blocks(held_documents, held, sequence_length, start)
    held_blocks = HELD_OUT_BLOCKS if validation is None else 0
    for i, part in enumerate(parts):
        if not len(part):
            total = int(documents.lengths[source_of == i].sum())
            raise _too_short(sources[i].name, total, total - part.tokens, sequence_length, held_blocks)
    if not len(held_out):
        raise _too_short(", ".join(validation or data), held_out.tokens, 0, sequence_length, 0)
    return BlockStream(parts, _weights(sources, parts), seed), held_out


def _open_all(
    sources: list[Source], tokenizer: PreTrainedTokenizerBase, cache_dir: Path
) -> tuple[Documents, np.ndarray]:
    """The documents of all sources, and (documents,) the index of the source that each comes from."""
    if not sources:
        raise UserError("no DATA given; name files, directories, a hub id or python-docs")
    tables = [open_store(source, tokenizer, cache_dir) for source in sources]
    counts = [table.num_rows for table in tables]
    return Documents(pa.concat_tables(tables)), np.repeat(np.arange(len(tables)), counts)


def _spans(ends: np.ndarray) -> np.ndarray:
    """(documents, 3) spans that take each document from its first token to ends."""
    return np.stack([np.arange(len(ends)), np.zeros_like(ends), ends], axis=1)


def _hold_out(documents: Documents, source_of: np.ndarray, sequence_length: int) -> np.ndarray:
    """(n, 3) spans of the documents held out, drawn from each source in proportion to its tokens."""
    total = int(documents.lengths.sum())
    least = HELD_OUT_BLOCKS * sequence_length
    budget = max(least, min(int(HELD_OUT_SHARE * total), HELD_OUT_TOKENS))
    held: list[tuple[int, int, int]] = []
    for source in np.unique(source_of):
        members = np.flatnonzero(source_of == source)
        share = int(documents.lengths[members].sum()) / total
        held += _choose(documents, members, math.ceil(budget * share), math.ceil(least * share))
    return np.array(held, dtype=np.int64).reshape(-1, 3)


def _choose(documents: Documents, members: np.ndarray, budget: int, least: int) -> list[tuple[int, int, int]]:
    """Spans of whole documents that fit budget tokens, in the order of their hashes.

    Where those come to less than least tokens, the tail of the first that did not fit fills the budget.
    """
    _, first = np.unique(documents.hashes[members], return_index=True)
    order = members[first]
    spans: list[tuple[int, int, int]] = []
    left, cut = budget, None
    for document, length in zip(order.tolist(), documents.lengths[order].tolist(), strict=True):
        if length <= left:
            spans.append((document, 0, length))
            left -= length
        elif cut is None:
            cut = (document, length)
    if cut and budget - left < least:
        spans.append((cut[0], cut[1] - left, cut[1]))
    return spans


def _training_ends(documents: Documents, held: np.ndarray) -> np.ndarray:
    """(documents,) int64 tokens left to train on in each document, copies of held-out ones cut alike."""
    ends = documents.lengths.copy()
    begins: dict[int, int] = {}
    for content, begin in zip(documents.hashes[held[:, 0]].tolist(), held[:, 1].tolist(), strict=True):
        begins[content] = min(begin, begins.get(content, begin))
    copies = np.flatnonzero(np.isin(documents.hashes, documents.hashes[held[:, 0]]))
    ends[copies] = [begins[content] for content in documents.hashes[copies].tolist()]
    return ends


def _weights(sources: list[Source], parts: list[Blocks]) -> list[float]:
    """The sources' weights, or their numbers of blocks where none has a weight; UserError for a mixture."""
    given = [source.weight for source in sources if source.weight is not None]
    if given and len(given) < len(sources):
        bare = next(source.name for source in sources if source.weight is None)
        raise UserError(f"DATA '{bare}' has no weight but others do; add one, such as {bare}=1, or drop them all")
    return given or [float(len(part)) for part in parts]


def _too_short(name: str, total: int, held: int, sequence_length: int, held_blocks: int) -> UserError:
    needed = max((held_blocks + 1) * sequence_length, held + sequence_length)
    fitting = 2 ** int(math.log2(max(total // (held_blocks + 1), 1)))
    shorter = f" or --set sequence_length={fitting}" if 16 <= fitting < sequence_length else ""
    return UserError(
        f"DATA '{name}' has {total} tokens; sequence_length {sequence_length} needs at least {needed}"
        f"{', held-out ones included' if held_blocks else ''}; use more text{shorter}"
    )
