"""Perplexity by position and LAMBADA: what a plain forward of each text gives."""

import json
import math

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from attn2mamba.convert import convert
from attn2mamba.errors import UserError
from attn2mamba.evaluate import lambada, length
from attn2mamba.evaluate import reading as reading_module
from attn2mamba.evaluate.lambada import Lambada
from attn2mamba.evaluate.length import MEASURES, Positions, buckets_of
from attn2mamba.evaluate.measure import Figure, Subject
from attn2mamba.evaluate.options import SuiteOptions

WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "dog", "log", "ran", "to", "see", "sun"]


def text_of(count: int, seed: int) -> str:
    generator = torch.Generator().manual_seed(seed)
    return " ".join(WORDS[i] for i in torch.randint(len(WORDS), (count,), generator=generator).tolist())


@pytest.fixture(scope="module", params=["teacher", "student", "bos"])
def subject(request, tiny_teacher, tiny_tokenizer, bos_tokenizer, randomise):
    tokenizer = bos_tokenizer if request.param == "bos" else tiny_tokenizer
    model = tiny_teacher("llama", vocab_size=len(tokenizer), max_position_embeddings=100)
    if request.param == "student":
        model = randomise(convert(model, {"name": "hedgemamba"})[0]).eval()
    return Subject(request.param, "name", model, tokenizer, "fp32", request.param)


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> str:
    """Texts of which the first and the third are too short for 200 tokens."""
    path = tmp_path_factory.mktemp("long") / "texts.jsonl"
    lines = [json.dumps({"text": text_of(count, count)}) for count in (20, 400, 30, 500, 600)]
    path.write_text("\n".join(lines))
    return str(path)


@torch.no_grad()
def nll(subject, text: str, count: int) -> torch.Tensor:
    """(count,) of the text's first tokens, by one forward without a cache."""
    tokenizer = subject.tokenizer
    ids = tokenizer(text, add_special_tokens=False).input_ids[:count]
    start = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    logits = subject.model(torch.tensor([[start, *ids]]), use_cache=False).logits[0, :-1].double()
    return -logits.log_softmax(-1).gather(1, torch.tensor(ids).unsqueeze(1)).squeeze(1)


@pytest.mark.parametrize("piece", [64, 1024])
def test_positions_equal_the_definition(subject, data, monkeypatch, piece):
    monkeypatch.setattr(reading_module, "PIECE_TOKENS", piece)
    measure = Positions([data], [200, 70], 2)
    results = json.loads(json.dumps({unit: measure.run(subject, unit) for unit in measure.units(subject)}))
    expected = torch.stack([nll(subject, text_of(count, count), 200) for count in (400, 500)])
    figures = measure.figures(results)
    for context in (70, 200):
        means = expected[:, :context].mean(1)
        assert figures[f"nll@{context}"].value == pytest.approx(float(means.mean()), rel=1e-4)
        assert figures[f"nll@{context}"].n == 2
        assert figures[f"perplexity@{context}"].value == pytest.approx(float(means.mean().exp()), rel=1e-4)
        error = float(means.std() / math.sqrt(2) * means.mean().exp())
        assert figures[f"perplexity@{context}"].stderr == pytest.approx(error, rel=1e-2, abs=1e-3)
    positions = [cell for cell in measure.cells(results) if "position_from" in cell]
    assert [(c["position_from"], c["position_to"]) for c in positions] == [(0, 64), (64, 128), (128, 200)]
    for cell in positions:
        part = expected[:, cell["position_from"] : cell["position_to"]]
        assert cell["perplexity"] == pytest.approx(float(part.mean().exp()), rel=1e-4)
        assert cell["n"] == part.numel()
        assert cell["beyond_training"] == (cell["position_from"] >= 100)
    contexts = [cell for cell in measure.cells(results) if "context" in cell]
    assert [(c["context"], c["n"], c["beyond_training"]) for c in contexts] == [(70, 140, False), (200, 400, True)]
    assert contexts[1]["perplexity"] == pytest.approx(float(expected.mean().exp()), rel=1e-4)


