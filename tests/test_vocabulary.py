"""Which tokenizers are one and the same, and which ids two models share."""

import copy
import json
import re

import pytest
import torch
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from attn2mamba import vocabulary
from attn2mamba.errors import UserError
from attn2mamba.losses import IGNORE
from attn2mamba.teachers import Teacher
from attn2mamba.vocabulary import Vocabulary, check_tokenizers

TOKENS = 277  # of tiny_tokenizer


@pytest.fixture
def edited(tiny_tokenizer):
    """tiny_tokenizer after `change` has been at its JSON."""

    def edit(change=lambda state: None) -> PreTrainedTokenizerFast:
        state = json.loads(tiny_tokenizer.backend_tokenizer.to_str())
        change(state)
        tokenizer = Tokenizer.from_str(json.dumps(state))
        return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<eos>")

    return edit


@pytest.fixture
def model(tiny_teacher):
    """(tokenizer, rows, name) -> a model with that many rows."""

    def build(tokenizer, rows=TOKENS, name="big") -> Teacher:
        teacher = tiny_teacher("llama", vocab_size=rows)
        return Teacher(teacher, tokenizer, name, teacher.config)

    return build


def rename(state, index, new):
    """Call the token something else; no merge makes or takes it any more."""
    old = next(token for token, i in state["model"]["vocab"].items() if i == index)
    state["model"]["vocab"][new] = state["model"]["vocab"].pop(old)
    state["model"]["merges"] = [pair for pair in state["model"]["merges"] if old not in (*pair, "".join(pair))]


def drop_last(state):
    """The last merge and its token."""
    vocab = state["model"]["vocab"]
    vocab.pop("".join(state["model"]["merges"].pop()))


@pytest.fixture
def few_words(monkeypatch):
    monkeypatch.setattr(vocabulary, "SAMPLE_WORDS", 100)


def test_one_tokenizer_is_accepted_whatever_the_rows(model, tiny_tokenizer, edited, few_words):
    for ours, theirs in ((277, 277), (288, 304), (304, 288)):
        check_tokenizers(model(edited(), theirs), model(tiny_tokenizer, ours))


@pytest.mark.parametrize("index", [17, 258])
def test_the_first_token_that_differs_is_named(model, tiny_tokenizer, edited, index):
    def change(state):
        rename(state, 275, "later")
        rename(state, index, "Ġthey")

    old = tiny_tokenizer.convert_ids_to_tokens(index)
    other = edited(change)
    expected = (
        "teacher 'big' and base 'small' have different tokenizers: "
        f"token {index} is 'Ġthey' in the teacher and {old!r} in the base"
    )
    with pytest.raises(UserError, match=re.escape(expected)):
        check_tokenizers(model(other), model(tiny_tokenizer, name="small"))


def test_special_tokens_count(model, tiny_tokenizer, edited):
    def change(state):
        state["added_tokens"][0]["content"] = "<end>"
        rename(state, 0, "<end>")

    with pytest.raises(UserError, match=re.escape("token 0 is '<end>' in the teacher and '<eos>' in the base")):
        check_tokenizers(model(edited(change)), model(tiny_tokenizer))
    other = copy.deepcopy(tiny_tokenizer)
    own = copy.deepcopy(tiny_tokenizer)
    other.add_tokens(["<a>"])
    own.add_tokens(["<b>"])
    with pytest.raises(UserError, match=re.escape("token 277 is '<a>' in the teacher and '<b>' in the base")):
        check_tokenizers(model(other), model(own))


def test_a_vocabulary_that_goes_on_is_another(model, tiny_tokenizer, edited):
    """Trained on the same text but longer: all shared ids agree."""
    last = tiny_tokenizer.convert_ids_to_tokens(TOKENS - 1)
    shorter = edited(drop_last)
    for teacher, base, words in (
        (tiny_tokenizer, shorter, f"token {TOKENS - 1} is {last!r} in the teacher and missing in the base"),
        (shorter, tiny_tokenizer, f"token {TOKENS - 1} is missing in the teacher and {last!r} in the base"),
    ):
        with pytest.raises(UserError, match=re.escape(words)):
            check_tokenizers(model(teacher), model(base))


def test_names_that_no_text_leads_to_do_not_count(model, tiny_tokenizer, edited, few_words):
    """As a .gguf file pads its vocabulary, or one model has a token added."""

    def pad(state):
        state["model"]["vocab"] |= {f"[PAD{i}]": i for i in range(TOKENS, 288)}

    check_tokenizers(model(edited(pad)), model(tiny_tokenizer))
    check_tokenizers(model(tiny_tokenizer), model(edited(pad)))
    added = copy.deepcopy(tiny_tokenizer)
    added.add_tokens(["<think>"])
    check_tokenizers(model(added), model(tiny_tokenizer))
    check_tokenizers(model(tiny_tokenizer), model(added))


def reorder(state):
    state["model"]["merges"].reverse()


def lower(state):
    state["normalizer"] = {"type": "Lowercase"}


def compose(state):
    state["normalizer"] = {"type": "NFC"}


def prefix(state):
    state["pre_tokenizer"]["add_prefix_space"] = True


@pytest.mark.parametrize("change", [reorder, lower, compose, prefix])
def test_the_same_tokens_cut_otherwise_are_refused(model, tiny_tokenizer, edited, change):
    other = edited(change)
    assert other.get_vocab() == tiny_tokenizer.get_vocab()
    with pytest.raises(UserError, match=r"the tokens are the same, but .* is cut into .* by the teacher and .* by the"):
        check_tokenizers(model(other), model(tiny_tokenizer))


@pytest.mark.parametrize(("theirs", "ours"), [(304, 277), (277, 304), (288, 304), (277, 277)])
def test_padding_rows_are_not_shared(model, tiny_tokenizer, theirs, ours):
    found = Vocabulary.of(model(tiny_tokenizer, theirs), model(tiny_tokenizer, ours))
    assert found.shared.tolist() == list(range(TOKENS)) and not len(found.unknown)


def test_a_model_beside_itself(model, tiny_tokenizer):
    teacher = model(tiny_tokenizer, 288)
    assert Vocabulary.of(teacher, teacher).shared.tolist() == list(range(TOKENS))


def test_ids_without_a_row_or_on_one_side_are_not_shared(model, tiny_tokenizer):
    added = copy.deepcopy(tiny_tokenizer)
    added.add_tokens(["<a>", "<b>"])
    found = Vocabulary.of(model(added, 279), model(added, 278))
    assert (found.shared.tolist(), found.unknown.tolist()) == (list(range(278)), [278])
    found = Vocabulary.of(model(tiny_tokenizer, 300), model(added, 300))
    assert (found.shared.tolist(), found.unknown.tolist()) == (list(range(277)), [277, 278])
    found = Vocabulary.of(model(added, 300), model(tiny_tokenizer, 300))
    assert (found.shared.tolist(), found.unknown.tolist()) == (list(range(277)), [])


def test_what_the_teacher_is_shown():
    found = Vocabulary(torch.tensor([1, 2, 3]), torch.tensor([0, 9]))
    ids, labels = torch.tensor([[1, 9, 2, 3], [3, 2, 1, 2]]), torch.tensor([[9, 2, 3, IGNORE], [2, 1, 2, IGNORE]])
    shown, kept = found.for_teacher(ids, labels)
    assert shown.tolist() == [[1, 1, 2, 3], [3, 2, 1, 2]]
    assert kept.tolist() == [[9, IGNORE, IGNORE, IGNORE], [2, 1, 2, IGNORE]]
