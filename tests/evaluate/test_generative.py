"""Tasks with generated answers: extraction, pairing, batches, their data, and the table beside likelihood."""

import dataclasses
from decimal import Decimal

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from attn2mamba.errors import UserError
from attn2mamba.evaluate import generative
from attn2mamba.evaluate.generative import MEASURES, Gsm8k, LambadaGenerate, last_number, marked_number
from attn2mamba.evaluate.measure import Subject, paired
from attn2mamba.evaluate.options import SuiteOptions
from attn2mamba.evaluate.side_by_side import side_by_side
from attn2mamba.evaluate.task_data import read_rows


def write_rows(root, folder, split, rows):
    path = root / folder
    path.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path / f"{split}.parquet")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    path = tmp_path_factory.mktemp("hub")
    texts = ["the cat sat on the mat", "a dog\n\nsat", "the dog sat on the log and the cat sat on the mat", "so it ran"]
    write_rows(path, "EleutherAI/lambada_openai/default", "test", [{"text": text} for text in texts])
    rows = [
        {"question": f"What is {i} + {i}?", "answer": f"{i}+{i} = <<{i}+{i}={2 * i}>>\n#### {2 * i}"} for i in range(9)
    ]
    write_rows(path, "openai/gsm8k/main", "train", rows)
    write_rows(path, "openai/gsm8k/main", "test", rows[5:])
    return path


@pytest.fixture(scope="module")
def subject(tiny_teacher, tiny_tokenizer):
    model = tiny_teacher("llama", vocab_size=len(tiny_tokenizer))
    return Subject("teacher", "tiny", model, tiny_tokenizer, "fp32", "f")


@pytest.mark.parametrize(
    ("answer", "marked", "last"),
    [
        ("6*7 = <<6*7=42>>42\n#### 42", 42, 42),
        ("#### 1,234.50", "1234.5", "1234.5"),
        ("#### $18", 18, 18),
        ("#### -7.", -7, -7),
        ("####5\n#### 6", 5, 6),
        ("The answer is $1,000.", None, 1000),
        ("It takes 2 days, 3 hours", None, 3),
        ("about .5 of it", None, "0.5"),
        ("#### none", None, None),
        ("", None, None),
        ("so the answer is 12, because", None, 12),
    ],
)
def test_numbers(answer, marked, last):
    assert marked_number(answer) == (None if marked is None else Decimal(marked))
    assert last_number(answer) == (None if last is None else Decimal(last))


@pytest.mark.parametrize(
    ("answer", "strict", "flexible"),
    [
        (" 5+5 = 10\n#### 10", 1, 1),
        ("#### 10.00", 1, 1),
        (" It is 10", 0, 1),
        ("#### 10 (or 11)", 1, 0),
        ("#### 11", 0, 0),
        ("#### 100", 0, 0),
        (" ten", 0, 0),
    ],
)
def test_gsm8k_scores(root, answer, strict, flexible):
    scores = Gsm8k(SuiteOptions(data_root=root)).score({"answer": "5+5 = 10\n#### 10"}, answer)
    assert scores == {"exact_match": strict, "flexible_match": flexible}


def test_gsm8k_prompt(root):
    measure = Gsm8k(SuiteOptions(data_root=root, limit=2))
    prompt = measure.prompt(measure.rows[1])
    assert prompt.count("Question:") == prompt.count("Answer:") == 6
    assert prompt.startswith("Question: What is 0 + 0?\nAnswer: 0+0 = <<0+0=0>>\n#### 0\n\nQuestion: What is 1 + 1?")
    assert prompt.endswith("#### 8\n\nQuestion: What is 6 + 6?\nAnswer:")
    assert measure.stop.search(" 12\n#### 12\n\nQuestion: And").start() == 13


@pytest.mark.parametrize(
    ("text", "answer", "right"),
    [
        ("he saw the dog", " dog", 1),
        ("he saw the dog", " dog.", 1),
        ("he saw the dog", "dog\n", 1),
        ("he saw the dog", " dogs", 0),
        ("he saw the dog", " dog's", 0),
        ("he saw the dog", " dog-like", 0),
        ("he saw the dog", " Dog", 0),
        ("he saw the dog", " old dog", 0),
        ("he saw the dog", "", 0),
        ('he said "King', ' "King', 1),
        ("a b the\ngloves", " the\ngloves", 1),
    ],
)
def test_lambada_scores(root, text, answer, right):
    measure = LambadaGenerate(SuiteOptions(data_root=root))
    assert measure.prompt({"text": text}) == text[: text.rindex(" ")]
    assert measure.score({"text": text}, answer) == {"exact_match": right}


@pytest.mark.parametrize(("answer", "length"), [(" dog and", 4), (" a\nb c", 4), (" dog", None), ("dog ", 3)])
def test_lambada_stops_after_a_word(answer, length):
    found = LambadaGenerate.stop.search(answer)
    assert (found.start() if found else None) == length


