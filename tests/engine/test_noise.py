"""The noise has the same bits whoever computes it, is Gumbel, and does not depend on itself."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from engine.noise import (
    MAX_NOISE,
    SCALAR_UP_TO,
    draw_at_least,
    draws,
    gumbel,
    gumbel_of_draws,
    gumbel_scalar,
    mix64,
)

torch.set_num_threads(1)
MANY = torch.arange(50_000)
seeds = st.integers(-(2**70), 2**70)
positions = st.integers(0, 2**24)
tokens = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=2 * SCALAR_UP_TO)


@given(seeds, positions, tokens)
@example(-(2**63) + 1, 2**24, [2**31 - 1] * (SCALAR_UP_TO + 1))
@example(2**63 - 1, 0, [0] * (SCALAR_UP_TO + 1))
def test_scalar_and_tensor_have_the_same_bits(seed: int, position: int, ids: list[int]) -> None:
    wide = gumbel_of_draws(draws(seed, position, torch.tensor(ids)))
    assert wide.tolist() == [gumbel_scalar(seed, position, token) for token in ids]
    assert torch.equal(wide, gumbel(seed, position, torch.tensor(ids)))


@pytest.mark.gpu
def test_a_gpu_has_the_same_bits() -> None:
    assert torch.equal(gumbel(-3, 77, MANY), gumbel(-3, 77, MANY.cuda()).cpu())


GOLDEN = {
    (0, 0, 0): "-0x1.dd76ce2674384p-2",
    (1234, 17, 42): "0x1.1d45fcd9cf193p+0",
    (-1, 5, 151935): "-0x1.023e21da39dd4p+0",
    (2**63 - 1, 2**24, 2**31 - 1): "0x1.4b68dd7a3f8f6p-1",
}


@pytest.mark.parametrize(("arguments", "bits"), GOLDEN.items())
def test_the_values_are_pinned(arguments: tuple[int, int, int], bits: str) -> None:
    assert gumbel_scalar(*arguments).hex() == bits


def test_the_logarithms_agree_with_libm() -> None:
    v = draws(9, 9, MANY)
    expected = -torch.log(-torch.log(v.to(torch.float64) * 2.0**-53))
    assert torch.allclose(gumbel_of_draws(v), expected, rtol=0.0, atol=1e-10)


def test_the_extreme_draws_are_finite_and_bounded() -> None:
    noise = gumbel_of_draws(torch.tensor([1, 3, 2**53 - 3, 2**53 - 1])).tolist()
    assert noise == sorted(noise)
    assert noise[0] == pytest.approx(-math.log(53 * math.log(2)))
    assert noise[-1] == pytest.approx(53 * math.log(2))
    assert noise[-1] <= MAX_NOISE


@given(st.floats(-10, 40) | st.floats(allow_nan=True, allow_infinity=True), st.integers(0, 1000))
def test_draws_below_the_bound_have_less_noise(noise: float, below: int) -> None:
    bound = draw_at_least(noise)
    assert bound < 2**53
    if bound > 0:
        v = max(1, bound - 1 - below * 10**6) | 1
        if v < bound:
            assert float(gumbel_of_draws(torch.tensor([v]))) < noise


def test_the_bound_is_close_enough_to_leave_few_ids() -> None:
    assert int((draws(1, 1, MANY) >= draw_at_least(8.0)).sum()) < 60


def test_the_distribution_is_gumbel() -> None:
    ordered = gumbel(2, 3, MANY).sort().values
    cdf = torch.exp(-torch.exp(-ordered))
    empirical = (torch.arange(len(MANY), dtype=torch.float64) + 0.5) / len(MANY)
    # Kolmogorov-Smirnov: 1.95 / sqrt(n) is passed with probability 0.001.
    assert float((cdf - empirical).abs().max()) < 1.95 / math.sqrt(len(MANY))


@pytest.mark.parametrize("lag", [1, 2, 64])
def test_tokens_positions_and_seeds_do_not_correlate(lag: int) -> None:
    rows = torch.stack(
        [
            gumbel(0, 100, MANY),
            gumbel(0, 100 + lag, MANY),
            gumbel(lag, 100, MANY),
            gumbel(-lag, 100, MANY),
            gumbel(0, 100, MANY + lag),
        ]
    )
    correlation = torch.corrcoef(rows) - torch.eye(len(rows), dtype=torch.float64)
    assert float(correlation.abs().max()) < 4.5 / math.sqrt(len(MANY))


def test_along_positions_one_token_is_gumbel_too() -> None:
    noise = torch.tensor([gumbel_scalar(5, position, 7) for position in range(10_000)], dtype=torch.float64)
    assert float(noise.mean()) == pytest.approx(0.5772, abs=0.06)
    assert float(noise.var()) == pytest.approx(math.pi**2 / 6, abs=0.15)
    assert abs(float(torch.corrcoef(torch.stack([noise[1:], noise[:-1]]))[0, 1])) < 0.045


def test_adjacent_arguments_do_not_collide() -> None:
    seen = torch.cat([draws(seed, position, MANY[:2000]) for seed in range(-3, 3) for position in range(5)])
    assert len(seen.unique()) == len(seen)


@given(st.integers(0, 2**64 - 1), st.integers(0, 63))
def test_mixing_spreads_each_input_bit(x: int, bit: int) -> None:
    assert 8 <= (mix64(x) ^ mix64(x ^ (1 << bit))).bit_count() <= 56