def test_a_model_equals_itself_and_differs_from_a_worse_one(subject, data):
    measure = Positions([data], [128], 3)
    results = {unit: measure.run(subject, unit) for unit in measure.units(subject)}
    same = measure.differences(results, results)
    assert set(same) == {"nll@128", "perplexity@128"}
    assert {(difference.difference, difference.p) for difference in same.values()} == {(0.0, 1.0)}
    better = {
        unit: {**result, "scores": {"nll@128": [result["scores"]["nll@128"][0] - 1 - int(unit) / 100]}}
        for unit, result in results.items()
    }
    worse = measure.differences(results, better)
    assert worse["nll@128"].difference == pytest.approx(1.01)
    assert worse["perplexity@128"].difference > 0 and worse["perplexity@128"].p < 0.01


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        (40, [(0, 40)]),
        (64, [(0, 64)]),
        (128, [(0, 64), (64, 128)]),
        (300, [(0, 64), (64, 128), (128, 256), (256, 300)]),
    ],
)
def test_buckets(tokens, expected):
    assert buckets_of(tokens) == expected


def test_as_many_texts_as_there_are(subject, data):
    assert Positions([data], [200], 9).units(subject) == ["0", "1", "2"]
    assert len(Positions([data, data], [200], 5).units(subject)) == 5
    with pytest.raises(UserError, match=r"no text in .*texts.jsonl has 9,000 tokens; give longer ones"):
        Positions([data], [9000], 2).units(subject)


def test_other_data_are_other_results(data, tmp_path):
    other = tmp_path / "other.jsonl"
    other.write_text(json.dumps({"text": "the cat"}))
    options = [Positions([name], [64], 1).options() for name in (data, str(other))]
    assert options[0] != options[1]
    json.dumps(options)


def test_where_texts_come_from(data, tmp_path):
    """The user's first, then the books beside the data root."""
    root = tmp_path / "hub"
    root.mkdir()
    make = MEASURES["positions"]
    for options in (SuiteOptions(), SuiteOptions(data_root=root)):
        with pytest.raises(UserError, match="positions needs long texts: give --data"):
            make(options)
    (tmp_path / "long").mkdir()
    books = tmp_path / "long" / "books.parquet"
    pq.write_table(pa.table({"text": [text_of(300, 1)], "title": ["T"]}), books)
    assert make(SuiteOptions(data_root=root)).options()["data"] == [str(books)]
    both = make(SuiteOptions(data_root=root, data=(data,), limit=3, context=(64, 128)))
    assert both.options()["data"] == [data, str(books)] and both.options()["texts"] == 3


def test_positions_needs_memory(subject, data, monkeypatch):
    monkeypatch.setattr(reading_module, "free_bytes", lambda device: 100)
    with pytest.raises(UserError, match="a context of 65 tokens takes"):
        Positions([data], [64], 1).units(subject)


def test_learned_positions_hold_the_start_token_too(data, tiny_teacher, tiny_tokenizer):
    model = tiny_teacher("gpt2", vocab_size=len(tiny_tokenizer), n_positions=200)
    subject = Subject("teacher", "name", model, tiny_tokenizer, "fp32", "gpt2")
    with pytest.raises(UserError, match="positions for 200 tokens, not 201"):
        Positions([data], [200], 1).units(subject)
    measure = Positions([data], [199], 1)
    assert measure.run(subject, measure.units(subject)[0])["scores"]


@pytest.mark.parametrize("column", [{"other": ["the cat sat"]}, {"text": [None]}, {"text": ["word"]}])
def test_passages_that_are_none(tmp_path, column):
    folder = tmp_path / "EleutherAI" / "lambada_openai" / "default"
    folder.mkdir(parents=True)
    pq.write_table(pa.table(column), folder / "test.parquet")
    with pytest.raises(UserError, match=r"lambada_openai.* fetch the data set again"):
        Lambada(tmp_path, None).options()


