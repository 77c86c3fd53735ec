"""Compression: exact where it says so, bounded and reported where it does not, and never mixed up with plain values."""

from __future__ import annotations

import hashlib
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool import Tier
from kvpool.errors import ConfigError
from kvpool.testing import TierContract, key, value
from kvpool.tiers import (
    CompressedTier,
    DiskTier,
    Fingerprint,
    KeyedTier,
    KeySpace,
    MemoryTier,
    Outcome,
    open_tier,
)
from kvpool.tiers.codecs import (
    GROUP,
    LOWEST_EXPONENT,
    MEASURED,
    NUM_EXPONENTS,
    CompressionStats,
    Fp8,
    Planes,
    UnreadableValueError,
    as_floats,
    nearest_codes,
    round_to_bfloat16,
    table,
)
from kvpool.tiers.compressed_tier import _parts

CODECS = ["zstd", "lz4", "fp8"]


class TestPlanesByZstd(TierContract):
    def make_tier(self, tmp_path: Path) -> KeyedTier:
        return CompressedTier(MemoryTier(10**7), "zstd")


class TestPlanesByLz4OnADisk(TierContract):
    def make_tier(self, tmp_path: Path) -> KeyedTier:
        return CompressedTier(DiskTier(tmp_path, 10**7), "lz4", dtype="float32")


