"""Perplexity window by window: the definition, whatever shares a forward."""

import math

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from attn2mamba import convert
from attn2mamba.data import load_texts
from attn2mamba.errors import UserError
from attn2mamba.evaluate import corpora, perplexity
from attn2mamba.evaluate.corpora import MIN_DOCUMENTS, Corpus, own_text, wikitext2
from attn2mamba.evaluate.measure import Subject
from attn2mamba.evaluate.options import SuiteOptions
from attn2mamba.evaluate.perplexity import text_perplexity

TEXTS = ["the cat sat on the mat and the dog sat on the log", "äöü — 😀 and\n\n the dog", "", "x"]


def subject(model, tokenizer, role="teacher") -> Subject:
    return Subject(role, role, model, tokenizer, "fp32", f"{role} {len(tokenizer)}")


@pytest.fixture(scope="module")
def teacher(tiny_teacher, tiny_tokenizer):
    return subject(tiny_teacher("llama", vocab_size=len(tiny_tokenizer)), tiny_tokenizer)


@pytest.fixture(scope="module")
def student(teacher, randomise):
    return subject(randomise(convert(teacher.model, {"name": "hedgemamba"})[0]), teacher.tokenizer, "student")


def measured(measure, who):
    return {unit: measure.run(who, unit) for unit in measure.units(who)}


def of_texts(texts=TEXTS, context=8, limit=None):
    return Corpus("mine", lambda: texts, "text", context, limit)


@pytest.mark.parametrize("context", [1, 7, 100])
@pytest.mark.parametrize("tokens", ["tiny_tokenizer", "bos_tokenizer"])
def test_equals_text_perplexity(request, tiny_teacher, tokens, context):
    tokenizer = request.getfixturevalue(tokens)
    who = subject(tiny_teacher("llama", vocab_size=len(tokenizer)), tokenizer)
    measure = of_texts(context=context)
    units = measured(measure, who)
    expected = text_perplexity(who.model, tokenizer, TEXTS, context)
    figures, (cell,) = measure.figures(units), measure.cells(units)
    assert figures["perplexity"].value == pytest.approx(expected.per_token, rel=1e-5)
    assert figures["nats_per_token"].value == pytest.approx(math.log(expected.per_token), rel=1e-5)
    assert figures["bits_per_byte"].value == pytest.approx(expected.bits_per_byte, rel=1e-5)
    assert (cell["tokens"], cell["bytes"], cell["documents"]) == (expected.tokens, expected.bytes, 3)


@pytest.mark.parametrize("role", ["teacher", "student"])
def test_what_shares_a_forward_or_a_unit_does_not_matter(request, monkeypatch, role):
    """Neither does reading a long window in pieces."""
    who, found = request.getfixturevalue(role), []
    for per_forward, per_unit in ((8, 8), (24, 40), (4096, 10**6), (4, 10**6)):
        monkeypatch.setattr(perplexity, "TOKENS_PER_FORWARD", per_forward)
        monkeypatch.setattr(corpora, "TOKENS_PER_FORWARD", per_forward)
        monkeypatch.setattr(corpora, "UNIT_TOKENS", per_unit)
        units = measured(of_texts(), who)
        found.append([row for unit in units.values() for row in unit["windows"]])
    for rows in found[1:]:
        for row, expected in zip(rows, found[0], strict=True):
            assert row == pytest.approx(expected, rel=1e-5)


def test_the_same_windows_are_compared(teacher, student):
    measure = of_texts()
    mine, theirs = measured(measure, student), measured(measure, teacher)
    found = measure.differences(mine, theirs)
    assert set(found) == {"perplexity", "nats_per_token", "bits_per_byte"}
    worth = measure.figures(mine)["perplexity"].value - measure.figures(theirs)["perplexity"].value
    assert found["perplexity"].difference == pytest.approx(worth)
    windows = sum(len(unit["windows"]) for unit in mine.values())
    assert found["perplexity"].n == windows
    same = measure.differences(theirs, theirs)["perplexity"]
    assert (same.difference, same.p) == (0.0, 1.0)


