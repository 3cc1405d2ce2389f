"""A measured number with all that it takes to reproduce it, and numbers as people read them."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..evaluate.measure import with_error
from ..sizes import human_bytes

Json = dict[str, Any]
MINUS = "\N{MINUS SIGN}"
SUFFIXES = {"x": " x", "speed-up": " x", "rate": " tokens/s"}
NOT_FINITE = "the student's perplexity is not finite"
"""Note of a headline that was measured, and came out as no number."""
MEASURED = "measured"
"""Note of a headline that was measured in its very place, and not reckoned from others."""

INTERVAL = 1.96
"""Standard errors on either side of a figure that make its 95 % interval."""


@dataclass(frozen=True)
class Number:
    """value, in `unit` (x, speed-up, share, points, tokens, bytes, seconds, flops, rate, perplexity, nats or a plain
    number; None: not measured, and `command` would measure it), its standard error, the n `of` which it is a figure,
    the precision of the model that gave it, and the command."""

    value: float | None
    unit: str
    n: int
    of: str
    precision: str
    command: str
    stderr: float | None = None
    note: str = ""

    @property
    def measured(self) -> bool:
        return self.value is not None

    def to_dict(self) -> Json:
        return {**asdict(self), "measured": self.measured, "text": self.text, "source": self.source}

    @property
    def text(self) -> str:
        return "not measured" if self.value is None else human(self.value, self.unit, self.stderr)

    @property
    def source(self) -> str:
        """n and precision, in words."""
        if self.value is None:
            return self.note
        return ", ".join(x for x in (f"n = {self.n:,} {self.of}", self.precision, self.note) if x)


def missing(unit: str, command: str, note: str = "") -> Number:
    """Stands where a number would, had it been measured; `command` measures it."""
    return Number(None, unit, 0, "", "", command, note=note)


def human(value: float, unit: str, stderr: float | None = None) -> str:
    """1.04 x, 12.3 MiB, 4,096 tokens, 45.2 ± 1.1 %; the standard error goes where it has a sense in that unit."""
    if unit in ("share", "points"):
        sign = "+" if unit == "points" and value > 0 else ""
        error = "" if stderr is None else f" ± {100 * stderr:.1f}"
        return minus(f"{sign}{100 * value:.1f}{error} {'%' if unit == 'share' else 'points'}")
    if unit == "speed-up" and 0 < value < 1:  # so that no one reads 0.6 x as a gain
        return f"{human(1 / value, 'x', None if stderr is None else stderr / value**2)} slower"
    if unit == "bytes":
        return human_bytes(value)
    if unit == "seconds":
        return human_seconds(value)
    if unit == "flops":
        return human_flops(value)
    if unit == "tokens":
        error = "" if stderr is None else f" ± {round(stderr):,}"
        return f"{round(value):,}{error} tokens"
    times = 2 if value < 10 else 0
    digits = {"x": times, "speed-up": times, "perplexity": 2, "nats": 4}.get(unit)

    if stderr and abs(value) < 1e6:
        return minus(f"{with_error(value, stderr)}{SUFFIXES.get(unit, '')}")
    text = plain(value) if digits is None or abs(value) >= 1e6 else f"{value:,.{digits}f}"
    error = "" if stderr is None else f" ± {plain(stderr)}"
    return minus(f"{text}{error}{SUFFIXES.get(unit, '')}")


def plain(value: float) -> str:
    """Three significant digits, or all of a whole number."""
    if value == int(value) and abs(value) < 1e9:
        return f"{int(value):,}"
    return (
        f"{value:,.{max(0, 2 - math.floor(math.log10(abs(value))))}f}" if 1e-3 <= abs(value) < 1e6 else f"{value:.2e}"
    )


def minus(text: str) -> str:
    return text.replace("-", MINUS) if text.startswith("-") else text


def human_seconds(value: float) -> str:
    for unit, size in (("h", 3600.0), ("min", 60.0), ("s", 1.0), ("ms", 1e-3)):
        if abs(value) >= size:
            return f"{value / size:.1f} {unit}"
    return f"{value * 1e6:.0f} µs"


def human_flops(value: float) -> str:
    for unit, size in (("E", 1e18), ("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if value >= size:
            return f"{value / size:.1f} {unit}FLOP"
    return f"{value:,.0f} FLOP"


def count_words(counts: Sequence[int]) -> str:
    """n = 20, or n = 8 to 20."""
    low, high = min(counts, default=0), max(counts, default=0)
    return f"n = {low:,}" if low == high else f"n = {low:,} to {high:,}"


def human_p(p: float | None) -> str:
    if p is None:
        return ""
    return "p < 0.001" if p < 0.001 else f"p = {p:.3f}" if p < 0.1 else f"p = {p:.2f}"


def normal_p(mean: float, stderr: float) -> float:
    """Two-sided p of a mean of zero."""
    return math.erfc(abs(mean) / stderr / math.sqrt(2)) if stderr else float(mean == 0)


def root_sum_square(errors: Sequence[float]) -> float:
    return math.sqrt(sum(e * e for e in errors))
