"""Accelerators by name, and rates."""

import pytest

from attn2mamba.errors import UserError
from attn2mamba.hardware import HARDWARE, parse_hardware


def test_names_and_numbers():
    assert parse_hardware("A100-80GB") is HARDWARE["a100-80gb"]
    given = parse_hardware("2e11")
    assert (given.bf16, given.fp32, given.memory, given.bandwidth) == (2e11, 2e11, None, None)


@pytest.mark.parametrize("name", HARDWARE)
def test_no_figure_is_off_by_a_thousand(name):
    given = HARDWARE[name]
    assert 1e13 < given.fp32 < given.bf16 < 1e16
    assert 1e10 < given.memory < 1e12 and 1e11 < given.bandwidth < 1e13


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("a100-80g", "did you mean a100-80gb?"),
        ("h100", "did you mean h100-pcie or h100-sxm?"),
        ("abacus", "a number of FLOP/s or one of"),
        ("-1", "above 0"),
        ("nan", "above 0"),
    ],
)
def test_what_is_neither(text, complaint):
    with pytest.raises(UserError, match=complaint):
        parse_hardware(text)
