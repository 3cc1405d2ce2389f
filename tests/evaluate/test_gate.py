"""A teacher that cannot be right is told from one that is merely small."""

import math
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from attn2mamba.evaluate import gate
from attn2mamba.evaluate.corpora import Corpus
from attn2mamba.evaluate.gate import complaint, gate_measures, unlike_itself
from attn2mamba.evaluate.measure import Figure, Measure, Subject
from attn2mamba.evaluate.options import SuiteOptions


class Told(Measure):
    """Figures and cells as told."""

    def __init__(self, name, figures, cells=()):
        self.name, self.told, self.rows = name, figures, list(cells)

    def units(self, subject):
        return []

    def run(self, subject, unit):
        return {}

    def figures(self, results):
        return self.told

    def cells(self, results):
        return self.rows


@pytest.fixture
def subject(tiny_teacher, tiny_tokenizer):
    model = tiny_teacher("llama", vocab_size=len(tiny_tokenizer))
    return Subject("teacher", "smollm2-135m", model, tiny_tokenizer, "fp32", "print")


@pytest.mark.parametrize("scale", [0.0, 1.0])
def test_guessing_is_not_reading(subject, scale):
    """With all weights 0 every token is as likely as any other; random weights are worse than that."""
    for parameter in subject.model.parameters():
        parameter.data.mul_(scale)
    measure = Corpus("text", lambda: ["the cat sat on the mat"], "text", 16, None)
    units = {unit: measure.run(subject, unit) for unit in measure.units(subject)}
    found = complaint(measure, subject, units)
    assert found is not None and "hardly better than guessing among" in found


def test_a_broken_path_gives_no_number(subject):
    subject.model.lm_head.weight.data.fill_(torch.nan)
    measure = Corpus("text", lambda: ["the cat sat on the mat"], "text", 16, None)
    units = {unit: measure.run(subject, unit) for unit in measure.units(subject)}
    assert complaint(measure, subject, units) == "its perplexity is no number"


@pytest.mark.parametrize(
    ("measure", "metric", "figure", "wrong"),
    [
        ("wikitext2", "perplexity", Figure(23.5, 4, 4.0), False),
        ("wikitext2", "perplexity", Figure(28.0, 4, 4.0), True),
        ("wikitext2", "perplexity", Figure(14.0, 4, 1.0), True),
        ("lambada", "accuracy", Figure(0.25, 64, 0.06), False),
        ("lambada", "accuracy", Figure(0.2, 64, 0.05), True),
        ("lambada", "accuracy", Figure(0.6, 64, 0.06), True),
        ("lambada", "accuracy", Figure(0.0, 2, 0.0), False),
        ("data", "perplexity", Figure(99.0, 4, 4.0), False),
        ("another", "perplexity", Figure(1e9, 4, 4.0), False),
    ],
)
def test_known_models_have_known_figures(subject, measure, metric, figure, wrong):
    found = unlike_itself(Told(measure, {metric: figure}), subject, {})
    assert (found is not None) == wrong
    if wrong:
        assert "is known to be" in found
    stranger = replace(subject, name="another")
    assert unlike_itself(Told(measure, {metric: figure}), stranger, {}) is None


def test_answers_below_chance_are_mixed_up(subject):
    def row(accuracy):
        return {"task": "arc", "n": 500, "chance": 0.25, "acc": accuracy}

    assert complaint(Told("arc", {}, [row(0.21)]), subject, {}) is None
    assert "below the 0.250 of a guess" in complaint(Told("arc", {}, [row(0.26), row(0.1)]), subject, {})
    assert complaint(Told("arc", {"acc": Figure(math.nan, 3)}), subject, {}) == "its acc is no number"


def test_the_measures_own_complaint_counts(subject):
    class Own(Told):
        def complaint(self, figures):
            return "backwards"

    assert complaint(Own("x", {}), subject, {}) == "backwards"


def test_few_items_and_no_data_needed(tmp_path, corpus):
    (own,) = gate_measures(SuiteOptions(data=(corpus,), limit=10**6, context=(4096,)))
    assert (own.name, own.limit, own.context) == ("data", gate.WINDOWS, gate.CONTEXT)


def test_models_of_few_positions_pass_with_short_contexts(corpus):
    """A gate of 1,024 tokens once refused GPT-2 with 512 positions, whatever --context said."""
    (own,) = gate_measures(SuiteOptions(data=(corpus,), context=(256, 512)))
    assert own.context == 256


def test_what_a_data_root_has_is_read_too(tmp_path, corpus):
    folder = tmp_path / "EleutherAI" / "lambada_openai" / "default"
    folder.mkdir(parents=True)
    pq.write_table(pa.table({"text": ["the cat sat"]}), folder / "test.parquet")
    found = gate_measures(SuiteOptions(tmp_path, data=(corpus,)))
    assert [measure.name for measure in found] == ["data", "lambada"]


@pytest.mark.slow
def test_the_built_in_teacher_passes():
    from attn2mamba.evaluate.command import Loading, load_subject

    subject = load_subject("teacher", "smollm2-135m", Loading())
    (measure,) = gate_measures(SuiteOptions())
    units = {unit: measure.run(subject, unit) for unit in measure.units(subject)}
    assert complaint(measure, subject, units) is None and unlike_itself(measure, subject, units) is None
    assert measure.figures(units)["perplexity"].value == pytest.approx(15.53, abs=0.1)
