"""fp8 (e4m3) of bfloat16, float16 and float32 with numpy alone: tables instead of arithmetic, and a bound for the error.

A group of values shares a scale, a power of two: the largest of them lies between 224 and 448, the end of e4m3. A scale
only shifts exponents, so a value's code depends on its 16 bits and the group's exponent, and is looked up.
"""

from __future__ import annotations

import functools
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Codes: TypeAlias = npt.NDArray[np.uint8]
Bits: TypeAlias = npt.NDArray[np.uint16]

RELATIVE_ERROR = 2.0**-4
"""Of a value that is at least 2^-13 of the largest one of its group; the others are off by 2^-17 of that one at most."""

LOWEST_EXPONENT, NUM_EXPONENTS = -142, 263
"""Exponents of scales, for values from the smallest subnormal to the largest bfloat16."""

_LARGEST = 448.0


@functools.cache
def _e4m3() -> npt.NDArray[np.float64]:
    """The values of the codes 0 to 126; the code 127 is no number."""
    code = np.arange(127)
    exponent, mantissa = code >> 3, code & 7
    values: npt.NDArray[np.float64] = np.where(
        exponent == 0, mantissa * 2.0**-9, (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    )
    return values


def nearest_codes(values: npt.NDArray[np.float64]) -> Codes:
    """The e4m3 code nearest to each value, to the even one in the middle of two; above 448 it is that of 448."""
    table = _e4m3()
    size = np.minimum(np.abs(values), _LARGEST)
    above = np.clip(np.searchsorted(table, size), 1, len(table) - 1)
    low, high = table[above - 1], table[above]
    up = (size - low > high - size) | ((size - low == high - size) & (above % 2 == 0))
    code = np.where(up, above, above - 1)
    codes: Codes = (code | np.where(np.signbit(values), 128, 0)).astype(np.uint8)
    return codes


def as_floats(bits: npt.NDArray[Any], dtype: str) -> npt.NDArray[np.float32]:
    """bfloat16 or float16 values from their bits."""
    if dtype == "float16":
        return bits.view(np.float16).astype(np.float32)
    floats: npt.NDArray[np.float32] = (bits.astype(np.uint32) << 16).view(np.float32)
    return floats


def round_to_bfloat16(values: npt.NDArray[np.float32]) -> Bits:
    """The bits of the nearest bfloat16, to the even one in the middle of two. No value may be NaN."""
    whole = values.view(np.uint32)
    bits: Bits = ((whole + np.uint32(0x7FFF) + ((whole >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(
        np.uint16
    )
    return bits


class Table:
    """Codes of all 65,536 values of a 16-bit type, by the exponent of the scale; rows are made when they are needed."""

    def __init__(self, dtype: str) -> None:
        self.dtype = dtype
        with np.errstate(invalid="ignore"):  # every bit pattern, NaN among them
            self._every = as_floats(np.arange(2**16, dtype=np.uint16), dtype).astype(np.float64)
        self._exponents: dict[int, int] = {}
        self._codes = np.empty((0, 2**16), np.uint8)
        self._bits = np.empty((0, 256), np.uint16)

    def exponents(self, groups: Bits) -> npt.NDArray[np.int16]:
        """The exponent of the scale of each row: the smallest with which nothing exceeds 448."""
        largest = as_floats((groups & np.uint16(0x7FFF)).max(axis=1), self.dtype)
        mantissa, exponent = np.frexp(largest)  # largest = mantissa * 2**exponent, mantissa from 0.5 to 1
        found: npt.NDArray[np.int16] = (exponent - 9 + (mantissa > 0.875)).astype(np.int16)
        found[largest == 0] = LOWEST_EXPONENT
        return found

    def encode(self, groups: Bits, exponents: npt.NDArray[np.int16]) -> Codes:
        """The code of every value."""
        rows = self._rows(exponents)
        codes: Codes = self._codes.ravel()[(rows.astype(np.int64) << 16)[:, None] + groups]
        return codes

    def decode(self, codes: Codes, exponents: npt.NDArray[np.int16]) -> Bits:
        """The bits of every value, in the type that they came from."""
        rows = self._rows(exponents)
        bits: Bits = self._bits.ravel()[(rows.astype(np.int64) << 8)[:, None] + codes]
        return bits

    def _rows(self, exponents: npt.NDArray[np.int16]) -> npt.NDArray[np.int16]:
        """Which row of the tables belongs to each exponent."""
        for exponent in np.unique(exponents).tolist():
            if exponent not in self._exponents:
                self._add(exponent)
        index = np.zeros(NUM_EXPONENTS, np.int16)
        for exponent, row in self._exponents.items():
            index[exponent - LOWEST_EXPONENT] = row
        rows: npt.NDArray[np.int16] = index[exponents - LOWEST_EXPONENT]
        return rows

    def _add(self, exponent: int) -> None:
        finite = np.where(np.isfinite(self._every), self._every, 0.0)
        codes = nearest_codes(finite * 2.0**-exponent)
        magnitudes = np.append(_e4m3(), 0.0) * 2.0**exponent
        with np.errstate(over="ignore"):  # codes that no finite number of the type has
            values = np.concatenate([magnitudes, -magnitudes]).astype(np.float32)
            bits = values.astype(np.float16).view(np.uint16) if self.dtype == "float16" else round_to_bfloat16(values)
        self._exponents[exponent] = len(self._codes)
        self._codes = np.concatenate([self._codes, codes[None]])
        self._bits = np.concatenate([self._bits, bits[None]])


@functools.cache
def table(dtype: str) -> Table:
    """The table of a type, made once."""
    return Table(dtype)
