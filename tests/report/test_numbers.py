"""Numbers as people read them."""

import pytest

from attn2mamba.report.numbers import human, human_p


@pytest.mark.parametrize(
    ("value", "unit", "stderr", "text"),
    [
        (1.0412, "x", None, "1.04 x"),
        (162.7, "x", None, "163 x"),
        (0.4523, "share", 0.0112, "45.2 ± 1.1 %"),
        (-0.0123, "points", 0.004, "−1.2 ± 0.4 points"),
        (0.0123, "points", None, "+1.2 points"),
        (12.3 * 2**20, "bytes", None, "12.3 MiB"),
        (4096.2, "tokens", None, "4,096 tokens"),
        (3433.2, "tokens", 633.4, "3,433 ± 633 tokens"),
        (0.0506, "seconds", None, "50.6 ms"),
        (5400, "seconds", None, "1.5 h"),
        (7.6e13, "flops", None, "76.0 TFLOP"),
        (16.9459, "perplexity", 0.123, "16.95 ± 0.12"),
        (5.09e16, "perplexity", 4.294e16, "5.09e+16 ± 4.29e+16"),
        (49.62, "rate", None, "49.6 tokens/s"),
        (0.0, "number", 0.0, "0 ± 0"),
    ],
)
def test_human(value, unit, stderr, text):
    assert human(value, unit, stderr) == text


def test_p():
    assert [human_p(p) for p in (0.0001, 0.0123, 0.5, None)] == ["p < 0.001", "p = 0.012", "p = 0.50", ""]