def test_other_tokenizers_are_not_paired(teacher, tiny_teacher, bos_tokenizer):
    other = subject(tiny_teacher("llama", vocab_size=len(bos_tokenizer)), bos_tokenizer, "other")
    measure = of_texts(context=4)
    assert measure.differences(measured(measure, other), measured(measure, teacher)) == {}


def test_many_documents_are_the_items(teacher):
    many = of_texts(["the cat sat on the mat"] * MIN_DOCUMENTS + ["a dog"], context=4)
    assert many.figures(measured(many, teacher))["perplexity"].n == MIN_DOCUMENTS + 1


def test_limit_and_units(teacher):
    units = measured(of_texts(context=2, limit=5), teacher)
    assert sum(len(unit["windows"]) for unit in units.values()) == 5
    with pytest.raises(UserError, match="no text to score"):
        of_texts(texts=["", ""]).units(teacher)


def test_a_context_beyond_training_is_marked(tiny_teacher, tiny_tokenizer):
    who = subject(tiny_teacher("llama", vocab_size=len(tiny_tokenizer), max_position_embeddings=8), tiny_tokenizer)
    for context, beyond in ((8, False), (9, True)):
        measure = of_texts(context=context)
        assert measure.cells(measured(measure, who))[0]["beyond_training"] is beyond
    learned = subject(tiny_teacher("gpt2", vocab_size=len(tiny_tokenizer)), tiny_tokenizer)
    with pytest.raises(UserError, match="positions for 2048 tokens"):
        of_texts(context=4096).units(learned)


ROWS = [
    "",
    " = First = \n",
    "",
    " Some text . \n",
    " = = A part = = \n",
    " More text . \n",
    "",
    " = Second = \n",
    "",
    " E \n",
]
ARTICLES = [
    " = First = \n \n Some text . \n = = A part = = \n More text . \n \n",
    " = Second = \n \n E \n",
]


@pytest.fixture
def root(tmp_path):
    folder = tmp_path / "hub" / "Salesforce" / "wikitext" / "wikitext-2-raw-v1"
    folder.mkdir(parents=True)
    pq.write_table(pa.table({"text": ROWS}), folder / "test.parquet")
    return tmp_path / "hub"


def test_wikitext_by_articles(root, teacher):
    measure = wikitext2(SuiteOptions(root, context=(64,)))
    assert list(measure.texts()) == ARTICLES
    result = text_perplexity(teacher.model, teacher.tokenizer, ARTICLES, 64)
    assert measure.figures(measured(measure, teacher))["perplexity"].value == pytest.approx(result.per_token, rel=1e-5)
    other = pa.table({"text": [*ROWS, " more \n"]})
    pq.write_table(other, root / "Salesforce" / "wikitext" / "wikitext-2-raw-v1" / "test.parquet")
    assert wikitext2(SuiteOptions(root)).options()["data"] != measure.options()["data"]


def test_the_packed_file_beside_is_the_same_text(root, tmp_path):
    (tmp_path / "wikitext2").mkdir()
    with pa.output_stream(str(tmp_path / "wikitext2" / "wiki.test.raw.zst"), compression="zstd") as stream:
        stream.write("".join(row or " \n" for row in ROWS).encode())
    (tmp_path / "empty").mkdir()
    packed, rows = wikitext2(SuiteOptions(tmp_path / "empty")), wikitext2(SuiteOptions(root))
    assert list(packed.texts()) == ARTICLES and packed.options() == rows.options()


def test_no_wikitext_there(tmp_path):
    with pytest.raises(UserError, match="Salesforce/wikitext"):
        wikitext2(SuiteOptions(tmp_path / "nowhere"))


def test_own_text(teacher, corpus):
    measure = own_text(SuiteOptions(data=(corpus,), context=(16,), limit=3))
    units = measured(measure, teacher)
    first = teacher.tokenizer(next(load_texts(corpus)), add_special_tokens=False).input_ids[:48]
    expected = text_perplexity(teacher.model, teacher.tokenizer, [str(teacher.tokenizer.decode(first))], 16)
    assert measure.figures(units)["perplexity"].value == pytest.approx(expected.per_token, rel=1e-5)
    assert own_text(SuiteOptions(data=(corpus,))).limit == corpora.MAX_WINDOWS
    with pytest.raises(UserError, match="no such file"):
        own_text(SuiteOptions(data=("nowhere.txt",)))
