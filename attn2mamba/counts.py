"""Counts as people write them."""

from decimal import Decimal

from attn2mamba.errors import UserError

SCALES = {"k": 10**3, "m": 10**6, "b": 10**9}
LARGEST = 10**15


def parse_count(value: object) -> int:
    """The positive whole number that 50000, 5e4, "5e4", "50k", "1.5M" or "1B" stands for.

    Raises UserError for anything else.
    """
    text = str(value).strip().lower()
    scale = SCALES.get(text[-1:])
    try:
        number = Decimal(text[:-1] if scale else text) * (scale or 1)
    except ArithmeticError:
        number = Decimal("nan")
    if not number.is_finite() or not 1 <= number <= LARGEST or number != int(number):
        raise UserError(f"{value!r} is not a count above 0, such as 50000, 5e4, 50k, 1.5M or 1B")
    return int(number)


def parse_list(text: str, option: str, k: int = 1000) -> tuple[int, ...]:
    """Counts between commas, in rising order, each once: "4k,1k" is (1000, 4000), with k=1024 (1024, 4096), and 1M its
    square.

    Raises UserError, naming the option, for anything else.
    """
    found = set()
    for part in text.lower().split(","):
        part = part.strip()
        scale = {"k": k, "m": k * k}.get(part[-1:], 1)
        try:
            found.add(parse_count(part if scale == 1 else part[:-1]) * scale)
        except UserError as error:
            raise UserError(f"{option} {text}: {error}") from None
    return tuple(sorted(found))
