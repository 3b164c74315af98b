"""Hit rates: they start at the prior, follow what happens, and forget."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from speculation.rates import MAX_PROBABILITY, MIN_PROBABILITY, HitRates, score_key, score_rates


def test_an_unseen_key_has_its_prior() -> None:
    assert HitRates(lambda key: 0.3).probability(7) == pytest.approx(0.3)
    assert score_rates().logprob(score_key(-1.0)) == pytest.approx(-1.0)


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_a_key_is_rated_by_how_often_it_was_right(rate: float) -> None:
    rng, rates = random.Random(1), HitRates(lambda key: 0.5)
    for _ in range(600):
        rates.observe(3, rng.random() < rate)
    assert rates.probability(3) == pytest.approx(rate, abs=0.08)
    assert rates.probability(4) == pytest.approx(0.5)


def test_overconfident_scores_are_calibrated() -> None:
    """A drafter that says 0.9 and is right in 40 % of the cases is rated 0.4; one that says 0.2 stays at 0.2."""
    rng, rates = random.Random(2), score_rates()
    sure, unsure = score_key(math.log(0.9)), score_key(math.log(0.2))
    for _ in range(800):
        rates.observe(sure, rng.random() < 0.4)
        rates.observe(unsure, rng.random() < 0.2)
    assert rates.probability(sure) == pytest.approx(0.4, abs=0.08)
    assert rates.probability(unsure) == pytest.approx(0.2, abs=0.08)


def test_c069_a_source_that_recovers_is_noticed() -> None:
    rates = HitRates(lambda key: 0.9)
    for _ in range(500):
        rates.observe(0, False)
    assert rates.probability(0) < 0.03
    for _ in range(200):
        rates.observe(0, True)
    assert rates.probability(0) > 0.6


@given(st.lists(st.tuples(st.integers(0, 4), st.booleans()), max_size=300), st.floats(0.0, 1.0))
def test_a_rate_is_always_a_usable_probability(observed: list[tuple[int, bool]], prior: float) -> None:
    rates = HitRates(lambda key: prior)
    for key, hit in observed:
        rates.observe(key, hit)
        assert MIN_PROBABILITY <= rates.probability(key) <= MAX_PROBABILITY
        assert rates.logprob(key) == pytest.approx(math.log(rates.probability(key)))


@given(st.floats(-100.0, 0.0), st.floats(-100.0, 0.0))
def test_keys_keep_the_order_of_scores(one: float, other: float) -> None:
    if one >= other:
        assert score_key(one) <= score_key(other)
