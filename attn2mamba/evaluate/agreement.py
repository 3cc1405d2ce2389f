"""Whether a model says, token by token, what the teacher says."""

import base64
import hashlib
import json
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from ..errors import UserError
from .decoding import continuations, padding_ids
from .measure import TEACHER, Figure, Json, Measure, Subject
from .openings import OPENING_TOKENS, digest, opening_ids, read_openings
from .options import SuiteOptions

NEW_TOKENS = 128
TOP = 64
"""Most likely tokens of the teacher whose probabilities are kept."""
UNIT = 4
"""Texts in a unit; the teacher's of one take about half a megabyte on disk."""
LEAST_SELF_AGREEMENT = 0.95


class Agreement(Measure):
    """Openings continued greedily by the teacher, up to 128 tokens with the one that ends the text.

    Of each text: `token_agreement`, the share of the continuation's tokens that are the model's likeliest too, given
    the opening and the teacher's tokens so far; `kl`, the mean over them of KL(teacher || model) in nats;
    `common_prefix`, how many tokens of the model's own greedy continuation are the teacher's before the first that is
    not; `same_text`, 1 where all are.

    The KL is that of distributions over the teacher's 64 likeliest tokens and all others as one, since no more than
    these log-probabilities (as float16) are kept: a lower bound of the KL over the whole vocabulary. Rows of the head
    that are no token have no probability in either model. A model with another tokenizer than the teacher's is left
    out.
    """

    name = "agreement"
    kind = "generation"

    def __init__(self, options: SuiteOptions) -> None:
        self.suite = options
        self.texts = read_openings(options.data, options.limit)
        self.teacher: dict[str, Json] | None = None

    @cached_property
    def _options(self) -> Json:
        texts = digest(self.texts)
        return {"texts": texts, "opening_tokens": OPENING_TOKENS, "new_tokens": NEW_TOKENS, "top": TOP}

    def options(self) -> Json:
        return self._options

    def learn_from(self, teacher: dict[str, Json]) -> None:
        kept = {name: {k: v for k, v in unit.items() if k != "seconds"} for name, unit in teacher.items()}
        self.teacher = kept
        self.reference = hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()

    def units(self, subject: Subject) -> list[str]:
        if subject.role != TEACHER:
            if self.teacher is None:
                raise UserError("agreement compares with a teacher; give --teacher, or leave agreement out")
            prompts = [text["prompt"] for unit in self.teacher.values() for text in unit["texts"]]
            if prompts != [opening_ids(subject.tokenizer, text) for text in self.texts]:
                return []
        return [str(start) for start in range(0, len(self.texts), UNIT)]

    def run(self, subject: Subject, unit: str) -> Json:
        prompts = [opening_ids(subject.tokenizer, text) for text in self.texts[int(unit) : int(unit) + UNIT]]
        own = continuations(subject.model, subject.tokenizer, prompts, NEW_TOKENS, batch_size=self.suite.batch_size)
        texts: list[Json] = [{"prompt": p, "continuation": c} for p, c in zip(prompts, own, strict=True)]
        if subject.role != TEACHER:
            assert self.teacher is not None
            texts = self.teacher[unit]["texts"]
        scores: dict[str, list[float]] = {}
        for text, tokens in zip(texts, own, strict=True):
            distribution = log_probabilities(subject, text["prompt"], text["continuation"])
            if subject.role == TEACHER:
                text.update(keep_top(distribution))
            for metric, score in compare(text, distribution, tokens).items():
                scores.setdefault(metric, []).append(score)
        return {"scores": scores, **({"texts": texts} if subject.role == TEACHER else {"continuations": own})}

    def complaint(self, figures: dict[str, Figure]) -> str | None:
        """A teacher must agree with itself: reading a text at once and token by token come to the same."""
        found = figures["token_agreement"].value
        if found >= LEAST_SELF_AGREEMENT:
            return None
        return f"its likeliest token is the one that it generated for {found:.0%} of the tokens, not nearly all"


def compare(text: Json, distribution: Tensor, tokens: list[int]) -> dict[str, float]:
    """text: as the teacher's results have it. distribution (T, V): log-probabilities of a model in the places of the
    teacher's T tokens. tokens: the model's own continuation."""
    theirs = text["continuation"]
    common = next((i for i, (a, b) in enumerate(zip(tokens, theirs, strict=False)) if a != b), None)
    common = min(len(tokens), len(theirs)) if common is None else common
    return {
        "token_agreement": float((distribution.argmax(-1) == torch.tensor(theirs)).double().mean()),
        "kl": float(binned_kl(text, distribution).mean()),
        "common_prefix": float(common),
        "same_text": float(tokens == theirs),
    }


@torch.no_grad()
def log_probabilities(subject: Subject, prompt: list[int], continuation: list[int]) -> Tensor:
    """(T, V), fp64, on the CPU: of every token in the place of each of the T of the continuation."""
    ids = torch.tensor([[*prompt, *continuation[:-1]]], device=subject.model.device)
    output = subject.model(input_ids=ids, use_cache=False, logits_to_keep=len(continuation))
    logits = output.logits[0, -len(continuation) :].cpu().double()
    logits[:, padding_ids(subject.model, subject.tokenizer)] = -torch.inf
    return logits.log_softmax(-1)


def keep_top(distribution: Tensor) -> Json:
    """Packed: the ids of the TOP likeliest tokens (T, k), and their log-probabilities with that of all others together
    (T, k + 1)."""
    values, ids = distribution.topk(min(TOP, distribution.shape[-1]), dim=-1)
    bins = torch.cat([values, _rest(distribution, ids)], dim=-1)
    return {"top": _pack(ids.numpy().astype("<i4")), "log_probabilities": _pack(bins.numpy().astype("<f2"))}


def binned_kl(text: Json, distribution: Tensor) -> Tensor:
    """(T,), in nats: KL(teacher || model) over the teacher's likeliest tokens and all others as one."""
    ids = _unpack(text["top"], "<i4", len(distribution)).long()
    theirs = _unpack(text["log_probabilities"], "<f2", len(distribution)).double().log_softmax(-1)
    ours = torch.cat([distribution.gather(-1, ids), _rest(distribution, ids)], dim=-1)
    # A bin that the teacher gives nothing adds nothing, whatever the model gives it.
    return torch.where(theirs.exp() > 0, theirs.exp() * (theirs - ours), 0.0).sum(-1)


def _rest(distribution: Tensor, ids: Tensor) -> Tensor:
    """(T, 1): log of the probability of all tokens but these."""
    return distribution.scatter(-1, ids, -torch.inf).logsumexp(-1, keepdim=True)


def _pack(array: np.ndarray) -> str:
    return base64.b64encode(array.tobytes()).decode()


def _unpack(text: str, kind: str, rows: int) -> Tensor:
    array = np.frombuffer(base64.b64decode(text), kind).reshape(rows, -1)
    return torch.from_numpy(array.astype(np.int64 if kind == "<i4" else np.float64))
