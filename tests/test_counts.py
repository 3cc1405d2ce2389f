import pytest

from attn2mamba.counts import parse_count, parse_list
from attn2mamba.errors import UserError


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        (50000, 50000),
        (5e4, 50000),
        ("5e4", 50000),
        ("50k", 50000),
        ("50K", 50000),
        ("1.5M", 1500000),
        ("1B", 10**9),
    ],
)
def test_counts_are_read_as_people_write_them(written, meant):
    assert parse_count(written) == meant


def test_lengths_are_powers_of_two():
    assert parse_list("4k,1k,1M,7", "--context", k=1024) == (7, 1024, 4096, 1024**2)
    assert parse_list("5k,2m", "--limit") == (5000, 2_000_000)


@pytest.mark.parametrize("written", [0, -5, 1.5, "1.5", "", "k", "50kk", True, None, "nan", "inf", "1e999999", []])
def test_what_is_no_count_is_refused(written):
    with pytest.raises(UserError, match="is not a count"):
        parse_count(written)
