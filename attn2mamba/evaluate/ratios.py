"""Figures that are a ratio of sums, such as nats over tokens, or a function of one, such as perplexity: errors by the
delta method, differences item by item."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .measure import Difference, Figure, two_sided_p


@dataclass(frozen=True)
class Scale:
    """A differentiable, increasing function of the ratio: value and derivative."""

    value: Callable[[float], float]
    slope: Callable[[float], float]


def exponential(x: float) -> float:
    """e^x; infinity where it overflows, as for perplexity by word in a script without spaces."""
    return math.inf if x > 709 else math.exp(x)


PLAIN = Scale(lambda x: x, lambda x: 1.0)
EXPONENTIAL = Scale(exponential, exponential)
BITS = Scale(lambda x: x / math.log(2), lambda x: 1 / math.log(2))


def ratio_figure(tops: Sequence[float], bottoms: Sequence[float], scale: Scale) -> Figure:
    """scale(sum of tops / sum of bottoms) over independent items, one of each an item."""
    ratio, influences = _influences(tops, bottoms)
    error = _error(influences)
    return Figure(scale.value(ratio), len(tops), None if error is None else scale.slope(ratio) * error)


def ratio_difference(
    ours: tuple[Sequence[float], Sequence[float]], theirs: tuple[Sequence[float], Sequence[float]], scale: Scale
) -> Difference:
    """Of two such figures over the same items, each given as (tops, bottoms). p is that of equal ratios, before the
    scale: for a perplexity, of equal nats a token."""
    (ratio, mine), (reference, other) = _influences(*ours), _influences(*theirs)
    assert len(mine) == len(other), "paired scores need the same items"
    scaled = [scale.slope(ratio) * a - scale.slope(reference) * b for a, b in zip(mine, other, strict=True)]
    p = two_sided_p(ratio - reference, _error([a - b for a, b in zip(mine, other, strict=True)]), len(mine))
    return Difference(scale.value(ratio) - scale.value(reference), _error(scaled), p, len(mine))


def _influences(tops: Sequence[float], bottoms: Sequence[float]) -> tuple[float, list[float]]:
    """The ratio, and what each item adds to its error."""
    total = math.fsum(bottoms)
    ratio = math.fsum(tops) / total
    return ratio, [(top - ratio * bottom) / total for top, bottom in zip(tops, bottoms, strict=True)]


def _error(influences: Sequence[float]) -> float | None:
    count = len(influences)
    return math.sqrt(count / (count - 1) * math.fsum(x * x for x in influences)) if count > 1 else None
