"""Ratios of sums: value, error, difference."""

import math
import random
import statistics

import pytest

from attn2mamba.evaluate.ratios import BITS, EXPONENTIAL, PLAIN, ratio_difference, ratio_figure


@pytest.fixture
def documents():
    draw = random.Random(0)
    tokens = [draw.randint(50, 500) for _ in range(200)]
    return [n * draw.gauss(3.0, 0.3) for n in tokens], tokens


def test_the_ratio_is_of_sums_not_a_mean_of_ratios():
    assert ratio_figure([3.0, 10.0], [1, 9], PLAIN).value == 1.3
    assert ratio_figure([3.0, 10.0], [1, 9], EXPONENTIAL).value == pytest.approx(math.exp(1.3))
    assert ratio_figure([3.0, 10.0], [1, 9], BITS).value == pytest.approx(1.3 / math.log(2))


def test_the_error_is_that_of_resampled_documents(documents):
    draw, pairs = random.Random(1), list(zip(*documents, strict=True))
    for scale in (PLAIN, EXPONENTIAL):
        figure = ratio_figure(*documents, scale)
        resampled = []
        for _ in range(2000):
            chosen = draw.choices(pairs, k=len(pairs))
            resampled.append(scale.value(sum(a for a, _ in chosen) / sum(b for _, b in chosen)))
        assert figure.stderr == pytest.approx(statistics.stdev(resampled), rel=0.08)


def test_equal_models_do_not_differ(documents):
    found = ratio_difference(documents, documents, EXPONENTIAL)
    assert (found.difference, found.stderr, found.p, found.n) == (0.0, 0.0, 1.0, 200)


def test_a_difference_far_below_the_spread_of_documents_shows(documents):
    draw = random.Random(2)
    nlls, tokens = documents
    ours = [nll + 0.01 * n * draw.gauss(1, 0.5) for nll, n in zip(nlls, tokens, strict=True)]
    found = ratio_difference((ours, tokens), documents, EXPONENTIAL)
    assert 0 < found.difference < ratio_figure(*documents, EXPONENTIAL).stderr
    assert found.p < 1e-6
    worth = ratio_figure(ours, tokens, EXPONENTIAL).value - ratio_figure(*documents, EXPONENTIAL).value
    assert found.difference == pytest.approx(worth)


def test_one_document_has_no_error():
    assert ratio_figure([3.0], [1], PLAIN).stderr is None
    assert ratio_difference(([3.0], [1]), ([2.0], [1]), PLAIN).p == 1.0


def test_a_ratio_beyond_any_float():
    assert ratio_figure([5000.0, 4000.0], [1, 1], EXPONENTIAL).to_dict()["value"] is None
