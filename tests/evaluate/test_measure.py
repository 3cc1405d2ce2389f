"""Figures with errors, and differences that say whether they mean anything."""

import json
import math
import random

import pytest

from attn2mamba.evaluate.measure import (
    Difference,
    Figure,
    joined_scores,
    mean_figure,
    paired,
    student_t,
    verdict,
    with_error,
)


@pytest.mark.parametrize(
    ("freedom", "t", "p"),
    [(1, 12.706, 0.05), (2, 4.303, 0.05), (5, 2.571, 0.05), (10, 3.169, 0.01), (29, 2.045, 0.05), (200, 1.972, 0.05)],
)
def test_student_t_as_tabled(freedom, t, p):
    assert student_t(t, freedom) == pytest.approx(p, rel=1e-3)
    assert student_t(0.0, freedom) == 1.0
    assert student_t(t, freedom) > student_t(t + 0.1, freedom)


def test_student_t_becomes_normal():
    assert student_t(1.5, 200) == pytest.approx(student_t(1.5, 201), rel=0.02)
    assert student_t(math.inf, 3) == 0.0


def test_mean_and_its_error():
    assert mean_figure([1.0, 0.0, 1.0, 0.0]) == Figure(0.5, 4, pytest.approx(math.sqrt(1 / 3 / 4)))
    assert mean_figure([0.25]) == Figure(0.25, 1, None)


def test_right_and_wrong_answers_are_compared_by_an_exact_sign_test():
    """Eight items that only the teacher has right, two that only we have, 90 alike: p = P(|X - 5| >= 3), X of 10."""
    ours, theirs = [0.0] * 8 + [1.0] * 2 + [1.0] * 90, [1.0] * 8 + [0.0] * 2 + [1.0] * 90
    found = paired(ours, theirs)
    assert (found.difference, found.n) == (pytest.approx(-0.06), 100)
    assert found.p == pytest.approx(2 * (1 + 10 + 45) / 1024)
    assert found.stderr == pytest.approx(math.sqrt((0.1 - 0.06**2) / 99), rel=0.05)


@pytest.mark.parametrize(("count", "expected"), [(20, "open"), (150, "open"), (300, "equal")])
def test_answers_alike_prove_equality_only_where_they_are_many(count, expected):
    """Of 150 answers alike, up to 2 % of all may still differ (the rule of three)."""
    same = [1.0, 0.0] * (count // 2)
    found = paired(same, same)
    assert (found.difference, found.p) == (0.0, 1.0)
    assert verdict("acc", found, 0.5) == expected


def test_numbers_are_compared_by_students_t():
    draw = random.Random(0)
    theirs = [draw.random() for _ in range(8)]
    ours = [x + 0.1 + draw.random() * 0.02 for x in theirs]
    found = paired(ours, theirs)
    assert found.difference == pytest.approx(0.11, abs=0.01) and found.p < 1e-6
    steps = [a - b for a, b in zip(ours, theirs, strict=True)]
    assert found.stderr == pytest.approx(mean_figure(steps).stderr)


def test_pairing_removes_what_items_share():
    """Items differ far more than models do: unpaired, a difference of 0.01 would drown."""
    draw = random.Random(1)
    theirs = [10 * draw.random() for _ in range(50)]
    ours = [x + 0.01 + draw.gauss(0, 0.01) for x in theirs]
    assert mean_figure(theirs).stderr > 0.2 and paired(ours, theirs).p < 0.001


@pytest.mark.parametrize("count", [2, 3, 5])
def test_few_differences_that_happen_to_be_alike_prove_nothing(count):
    """Scores of four answers lie on a coarse grid: two contexts, each one answer worse, once had p = 0."""
    found = paired([0.5] * count, [0.75] * count)
    assert found.p == pytest.approx(2 / 2**count) and verdict("greedy", found, 0.75) == "open"
    assert paired([3.0] * count, [4.0] * count).p == pytest.approx(2 / 2**count)


def test_coarse_scores_that_are_all_alike_are_not_equal_at_once():
    assert verdict("right", paired([0.5] * 40, [0.5] * 40), 0.5) == "open"
    assert verdict("right", paired([0.5] * 400, [0.5] * 400), 0.5) == "equal"


def test_errors_say_how_many_digits_mean_something():
    assert with_error(62.2169, 16.62) == "62 ± 17"
    assert with_error(-0.39871, 0.018132, "+") == "-0.399 ± 0.018"
    assert with_error(1.0, 0.0) == "1.00 ± 0.00"
    assert with_error(5.0, math.inf) == "5.00 ± inf"


def test_one_item_says_nothing():
    found = paired([0.3], [0.9])
    assert (found.stderr, found.p) == (None, 1.0)
    assert json.dumps(found.to_dict())


def test_equal_only_where_the_interval_is_narrow():
    assert verdict("acc", Difference(0.001, 0.002, 0.6, 5000), 0.6) == "equal"
    assert verdict("acc", Difference(0.001, 0.02, 0.9, 50), 0.6) == "open"
    assert verdict("acc", Difference(-0.05, 0.01, 1e-6, 5000), 0.6) == "differs"
    assert verdict("perplexity", Difference(0.1, 0.02, 1e-6, 500), 20.0) == "equal"  # half a per cent
    assert verdict("acc", Difference(0.0, 0.0, 1.0, 3), 0.6) == "open"  # three items
    assert verdict("acc", Difference(0.0, None, 1.0, 1), 0.6) == "open"


def test_equal_nats_are_equal_perplexities():
    """Of a sum in nats 1 % is no measure: at 4 nats it would be 4 % of the perplexity."""
    assert verdict("log_likelihood", Difference(-0.03, 0.001, 1e-6, 500), -4.0) == "differs"
    assert verdict("perplexity", Difference(1.6, 0.05, 1e-6, 500), math.exp(4)) == "differs"
    assert verdict("nats_per_token", Difference(0.005, 0.001, 1e-6, 500), 3.0) == "equal"


def test_what_is_no_number_is_null_in_json():
    assert Figure(math.nan, 3, math.inf).to_dict() == {"value": None, "n": 3, "stderr": None}


def test_scores_of_units_are_joined_in_order():
    units = {"a": {"scores": {"x": [1.0, 2.0], "y": [0.0]}}, "b": {"scores": {"x": [3.0]}}}
    assert joined_scores(units) == {"x": [1.0, 2.0, 3.0], "y": [0.0]}
