"""The C code of attention as ARM processors run it, in an emulator: it stands for the compiled module."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tool_files import emulated

ITEM_SIZES = (4, 2, 2, 1)  # by kind: float32, bfloat16, float16, int8


class EmulatedAttention:
    """Has the functions of `kvpool.kernels._paged_attention`. Each call is one run of the emulator."""

    def __init__(self, directory: Path, flags: Sequence[str] = ("-O1",)) -> None:
        self._command = emulated(Path(__file__).with_suffix(".c"), directory, flags)

    def instructions(self) -> tuple[str, ...]:
        return ("neon",)

    def attend(self, instructions: str, q: Any, out: Any, k: Any, v: Any, *rest: Any) -> None:
        sink_logits, shape, scores, indices, queries, pieces, merges, num_partials, threads = rest
        q_heads, kv_heads, head_dim, v_dim, block_size = shape[:5]
        num_rows, num_blocks = int(queries[:, 0].max(initial=-1)) + 1, int(indices.max(initial=-1)) + 1
        rows, places = (num_rows, q_heads), (num_blocks, block_size, kv_heads)
        numbers = np.array(
            [*q[1:], *out[1:], *k[1:5], *k[6:], *v[1:5], *v[6:], *shape, num_partials, threads], np.int64
        )
        out_size = _extent(rows, out[2:], v_dim) * ITEM_SIZES[out[1]]
        arrays = [numbers.tobytes(), np.array(scores, np.float32).tobytes()]
        arrays += [_read(q, rows, head_dim), ctypes.string_at(out[0], out_size)]
        arrays += [_read(k[:5], places, head_dim), _scales(k, places), _read(v[:5], places, v_dim), _scales(v, places)]
        arrays.append(ctypes.string_at(sink_logits, 4 * q_heads if sink_logits else 0))
        arrays += [array.tobytes() for array in (indices, queries, pieces, merges)]
        sent = b"".join(len(array).to_bytes(8, "little") + array for array in arrays)
        result = subprocess.run(self._command, input=sent, capture_output=True, check=True).stdout
        ctypes.memmove(out[0], result, out_size)


def _extent(sizes: Sequence[int], strides: Sequence[int], dim: int) -> int:
    """Elements from the first to the last."""
    if 0 in sizes:
        return 0
    return sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True)) + dim


def _read(tensor: Sequence[int], sizes: Sequence[int], dim: int) -> bytes:
    """The memory of a tensor that is given as (address, kind, strides); its last dimension has no gaps."""
    address, kind, *strides = tensor
    return ctypes.string_at(address, _extent(sizes, strides, dim) * ITEM_SIZES[kind])


def _scales(stored: Sequence[int], sizes: Sequence[int]) -> bytes:
    address, *strides = stored[5:]
    return ctypes.string_at(address, 2 * _extent(sizes, strides, 1)) if address else b""