@pytest.fixture
def passages(tmp_path) -> list[str]:
    found = [text_of(20 + i % 7, i) for i in range(40)]
    folder = tmp_path / "EleutherAI" / "lambada_openai" / "default"
    folder.mkdir(parents=True)
    pq.write_table(pa.table({"text": found}), folder / "test.parquet")
    return found


@pytest.mark.parametrize("unit", [3, 32])
def test_lambada_scores_the_last_word(subject, passages, tmp_path, monkeypatch, unit):
    """However many passages a unit holds."""
    monkeypatch.setattr(lambada, "UNIT", unit)
    measure = Lambada(tmp_path, 10)
    results = {name: measure.run(subject, name) for name in measure.units(subject)}
    tokenizer, bos = subject.tokenizer, subject.tokenizer.bos_token_id
    accuracies, likelihoods = [], []
    for passage in passages[:10]:
        context, word = passage.rsplit(" ", 1)
        ids = tokenizer(context, add_special_tokens=False).input_ids
        target = tokenizer(f" {word}", add_special_tokens=False).input_ids
        ids = ids if bos is None else [bos, *ids]
        with torch.no_grad():
            logits = subject.model(torch.tensor([ids + target]), use_cache=False).logits[0, len(ids) - 1 : -1]
        accuracies.append(float(logits.argmax(-1).tolist() == target))
        likelihoods.append(float(logits.log_softmax(-1).gather(1, torch.tensor(target).unsqueeze(1)).sum()))
    figures = measure.figures(results)
    assert figures["accuracy"].value == sum(accuracies) / 10 and figures["accuracy"].n == 10
    assert figures["log_likelihood"].value == pytest.approx(sum(likelihoods) / 10, rel=1e-4)
    assert figures["perplexity"].value == pytest.approx(math.exp(-sum(likelihoods) / 10), rel=1e-3)
    same = measure.differences(results, results)
    assert set(same) == set(figures) and same["perplexity"].difference == 0


def test_lambada_right_word(passages, tmp_path, subject):
    """A model that says the last word of every passage is right every time."""
    measure = Lambada(tmp_path, None)
    assert len(measure.passages) == 40 and measure.options()["passages"] == 40
    answers = {passage.rsplit(" ", 1)[0]: passage.rsplit(" ", 1)[1] for passage in passages}

    class Knowing:
        def __init__(self, model):
            pass

        def read(self, ids):
            text = subject.tokenizer.decode(ids).removeprefix("<bos>")
            self.predicted = subject.tokenizer(f" {answers[text]}", add_special_tokens=False).input_ids
            return self

        def follow(self, ids):
            return torch.zeros(len(ids)), torch.tensor(self.predicted)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lambada, "Reading", Knowing)
        results = {unit: measure.run(subject, unit) for unit in measure.units(subject)}
    figures = measure.figures(results)
    assert figures["accuracy"].value == figures["perplexity"].value == 1.0


def test_lambada_limit_changes_the_options(passages, tmp_path):
    assert Lambada(tmp_path, 3).options() != Lambada(tmp_path, 4).options()


def test_lambada_data_missing(tmp_path, subject):
    with pytest.raises(UserError, match="lambada_openai"):
        Lambada(tmp_path, 3).units(subject)


@pytest.mark.parametrize(("value", "n", "broken"), [(0.0, 200, True), (0.0, 20, False), (0.01, 200, False)])
def test_a_teacher_without_one_right_word_is_broken(value, n, broken):
    complaint = Lambada(None, None).complaint({"accuracy": Figure(value, n)})
    assert complaint == (f"not one of {n} last words right" if broken else None)


def test_registry():
    assert set(MEASURES) == {length.Positions.name}
    assert set(lambada.MEASURES) == {Lambada.name}
