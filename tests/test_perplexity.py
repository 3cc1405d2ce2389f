"""Perplexity: every token once, whatever is scored beside it."""

import json
import math

import pytest
import torch

from attn2mamba.errors import UserError
from attn2mamba.evaluate import perplexity
from attn2mamba.evaluate.generation import continue_text, decode_rate
from attn2mamba.evaluate.perplexity import Perplexity, block_perplexity, text_perplexity
from attn2mamba.teachers import load_teacher

TEXTS = ["the cat sat on the mat", "äöü — 😀 and\n\n the dog", "", "x"]


@pytest.fixture(scope="module")
def teacher(teacher_directory):
    return load_teacher(teacher_directory)


def naive(teacher, text: str, context: int) -> tuple[float, int]:
    """Token by token: -log p of each, given the tokens of its window so far and the one before the window."""
    ids = teacher.tokenizer(text, add_special_tokens=False).input_ids
    total = 0.0
    for position, token in enumerate(ids):
        first = position - position % context
        before = [teacher.tokenizer.eos_token_id, *ids][first : position + 1]
        with torch.no_grad():
            logits = teacher.model(torch.tensor([before]), use_cache=False).logits[0, -1].double()
        total -= float(logits.log_softmax(-1)[token])
    return total, len(ids)


@pytest.mark.parametrize("context", [1, 4, 7, 100])
def test_equals_the_definition(teacher, context):
    result = text_perplexity(teacher.model, teacher.tokenizer, TEXTS, context)
    expected = [naive(teacher, text, context) for text in TEXTS]
    assert result.tokens == sum(tokens for _, tokens in expected)
    assert result.nll == pytest.approx(sum(nll for nll, _ in expected), rel=1e-5)
    assert result.per_token == pytest.approx(math.exp(result.nll / result.tokens))
    assert result.words == sum(len(text.split()) for text in TEXTS) == 13
    assert result.bytes == sum(len(text.encode()) for text in TEXTS)
    assert result.bits_per_byte == pytest.approx(result.nll / math.log(2) / result.bytes)


@pytest.mark.parametrize("context", [2, 4, 7, 100])
def test_every_window_begins_with_the_bos(teacher, tiny_teacher, bos_tokenizer, context):
    """Where the tokenizer puts one; a token is scored once, from the BOS and what its window holds before it."""
    model, bos = tiny_teacher("llama", vocab_size=len(bos_tokenizer)), bos_tokenizer.bos_token_id
    result = text_perplexity(model, bos_tokenizer, TEXTS[:2], context)
    total, step = 0.0, context - 1
    for text in TEXTS[:2]:
        ids = bos_tokenizer(text, add_special_tokens=False).input_ids
        for position, token in enumerate(ids):
            before = ids[max(0, position - position % step - 1) : position]
            with torch.no_grad():
                logits = model(torch.tensor([[bos, *before]]), use_cache=False).logits[0, -1].double()
            total -= float(logits.log_softmax(-1)[token])
    assert result.tokens == sum(len(bos_tokenizer(x, add_special_tokens=False).input_ids) for x in TEXTS[:2])
    assert result.nll == pytest.approx(total, rel=1e-5)


@pytest.mark.parametrize("tokens_per_forward", [1, 8, 24, 4096])
def test_what_is_scored_together_does_not_matter(teacher, monkeypatch, tokens_per_forward):
    alone = text_perplexity(teacher.model, teacher.tokenizer, TEXTS, 8)
    monkeypatch.setattr(perplexity, "TOKENS_PER_FORWARD", tokens_per_forward)
    together = text_perplexity(teacher.model, teacher.tokenizer, TEXTS, 8)
    assert together.nll == pytest.approx(alone.nll, rel=1e-6)
    assert (together.tokens, together.words, together.bytes) == (alone.tokens, alone.words, alone.bytes)


def test_stops_at_max_tokens(teacher):
    whole = "one two three four five"
    result = text_perplexity(teacher.model, teacher.tokenizer, [whole, "never read"], 4, 9)
    ids = teacher.tokenizer(whole).input_ids[:9]
    scored = teacher.tokenizer.decode(ids)
    assert whole.startswith(scored) and result.tokens == 9
    assert (result.words, result.bytes) == (len(scored.split()), len(scored))
    assert result.nll == pytest.approx(naive(teacher, scored, 4)[0], rel=1e-5)


@pytest.mark.parametrize("texts", [[], [""], ["", ""]])
def test_nothing_to_score(teacher, texts):
    with pytest.raises(UserError, match="no text to score"):
        text_perplexity(teacher.model, teacher.tokenizer, texts, 8)


def test_a_tokenizer_without_eos(teacher, tiny_tokenizer):
    bare = type(tiny_tokenizer)(tokenizer_object=tiny_tokenizer.backend_tokenizer)
    with pytest.raises(UserError, match="no EOS token"):
        text_perplexity(teacher.model, bare, TEXTS, 8)


@pytest.mark.parametrize("nll", [1e6, math.inf, math.nan])
def test_what_is_no_number_is_null_in_json(nll):
    """A script without spaces is one word: its perplexity by word is beyond any float."""
    figures = Perplexity(nll, tokens=10**5, words=1, bytes=10).to_dict()
    json.dumps(figures, allow_nan=False)
    assert figures["word_perplexity"] is None
    assert (figures["perplexity"] is None) == (nll != 1e6)


class Held:
    """Blocks of a held-out text."""

    sequence_length = 16

    def __init__(self, count):
        ids = torch.randint(50, (count, 16), generator=torch.Generator().manual_seed(0))
        self.rows = [{"input_ids": row} for row in ids]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]


@pytest.mark.parametrize(("max_tokens", "blocks"), [(1, 1), (16, 1), (40, 2), (10**6, 5)])
def test_blocks(teacher, monkeypatch, max_tokens, blocks):
    held, results = Held(5), []
    for tokens_per_forward in (16, 48):
        monkeypatch.setattr(perplexity, "TOKENS_PER_FORWARD", tokens_per_forward)
        results.append(block_perplexity(teacher.model, held, max_tokens))
    ids = torch.stack([row["input_ids"] for row in held.rows[:blocks]])
    with torch.no_grad():
        logits = teacher.model(ids, use_cache=False).logits[:, :-1]
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
    for result in results:
        assert result.tokens == blocks * 15
        assert result.per_token == pytest.approx(math.exp(float(expected)), rel=1e-5)


@pytest.mark.parametrize("prompt", ["the cat", ""])
def test_continuation_is_written_as_it_comes(teacher, prompt):
    pieces: list[str] = []
    text = continue_text(teacher.model, teacher.tokenizer, prompt, 12, write=pieces.append)
    assert "".join(pieces) == text
    assert continue_text(teacher.model, teacher.tokenizer, prompt, 12) == text
    torch.manual_seed(0)
    sampled = continue_text(teacher.model, teacher.tokenizer, prompt, 12, temperature=1.0)
    torch.manual_seed(0)
    assert continue_text(teacher.model, teacher.tokenizer, prompt, 12, temperature=1.0) == sampled


def test_decode_rate_is_a_rate(teacher):
    assert 1 < decode_rate(teacher.model, 8, steps=3) < 1e6
