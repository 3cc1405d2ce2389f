"""The rules of the verdict, and that it never claims what was not measured."""

import pytest

from attn2mamba.report.numbers import MEASURED, NOT_FINITE, Number, missing
from attn2mamba.report.verdict import Grade, grade_accuracy, grade_perplexity, grade_quality, grade_recall, verdict


def number(value, unit="x", note=""):
    return (
        missing(unit, "attn2mamba eval RUN") if value is None else Number(value, unit, 100, "", "fp32", "", note=note)
    )


def difference(value, stderr=0.001, n=1000):
    return {"value": value, "stderr": stderr, "n": n, "of": "items of piqa"}


def card(ratio=None, recall=None, memory=None, speed=None, note=MEASURED, measured=None):
    return {
        "perplexity_ratio": number(ratio),
        "recall_kept": number(recall, "share"),
        "memory_at_32k": number(memory and 1e6, "bytes"),
        "memory_factor_at_32k": number(memory),
        "speed_up_at_32k": number(speed, note=note),
        "speed_up_measured": number(measured, note="1,024 tokens"),
    }


@pytest.mark.parametrize(
    ("ratio", "grade"),
    [(0.99, "KEPT"), (1.05, "KEPT"), (1.06, "MOST"), (1.25, "MOST"), (1.26, "LOST"), (None, "UNKNOWN")],
)
def test_perplexity(ratio, grade):
    assert grade_perplexity(number(ratio)) is Grade[grade]


@pytest.mark.parametrize(
    ("found", "grade"),
    [
        (difference(-0.015), "KEPT"),
        (difference(-0.03), "LOST"),
        (difference(0.0, 0.02), "OPEN"),  # not significant, and no proof of anything
        (difference(-0.03, 0.02), "OPEN"),
        (difference(0.0, 0.0, 10), "OPEN"),
        (difference(0.0, None), "OPEN"),
        (None, "UNKNOWN"),
    ],
)
def test_accuracy_is_kept_only_where_its_interval_says_so(found, grade):
    assert grade_accuracy(found) is Grade[grade]


def test_quality_is_the_worse_of_the_two():
    assert grade_quality(number(1.01), difference(-0.1)) is Grade.LOST
    assert grade_quality(number(1.2), difference(0.0)) is Grade.MOST
    assert grade_quality(number(1.01), None) is Grade.KEPT
    assert grade_quality(number(None), None) is Grade.UNKNOWN


@pytest.mark.parametrize(
    ("kept", "grade"), [(0.9, "KEPT"), (0.89, "MOST"), (0.5, "MOST"), (0.4, "LOST"), (None, "UNKNOWN")]
)
def test_recall(kept, grade):
    assert grade_recall(number(kept, "share")) is Grade[grade]


def test_sentences():
    text = verdict("run", card(1.04, 0.31, 100.0, 1.5), difference(-0.004))
    assert text == (
        "run keeps the quality (perplexity 1.04 x the teacher's; accuracy −0.4 ± 0.1 points on piqa: kept) but loses "
        "the recall "
        "(31.0 % of the teacher's); at 32,768 tokens its state takes 100 x less memory than a KV cache (reckoned); "
        "after 32,768 tokens it decodes 1.5 x as fast as its teacher."
    )
    text = verdict("run", card(2.0, 0.1, 0.5, 0.7), difference(-0.2))
    assert "loses the quality" in text and "and loses the recall" in text
    assert "takes 2.0 x more memory" in text and "1.4 x slower than its teacher" in text
    text = verdict("run", card(1.6, measured=0.5), difference(-0.05, 0.03))
    assert "loses the quality (perplexity 1.60 x the teacher's; accuracy −5.0 ± 3.0 points on piqa: open)" in text
    assert "after 1,024 tokens it decodes 2.0 x slower than its teacher" in text and "speed at 32k" in text
    assert "but keeps part of the recall" in verdict("run", card(2.0, 0.6), difference(-0.2))
    assert "may keep the quality (these items cannot tell)" in verdict("run", card(1.0), difference(0.0, 0.1))
    assert "(reckoned)" in verdict("run", card(1.0, speed=2.0, note="reckoned"), None)


def test_what_came_out_as_no_number_is_lost_and_not_unknown():
    broken = {**card(), "perplexity_ratio": missing("x", "", NOT_FINITE)}
    text = verdict("run", broken, None)
    assert text.startswith("run loses the quality (its perplexity is not finite).")
    assert "Not measured: task accuracy, recall" in text


def test_what_was_not_measured_is_named_and_not_claimed():
    text = verdict("run", card(1.04), None)
    assert text == (
        "run keeps the perplexity (1.04 x the teacher's). "
        "Not measured: task accuracy, recall, memory at 32k, speed at 32k."
    )
    text = verdict("run", card(1.2, 0.95), None)
    assert text.startswith("run comes near the perplexity (1.20 x the teacher's) and keeps the recall (95.0 %")
    assert "loses the perplexity" in verdict("run", card(3.0), None)
    assert verdict("run", card(), None) == "run: nothing was measured yet."
    text = verdict("run", card(recall=0.95), None)
    assert text.startswith("run keeps the recall (95.0 % of the teacher's).") and "quality" not in text
