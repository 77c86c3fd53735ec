"""What compression makes of real keys and values, those of SmolLM2 for 440 tokens of text. Cases of benchmarks/tiers.py."""

from __future__ import annotations

import time
from functools import cache, partial

import numpy as np

from harness import Case, PeerAbsentError, Runner
from kvpool.tiers import MemoryTier
from kvpool.tiers.codecs import Codec, as_floats, round_to_bfloat16
from kvpool.tiers.compressed_tier import make_codec

TEXT = (
    "The cache of a language model holds keys and values of every token that it has read. They are computed once and read "
    "again for each word that follows, so a server keeps them in blocks, shares those that several prompts begin with, and "
    "moves the ones that nobody reads to slower memory: first to the host, then to a disk, at last to a store that many "
    "machines use. Whether it pays to bring them back depends on how fast the disk is and how long computing them again "
    "would take. "
)


@cache
def real_blocks(dtype: str) -> list[bytes]:
    """Blocks of 16 tokens as an engine stores them: all layers, K and V. The model runs in float32 here."""
    from kvpool.engine import Engine, SamplingParams
    from kvpool.errors import ModelLoadError

    tier = MemoryTier(2**30)
    try:
        with Engine(device="cpu", kv_bytes=2**28, tiers=[tier]) as engine:
            engine.generate([TEXT * 4], SamplingParams(max_new_tokens=16))
    except ModelLoadError as error:
        raise PeerAbsentError(str(error).splitlines()[0]) from None
    blocks = list(tier._values.values())
    if dtype == "float32":
        return blocks
    return [round_to_bfloat16(np.frombuffer(block, np.float32)).tobytes() for block in blocks]


def size(codec_name: str, dtype: str) -> Runner:
    """Bytes after compression, in percent."""
    blocks, codec = real_blocks(dtype), make_codec(codec_name, dtype)

    def repeat() -> list[float]:
        encoded = sum(len(b"".join(codec.encode(memoryview(block)))) for block in blocks)
        return [100 * encoded / sum(map(len, blocks))]

    return repeat


def speed(codec_name: str, dtype: str, decode: bool) -> Runner:
    """Bytes of plain values per CPU time of one thread."""
    blocks, codec = real_blocks(dtype), make_codec(codec_name, dtype)
    encoded = [b"".join(codec.encode(memoryview(block))) for block in blocks]
    out = memoryview(bytearray(len(blocks[0])))

    def repeat() -> list[float]:
        start = time.thread_time_ns()
        for plain, packed in zip(blocks, encoded, strict=True):
            if decode:
                codec.decode(memoryview(packed), out)
            else:
                codec.encode(memoryview(plain))
        return [sum(map(len, blocks)) / (time.thread_time_ns() - start)]

    return repeat


def error(dtype: str) -> Runner:
    """Root of the mean squared error of fp8, in percent of that of the numbers."""
    blocks, codec = real_blocks(dtype), make_codec("fp8", dtype)

    def repeat() -> list[float]:
        lost = total = 0.0
        for block in blocks:
            before, after = _numbers(block, dtype), _numbers(_back(codec, block), dtype)
            lost += float(np.square(before - after).sum())
            total += float(np.square(before).sum())
        assert 0 < codec.error() <= 1.0
        return [100 * (lost / total) ** 0.5]

    return repeat


def _back(codec: Codec, block: bytes) -> bytes:
    out = bytearray(len(block))
    codec.decode(memoryview(b"".join(codec.encode(memoryview(block)))), memoryview(out))
    return bytes(out)


def _numbers(block: bytes, dtype: str) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    if dtype == "float32":
        return np.frombuffer(block, np.float32).astype(np.float64)
    return as_floats(np.frombuffer(block, np.uint16), dtype).astype(np.float64)


def compression_cases() -> list[Case]:
    """The rows of the codecs."""
    cases = []
    for name in ("zstd", "lz4", "fp8"):
        for dtype in ("bfloat16", "float32"):
            title = f"compression, {name} of {dtype}, "
            cases += [
                Case(title + "size", "%", "lower", partial(size, name, dtype), repeats=1, warmups=0),
                Case(title + "encode", "GB/s", "higher", partial(speed, name, dtype, False), repeats=5),
                Case(title + "decode", "GB/s", "higher", partial(speed, name, dtype, True), repeats=5),
            ]
    cases += [
        Case(f"compression, fp8 of {dtype}, error", "%", "lower", partial(error, dtype), repeats=1, warmups=0)
        for dtype in ("bfloat16", "float32")
    ]
    return cases
