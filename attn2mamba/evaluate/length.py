"""Perplexity by position and by context length, on long texts, each read once from its beginning."""

import hashlib
import json
from collections.abc import Callable, Sequence
from itertools import islice, pairwise

from ..errors import UserError
from ..sources import parse_source
from ..store import start_token
from .measure import Difference, Figure, Json, Measure, Subject, joined_scores
from .options import SuiteOptions
from .ratios import EXPONENTIAL, exponential, ratio_difference, ratio_figure
from .reading import Reading, beyond_training, check_context, token_ids

TEXTS = 8
NEAREST = 64
"""The first bucket of positions ends here; each other one is as long as all before it."""


class Positions(Measure):
    """Of each text, as many tokens as the longest context holds are scored once, given all of the text before them and
    the BOS that the tokenizer puts there, else the EOS. `nll@N`: mean over the first N tokens, in nats a token, and
    `perplexity@N`, its exponential; one item is a text. Texts are read one at a time, unpadded."""

    name = kind = "positions"

    def __init__(self, data: Sequence[str], context: Sequence[int], items: int) -> None:
        """The texts are the first `items` documents of data, DATA strings, that are long enough."""
        self.context, self.items = sorted(context), items
        self.sources = [parse_source(name) for name in data]
        self._ids: dict[str, list[list[int]]] = {}

    def options(self) -> Json:
        identity = json.dumps([source.identity for source in self.sources])
        return {
            "context": self.context,
            "texts": self.items,
            "data": [source.name for source in self.sources],
            "identity": hashlib.sha256(identity.encode()).hexdigest()[:16],
        }

    def units(self, subject: Subject) -> list[str]:
        """Numbers of texts. Raises UserError where none is long enough or the context does not fit into memory."""
        check_context(subject.model, self.context[-1] + 1)  # with the start token
        if subject.tokenizer.eos_token_id is None and start_token(subject.tokenizer) is None:
            raise UserError(
                f"tokenizer '{subject.tokenizer.name_or_path}' has no EOS token to start from; set eos_token"
            )
        return [str(i) for i in range(len(self.texts(subject)))]

    def texts(self, subject: Subject) -> list[list[int]]:
        """The first tokens of each text."""
        if subject.fingerprint not in self._ids:
            longest = self.context[-1]
            texts = (text for source in self.sources for text in source.documents())
            long = (text for text in texts if len(text.encode()) >= longest)  # a token is a byte at least
            ids = (token_ids(subject.tokenizer, text) for text in long)
            found = [x[:longest] for x in islice((x for x in ids if len(x) >= longest), self.items)]
            if not found:
                names = ", ".join(source.name for source in self.sources)
                raise UserError(f"no text in {names} has {longest:,} tokens; give longer ones or use a shorter context")
            self._ids = {subject.fingerprint: found}
        return self._ids[subject.fingerprint]

    def run(self, subject: Subject, unit: str) -> Json:
        model, ids = subject.model, self.texts(subject)[int(unit)]
        start = start_token(subject.tokenizer)
        start = subject.tokenizer.eos_token_id if start is None else start
        nll = -Reading(model).read([start]).follow(ids)[0].double()
        buckets = [
            {"from": low, "to": high, "nll": float(nll[low:high].sum()), "beyond": beyond_training(model, low + 1)}
            for low, high in buckets_of(self.context[-1])
        ]
        beyond = {str(n): beyond_training(model, n) for n in self.context}
        return {
            "scores": {f"nll@{n}": [float(nll[:n].mean())] for n in self.context},
            "buckets": buckets,
            "beyond_training": beyond,
        }

    def figures(self, results: dict[str, Json]) -> dict[str, Figure]:
        figures = super().figures(results)
        for name, nll in joined_scores(results).items():
            figures[perplexity_name(name)] = ratio_figure(nll, [1.0] * len(nll), EXPONENTIAL)
        return figures

    def differences(self, results: dict[str, Json], teacher: dict[str, Json]) -> dict[str, Difference]:
        differences = super().differences(results, teacher)
        ours, theirs = joined_scores(results), joined_scores(teacher)
        for name, nll in ours.items():
            ones = [1.0] * len(nll)
            differences[perplexity_name(name)] = ratio_difference((nll, ones), (theirs[name], ones), EXPONENTIAL)
        return differences

    def cells(self, results: dict[str, Json]) -> list[Json]:
        """{"position_from", "position_to", "perplexity", "n", "beyond_training"}: over the tokens with so many others
        of the text before them, the end excluded. {"context", "perplexity", "n", "beyond_training"}: over the first
        `context` tokens. n is in tokens."""
        units = list(results.values())
        cells: list[Json] = []
        for parts in zip(*(unit["buckets"] for unit in units), strict=True):
            first, n = parts[0], len(parts) * (parts[0]["to"] - parts[0]["from"])
            place = {"position_from": first["from"], "position_to": first["to"]}
            perplexity = exponential(sum(part["nll"] for part in parts) / n)
            cells.append({**place, "perplexity": perplexity, "n": n, "beyond_training": first["beyond"]})
        for name, figure in super().figures(results).items():
            n = name.split("@")[1]
            beyond = units[0]["beyond_training"][n]
            row = {"context": int(n), "perplexity": exponential(figure.value), "n": int(n) * len(units)}
            cells.append({**row, "beyond_training": beyond})
        return cells


def perplexity_name(name: str) -> str:
    """Of a score, `nll@N`."""
    return name.replace("nll", "perplexity")


def buckets_of(tokens: int) -> list[tuple[int, int]]:
    """[0, 64), [64, 128), [128, 256) ... up to `tokens`."""
    edges = [0, *(NEAREST << i for i in range(32) if NEAREST << i < tokens), tokens]
    return list(pairwise(edges))


def make_positions(options: SuiteOptions) -> Positions:
    """The user's data first, then the books beside the data root."""
    data = list(options.data)
    books = options.data_root.parent / "long" / "books.parquet" if options.data_root else None
    if books is not None and books.is_file():
        data.append(str(books))
    if not data:
        raise UserError(
            "positions needs long texts: give --data, or a --data-root beside which long/books.parquet lies"
        )
    return Positions(data, options.context, options.limit or TEXTS)


MEASURES: dict[str, Callable[[SuiteOptions], Measure]] = {"positions": make_positions}
