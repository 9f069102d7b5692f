"""Packed matrices give what plain ones give, and take the bytes that the budget counts."""

import pytest
import torch
from kvscaler_sidecar.weights import projection as module
from kvscaler_sidecar.weights.projection import ROWS, Packed, Plain, can_pack, projection

INPUTS, OUTPUTS = 64, 192


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 8, ROWS, ROWS + 1, 2 * ROWS + 5])
def test_a_packed_product_is_the_plain_one(dtype: torch.dtype, rows: int) -> None:
    torch.manual_seed(rows)
    matrix = torch.randn(OUTPUTS, INPUTS).to(dtype)
    x, before = torch.randn(rows, INPUTS).to(dtype), torch.randn(rows, OUTPUTS).to(dtype)
    exact = x.double() @ matrix.t().double()
    # One rounding of the result and, for fp32, a sum of 64 products in any order.
    tolerance = 2.0**-7 if dtype == torch.bfloat16 else 1e-5
    for found in (projection(matrix), Plain(matrix.t())):
        out = torch.empty(rows, OUTPUTS, dtype=dtype)
        found.multiply(x, out)
        torch.testing.assert_close(out.double(), exact, rtol=tolerance, atol=8 * tolerance)
        out.copy_(before)
        found.add_product(x, out)
        wanted = before.double() + exact
        torch.testing.assert_close(out.double(), wanted, rtol=2 * tolerance, atol=16 * tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("outputs", "inputs"), [(192, 64), (960, 576), (7, 5), (33, 576), (1, 1)])
def test_it_takes_the_bytes_of_its_numbers(dtype: torch.dtype, outputs: int, inputs: int) -> None:
    found = projection(torch.randn(outputs, inputs).to(dtype))
    assert found.nbytes == outputs * inputs * dtype.itemsize


def test_what_can_be_packed_is_packed() -> None:
    assert isinstance(projection(torch.randn(960, 576)), Packed) is can_pack(torch.float32, "cpu")
    assert isinstance(projection(torch.randn(7, 5)), Plain), "it would be filled up"
    assert isinstance(projection(torch.randn(64, 64).double()), Plain)
    assert not can_pack(torch.float32, "cuda")


def test_without_the_library_products_are_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "can_pack", lambda dtype, device: False)
    matrix = torch.randn(OUTPUTS, INPUTS)
    found = projection(matrix)
    assert isinstance(found, Plain)
    assert found.nbytes == matrix.nbytes
    x, out = torch.randn(3, INPUTS), torch.empty(3, OUTPUTS)
    found.multiply(x, out)
    torch.testing.assert_close(out, x @ matrix.t())
