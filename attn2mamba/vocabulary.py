"""Two tokenizers side by side: whether they are the same, and which ids both models know."""

import random
from dataclasses import dataclass
from typing import Self, cast

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from .errors import UserError
from .losses import IGNORE
from .teachers import Teacher

SAMPLE = (
    "The quick brown fox doesn't jump; it's 3.14159 o'clock on 2024-02-29, and e-mail costs $1,234.56 (50 % off)!",
    "  leading blanks,\ttabs,   runs of blanks   \n\n\nand line ends\r\nof both kinds \n",
    "def f(x_1, *args):\n    if x_1 >= 0x1F and not args:\n        return {'key': [x_1 ** 2, None]}  # comment\n",
    'UPPER lower camelCase snake_case https://example.org/a?b=c&d=%20 <tag attr="1">&amp;</tag> \\frac{1}{2}',
    "Zażółć gęślą jaźń, naïve café, cafe\u0301, Straße, İstanbul, ﬁne ½ ² Ⅳ ｆｕｌｌ－ｗｉｄｔｈ, “quotes” – dash…",
    "no-break\u00a0space, zero\u200bwidth, \U0001f469\u200d\U0001f467 \U0001f44d\U0001f3fd ∀x∈ℝ: ⌈x⌉ = −⌊−x⌋ 123456",
    "Съешь ещё этих мягких булок. Γειά σου Κόσμε. שלום עולם. مرحبا بالعالم. नमस्ते दुनिया. สวัสดีชาวโลก",
    "天地玄黄，宇宙洪荒。いろはにほへと チリヌルヲ 키스의 고유조건은 한글",
)
SAMPLE_TOKENS, SAMPLE_WORDS = 5000, 10_000


@dataclass(frozen=True)
class Vocabulary:
    """What teacher and base have in common. shared: (n,) int64, ascending, the ids that both tokenizers have and both
    models have rows for; a model's other rows are padding. unknown: (m,) int64, the base's ids that are not shared."""

    shared: Tensor
    unknown: Tensor

    @classmethod
    def of(cls, teacher: Teacher, base: Teacher) -> Self:
        """Of two models with one tokenizer, which may be the same model: then all its ids are shared."""
        rows = min(cast(Tensor, x.model.get_input_embeddings().weight).shape[0] for x in (teacher, base))
        theirs, ours = (set(tokens_by_id(tokenizer_of(x))) for x in (teacher, base))
        shared = sorted(i for i in theirs & ours if i < rows)
        return cls(torch.tensor(shared), torch.tensor(sorted(ours.difference(shared)), dtype=torch.long))

    def for_teacher(self, input_ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """The same (B, T) twice, for a teacher that may not know every id: from an unknown one on, a sequence has other
        ids in the teacher's eyes and no labels, since what the teacher says after it means nothing."""
        unknown = torch.isin(input_ids, self.unknown.to(input_ids.device))
        known_ids = input_ids.masked_fill(unknown, int(self.shared[0]))
        return known_ids, labels.masked_fill(unknown.cumsum(dim=1) > 0, IGNORE)


def tokenizer_of(teacher: Teacher) -> PreTrainedTokenizerBase:
    """Raises UserError where a model was found without one."""
    if teacher.tokenizer is None:
        raise UserError(f"'{teacher.name}' has no tokenizer; put its tokenizer.json beside the weights")
    return teacher.tokenizer


def tokens_by_id(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    """Every token of the tokenizer, added and special ones included."""
    return {index: token for token, index in tokenizer.get_vocab().items()}


def check_tokenizers(teacher: Teacher, base: Teacher) -> None:
    """Raise UserError, naming the first token that differs, unless both give every text the same ids.

    What only one of them has does not count when no text leads to it (a vocabulary padded with names), nor when it is
    an added token: those are left out of the comparison of the models (`Vocabulary`).
    """
    difference = tokenizer_difference(tokenizer_of(teacher), tokenizer_of(base))
    if difference:
        raise UserError(
            f"teacher '{teacher.name}' and base '{base.name}' have different tokenizers: {difference}; "
            "choose a teacher that has the base's tokenizer"
        )


def tokenizer_difference(teacher: PreTrainedTokenizerBase, base: PreTrainedTokenizerBase) -> str | None:
    """In words, the first difference by which the two may cut a text differently; None where none is found."""
    return None if teacher is base else _differing_token(teacher, base) or _differing_text(teacher, base)


def _differing_token(teacher: PreTrainedTokenizerBase, base: PreTrainedTokenizerBase) -> str | None:
    theirs, ours = tokens_by_id(teacher), tokens_by_id(base)
    for index in sorted(theirs.keys() | ours.keys()):
        if index in theirs and index in ours:
            if theirs[index] != ours[index]:
                return f"token {index} is {theirs[index]!r} in the teacher and {ours[index]!r} in the base"
        elif index in theirs and _in_text(teacher, index):
            return f"token {index} is {theirs[index]!r} in the teacher and missing in the base"
        elif index in ours and _in_text(base, index):
            return f"token {index} is missing in the teacher and {ours[index]!r} in the base"
    return None


def _in_text(tokenizer: PreTrainedTokenizerBase, index: int) -> bool:
    """Whether a token that was not added by name comes out of its own text."""
    return index not in tokenizer.added_tokens_decoder and _ids(tokenizer, [_text(tokenizer, index)]) == [[index]]


def _differing_text(teacher: PreTrainedTokenizerBase, base: PreTrainedTokenizerBase) -> str | None:
    """The same tokens may be cut by other rules: other merges, another normaliser. Compares SAMPLE, the text of tokens
    spread over the vocabulary, and words made of several of those, in which the order of merges shows."""
    ids = sorted(tokens_by_id(teacher).keys() & tokens_by_id(base).keys())
    spread = [_text(base, index) for index in ids[:: max(1, len(ids) // SAMPLE_TOKENS)]]
    draw = random.Random(0)
    texts = [*SAMPLE, *spread, *("".join(draw.choices(spread, k=4)) for _ in range(SAMPLE_WORDS))]
    for text, theirs, ours in zip(texts, _ids(teacher, texts), _ids(base, texts), strict=True):
        if theirs != ours:
            pairs = enumerate(zip(theirs, ours, strict=False))
            start = next((i for i, (a, b) in pairs if a != b), min(len(theirs), len(ours)))
            a, b = (t.convert_ids_to_tokens(x[start : start + 4]) for t, x in ((teacher, theirs), (base, ours)))
            return f"the tokens are the same, but {text[:40]!r} is cut into {a} by the teacher and {b} by the base"
    return None


def _text(tokenizer: PreTrainedTokenizerBase, index: int) -> str:
    return str(tokenizer.decode([index]))


def _ids(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[list[int]]:
    return tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
