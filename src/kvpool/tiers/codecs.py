"""Codecs make values smaller: planes of bytes with zstd or lz4 (exact), or fp8 (half the bytes, with an error).

fp8 (e4m3) of bfloat16, float16 and float32 needs numpy only, because it uses tables. Numbers of a group share a scale, a
power of two that brings the largest of them between 224 and 448, the largest number of e4m3. A scale only shifts exponents,
so the 16 bits of a number and the exponent of its group determine its code. A table holds the codes.
"""

from __future__ import annotations

import functools
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from kvpool.checks import check_int, show
from kvpool.errors import ConfigError

Codes: TypeAlias = npt.NDArray[np.uint8]
Bits: TypeAlias = npt.NDArray[np.uint16]

RELATIVE_ERROR = 2.0**-4
"""Of a value that is at least 2^-13 of the largest one of its group; the others are off by 2^-17 of that one at most."""

LOWEST_EXPONENT, NUM_EXPONENTS = -142, 263
"""Exponents of scales, for values from the smallest subnormal to the largest bfloat16."""

_LARGEST = 448.0
_LARGEST_OF_TYPE = {"bfloat16": 2.0**128 - 2.0**120, "float16": 65504.0}


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
    """The nearest e4m3 code of each finite value; of two equally near ones the even one; above 448 the code of 448."""
    table = _e4m3()
    size = np.minimum(np.abs(values), _LARGEST)
    above = np.maximum(np.searchsorted(table, size), 1)
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
    """The bits of the nearest bfloat16; of two equally near ones the even one. No value may be NaN."""
    whole = values.view(np.uint32)
    bits: Bits = ((whole + np.uint32(0x7FFF) + ((whole >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(
        np.uint16
    )
    return bits


class Table:
    """The codes of all 65,536 values of a 16-bit type, one row per exponent of a scale. Rows are made when needed."""

    def __init__(self, dtype: str) -> None:
        self.dtype = dtype
        with np.errstate(invalid="ignore"):  # every bit pattern, NaN among them
            self._every = as_floats(np.arange(2**16, dtype=np.uint16), dtype).astype(np.float64)
        self._exponents: dict[int, int] = {}
        self._codes = np.empty((0, 2**16), np.uint8)
        self._bits = np.empty((0, 256), np.uint16)

    def exponents(self, groups: Bits) -> npt.NDArray[np.int16]:
        """The exponent of the scale of each row: the smallest for which no value exceeds 448."""
        largest = as_floats((groups & np.uint16(0x7FFF)).max(axis=1), self.dtype)
        mantissa, exponent = np.frexp(largest)  # largest = mantissa * 2**exponent, mantissa from 0.5 to 1
        found: npt.NDArray[np.int16] = (exponent - 9 + (mantissa > 0.875)).astype(np.int16)
        return found

    def encode(self, groups: Bits, exponents: npt.NDArray[np.int16]) -> Codes:
        """The code of every value."""
        rows = self._rows(exponents)
        codes: Codes = self._codes.ravel()[(rows.astype(np.int64) << 16)[:, None] + groups]
        return codes

    def decode(self, codes: Codes, exponents: npt.NDArray[np.int16]) -> Bits:
        """The bits of every value, in its original type."""
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
        # the nearest code of the largest numbers of a type stands for more than the type can hold
        magnitudes = np.minimum(np.append(_e4m3(), 0.0) * 2.0**exponent, _LARGEST_OF_TYPE[self.dtype])
        values = np.concatenate([magnitudes, -magnitudes]).astype(np.float32)
        bits = values.astype(np.float16).view(np.uint16) if self.dtype == "float16" else round_to_bfloat16(values)
        self._exponents[exponent] = len(self._codes)
        self._codes = np.concatenate([self._codes, codes[None]])
        self._bits = np.concatenate([self._bits, bits[None]])


@functools.cache
def table(dtype: str) -> Table:
    """The table of a type, made once."""
    return Table(dtype)


ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
GROUP = 64
"""Values that share a scale in fp8."""

MEASURED = 16
"""One value in so many is decoded again, to report the error of fp8."""


class UnreadableValueError(Exception):
    """Bytes that this codec did not make."""


class Codec(ABC):
    """Encodes and decodes values. `identity` names all settings that change the bytes; values get keys that depend on it."""

    identity: str

    @abstractmethod
    def encode(self, data: memoryview) -> list[Any]:
        """The encoded value, in pieces of memory."""

    @abstractmethod
    def decode(self, encoded: memoryview, out: memoryview) -> None:
        """Fills `out`, which is as long as the original value; raises `UnreadableValueError` if it cannot."""

    def error(self) -> float:
        """The largest error so far, as a share of the bound; 0 for codecs that are exact."""
        return 0.0


class Planes(Codec):
    """Compresses the first bytes of all numbers, then their second bytes, and so on, each plane by itself. Exact.

    Exponents of keys and values repeat, and lowest bits do not. A compressor finds the repetitions only if they are apart.
    `method` is "zstd" (smaller) or "lz4" (faster).
    """

    def __init__(self, dtype: str = "bfloat16", method: str = "zstd", level: int = 1) -> None:
        self._item = _item_bytes(dtype)
        check_int(level, "level", 1, 19 if method == "zstd" else 12)
        self._compress, self._decompress = _functions(method, level)
        self.identity = f"planes {self._item} {method}"

    def encode(self, data: memoryview) -> list[Any]:
        """For each plane its length and its bytes, then bytes that fill no number. A plane that does not shrink stays raw."""
        count = data.nbytes // self._item
        numbers = np.frombuffer(data, np.uint8, count * self._item).reshape(count, self._item)
        pieces: list[Any] = []
        for place in range(self._item):
            plane = np.ascontiguousarray(numbers[:, place])
            packed = self._compress(plane)
            if len(packed) >= count:
                packed = plane.tobytes()
            pieces += [len(packed).to_bytes(8, "little"), packed]
        return [*pieces, data[count * self._item :]]

    def decode(self, encoded: memoryview, out: memoryview) -> None:
        """Puts the planes together again."""
        count, position = out.nbytes // self._item, 0
        numbers = np.frombuffer(out, np.uint8, count * self._item).reshape(count, self._item)
        for place in range(self._item):
            length = int.from_bytes(encoded[position : position + 8], "little")
            packed = encoded[position + 8 : position + 8 + length]
            position += 8 + length
            plane = packed if length == count else self._decompress(packed, count)
            if len(plane) != count:
                raise UnreadableValueError(f"a plane of {len(plane)} bytes where {count} belong")
            numbers[:, place] = np.frombuffer(plane, np.uint8)
        rest = encoded[position:]
        if rest.nbytes != out.nbytes - count * self._item:
            raise UnreadableValueError("cut short, or too long")
        out[count * self._item :] = rest


class Fp8(Codec):
    """e4m3 with a scale for every 64 numbers: about half the bytes of bfloat16 and float16, a quarter of float32.

    A number is off by at most a sixteenth of itself, or by 2^-17 of the largest of its group if it is very small. Values
    with infinities, or NaN, are kept as they are. For models whose answers may change a little; see docs/tiers.md.
    """

    def __init__(self, dtype: str = "bfloat16") -> None:
        self._item = _item_bytes(dtype)
        self._dtype = dtype
        self._table = table("float16" if dtype == "float16" else "bfloat16")
        self._measuring = threading.Lock()
        self._num_encoded = 0
        self._largest_error = 0.0
        self.identity = f"fp8 {dtype} {GROUP}"

    def encode(self, data: memoryview) -> list[Any]:
        """Flag 1, exponents, codes and bytes that fill no group; or flag 0 and the value as it is, if fp8 cannot hold it."""
        count = data.nbytes // (self._item * GROUP) * GROUP
        groups = self._bits(data, count)
        if groups is None:
            return [b"\0", data]
        exponents = self._table.exponents(groups)
        codes = self._table.encode(groups, exponents)
        self._measure(groups, codes, exponents)
        return [b"\1", exponents, codes, data[count * self._item :]]

    def decode(self, encoded: memoryview, out: memoryview) -> None:
        """The numbers, in their original type."""
        count = out.nbytes // (self._item * GROUP) * GROUP
        rest = out.nbytes - count * self._item
        flag, body = bytes(encoded[:1]), encoded[1:]
        if flag == b"\0" and body.nbytes == out.nbytes:
            out[:] = body
            return
        num_groups = count // GROUP
        if flag != b"\1" or body.nbytes != 2 * num_groups + count + rest:
            raise UnreadableValueError("cut short, or made by another codec")
        exponents = np.frombuffer(body, np.int16, num_groups)
        first, end = LOWEST_EXPONENT, LOWEST_EXPONENT + NUM_EXPONENTS
        if num_groups and not first <= exponents.min() <= exponents.max() < end:
            raise UnreadableValueError("a scale that does not exist")
        codes = np.frombuffer(body, np.uint8, count, 2 * num_groups).reshape(num_groups, GROUP)
        bits = self._table.decode(codes, exponents).ravel()
        if self._item == 4:
            np.frombuffer(out, np.float32, count)[:] = as_floats(bits, "bfloat16")
        else:
            np.frombuffer(out, np.uint16, count)[:] = bits
        out[count * self._item :] = body[2 * num_groups + count :]

    def error(self) -> float:
        """The largest error that was measured, as a share of the bound."""
        return self._largest_error

    def _bits(self, data: memoryview, count: int) -> npt.NDArray[np.uint16] | None:
        """Sixteen bits of each number, in groups; None if one of them is no finite number."""
        if self._item == 4:
            floats = np.frombuffer(data, np.float32, count)
            if not np.isfinite(floats).all() or (count and np.abs(floats).max() > 3.0e38):
                return None
            return round_to_bfloat16(floats).reshape(-1, GROUP)
        bits = np.frombuffer(data, np.uint16, count)
        exponent = np.uint16(0x7C00 if self._dtype == "float16" else 0x7F80)
        return None if ((bits & exponent) == exponent).any() else bits.reshape(-1, GROUP)

    def _measure(
        self, groups: npt.NDArray[np.uint16], codes: npt.NDArray[np.uint8], exponents: npt.NDArray[np.int16]
    ) -> None:
        with self._measuring:
            self._num_encoded += 1
            if self._num_encoded % MEASURED != 1 or not groups.size:
                return
        before = as_floats(groups, self._table.dtype).astype(np.float64)
        after = as_floats(self._table.decode(codes, exponents), self._table.dtype)
        bound = np.maximum(np.abs(before) * RELATIVE_ERROR, np.ldexp(2.0**-10, exponents.astype(int))[:, None])
        share = float((np.abs(before - after) / bound).max())
        with self._measuring:
            self._largest_error = max(self._largest_error, share)


@dataclass(frozen=True)
class CompressionStats:
    """What compression did since the tier was opened."""

    codec: str
    bytes_before: int = 0
    bytes_after: int = 0
    seconds_encoding: float = 0.0
    seconds_decoding: float = 0.0
    largest_error: float = 0.0
    """Of fp8, measured on one value in sixteen, as a share of the bound; 0 where nothing is lost."""


def _item_bytes(dtype: str) -> int:
    if dtype not in ITEM_BYTES:
        raise ConfigError(f"dtype={show(dtype)} must be one of {', '.join(ITEM_BYTES)}")
    return ITEM_BYTES[dtype]


def _functions(method: str, level: int) -> tuple[Callable[[Any], bytes], Callable[[Any, int], bytes]]:
    """Compress, and decompress to so many bytes at most; any number of threads may call them."""
    try:
        if method == "zstd":
            import zstandard

            local = threading.local()

            def pack(plane: Any) -> bytes:
                if not hasattr(local, "compressor"):
                    local.compressor = zstandard.ZstdCompressor(level=level)
                packed: bytes = local.compressor.compress(plane)
                return packed

            def unpack(packed: Any, length: int) -> bytes:
                if zstandard.frame_content_size(packed) != length:
                    raise UnreadableValueError("a plane of another length")
                plain: bytes = zstandard.ZstdDecompressor().decompress(packed, max_output_size=length)
                return plain

            return pack, unpack
        if method == "lz4":
            import lz4.block

            def unpack_lz4(packed: Any, length: int) -> bytes:
                plain: bytes = lz4.block.decompress(packed, uncompressed_size=length)
                return plain

            return (lambda plane: lz4.block.compress(plane, store_size=False, compression=level)), unpack_lz4
    except ImportError as error:
        raise ConfigError(
            f"compression by {method} needs {error.name}: pip install '.[tiers]' in a checkout of kvpool"
        ) from None
    raise ConfigError(f"method={show(method)} must be zstd or lz4")
