"""Whether a drafter may move: the second write-up's figures, and the closed forms against simulation by hand."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from speculation.breakeven import (
    Link,
    Relocation,
    capacity_gain,
    mean_tokens,
    payload_bytes,
    relocation_sensitivity,
    synchronous_rate,
    synchronous_rtt_limit_s,
)

CYCLE_S, FREED_S, TOKENS_PER_S = 0.08934, 0.01588, 24.05
SECOND = Relocation(cycle_s=CYCLE_S, draft_forward_s=FREED_S, tokens_per_cycle=TOKENS_PER_S * CYCLE_S)


def test_the_second_write_up_is_reproduced() -> None:
    assert SECOND.freed_share == pytest.approx(0.178, abs=0.0005)
    assert SECOND.gain_at(0.198e-3) == pytest.approx(0.21, abs=0.005)
    assert SECOND.gain_at(1.713e-3) == pytest.approx(0.19, abs=0.005)
    assert SECOND.rate_at(1.713e-3) == pytest.approx(28.59, rel=0.001)
    assert abs(SECOND.gain_at(16.02e-3)) < 0.01


def test_its_payload_is_reproduced() -> None:
    assert payload_bytes(num_layers=5, hidden_size=6144, num_tokens=1) == 61_440


def test_break_even_is_the_freed_time_and_the_link_that_takes_it() -> None:
    assert SECOND.gain_at(SECOND.freed_s) == pytest.approx(0)
    rate = SECOND.break_even_rate_bytes_per_s(payload_bytes=184_320, latency_s=0.001)
    assert rate is not None
    assert SECOND.gain_at(Link(latency_s=0.001, rate_bytes_per_s=rate).hop_s(184_320)) == pytest.approx(0)
    latency = SECOND.break_even_latency_s(payload_bytes=184_320, rate_bytes_per_s=rate)
    assert latency == pytest.approx(0.001)
    assert SECOND.break_even_rate_bytes_per_s(payload_bytes=1, latency_s=0.02) is None
    assert SECOND.break_even_latency_s(payload_bytes=1e9, rate_bytes_per_s=1e6) is None


@given(st.floats(0, 0.99), st.integers(0, 32), st.floats(1e-4, 0.02), st.floats(0.005, 0.2))
def test_at_the_limit_synchronous_drafting_ties_with_the_target_alone(
    acceptance: float, gamma: int, draft_s: float, target_s: float
) -> None:
    limit = synchronous_rtt_limit_s(acceptance=acceptance, num_drafted=gamma, draft_token_s=draft_s, target_s=target_s)
    tau = mean_tokens(acceptance=acceptance, num_drafted=gamma)
    assert limit == pytest.approx((tau - 1) * target_s - gamma * draft_s, abs=1e-12)
    rate = synchronous_rate(
        rtt_s=limit, acceptance=acceptance, num_drafted=gamma, draft_token_s=draft_s, verify_s=target_s
    )
    assert rate == pytest.approx(1 / target_s, rel=1e-6)


def test_a_verify_pass_that_costs_more_lowers_the_limit_by_as_much() -> None:
    known = {"acceptance": 0.8, "num_drafted": 8, "draft_token_s": 0.003, "target_s": 0.034}
    flat = synchronous_rtt_limit_s(**known)  # type: ignore[arg-type]
    assert synchronous_rtt_limit_s(**known, verify_s=0.044) == pytest.approx(flat - 0.010)  # type: ignore[arg-type]


def test_mean_tokens_is_what_independent_acceptances_give() -> None:
    rng = random.Random(7)
    total = 0
    for _ in range(20_000):
        run = 1
        while run <= 8 and rng.random() < 0.8:
            run += 1
        total += run
    assert total / 20_000 == pytest.approx(mean_tokens(acceptance=0.8, num_drafted=8), rel=0.02)
    assert mean_tokens(acceptance=1, num_drafted=8) == 9
    assert mean_tokens(acceptance=0, num_drafted=8) == 1


def test_capacity_grows_by_what_drafting_took_of_the_device() -> None:
    assert capacity_gain(num_drafted=8, draft_token_s=0.003, verify_s=0.034) == pytest.approx(58 / 34)


def test_sensitivity_has_the_sign_and_size_of_each_input() -> None:
    link = Link(latency_s=0.001, rate_bytes_per_s=125e6)
    changes = relocation_sensitivity(SECOND, link, 184_320)
    assert changes["draft forward"] > 0
    assert changes["sampling"] == changes["context update"] == 0
    assert changes["latency"] < 0
    assert changes["payload"] < 0
    assert 0 < changes["bandwidth"] < -changes["payload"]
    assert "bandwidth" not in relocation_sensitivity(SECOND, Link(latency_s=0.001), 184_320)
    hop = link.hop_s(184_320)
    assert changes["latency"] == pytest.approx(SECOND.gain_at(hop + 1e-4) - SECOND.gain_at(hop))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"cycle_s": 0.0}, "cycle_s must be positive, got 0"),
        ({"sampling_s": -1.0}, "sampling_s must be at least 0, got -1.0"),
        ({"draft_forward_s": 0.1}, "freed time must be below the cycle of 0.08934 s, got 0.1 s"),
    ],
)
def test_bad_input_is_named(change: dict[str, float], named: str) -> None:
    good = {"cycle_s": CYCLE_S, "draft_forward_s": FREED_S, "tokens_per_cycle": 2.0}
    with pytest.raises(ValueError, match=named):
        Relocation(**(good | change))


def test_acceptance_beyond_its_range_is_named() -> None:
    with pytest.raises(ValueError, match=r"acceptance must lie within 0\.\.1, got 1\.5"):
        mean_tokens(acceptance=1.5, num_drafted=2)
