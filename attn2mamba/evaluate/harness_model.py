"""A loaded model as lm-evaluation-harness asks for it: log-likelihoods and greedy continuations, nothing padded.

The harness's own HFLM pads rows of a batch; in lower precision, with experts or in a recurrence that shows in the
scores. Here only rows of equal length share a forward, and which rows do is decided by the requests alone.
"""

import re
from collections import defaultdict
from itertools import groupby
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from ..errors import UserError
from ..store import start_token
from .decoding import answers, prompt_ids
from .measure import Subject
from .perplexity import TOKENS_PER_FORWARD

ROLLING_TOKENS = 2048
"""Window of perplexity tasks, at most; the harness has the model's longest, which memory rarely allows."""
LONGEST = 2048
"""Tokens of a model that does not say how many it was trained on, as in the harness."""
NEW_TOKENS = 256

Answer = tuple[float, bool]


class HarnessModel(TemplateLM):
    """Log-likelihoods are summed in fp64 over fp32 log-probabilities. A text begins with the BOS where the tokenizer
    puts one; an empty context is that BOS, else the EOS. A prompt that is too long loses its beginning."""

    def __init__(self, subject: Subject, batch_size: int) -> None:
        super().__init__()
        self.model, self.tokenizer, self.batch_size = subject.model, subject.tokenizer, batch_size
        self.start = start_token(subject.tokenizer)
        self.max_length = getattr(subject.model.config, "max_position_embeddings", None) or LONGEST
        if subject.tokenizer.eos_token_id is None:
            raise UserError(f"tokenizer '{subject.tokenizer.name_or_path}' has no EOS token; set eos_token")

    @property
    def eot_token_id(self) -> int:
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        return self.eot_token_id if self.start is None else self.start

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        if add_special_tokens is False:
            return self.tokenizer(string, add_special_tokens=False, verbose=False)["input_ids"]
        return prompt_ids(self.tokenizer, string)

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """In the harness's windows; with a BOS, every one of them begins with it."""
        length = min(self.max_length, ROLLING_TOKENS) - (self.start is not None)
        rows, owners = [], []
        for i, request in enumerate(requests):
            ids = self.tok_encode(request.args[0], add_special_tokens=False)
            for pair in get_rolling_token_windows(ids, self.prefix_token_id, length, context_len=1):
                context, targets = make_disjoint_window(pair)
                if self.start is not None and context[0] != self.start:
                    context = [self.start, *context]
                rows.append((("", ""), context, targets))
                owners.append(i)
        sums = [0.0] * len(requests)
        for i, (likelihood, _) in zip(owners, self._loglikelihood_tokens(rows), strict=True):
            sums[i] += likelihood
        return sums

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **kwargs: Any
    ) -> list[Answer]:
        """(log-likelihood of the continuation, whether it is greedy) of each (texts, context, continuation). What two
        requests have in common but for the last token is read once."""
        wanted: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for i, (_, context, continuation) in enumerate(requests):
            wanted[tuple(self._fit([*context, *continuation])[:-1])].append(i)
        found: list[Answer] = [(0.0, True)] * len(requests)
        for rows in equal_lengths(sorted(wanted, key=len)):
            owners = [wanted[row] for row in rows]
            keep = max(len(requests[i][2]) for group in owners for i in group)
            logits = self._logits(torch.tensor(rows), min(keep, len(rows[0])))
            for group, row in zip(owners, logits, strict=True):
                for i in group:
                    targets = torch.tensor(requests[i][2][-row.shape[0] :], device=row.device)
                    found[i] = _score(row[row.shape[0] - len(targets) :], targets)
        return found

    def _fit(self, ids: list[int]) -> list[int]:
        """The last ids that the model takes, one more than it reads; the BOS stays."""
        if len(ids) <= self.max_length + 1:
            return ids
        head = [] if self.start is None else [self.start]
        return [*head, *ids[len(head) - self.max_length - 1 :]]

    @torch.no_grad()
    def _logits(self, ids: torch.Tensor, keep: int) -> torch.Tensor:
        """(B, keep, V) fp32 of the last `keep` positions."""
        inputs = ids.to(self.model.device)
        return self.model(input_ids=inputs, use_cache=False, logits_to_keep=keep).logits[:, -keep:].float()

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Greedy, up to the first stop string. Raises UserError for a task that samples."""
        groups: dict[str, list[int]] = defaultdict(list)
        for i, request in enumerate(requests):
            groups[repr(sorted(request.args[1].items()))].append(i)
        found = [""] * len(requests)
        for members in groups.values():
            for i, text in zip(members, self._generate([requests[i] for i in members]), strict=True):
                found[i] = text
        return found

    def _generate(self, requests: list[Instance]) -> list[str]:
        settings = dict(normalize_gen_kwargs(requests[0].args[1], NEW_TOKENS))
        if settings.get("do_sample"):
            raise UserError("this task samples its answers, which no two machines do alike; choose a greedy one")
        count = min(int(settings["max_gen_toks"]), self.max_length - 1)
        until = handle_stop_sequences(settings["until"], eos=str(self.tokenizer.decode([self.eot_token_id])))
        stop = re.compile("|".join(re.escape(word) for word in until if word))
        prompts = [self._fit_prompt(self.tok_encode(request.args[0]), count) for request in requests]
        return answers(self.model, self.tokenizer, prompts, count, stop, self.batch_size)

    def _fit_prompt(self, ids: list[int], count: int) -> list[int]:
        room = self.max_length - count
        if len(ids) <= room:
            return ids
        head = [] if self.start is None else [self.start]
        return [*head, *ids[len(head) - room :]]


def equal_lengths(rows: list[tuple[int, ...]]) -> list[list[tuple[int, ...]]]:
    """Rows in order of length, those of one length together, at most TOKENS_PER_FORWARD tokens."""
    found = []
    for length, group in groupby(rows, key=len):
        same, step = list(group), max(1, TOKENS_PER_FORWARD // length)
        found += [same[start : start + step] for start in range(0, len(same), step)]
    return found


def _score(logits: torch.Tensor, targets: torch.Tensor) -> Answer:
    """logits (T, V) predict targets (T,)."""
    likelihoods = logits.gather(1, targets.unsqueeze(1)).squeeze(1) - logits.logsumexp(1)
    return float(likelihoods.double().sum()), bool((logits.argmax(1) == targets).all())
