"""Matrix products of a few rows on a CPU, where the library's own choice is slow.

A pass over n rows multiplies [n, in] by each weight [out, in]. `functional.linear` hands float32 to MKL, which on the
machines we measured reads a weight at half the memory's speed for one row and computes at half of what the core can
for more. oneDNN with weights packed once into its own blocked layout does neither: SmolLM2's layers take 16 ms instead
of 27 for one row, 21 instead of 47 for eight, 128 instead of 300 for 128 (docs/log.md). torch ships it and uses it
itself when it compiles a model with frozen weights; without it, `linear` serves.

Packed weights are a copy: a model on a CPU is held twice.

For a drafter, weights may be int8: it cannot change the output, and a quarter of the bytes is read.
"""

from __future__ import annotations

import functools
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

PACKED_FOR_ROWS = 8
"""The layout is chosen for this many rows; it serves 1 to 128 as well as one chosen for them."""
INT8_LEVELS = 127.0


class Product(Protocol):
    """A weight, ready to be multiplied with."""

    def __call__(self, rows: Tensor) -> Tensor:
        """[n, in] -> [n, out], contiguous."""
        ...


class Dense:
    """A weight in a floating-point dtype, [out, in], with an optional bias [out]."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight = weight
        self.bias = bias
        self._packed = _pack(weight) if packing_available(weight.dtype) else None

    def __call__(self, rows: Tensor) -> Tensor:
        if self._packed is None:
            return functional.linear(rows, self.weight, self.bias)
        result: Tensor = torch.ops.mkldnn._linear_pointwise(rows, self._packed, self.bias, "none", [], "")
        return result


class Int8:
    """A weight quantized to int8, symmetric, with one scale for each output; rows are bfloat16."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        wide = weight.float()
        scales = wide.abs().amax(1).clamp_min(1e-12) / INT8_LEVELS
        self.weight = (wide / scales[:, None]).round().to(torch.int8)
        self.scales = scales.to(torch.bfloat16)
        self.bias = None if bias is None else bias.to(torch.bfloat16)

    def __call__(self, rows: Tensor) -> Tensor:
        result: Tensor = torch.ops.aten._weight_int8pack_mm(rows, self.weight, self.scales)
        return result if self.bias is None else result.add_(self.bias)


def _pack(weight: Tensor) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), PACKED_FOR_ROWS)
    return packed


@functools.cache
def packing_available(dtype: torch.dtype) -> bool:
    """Whether this build of torch multiplies with packed weights of this dtype on this CPU."""
    try:
        rows = torch.eye(32, dtype=dtype)
        result = torch.ops.mkldnn._linear_pointwise(rows, _pack(rows), None, "none", [], "")
    except (AttributeError, NotImplementedError, RuntimeError):
        return False
    return torch.equal(result, rows)


@functools.cache
def int8_available() -> bool:
    """Whether this build of torch multiplies bfloat16 rows with int8 weights on the CPU."""
    try:
        Int8(torch.ones(32, 32))(torch.ones(1, 32, dtype=torch.bfloat16))
    except (AttributeError, NotImplementedError, RuntimeError):
        return False
    return True
