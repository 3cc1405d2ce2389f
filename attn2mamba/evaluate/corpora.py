"""Perplexity by token on WikiText-2 and on the user's own text, window by window."""

import hashlib
import io
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import pyarrow as pa
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..errors import UserError
from ..losses import IGNORE
from ..sources import check_text, load_texts, parse_source
from ..store import start_token
from .measure import Difference, Figure, Json, Measure, Subject
from .options import SuiteOptions
from .perplexity import TOKENS_PER_FORWARD, batches, negative_log_likelihoods, windows
from .ratios import BITS, EXPONENTIAL, PLAIN, Scale, ratio_difference, ratio_figure
from .reading import Reading, beyond_training, check_context
from .task_data import read_rows

UNIT_TOKENS = 16_384
MAX_WINDOWS = 512
"""Of the user's own text, unless a limit is given."""
MIN_DOCUMENTS = 20
ARTICLE = re.compile(r"^ = [^=\n]+ = \n", re.M)
WIKITEXT = "Salesforce/wikitext"


@dataclass(frozen=True)
class Window:
    """inputs and targets as `perplexity.windows` gives them; tokens and bytes that it scores (bytes 0: unknown)."""

    document: int
    inputs: list[int]
    targets: list[int]
    tokens: int
    bytes: int


class Corpus(Measure):
    """Perplexity of texts, every token scored once, in windows of `context` tokens that do not overlap.

    Errors: documents count as independent where there are at least MIN_DOCUMENTS, else windows do.
    """

    version = 1
    headline = ("perplexity",)

    def __init__(
        self, name: str, texts: Callable[[], Iterable[str]], identity: str, context: int, limit: int | None
    ) -> None:
        """limit: windows. identity: tells one content from another."""
        self.name, self.texts, self.identity = name, texts, identity
        self.context, self.limit = context, limit
        self._windows: tuple[str, list[Window]] | None = None

    def options(self) -> Json:
        return {"context": self.context, "data": self.identity}

    def units(self, subject: Subject) -> list[str]:
        check_context(subject.model, self.context)
        count, step = len(self.windows(subject)), max(1, UNIT_TOKENS // self.context)
        return [f"{start}-{min(start + step, count)}" for start in range(0, count, step)]

    def run(self, subject: Subject, unit: str) -> Json:
        start, _, stop = unit.partition("-")
        chosen = self.windows(subject)[int(start) : int(stop)]
        nlls = window_nlls(subject.model, chosen)
        beyond = beyond_training(subject.model, self.context)
        return {
            "windows": [[w.document, nll, w.tokens, w.bytes] for w, nll in zip(chosen, nlls, strict=True)],
            "beyond_training": beyond,
        }

    def windows(self, subject: Subject) -> list[Window]:
        """All windows, for the subject's tokenizer."""
        if self._windows is None or self._windows[0] != subject.fingerprint:
            found = list(islice(cut(self.texts(), subject.tokenizer, self.context), self.limit))
            if not found:
                raise UserError(f"{self.name}: no text to score; give text that is not empty")
            self._windows = subject.fingerprint, found
        return self._windows[1]

    def figures(self, results: dict[str, Json]) -> dict[str, Figure]:
        items = _items(results)
        return {name: ratio_figure(*_sums(items, column), scale) for name, (column, scale) in _scales(items).items()}

    def differences(self, results: dict[str, Json], teacher: dict[str, Json]) -> dict[str, Difference]:
        ours, theirs = _items(results), _items(teacher)
        if [item[1] for item in ours] != [item[1] for item in theirs]:  # another tokenizer, other windows
            return {}
        scales = {name: _scales(ours)[name] for name in _scales(ours) if name in _scales(theirs)}
        return {
            name: ratio_difference(_sums(ours, column), _sums(theirs, column), scale)
            for name, (column, scale) in scales.items()
        }

    def cells(self, results: dict[str, Json]) -> list[Json]:
        rows = [row for result in results.values() for row in result["windows"]]
        return [
            {
                "documents": len({row[0] for row in rows}),
                "windows": len(rows),
                "context": self.context,
                "tokens": sum(row[2] for row in rows),
                "bytes": sum(row[3] for row in rows),
                "beyond_training": any(result["beyond_training"] for result in results.values()),
            }
        ]


def cut(texts: Iterable[str], tokenizer: PreTrainedTokenizerBase, context: int) -> Iterator[Window]:
    """Windows of each text in turn; see `perplexity.windows` for what they begin with."""
    if tokenizer.eos_token_id is None:
        raise UserError(f"tokenizer '{tokenizer.name_or_path}' has no EOS token to start a text from; set eos_token")
    start = start_token(tokenizer)
    for document, text in enumerate(texts):
        offsets = bool(tokenizer.is_fast)
        encoded = tokenizer(text, add_special_tokens=False, verbose=False, return_offsets_mapping=offsets)
        starts = [first for first, _ in encoded["offset_mapping"]] if offsets else []
        done = 0
        for inputs, targets in windows(encoded["input_ids"], tokenizer.eos_token_id, context, start):
            tokens = sum(target != IGNORE for target in targets)
            begin, end = done, done + tokens
            size = 0
            if offsets:
                last = starts[end] if end < len(starts) else len(text)
                size = len(text[starts[begin] if begin else 0 : last].encode())
            yield Window(document, inputs, targets, tokens, size)
            done = end


def window_nlls(model: PreTrainedModel, chosen: list[Window]) -> list[float]:
    """Summed -log p in nats of each window. Only windows of one length share a forward, and which ones do is decided by
    their order alone; one that is longer than a forward is read in pieces."""
    sums: list[float] = []
    short = all(len(window.inputs) <= TOKENS_PER_FORWARD for window in chosen)
    if not short:
        return [_long_nll(model, window) for window in chosen]
    for inputs, targets in batches((window.inputs, window.targets) for window in chosen):
        sums += negative_log_likelihoods(model, inputs, targets).double().sum(1).tolist()
    return sums


def _long_nll(model: PreTrainedModel, window: Window) -> float:
    likelihoods, _ = Reading(model).read(window.inputs[:1]).follow([*window.inputs[1:], window.targets[-1]])
    return -float(likelihoods[-window.tokens :].double().sum())


Item = tuple[float, float, float]


def _items(results: dict[str, Json]) -> list[Item]:
    """(nll, tokens, bytes) of each document, or of each window where documents are few."""
    rows = [row for result in results.values() for row in result["windows"]]
    if len({row[0] for row in rows}) < MIN_DOCUMENTS:
        return [(nll, tokens, size) for _, nll, tokens, size in rows]
    sums: dict[int, Item] = {}
    for document, nll, tokens, size in rows:
        before = sums.get(document, (0.0, 0, 0))
        sums[document] = (before[0] + nll, before[1] + tokens, before[2] + size)
    return list(sums.values())


def _sums(items: list[Item], column: int) -> tuple[list[float], list[float]]:
    return [item[0] for item in items], [item[column] for item in items]


def _scales(items: list[Item]) -> dict[str, tuple[int, Scale]]:
    """Figure -> (column of `Item` that it divides by, scale)."""
    found: dict[str, tuple[int, Scale]] = {"perplexity": (1, EXPONENTIAL), "nats_per_token": (1, PLAIN)}
    return found | ({"bits_per_byte": (2, BITS)} if any(item[2] for item in items) else {})


def wikitext2(options: SuiteOptions) -> Corpus:
    """The raw test split, 62 articles, each from its start."""
    text = _read_wikitext2(options.data_root)
    heads = [match.start() for match in ARTICLE.finditer(text)]
    articles = [text[a:b] for a, b in zip(heads, [*heads[1:], len(text)], strict=True)]
    if not articles:
        raise UserError("wikitext2: this is not WikiText's raw text (no article headings); fetch it again")
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    return Corpus("wikitext2", lambda: articles, digest, options.context[0], options.limit)


def _read_wikitext2(root: Path | None) -> str:
    packed = root.parent / "wikitext2" / "wiki.test.raw.zst" if root else None
    if root and packed and packed.is_file() and not (root / WIKITEXT).is_dir():
        with pa.input_stream(str(packed), compression="zstd") as stream:
            return io.TextIOWrapper(stream, "utf-8", newline="\n").read()
    rows = read_rows(root, WIKITEXT, "wikitext-2-raw-v1", "test")
    return "".join(row["text"] or " \n" for row in rows)  # the hub has emptied the lines of one space


def own_text(options: SuiteOptions) -> Corpus:
    """The user's --data, or Python's documentation; the first MAX_WINDOWS windows unless there is a limit."""
    names = options.data or ("python-docs",)
    sources = [parse_source(name) for name in names]
    check_text(names)
    identity = str([source.identity for source in sources])
    limit = MAX_WINDOWS if options.limit is None else options.limit
    return Corpus("data", lambda: (t for n in names for t in load_texts(n)), identity, options.context[0], limit)


MEASURES: dict[str, Callable[[SuiteOptions], Measure]] = {"wikitext2": wikitext2, "data": own_text}
