"""Quantising per token and head: small errors, extremes that saturate, packing that loses nothing."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from kvpool import DType  # noqa: E402
from kvpool.kernels.quantization import dequantize, pack_nibbles, quantize, unpack_nibbles  # noqa: E402

SCALED = [DType.INT8, DType.INT4]


@pytest.mark.parametrize("dim", [1, 2, 7, 128])
@pytest.mark.parametrize("dtype", SCALED)
def test_given_a_row_when_it_is_quantised_and_back_then_each_element_is_within_half_a_step(
    dtype: DType, dim: int
) -> None:
    torch.manual_seed(dim)
    values = torch.randn(50, 3, dim) * torch.logspace(-1, 3, 50)[:, None, None]
    stored = quantize(values, dtype)
    assert stored.scale is not None
    error = (dequantize(stored, dtype, dim) - values).abs()
    rounding = values.abs().amax(-1, keepdim=True) * 2**-9  # float16 scales and zeros are not exact either
    assert (error <= stored.scale.float()[..., None] / 2 + rounding).all()


@pytest.mark.parametrize("dtype", list(DType))
def test_given_rows_of_zeros_then_they_come_back_as_zeros(dtype: DType) -> None:
    zeros = torch.zeros(2, 1, 6)
    assert (dequantize(quantize(zeros, dtype), dtype, 6).float() == 0).all()


@pytest.mark.parametrize("dtype", [DType.FP8_E4M3, DType.FP8_E5M2, *SCALED])
def test_given_values_beyond_the_type_then_they_saturate_and_stay_finite(dtype: DType) -> None:
    values = torch.tensor([[1e9, -1e9, 0.0, 1.0]])
    found = dequantize(quantize(values, dtype), dtype, 4).float()
    assert torch.isfinite(found).all()
    assert found[0, 0] > 400


@pytest.mark.parametrize("dtype", [DType.FP8_E4M3, DType.FP8_E5M2])
def test_given_a_factor_then_stored_values_are_divided_by_it(dtype: DType) -> None:
    values = torch.tensor([[4.0, -8.0]])
    stored = quantize(values, dtype, factor=4.0)
    assert stored.data.float().tolist() == [[1.0, -2.0]]
    assert torch.equal(dequantize(stored, dtype, 2, factor=4.0), values)


@pytest.mark.parametrize("dim", [1, 2, 5, 8])
def test_given_nibbles_when_packed_and_unpacked_then_they_are_the_same(dim: int) -> None:
    steps = torch.randint(0, 16, (4, 2, dim), dtype=torch.uint8)
    packed = pack_nibbles(steps)
    assert packed.shape == (4, 2, -(-dim // 2))
    assert torch.equal(unpack_nibbles(packed, dim), steps)
