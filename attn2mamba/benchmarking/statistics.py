"""Spread of repeats, least-squares lines through them, and where two curves meet."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]
Points = Sequence[tuple[float, float]]

T_95 = (math.inf, 12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23)
"""Two-sided 95 % quantiles of Student's t by degrees of freedom; 2 stands for more."""


def clearly(points: int) -> float:
    """Standard errors by which slopes of lines through so many points must differ before anything is said of it."""
    freedom = max(0, points - 2)
    return T_95[freedom] if freedom < len(T_95) else 2.0


def spread(values: Sequence[float]) -> Json:
    """Median, quartiles (None of a single value) and count."""
    quartiles = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else None
    low, high = (quartiles[0], quartiles[2]) if quartiles else (None, None)
    return {"median": statistics.median(values), "quartiles": [low, high], "n": len(values)}


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest of the values that at least `share` of them do not exceed."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


@dataclass(frozen=True)
class Line:
    """y = intercept + slope x by least squares over n points; standard errors are None for a line through two."""

    intercept: float
    slope: float
    intercept_stderr: float | None
    slope_stderr: float | None
    mean_x: float
    n: int

    def at(self, x: float) -> float:
        return self.intercept + self.slope * x

    def falls(self) -> bool:
        """Whether the slope is clearly below 0."""
        return self.slope_stderr is not None and self.slope < -clearly(self.n) * self.slope_stderr

    def relative_stderr(self, x: float) -> float:
        """Standard error of the line's height at x over that height; infinite where it is not known."""
        if self.intercept_stderr is None or self.slope_stderr is None or self.at(x) <= 0:
            return math.inf
        variance = self.intercept_stderr**2 + (x**2 - 2 * x * self.mean_x) * self.slope_stderr**2
        return math.sqrt(max(0.0, variance)) / self.at(x)


def fit_line(points: Points) -> Line | None:
    """None where all points have the same x."""
    if len({x for x, _ in points}) < 2:
        return None
    xs, ys = [x for x, _ in points], [y for _, y in points]
    mean_x, mean_y, n = statistics.fmean(xs), statistics.fmean(ys), len(points)
    square = sum((x - mean_x) ** 2 for x in xs)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / square
    intercept = mean_y - slope * mean_x
    if n == 2:
        return Line(intercept, slope, None, None, mean_x, n)
    variance = sum((y - intercept - slope * x) ** 2 for x, y in points) / (n - 2)
    errors = math.sqrt(variance * (1 / n + mean_x**2 / square)), math.sqrt(variance / square)
    return Line(intercept, slope, *errors, mean_x, n)


def crossing(teacher: Line, student: Line) -> tuple[float | None, float | None]:
    """x above which the student's line is below the teacher's, and its standard error (delta method); 0 where it is
    below from the start. (None, None) where the student's slope is not clearly the smaller one."""
    rise = teacher.slope - student.slope
    rise_error = _joined(teacher.slope_stderr, student.slope_stderr)
    if rise <= 0 or rise <= clearly(min(teacher.n, student.n)) * rise_error:
        return None, None
    x = (student.intercept - teacher.intercept) / rise
    variance = _joined(teacher.intercept_stderr, student.intercept_stderr) ** 2 + (x * rise_error) ** 2
    for line in (teacher, student):  # intercept and slope of one line go against each other
        variance -= 2 * x * line.mean_x * (line.slope_stderr or 0.0) ** 2
    known = teacher.slope_stderr is not None and student.slope_stderr is not None
    return max(0.0, x), math.sqrt(max(0.0, variance)) / rise if known else None


def _joined(*errors: float | None) -> float:
    return math.hypot(*(e or 0.0 for e in errors))


def interpolated_crossing(teacher: Points, student: Points) -> float | None:
    """x from which on the student's curve stays below the teacher's, both given at the same x, straight between points
    in a plot with logarithmic axes. None where it is above at the last point, or below at all of them: nothing is
    guessed beyond the points."""
    gaps = [(x, math.log(s) - math.log(t)) for (x, t), (_, s) in zip(teacher, student, strict=True)]
    if not gaps or gaps[-1][1] >= 0 or all(gap < 0 for _, gap in gaps):
        return None
    last = max(i for i, (_, gap) in enumerate(gaps) if gap >= 0)
    (x0, g0), (x1, g1) = gaps[last], gaps[last + 1]
    return math.exp(math.log(x0) + (math.log(x1) - math.log(x0)) * g0 / (g0 - g1))
