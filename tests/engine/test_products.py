"""Products of few rows equal the library's, whatever form they take."""

from __future__ import annotations

import pytest
import torch

from engine import products
from engine.products import Dense, Int8, int8_available


@pytest.mark.parametrize("num_rows", [*range(1, 10), 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("biased", [True, False])
def test_a_dense_product_is_linear(num_rows: int, dtype: torch.dtype, biased: bool) -> None:
    generator = torch.Generator().manual_seed(num_rows)
    weight = torch.randn(48, 32, generator=generator).to(dtype)
    bias = torch.randn(48, generator=generator).to(dtype) if biased else None
    rows = torch.randn(num_rows, 32, generator=generator).to(dtype)
    result = Dense(weight, bias)(rows)
    expected = torch.nn.functional.linear(rows, weight, bias)
    assert result.is_contiguous()
    assert torch.allclose(result.float(), expected.float(), atol=1e-4 if dtype == torch.float32 else 0.1)


def test_without_packing_the_librarys_own_product_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "packing_available", lambda dtype: False)
    weight, rows = torch.randn(48, 32), torch.randn(3, 32)
    assert torch.equal(Dense(weight)(rows), torch.nn.functional.linear(rows, weight))


@pytest.mark.skipif(not int8_available(), reason="this build of torch has no int8 product")
@pytest.mark.parametrize("num_rows", [1, 2, 5, 8])
def test_int8_is_within_its_step_of_the_exact_product(num_rows: int) -> None:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(64, 96, generator=generator)
    rows = torch.randn(num_rows, 96, generator=generator)
    result = Int8(weight, torch.ones(64))(rows.to(torch.bfloat16)).float()
    exact = rows @ weight.T + 1
    assert (result - exact).abs().max() < 0.03 * exact.abs().max() + 0.2
