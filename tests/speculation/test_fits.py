"""Lines, their errors, and the refusal of a figure that its error swallows."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from speculation.fits import FitRefused, fit_line, mean_interval


@given(st.floats(-10, 10), st.floats(-10, 10))
def test_a_line_without_noise_is_found(intercept: float, slope: float) -> None:
    fit = fit_line([(x, intercept + slope * x) for x in (0.0, 1.0, 2.0, 5.0)])
    assert (fit.intercept, fit.slope) == pytest.approx((intercept, slope), abs=1e-9)


def test_relative_weights_keep_a_small_intercept_among_large_values() -> None:
    points = [(16.0, 0.00100), (1e3, 0.00101), (1e6, 0.0110), (16e6, 0.1610 * 1.03)]
    weighted, plain = fit_line(points, relative=True).intercept, fit_line(points).intercept
    assert weighted == pytest.approx(0.001, rel=0.02)
    assert abs(plain - 0.001) > 5 * abs(weighted - 0.001)


def test_an_intercept_with_an_error_above_its_value_is_refused() -> None:
    fit = fit_line([(1, 1.3), (2, 1.6), (3, 3.4), (4, 3.7)])
    assert fit.intercept_error > abs(fit.intercept)
    with pytest.raises(FitRefused, match="the error exceeds the value"):
        fit.answer("intercept")
    assert fit.answer("slope") == fit.slope


def test_two_points_give_no_error_and_so_no_answer() -> None:
    with pytest.raises(FitRefused, match="at least 3"):
        fit_line([(1, 1.0), (2, 2.0)]).answer("intercept")


def test_one_x_is_no_line() -> None:
    with pytest.raises(ValueError, match="two different x"):
        fit_line([(1, 1.0), (1, 2.0)])


def test_the_interval_is_students() -> None:
    mean, low, high = mean_interval([1.0, 2.0, 3.0])
    assert mean == 2
    assert high - mean == pytest.approx(4.303 / 3**0.5)
    assert mean - low == pytest.approx(high - mean)