def test_items_run_by_length_and_pair_by_number(root, subject, monkeypatch):
    monkeypatch.setattr(generative, "UNIT", 2)

    def run(batch_size, subject=subject):
        measure = LambadaGenerate(SuiteOptions(data_root=root, batch_size=batch_size))
        return {unit: measure.run(subject, unit) for unit in measure.units(subject)}, measure

    results, measure = run(8)
    order = [i for unit in results.values() for i in unit["items"]]
    lengths = [len(subject.tokenizer(measure.prompt(measure.rows[i])).input_ids) for i in order]
    assert sorted(order) == [0, 1, 2, 3] != order and lengths == sorted(lengths)
    assert run(1)[0] == results
    scores = [1.0, 0.0, 1.0, 1.0]
    ours = {str(i): {"items": [i], "scores": {"exact_match": [score]}} for i, score in enumerate(scores)}
    theirs = {"0": {"items": [2, 0, 3, 1], "scores": {"exact_match": [1.0, 1.0, 1.0, 0.0]}}}
    by_number = measure.differences(ours, theirs)["exact_match"]
    assert by_number == paired(scores, scores)
    theirs["0"]["items"] = [0, 1, 2, 3]
    assert measure.differences(ours, theirs)["exact_match"] == paired(scores, [1.0, 1.0, 1.0, 0.0]) != by_number


def test_items_beyond_the_training_length_are_counted_apart(root, subject, tiny_teacher):
    measure = LambadaGenerate(SuiteOptions(data_root=root))
    assert [(row["beyond_training"], row["n"]) for row in measure.cells({"0": measure.run(subject, "0")})] == [
        (False, 4)
    ]
    lengths = sorted(len(prompt) for _, prompt in measure._by_length(subject))
    model = tiny_teacher("llama", vocab_size=len(subject.tokenizer), max_position_embeddings=lengths[2] + 16)
    short = dataclasses.replace(subject, model=model, fingerprint="g")
    rows = measure.cells({"0": measure.run(short, "0")})
    assert [(row["beyond_training"], row["n"]) for row in rows] == [(False, 3), (True, 1)]


def test_options_tell_the_items(root):
    def options(**changes):
        return LambadaGenerate(SuiteOptions(data_root=root, **changes)).options()

    assert options() == options(batch_size=1) == options(limit=4)
    assert options(limit=2) != options()
    assert Gsm8k(SuiteOptions(data_root=root)).options()["shots"] == 5


def test_missing_and_broken_data(tmp_path):
    for name in ("lambada_generate", "gsm8k", "tool_calls"):
        with pytest.raises(UserError, match="--data-root"):
            MEASURES[name](SuiteOptions(data_root=tmp_path))
    with pytest.raises(UserError, match="local copy"):
        MEASURES["tool_calls"](SuiteOptions())
    folder = tmp_path / "a" / "b"
    folder.mkdir(parents=True)
    (folder / "test.parquet").write_bytes(b"no parquet")
    with pytest.raises(UserError, match="cannot read"):
        read_rows(tmp_path, "a", "b", "test")


def test_every_measure_has_its_name(root):
    assert list(MEASURES) == ["repetition", "lambada_generate", "gsm8k", "tool_calls", "json", "agreement"]
    for name in ("repetition", "lambada_generate", "gsm8k", "json", "agreement"):
        assert MEASURES[name](SuiteOptions(data_root=root)).name == name


def test_side_by_side():
    def measured(**figures):
        kept = {
            role: {metric: {"value": value} for metric, value in figures.items()} for role in ("teacher", "student")
        }
        return {"figures": kept, "differences": {"student": {metric: {"p": 0.5} for metric in figures}}, "cells": {}}

    measures = {"lambada": measured(accuracy=0.5, perplexity=9.0), "wikitext2": measured(perplexity=20.0)}
    assert side_by_side({"measures": measures}) == []
    measures |= {"lambada_generate": measured(exact_match=0.4), "repetition": measured(greedy_loop=0.1)}
    first, second = side_by_side({"measures": measures})
    assert first["likelihood"] == {
        "measure": "lambada",
        "metric": "accuracy",
        "figures": {"teacher": {"value": 0.5}, "student": {"value": 0.5}},
        "differences": {"student": {"p": 0.5}},
    }
    assert first["generation"]["figures"]["student"] == {"value": 0.4}
    assert (second["likelihood"]["measure"], second["generation"]["metric"]) == ("wikitext2", "greedy_loop")
    measures["data"] = measured(perplexity=7.0)
    measures["agreement"] = measured(token_agreement=0.9, common_prefix=40.0)
    rows = side_by_side({"measures": measures})
    assert [row["likelihood"]["measure"] for row in rows] == ["lambada", "data", "agreement"]
