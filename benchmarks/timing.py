"""Paired timings: every round runs each candidate once, so that a machine whose speed drifts still gives ratios."""

import statistics
import time
from collections.abc import Callable


def compare(candidates: dict[str, Callable[[], object]], repeats: int) -> None:
    """Print each candidate's median milliseconds and its time over the first candidate's (min, median, max)."""
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for round_number in range(repeats + 1):
        for name, run in candidates.items():
            began = time.perf_counter()
            run()
            if round_number:  # the first round warms up
                seconds[name].append(time.perf_counter() - began)
    first = next(iter(seconds.values()))
    for name, times in seconds.items():
        ratios = sorted(b / a for a, b in zip(first, times, strict=True))
        low, middle, high = ratios[0], statistics.median(ratios), ratios[-1]
        print(f"{name:42} {statistics.median(times) * 1e3:9.1f} ms   x {middle:7.2f}  ({low:.2f} to {high:.2f})")
