"""The cost of a pass by rows: interpolated, never falling, following what is measured."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from speculation.costs import PassCosts

measured = st.dictionaries(st.integers(1, 64), st.floats(0.001, 0.2), min_size=1, max_size=6)


def test_between_buckets_costs_are_interpolated_and_beyond_them_go_on_with_the_slope() -> None:
    costs = PassCosts({1: 0.010, 4: 0.016, 8: 0.020})
    assert costs.seconds(2) == pytest.approx(0.012)
    assert costs.seconds(8) == pytest.approx(0.020)
    assert costs.seconds(10) == pytest.approx(0.022)


@given(measured, st.lists(st.tuples(st.integers(1, 80), st.floats(0.0001, 1.0)), max_size=30))
def test_more_rows_never_cost_less(start: dict[int, float], seen: list[tuple[int, float]]) -> None:
    costs = PassCosts(start)
    for rows, seconds in seen:
        costs.observe(rows, seconds)
    row_seconds = [costs.seconds(rows) for rows in range(1, 90)]
    assert row_seconds == sorted(row_seconds)
    assert row_seconds[0] > 0


def test_costs_follow_what_passes_take_where_they_are_taken() -> None:
    costs = PassCosts({1: 0.010, 8: 0.010, 64: 0.100})
    for _ in range(200):
        costs.observe(1, 0.020)
    assert costs.seconds(1) == pytest.approx(0.020, rel=0.05)
    assert costs.seconds(64) == pytest.approx(0.100)


def test_one_long_pause_is_no_news() -> None:
    costs = PassCosts({1: 0.010})
    costs.observe(1, 60.0)
    assert costs.seconds(1) < 0.012


@pytest.mark.parametrize("measured", [{}, {0: 0.1}, {1: 0.0}, {2: -1.0}])
def test_costs_without_sense_are_refused(measured: dict[int, float]) -> None:
    with pytest.raises(ValueError, match=r"rows >= 1 to seconds > 0"):
        PassCosts(measured)