def keys_and_values(seed: int, count: int = 4096, dtype: str = "bfloat16") -> bytes:
    """Numbers like those of a model: normal, with a scale for each channel of 64."""
    rng = np.random.default_rng(seed)
    numbers = (rng.normal(size=(count // 64, 64)) * np.exp(rng.normal(size=64))).astype(np.float32)
    if dtype == "bfloat16":
        return round_to_bfloat16(numbers.ravel()).tobytes()
    return numbers.astype(dtype).tobytes()


def back_and_forth(tier: KeyedTier, data: bytes) -> bytes:
    assert tier.store([key(1)], [data]) == [Outcome.OK]
    out = bytearray(len(data))
    assert tier.load([key(1)], [out]) == [Outcome.OK]
    return bytes(out)


@pytest.mark.parametrize("error", [ValueError("a mistake"), UnreadableValueError("cut short")])
def test_given_a_value_that_cannot_be_decoded_then_only_a_mistake_of_the_codec_is_logged(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def decode(*_: object) -> None:
        raise error

    tier = CompressedTier(MemoryTier(10**6), "zstd")
    tier.store([key(1)], [bytes(64)])
    monkeypatch.setattr(tier.codec, "decode", decode)
    assert tier.load([key(1)], [bytearray(64)]) == [Outcome.FAILED]
    assert ("ValueError: a mistake" in caplog.text) == isinstance(error, ValueError)
    assert "cut short" not in caplog.text


# --- exact -----------------------------------------------------------------------------------------------------------------


@given(st.binary(max_size=600), st.sampled_from(["bfloat16", "float32"]), st.sampled_from(["zstd", "lz4"]))
def test_given_any_bytes_then_planes_bring_them_back_exactly(data: bytes, dtype: str, method: str) -> None:
    codec = Planes(dtype, method)
    encoded = b"".join(codec.encode(memoryview(data)))
    out = bytearray(len(data))
    codec.decode(memoryview(encoded), memoryview(out))
    assert bytes(out) == data


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("method", ["zstd", "lz4"])
def test_given_keys_and_values_then_planes_are_exact_and_smaller_by_zstd(dtype: str, method: str) -> None:
    tier = CompressedTier(MemoryTier(2**20), method, dtype=dtype)
    data = keys_and_values(1, 2**15, dtype)
    assert back_and_forth(tier, data) == data
    stats = tier.compression()
    assert stats.bytes_before == len(data)
    limit = 0.95 * len(data) if method == "zstd" else len(data) + 64  # lz4 finds repetitions only, and these are few
    assert stats.bytes_after < limit
    assert stats.largest_error == 0.0


@pytest.mark.parametrize("more", [-1, 0, 1])
def test_given_a_plane_that_does_not_shrink_then_it_is_kept_as_it_is(more: int) -> None:
    codec, data = Planes("float32"), value(1, 4 * 100)
    packed: dict[bytes, bytes] = {}

    def compress(plane: Any) -> bytes:
        packed[bytes(len(plane) + more)] = plane.tobytes()
        return bytes(len(plane) + more)

    codec._compress, codec._decompress = compress, lambda found, length: packed[bytes(found)]
    encoded = b"".join(codec.encode(memoryview(data)))
    assert (encoded.count(bytes(99)) > 0) == (more < 0)
    if more >= 0:
        out = bytearray(len(data))
        codec.decode(memoryview(encoded), memoryview(out))
        assert out == data


# --- fp8 -------------------------------------------------------------------------------------------------------------------


def test_given_every_value_of_e4m3_then_it_is_its_own_nearest_code() -> None:
    magnitudes = [m * 2.0**-9 if e == 0 else (1 + m / 8) * 2.0 ** (e - 7) for e in range(16) for m in range(8)][:-1]
    assert nearest_codes(np.array(magnitudes)).tolist() == list(range(127))
    assert nearest_codes(-np.array(magnitudes)).tolist() == [code | 128 for code in range(127)]
    assert nearest_codes(np.array([1e30, -1e30, 17.0, 19.0])).tolist() == [126, 254, 88, 90]  # ties to even


def test_given_float32_numbers_then_they_are_rounded_to_the_nearest_bfloat16() -> None:
    torch = pytest.importorskip("torch")
    kept = np.random.default_rng(0).integers(0, 0x7F70, 10_000, dtype=np.uint32) | np.uint32(0x8000 << 16) * (
        np.arange(10_000, dtype=np.uint32) % 2
    )
    cut = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)  # exactly between two, and beside that
    numbers = ((kept[:, None] << np.uint32(16)) | cut).ravel().view(np.float32)
    expected = torch.from_numpy(numbers).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    assert (round_to_bfloat16(numbers) == expected).all()


@given(st.integers(0, 2**32), st.sampled_from(["bfloat16", "float16", "float32"]), st.integers(-20, 14))
def test_given_any_numbers_then_fp8_stays_within_its_bound(seed: int, dtype: str, exponent: int) -> None:
    rng = np.random.default_rng(seed)
    numbers = (rng.normal(size=4 * GROUP) * 2.0**exponent * 2.0 ** -rng.integers(0, 30, 4 * GROUP)).astype(np.float32)
    if dtype == "bfloat16":
        bits = round_to_bfloat16(numbers)
        data, before = bits.tobytes(), as_floats(bits, dtype)
    else:
        before = numbers.astype(dtype).astype(np.float32)
        data = numbers.astype(dtype).tobytes()
    codec, out = Fp8(dtype), bytearray(len(data))
    encoded = b"".join(codec.encode(memoryview(data)))
    codec.decode(memoryview(encoded), memoryview(out))
    after = (
        as_floats(np.frombuffer(out, np.uint16), dtype) if dtype != "float32" else np.frombuffer(out, np.float32)
    ).astype(np.float64)
    largest = np.abs(before).reshape(-1, GROUP).max(axis=1).repeat(GROUP)
    slack = 2.0**-9 * np.abs(before) if dtype == "float32" else 0.0  # float32 becomes bfloat16 first
    smallest = 2.0**-24 if dtype == "float16" else 0.0  # what is smaller cannot be written in float16
    assert (np.abs(before - after) <= np.maximum(np.abs(before) / 16, largest * 2.0**-17) + slack + smallest).all()
    assert codec.error() <= 1.0 or dtype == "float16"


@pytest.mark.parametrize(("dtype", "share"), [("bfloat16", 0.52), ("float16", 0.52), ("float32", 0.27)])
def test_given_keys_and_values_then_fp8_halves_them_and_reports_its_error(dtype: str, share: float) -> None:
    tier = CompressedTier(MemoryTier(2**20), "fp8", dtype=dtype)
    data = keys_and_values(2, 2**14, dtype)
    assert back_and_forth(tier, data) != data
    stats = tier.compression()
    assert stats.bytes_after <= share * stats.bytes_before
    assert 0.0 < stats.largest_error <= 1.0


@pytest.mark.slow
def test_given_every_number_of_a_type_then_fp8_writes_and_reads_the_bytes_of_its_format() -> None:
    found = []
    for dtype, end in (("bfloat16", 0x7F80), ("float16", 0x7C00), ("float32", 0x7F60)):
        bits = np.arange(2**16, dtype=np.uint16)
        bits = bits[(bits & 0x7FFF) < end]
        bits = np.concatenate([bits, np.random.default_rng(0).permutation(bits)])  # of one size, and of all sizes
        data = as_floats(bits, dtype).astype(np.float32).tobytes() if dtype == "float32" else bits.tobytes()
        codec, out = Fp8(dtype), bytearray(len(data) + 3)
        encoded = b"".join(codec.encode(memoryview(data + b"end")))
        codec.decode(memoryview(encoded), memoryview(out))
        found += [hashlib.sha256(encoded).hexdigest()[:16], hashlib.sha256(out).hexdigest()[:16], codec.error()]
    assert found == [
        *("4b909e540f5dd60e", "12906ddaee754f2a", 1.0),
        *("7dc532dcd7fe9234", "6de8c39e08c87137", 1.0),
        *("07991fb7fa54a3d7", "6e309071814dcd6a", 1.0),
    ]


@pytest.mark.parametrize(
    ("numbers", "error"),
    [
        ([448.0, 2.0**-10], 1.0),  # the smallest code is 2^-9: the other one becomes 0
        ([448.0, 2.0**-11], 0.5),
        ([448.0, 1.0625], 1 / 1.0625),  # between 1 and 1.125: off by a sixteenth of 1
        ([-448.0, 1.125], 0.0),
        ([0.0, 0.0], 0.0),
    ],
)
def test_given_numbers_between_two_codes_then_the_error_is_a_share_of_the_bound(
    numbers: list[float], error: float
) -> None:
    codec = Fp8("float32")
    codec.encode(memoryview(np.array(numbers + [0.0] * (GROUP - 2), np.float32).tobytes()))
    assert codec.error() == pytest.approx(error, rel=1e-12)


@pytest.mark.parametrize(("dtype", "least", "largest"), [("bfloat16", 0x7F78, 0x7F7F), ("float16", 0x7BC0, 0x7BFF)])
def test_given_the_largest_numbers_of_a_type_then_fp8_makes_none_of_them_infinite(
    dtype: str, least: int, largest: int
) -> None:
    data = np.resize(np.arange(least, largest + 1, dtype=np.uint16) | np.uint16(0x8000), GROUP).tobytes()
    codec, out = Fp8(dtype), bytearray(len(data))
    codec.decode(memoryview(b"".join(codec.encode(memoryview(data)))), memoryview(out))
    assert set(np.frombuffer(out, np.uint16).tolist()) == {largest | 0x8000}
    assert codec.error() <= 1.0


def test_given_zeros_then_fp8_brings_zeros_back() -> None:
    data = bytes(2 * GROUP * 3)
    assert back_and_forth(CompressedTier(MemoryTier(2**20), "fp8"), data) == data


@pytest.mark.parametrize(
    ("dtype", "bits"),
    [
        *(("bfloat16", bits) for bits in (0x7F80, 0xFF80, 0x7FC0)),  # infinities, NaN
        *(("float16", bits) for bits in (0x7C00, 0xFC00, 0x7E00)),
        *(("float32", bits) for bits in (0x7F800000, 0xFF800000, 0x7FC00000, 0x7F7FFFFF)),  # rounded, it is infinite
    ],
)
def test_given_what_is_no_finite_number_then_fp8_keeps_the_value_as_it_is(dtype: str, bits: int) -> None:
    words = np.uint32 if dtype == "float32" else np.uint16
    numbers = np.frombuffer(keys_and_values(3, dtype=dtype), words).copy()
    tier = CompressedTier(MemoryTier(2**20), "fp8", dtype=dtype)
    assert back_and_forth(tier, numbers.tobytes()) != numbers.tobytes()
    numbers[100] = bits
    tier.remove([key(1)])
    assert back_and_forth(tier, numbers.tobytes()) == numbers.tobytes()


def test_given_many_values_then_fp8_measures_its_error_on_the_first_of_sixteen() -> None:
    codec = Fp8()
    exact, inexact = memoryview(bytes(2 * GROUP)), memoryview(keys_and_values(7))
    codec.encode(exact)
    for _ in range(MEASURED - 1):
        codec.encode(inexact)
        assert codec.error() == 0.0
    codec.encode(inexact)
    largest = codec.error()
    assert 0.0 < largest <= 1.0
    for _ in range(MEASURED):
        codec.encode(exact)
    assert codec.error() == largest


@given(st.lists(st.integers(0, 9), max_size=8), st.integers(1, 12))
def test_given_buffers_then_parts_keep_their_order_and_none_could_take_one_more(sizes: list[int], most: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvpool.tiers.compressed_tier.AT_ONCE_BYTES", most)
        parts = _parts(list(range(len(sizes))), [memoryview(bytes(size)) for size in sizes])
    assert [index for part in parts for index in part] == list(range(len(sizes)))
    sums = [sum(sizes[index] for index in part) for part in parts]
    assert all(part and (total <= most or len(part) == 1) for part, total in zip(parts, sums, strict=True))
    assert all(total + sizes[after[0]] > most for total, after in zip(sums, parts[1:], strict=False))


def test_given_a_deadline_that_is_over_then_nothing_is_encoded_or_decoded() -> None:
    tier = CompressedTier(MemoryTier(10**6), "zstd")
    data, late = memoryview(keys_and_values(8)), time.monotonic() - 1.0
    assert tier._store([key(1)], [data], late) == [Outcome.LATE]
    assert tier.compression() == CompressionStats("planes 2 zstd")
    tier.store([key(1)], [data])
    assert tier._load([key(1)], [memoryview(bytearray(len(data)))], late) == [Outcome.LATE]
    stats = tier.compression()
    assert (stats.seconds_encoding > 0, stats.seconds_decoding) == (True, 0.0)
    back_and_forth(tier, bytes(data))
    assert tier.compression().seconds_decoding > 0


def test_given_a_disk_then_a_compressed_tier_in_front_of_it_is_on_a_disk(tmp_path: Path) -> None:
    with CompressedTier(DiskTier(tmp_path, 2**24), "zstd") as tier:
        assert tier.medium == Tier.DISK


@pytest.mark.parametrize(("flag", "more"), [(b"\0", -1), (b"\0", 1), (b"\1", 0), (b"\2", 0)])
def test_given_a_flag_or_a_length_that_fp8_does_not_write_then_the_value_cannot_be_read(flag: bytes, more: int) -> None:
    out = bytearray(b"x" * 4 * GROUP)
    with pytest.raises(UnreadableValueError, match="cut short, or made by another codec"):
        Fp8().decode(memoryview(flag + bytes(len(out) + more)), memoryview(out))
    assert out == b"x" * 4 * GROUP


def test_given_a_length_that_is_no_multiple_of_a_group_then_fp8_keeps_the_rest_as_it_is() -> None:
    data = keys_and_values(4) + b"odd"
    assert back_and_forth(CompressedTier(MemoryTier(2**20), "fp8"), data)[-3:] == b"odd"


# --- keys, damage, arguments ---------------------------------------------------------------------------------------------


def test_given_one_store_then_plain_values_and_those_of_each_codec_are_never_mixed_up() -> None:
    inner, data = MemoryTier(10**7), keys_and_values(5)
    for codec in CODECS:
        CompressedTier(inner, codec).store([key(1)], [data])
    assert inner.contains([key(1)]) == [False]  # a plain reader would take the encoded bytes for the value
    assert inner.stats().num_values == 3
    for codec in CODECS:
        for dtype in ("bfloat16", "float32"):
            assert CompressedTier(inner, codec, dtype=dtype).contains([key(1)]) == [dtype == "bfloat16"]


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("seed", range(6))
def test_given_bytes_that_no_codec_made_then_they_are_a_failure(codec: str, seed: int) -> None:
    inner = MemoryTier(10**7)
    tier = CompressedTier(inner, codec)
    rng = np.random.default_rng(seed)
    length = 2048
    spoilt = length.to_bytes(8, "little") + (500).to_bytes(8, "little") + rng.bytes(500)
    inner.store(tier._own([key(1)]), [spoilt])
    assert tier.load([key(1)], [bytearray(length)]) == [Outcome.FAILED]


@pytest.mark.parametrize(("method", "level"), [("zstd", 1), ("zstd", 19), ("lz4", 1), ("lz4", 12)])
def test_given_the_least_or_the_most_effort_then_planes_are_exact(method: str, level: int) -> None:
    codec, data = Planes("bfloat16", method, level), keys_and_values(6)
    out = bytearray(len(data))
    codec.decode(memoryview(b"".join(codec.encode(memoryview(data)))), memoryview(out))
    assert bytes(out) == data


def decode_with_scale(exponent: int) -> None:
    """Two groups of numbers in fp8; the scale of the second is a power of two with this exponent."""
    encoded = b"\1\0\0" + exponent.to_bytes(2, "little", signed=True) + bytes(2 * GROUP)
    Fp8().decode(memoryview(encoded), memoryview(bytearray(4 * GROUP)))


@pytest.mark.parametrize("exponent", [LOWEST_EXPONENT - 1, LOWEST_EXPONENT + NUM_EXPONENTS, -(2**15), 2**15 - 1])
def test_given_a_scale_that_does_not_exist_then_the_value_cannot_be_read(exponent: int) -> None:
    with pytest.raises(UnreadableValueError, match="a scale that does not exist"):
        decode_with_scale(exponent)


@pytest.mark.parametrize("exponent", [LOWEST_EXPONENT, LOWEST_EXPONENT + NUM_EXPONENTS - 1])
def test_given_the_smallest_or_the_largest_scale_then_the_value_can_be_read(exponent: int) -> None:
    decode_with_scale(exponent)


def test_given_more_than_fits_in_memory_at_once_then_values_come_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvpool.tiers.compressed_tier.AT_ONCE_BYTES", 12_000)
    tier = CompressedTier(MemoryTier(10**7), "zstd")
    data = [value(number) for number in range(10)]
    assert tier.store([key(number) for number in range(10)], data) == [Outcome.OK] * 10
    out = [bytearray(5000) for _ in data]
    assert tier.load([key(number) for number in range(11)], [*out, bytearray(9)]) == [Outcome.OK] * 10 + [Outcome.MISS]
    assert [bytes(buffer) for buffer in out] == data


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: CompressedTier(MemoryTier(10), "gzip"), "codec='gzip' must be one of zstd, lz4, fp8"),
        (lambda: CompressedTier(MemoryTier(10), "fp8", dtype="int8"), "dtype='int8' must be one of bfloat16"),
        (lambda: CompressedTier("redis://", "fp8"), "needs a tier to store in"),  # type: ignore[arg-type]
        (lambda: Planes(method="zip"), "method='zip' must be zstd or lz4"),
        (lambda: Planes(level=20), "level=20 must be at most 19"),
        (lambda: Planes(level=0), "level=0 must be at least 1"),
        (lambda: Planes(method="lz4", level=13), "level=13 must be at most 12"),
    ],
)
def test_given_a_wrong_argument_then_it_is_refused_by_name(make: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()  # type: ignore[operator]


def test_given_an_address_with_a_codec_then_the_tier_behind_it_is_compressed(tmp_path: Path) -> None:
    with open_tier(f"disk:{tmp_path}?bytes=1MB&compress=fp8&dtype=float16&threads=2") as tier:
        assert isinstance(tier, CompressedTier)
        assert isinstance(tier.inner, DiskTier)
        assert tier.compression().codec == "fp8 float16 64"
    with pytest.raises(ConfigError, match="codec='gz' must be one of"):
        open_tier(f"disk:{tmp_path}?bytes=1MB&compress=gz")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_given_a_group_of_values_then_its_scale_is_the_smallest_at_which_none_exceeds_the_largest_code(
    dtype: str,
) -> None:
    every = np.arange(1, 0x7B00, 7, dtype=np.uint16)  # finite in both types
    largest = as_floats(every, dtype).astype(np.float64)
    exponents = table(dtype).exponents(every[:, None]).astype(np.float64)
    assert (largest <= 448 * 2.0**exponents).all()
    assert (largest > 448 * 2.0 ** (exponents - 1)).all()


def test_given_a_codec_then_keys_and_values_are_those_of_its_format() -> None:
    class Doubled(Fp8):
        identity = "doubled"

        def __init__(self) -> None:
            pass

        def encode(self, data: memoryview) -> list[Any]:
            return [data, data]

    inner = MemoryTier(10**6)
    assert CompressedTier(inner, Doubled()).store([key(1)], [b"abc"]) == [Outcome.OK]
    ((own, stored),) = inner._values.items()
    assert own == key(1)[:12] + hashlib.sha256(b"kvpool codec\0doubled\0" + key(1)).digest()[12:]
    assert stored == b"\3\0\0\0\0\0\0\0" + b"\6\0\0\0\0\0\0\0" + b"abcabc"


def test_given_a_model_then_the_inner_tier_hears_of_it() -> None:
    told: list[Any] = []
    inner = MemoryTier(2**20)
    inner.introduce = told.append  # type: ignore[method-assign]
    space = KeySpace(Fingerprint("model", "weights", 16, ()))
    CompressedTier(inner, "zstd").introduce(space)
    assert told == [space]


@pytest.mark.parametrize("method", ["zstd", "lz4"])
def test_given_encoded_planes_that_were_changed_then_they_cannot_be_read(method: str) -> None:
    codec, data = Planes("float32", method), bytes(range(256)) * 4 + b"end"
    encoded = b"".join(codec.encode(memoryview(data)))
    length = int.from_bytes(encoded[:8], "little")
    assert 0 < length < 256

    def decoded(changed: bytes, size: int = len(data)) -> bytes:
        out = bytearray(size)
        codec.decode(memoryview(changed), memoryview(out))
        return bytes(out)

    assert decoded(encoded) == data
    for wrong, size in (
        (encoded[:-1], len(data)),
        (encoded + b"x", len(data)),
        (encoded, len(data) - 1),
        (encoded, len(data) + 4),
        (encoded[:8] + encoded[9:], len(data)),
        ((length + 1).to_bytes(8, "little") + encoded[8:], len(data)),
        (b"", len(data)),
    ):
        with pytest.raises(Exception):  # noqa: B017,PT011  # of the codec, or of the library below it
            decoded(wrong, size)


def test_given_a_plane_of_another_length_then_zstd_says_so() -> None:
    codec = Planes("bfloat16", "zstd")
    with pytest.raises(UnreadableValueError, match="a plane of another length"):
        codec._decompress(memoryview(codec._compress(np.zeros(100, np.uint8))), 99)
    with pytest.raises(UnreadableValueError, match="cut short, or too long"):
        codec.decode(memoryview(bytes(16) + b"xy"), memoryview(bytearray(1)))
    with pytest.raises(UnreadableValueError, match="a plane of 1 bytes where 2 belong"):
        Planes.decode(_Short(codec), memoryview((9).to_bytes(8, "little") + bytes(9)), memoryview(bytearray(4)))  # type: ignore[arg-type]


class _Short:
    """A codec whose library brings too little."""

    def __init__(self, codec: Planes) -> None:
        self._item = codec._item

    def _decompress(self, packed: object, length: int) -> bytes:
        return bytes(length - 1)


def test_given_a_value_that_is_longer_than_its_buffer_then_it_is_failed_and_nothing_is_written() -> None:
    inner = MemoryTier(2**20)
    tier = CompressedTier(inner, "zstd")
    tier.store([key(1)], [bytes(200)])
    out = bytearray(b"x" * 199)
    assert tier.load([key(1)], [out]) == [Outcome.FAILED]
    assert out == b"x" * 199
    assert tier.stats().load_failures == 1


@pytest.mark.parametrize(("method", "most"), [("zstd", 19), ("lz4", 12)])
def test_given_a_level_then_it_is_what_the_library_takes(method: str, most: int) -> None:
    for level in (1, most):
        codec = Planes("bfloat16", method, level)
        assert codec.identity == f"planes 2 {method}"
        packed = codec._compress(np.zeros(1000, np.uint8))
        assert bytes(codec._decompress(memoryview(packed), 1000)) == bytes(1000)
    for wrong in (0, most + 1):
        with pytest.raises(ConfigError, match=f"level={wrong}"):
            Planes("bfloat16", method, wrong)


def test_given_a_method_or_a_library_that_is_not_there_then_it_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(ConfigError, match="method='zip' must be zstd or lz4"):
        Planes("bfloat16", "zip")
    for name, module in (("zstd", "zstandard"), ("lz4", "lz4.block")):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, module, None)
            with pytest.raises(ConfigError, match=f"compression by {name} needs {module}: pip install"):
                Planes("bfloat16", name)
