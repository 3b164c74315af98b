"""Gumbel noise as a function of (seed, position, token id): no state, no order of draws, the same bits everywhere.

    key = mix(mix(seed) + position * GAMMA)               Python integers, modulo 2^64
    v   = odd integer from 52 bits of mix(key + token * GAMMA), so u = v / 2^53 is never 0 or 1
    g   = -ln(-ln u)

`mix` is the finalizer of SplitMix64 (Steele, Lea and Flood 2014, with Stafford's variant 13). The logarithm is made of
operations that IEEE 754 rounds exactly (+, -, * and / in float64, and bits of the representation), in one fixed
order, because `torch.log` and libm differ from device to device. For the same reason nothing in here may be
compiled: a compiler could contract a product and a sum into one rounding.

The logarithm is ln x = e ln 2 + ln c + ln(1 + r), with x = 2^e m, c the middle of the 1/2048 of 1..2 that holds m,
and r = (m - c) / c, |r| < 2.5e-4, a series cut after r^4 (absolute error below 2e-16 + rounding). -ln u is held to
at least 2^-53, so g lies in -3.61 .. MAX_NOISE.
"""

from __future__ import annotations

import functools
import math
from decimal import Context, Decimal

import torch
from torch import Tensor

MAX_NOISE = 36.7369
"""No g is above it: 53 ln 2, rounded up."""
SCALAR_UP_TO = 48
"""For so few ids on a CPU, Python floats are faster than tensors."""

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_MIX1 = 0xBF58476D1CE4E5B9
_MIX2 = 0x94D049BB133111EB
_CELLS_LOG2 = 11
_CELLS = 1 << _CELLS_LOG2
_SMALLEST_EXPONENTIAL = 2.0**-53
_THIRD = 1 / 3


def mix64(x: int) -> int:
    """A bijection of 0..2^64-1 that flips each output bit with probability near 1/2 for any flipped input bit."""
    x &= _MASK
    x = ((x ^ (x >> 30)) * _MIX1) & _MASK
    x = ((x ^ (x >> 27)) * _MIX2) & _MASK
    return x ^ (x >> 31)


def gumbel(seed: int, position: int, tokens: Tensor) -> Tensor:
    """g of each token id.

    Args:
        seed, position: taken modulo 2^64.
        tokens: int64 [n].

    Returns:
        float64 [n], on the device of `tokens`.
    """
    if tokens.numel() <= SCALAR_UP_TO and tokens.device.type == "cpu":
        key = _key(seed, position)
        return torch.tensor([_gumbel_of(_draw(key, token)) for token in tokens.tolist()], dtype=torch.float64)
    return gumbel_of_draws(draws(seed, position, tokens))


def gumbel_scalar(seed: int, position: int, token: int) -> float:
    """The same bits as `gumbel`, from Python integers and floats alone."""
    return _gumbel_of(_draw(_key(seed, position), token))


def draws(seed: int, position: int, tokens: Tensor) -> Tensor:
    """v of each token id: odd, 1..2^53-1, int64 [n]. g grows with v; this is the cheap part of it."""
    return draws_of_key(noise_key(seed, position), tokens)


def noise_key(seed: int, position: int) -> int:
    """What `draws` makes of seed and position: an int64."""
    return _signed(_key(seed, position))


def draws_of_key(key: int | Tensor, tokens: Tensor) -> Tensor:
    """`draws` for a key from `noise_key`, which may lie on the device, int64 []."""
    x = tokens * _signed(_GAMMA) + key
    x = (x ^ _shift_right(x, 30)) * _signed(_MIX1)
    x = (x ^ _shift_right(x, 27)) * _signed(_MIX2)
    x = x ^ _shift_right(x, 31)
    # Bits 12..63 become bits 1..52; bit 0 is set.
    return (_shift_right(x, 11) & -2) | 1


def gumbel_of_draws(v: Tensor) -> Tensor:
    """g, float64 [n], of draws, int64 [n]."""
    # Below 2^53, so both steps are exact; by a product, because some devices divide by a scalar as a product.
    exponential = -_ln(v.to(torch.float64) * 2.0**-53)
    return -_ln(exponential.clamp(min=_SMALLEST_EXPONENTIAL))


def draw_at_least(noise: float) -> int:
    """A v such that every draw below it has g < `noise`; 0 for NaN. Not tight: some draws above it have too."""
    if not noise >= -3.7:
        return 0
    # -ln u is known to 2e-16, so where it is above 1e-9 its logarithm is good to far better than 1e-6.
    u = min(math.exp(-math.exp(1e-6 - noise)), 1.0 - 1e-9)
    return int(u * (1.0 - 1e-12) * 2.0**53)


def _key(seed: int, position: int) -> int:
    return mix64(mix64(seed + _GAMMA) + position * _GAMMA)


def _draw(key: int, token: int) -> int:
    return (mix64(key + token * _GAMMA) >> 11) | 1


def _gumbel_of(v: int) -> float:
    exponential = -_ln_scalar(v * 2.0**-53)
    return -_ln_scalar(max(exponential, _SMALLEST_EXPONENTIAL))


def _signed(x: int) -> int:
    """The int64 of the same bits."""
    return x - (1 << 64) if x >> 63 else x


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical shift of int64, which torch shifts arithmetically."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


@functools.cache
def _ln_table() -> tuple[float, list[float]]:
    """ln 2, and ln of the middle of each cell of 1..2, correctly rounded."""
    context = Context(prec=40)
    logs = [float((1 + (Decimal(i) + Decimal("0.5")) / _CELLS).ln(context)) for i in range(_CELLS)]
    return float(Decimal(2).ln(context)), logs


@functools.cache
def _ln_tensor(device: torch.device) -> Tensor:
    return torch.tensor(_ln_table()[1], dtype=torch.float64, device=device)


def _ln(x: Tensor) -> Tensor:
    """ln of positive normal numbers, float64 [n]. `_ln_scalar` does the same operations in the same order."""
    bits = x.contiguous().view(torch.int64)
    exponent = ((bits >> 52) - 1023).to(torch.float64)
    mantissa = ((bits & ((1 << 52) - 1)) | (1023 << 52)).view(torch.float64)
    cell = (bits >> (52 - _CELLS_LOG2)) & (_CELLS - 1)
    middle = (cell.to(torch.float64) + 0.5) * (1.0 / _CELLS) + 1.0
    r = (mantissa - middle) / middle
    series = r - (r * r) * (0.5 - r * (_THIRD - r * 0.25))
    return exponent * _ln_table()[0] + (_ln_tensor(x.device)[cell] + series)


def _ln_scalar(x: float) -> float:
    half, exponent = math.frexp(x)
    mantissa = half * 2.0
    cell = int((mantissa - 1.0) * _CELLS)
    middle = (cell + 0.5) * (1.0 / _CELLS) + 1.0
    r = (mantissa - middle) / middle
    series = r - (r * r) * (0.5 - r * (_THIRD - r * 0.25))
    ln2, logs = _ln_table()
    return (exponent - 1) * ln2 + (logs[cell] + series)
