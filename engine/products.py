"""Matrix products of a few rows on a CPU, where the library's own choice is slow.

A pass over n rows multiplies [n, in] by a weight [out, in]. For n of 1 to 5 in float32, MKL is faster when asked for
weight x rows^T than for rows x weight^T, and an odd n is slower than the next even one: one row costs 25.8 ms over
SmolLM2's layers as rows, 18.9 ms as two columns of which one is zero; four rows 37.1 ms against 21.7 ms
(docs/log.md). Which form is used depends on n alone, never on a measurement, so a restart does not change rounding.

For a drafter, weights may be int8: it cannot change the output, and a quarter of the bytes is read.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

COLUMNS = {1: 2, 2: 2, 3: 4, 4: 4, 5: 5}
"""Rows to columns, for float32; other numbers of rows stay rows."""
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
        self._columns = COLUMNS if weight.dtype == torch.float32 else {}

    def __call__(self, rows: Tensor) -> Tensor:
        num_rows = rows.shape[0]
        num_columns = self._columns.get(num_rows)
        if num_columns is None:
            return functional.linear(rows, self.weight, self.bias)
        if num_columns != num_rows:
            padded = rows.new_zeros(num_columns, rows.shape[1])
            padded[:num_rows] = rows
            rows = padded
        result = torch.mm(self.weight, rows.t())[:, :num_rows].t().contiguous()
        return result if self.bias is None else result.add_(self.bias)


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


def int8_available() -> bool:
    """Whether this build of torch multiplies bfloat16 rows with int8 weights on the CPU."""
    try:
        Int8(torch.ones(32, 32))(torch.ones(1, 32, dtype=torch.bfloat16))
    except (AttributeError, NotImplementedError, RuntimeError):
        return False
    return True
