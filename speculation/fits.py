"""A straight line through measurements, with the error of each term, and a refusal where a term says nothing."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

# Two-sided 95 % quantiles of Student's t by degrees of freedom; beyond the last the normal one is near enough.
STUDENT_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
NORMAL_95 = 1.960


class FitRefused(ValueError):
    """The data do not answer the question: the error of the figure is larger than the figure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LineFit:
    """y = intercept + slope · x by least squares; errors are standard errors (0 for two points, an exact line)."""

    intercept: float
    slope: float
    intercept_error: float
    slope_error: float
    num_points: int

    def at(self, x: float) -> float:
        """The line's value."""
        return self.intercept + self.slope * x

    def answer(self, term: str) -> float:
        """The named term, "intercept" or "slope", if it is one.

        Raises:
            FitRefused: its standard error exceeds its value, so it cannot be told from nothing; or there are fewer
                than three points, so its error is not known.
        """
        value, error = (self.intercept, self.intercept_error) if term == "intercept" else (self.slope, self.slope_error)
        if self.num_points < 3:
            raise FitRefused(f"{term} of {self.num_points} points: at least 3 are needed to know its error")
        if error > abs(value):
            raise FitRefused(f"{term} {value:.4g} ± {error:.4g}: the error exceeds the value, so this is no answer")
        return value


def fit_line(points: Sequence[tuple[float, float]], *, relative: bool = False) -> LineFit:
    """Least squares through (x, y); `relative` weighs each point by 1/y², for errors in proportion to y.

    Raises:
        ValueError: fewer than two different x, or a y that is not positive where errors are relative.
    """
    if len({x for x, _ in points}) < 2:
        raise ValueError(f"a line needs two different x, got {sorted({x for x, _ in points})}")
    if relative and min(y for _, y in points) <= 0:
        raise ValueError(f"y must be positive for relative errors, got {min(y for _, y in points)}")
    weights = [1 / y**2 if relative else 1.0 for _, y in points]
    total = sum(weights)
    mean_x = sum(w * x for w, (x, _) in zip(weights, points, strict=True)) / total
    mean_y = sum(w * y for w, (_, y) in zip(weights, points, strict=True)) / total
    spread = sum(w * (x - mean_x) ** 2 for w, (x, _) in zip(weights, points, strict=True))
    slope = sum(w * (x - mean_x) * (y - mean_y) for w, (x, y) in zip(weights, points, strict=True)) / spread
    intercept = mean_y - slope * mean_x
    residual = sum(w * (y - intercept - slope * x) ** 2 for w, (x, y) in zip(weights, points, strict=True))
    variance = residual / (len(points) - 2) if len(points) > 2 else 0.0
    return LineFit(
        intercept=intercept,
        slope=slope,
        intercept_error=math.sqrt(variance * (1 / total + mean_x**2 / spread)),
        slope_error=math.sqrt(variance / spread),
        num_points=len(points),
    )


def mean_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Mean, and the ends of its 95 % interval by Student's t; at least two values."""
    if len(values) < 2:
        raise ValueError(f"an interval needs at least 2 values, got {len(values)}")
    mean = statistics.fmean(values)
    degrees = len(values) - 1
    quantile = STUDENT_95[degrees - 1] if degrees <= len(STUDENT_95) else NORMAL_95
    half = quantile * statistics.stdev(values) / math.sqrt(len(values))
    return mean, mean - half, mean + half
