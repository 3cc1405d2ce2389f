"""Loops are found where they are, and nowhere else."""

import io

import pytest

from attn2mamba.errors import UserError
from attn2mamba.evaluate import repetition
from attn2mamba.evaluate.measure import Subject
from attn2mamba.evaluate.openings import OPENING_TOKENS, OPENINGS, opening_ids, read_openings
from attn2mamba.evaluate.options import SuiteOptions
from attn2mamba.evaluate.repetition import Repetition, distinct, loop_period
from attn2mamba.evaluate.results import Results
from attn2mamba.evaluate.runner import Candidate, evaluate
from attn2mamba.progress import Steps

VARIED = list(range(100, 400))


@pytest.mark.parametrize(
    ("tokens", "period"),
    [
        (VARIED, None),
        ([], None),
        ([1] * 31, None),
        ([1] * 32, 1),
        (VARIED + [1, 2] * 16, 2),
        (VARIED + [1, 2] * 15, None),
        (VARIED + [1, 2] * 16 + [3], None),
        ([1, 2] * 16 + VARIED, None),
        (VARIED + list(range(20)) * 3, 20),
        (VARIED + list(range(20)) * 3 + [0, 1, 2], 20),
        (VARIED + list(range(20)) * 2 + list(range(19)), None),
        (list(range(128)) * 3, 128),
        (list(range(129)) * 4, None),
        (VARIED + [1, 1, 2] * 30, 3),
    ],
)
def test_loops(tokens, period):
    assert loop_period(tokens) == period


def test_distinct_grams():
    assert distinct([1, 2, 1, 2, 1], 1) == 2 / 5
    assert distinct([1, 2, 1, 2, 1], 2) == 2 / 4
    assert distinct([1, 2, 1, 2, 1], 4) == 1.0
    assert distinct([1] * 7, 4) == 1 / 4
    assert distinct([1, 2], 4) == 1.0


def test_openings_are_of_one_length(tiny_tokenizer, bos_tokenizer):
    assert len(OPENINGS) == len(set(OPENINGS)) == 20
    for text in OPENINGS:
        assert len(opening_ids(tiny_tokenizer, text)) == OPENING_TOKENS
        assert opening_ids(bos_tokenizer, text)[0] == bos_tokenizer.bos_token_id
        assert len(text.split()) >= OPENING_TOKENS  # so that no tokenizer makes fewer tokens of it


def test_openings_of_the_users_text(tmp_path, tiny_tokenizer):
    path = tmp_path / "x.jsonl"
    texts = [f"{word} " * 100 for word in ("one", "two", "three")]
    path.write_text("".join(f'{{"text": "{text}"}}\n' for text in [texts[0], "too short", *texts[1:]]))
    assert [x.split()[0] for x in read_openings((str(path),), None)] == ["one", "two", "three"]
    assert [x.split()[0] for x in read_openings((str(path),), 2)] == ["one", "two"]
    path.write_text('{"text": "too short"}\n')
    with pytest.raises(UserError, match="no text of 240 characters"):
        read_openings((str(path),), None)
    with pytest.raises(UserError, match="needs 24 tokens"):
        opening_ids(tiny_tokenizer, "the cat")


@pytest.fixture
def short(monkeypatch):
    monkeypatch.setattr(repetition, "NEW_TOKENS", 36)
    monkeypatch.setattr(repetition, "CHECKPOINTS", (32, 36))
    monkeypatch.setattr(repetition, "UNIT", 2)


@pytest.fixture(scope="module")
def subject(tiny_teacher, tiny_tokenizer):
    model = tiny_teacher("llama", vocab_size=len(tiny_tokenizer))
    return Subject("teacher", "tiny", model, tiny_tokenizer, "fp32", "f")


def test_measure(short, subject, tmp_path):
    def run(batch_size, seed=0, limit=3):
        measure = Repetition(SuiteOptions(limit=limit, seed=seed, batch_size=batch_size))
        return {unit: measure.run(subject, unit) for unit in measure.units(subject)}, measure

    results, measure = run(8)
    assert list(results) == ["greedy/0", "greedy/2", "sampled/0", "sampled/2"]
    assert run(1)[0] == results
    other = run(8, seed=1)[0]
    assert other["greedy/0"] == results["greedy/0"] and other["sampled/0"] != results["sampled/0"]
    figures = measure.figures(results)
    assert {figure.n for figure in figures.values()} == {3}
    for mode in ("greedy", "sampled"):
        assert figures[f"{mode}_tokens"].value <= 36 and figures[f"{mode}_tokens"].stderr is not None
        texts = [text for unit in results if unit.startswith(mode) for text in results[unit]["continuations"]]
        assert len(texts) == 3
    assert figures["sampled_distinct_2"].value > figures["greedy_distinct_2"].value  # tiny models run in circles
    assert [(row["mode"], row["tokens"], row["n"]) for row in measure.cells(results)] == [
        (mode, tokens, 3) for mode in ("greedy", "sampled") for tokens in (32, 36)
    ]
    last = measure.cells(results)[1]
    assert last["loop"] == figures["greedy_loop"].value


def test_an_end_is_no_part_of_the_text(short, subject, monkeypatch):
    """Of 9 tokens and the one that ends the text, nine count."""
    rows = [[*range(1, 10), subject.tokenizer.eos_token_id], [1] * 36]
    monkeypatch.setattr(repetition, "continuations", lambda *_, **__: rows)
    scores = Repetition(SuiteOptions(limit=2)).run(subject, "greedy/0")["scores"]
    assert scores["greedy_tokens"] == [9.0, 36.0]
    assert scores["greedy_loop"] == [0.0, 1.0]
    assert scores["greedy_repeated_4grams"] == [0.0, pytest.approx(32 / 33)]


def test_resumes(short, subject, tmp_path, monkeypatch):
    """What was generated before a stop is not generated again."""
    asked = []
    run = Repetition.run

    def counted(self, subject, unit):
        asked.append(unit)
        if len(asked) == 3:
            raise KeyboardInterrupt
        return run(self, subject, unit)

    monkeypatch.setattr(Repetition, "run", counted)

    def once():
        steps = Steps(io.StringIO())
        measure = Repetition(SuiteOptions(limit=3))
        return evaluate([Candidate("teacher", lambda: subject)], [measure], Results(tmp_path), steps, "test")

    with pytest.raises(KeyboardInterrupt):
        once()
    report = once()
    assert asked == ["greedy/0", "greedy/2", "sampled/0", "sampled/0", "sampled/2"]
    assert report["measures"]["repetition"]["figures"]["teacher"]["sampled_loop"]["n"] == 3
    once()
    assert len(asked) == 5
