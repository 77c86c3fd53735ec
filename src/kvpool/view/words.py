"""A block as one number, and the blocks of a pool that changed as spans of equal numbers: what travels to the page.

The upper half of a word holds, from the lowest bit: 3 bits of state, 5 of how many live sequences hold the block (31: that
many or more), 8 of priority, 16 of the tenant's number. The lower half says when a cached block was last used, in tenths of
a second by the sampler's clock. A free block is 0, so a pool that nobody has seen yet is all zeros, and a snapshot is the
difference to that.
"""

from __future__ import annotations

import base64
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from kvpool.pools.arrays import Int32Array, Int64Array

Words = npt.NDArray[np.uint64]

FREE: Final = 0
REFERENCED: Final = 1
CACHED: Final = 2
PINNED: Final = 3
MAX_HOLDERS: Final = 31
MAX_TENANTS: Final = 1 << 16


class Spans(NamedTuple):
    """Blocks `start[i]` to `start[i] + length[i] - 1` have become `word[i]`."""

    start: npt.NDArray[np.uint32]
    length: npt.NDArray[np.uint32]
    word: Words

    def to_json(self) -> dict[str, str]:
        """The arrays in base64, little-endian."""
        return {
            "start": packed(self.start, "<u4"),
            "length": packed(self.length, "<u4"),
            "word": packed(self.word, "<u8"),
        }


def pack_words(
    state: npt.NDArray[Any],
    num_holders: npt.NDArray[Any],
    priority: npt.NDArray[Any],
    tenant: npt.NDArray[Any],
    touched: npt.NDArray[Any],
) -> Words:
    """One word for each block, from arrays of the same length; those of free blocks are 0."""
    upper = state.astype(np.uint32)
    upper |= np.minimum(num_holders, MAX_HOLDERS).astype(np.uint32) << np.uint32(3)
    upper |= priority.astype(np.uint32) << np.uint32(8)
    upper |= tenant.astype(np.uint32) << np.uint32(16)
    halves = np.empty((len(upper), 2), "<u4")
    halves[:, 0] = np.where(state >= CACHED, touched, 0)
    halves[:, 1] = upper
    words: Words = halves.view("<u8").reshape(-1)
    words[state == FREE] = 0
    return words


def changed_spans(old: Words | None, new: Words) -> Spans:
    """What is different, as few spans as there are; `old` is None, or of another size, where all blocks were free."""
    if old is None or len(old) != len(new):
        old = np.zeros(len(new), np.uint64)
    at = np.flatnonzero(new != old)
    words = new[at]
    breaks = np.flatnonzero((np.diff(at) != 1) | (words[1:] != words[:-1])) + 1
    first = np.concatenate([np.zeros(min(len(at), 1), np.int64), breaks])
    length = np.diff(np.append(first, len(at)))
    return Spans(at[first].astype(np.uint32), length.astype(np.uint32), words[first])


class IdSpans(NamedTuple):
    """Block ids of several lists: pairs (first, how many that count up from it), and in which list each pair is."""

    pairs: Int64Array  # first, how many, first, how many, ...; a first of -1 stands for so many without a block
    at: Int64Array  # list i has the pairs `at[i]` to `at[i + 1] - 1`


def id_spans(ids: Int32Array, lengths: Int64Array) -> IdSpans:
    """Lists of block ids, one after the other, as spans."""
    ends = np.cumsum(lengths)
    if not len(ids):
        return IdSpans(np.empty(0, np.int64), np.zeros(len(lengths) + 1, np.int64))
    is_first = np.empty(len(ids), np.bool_)
    is_first[0] = True
    np.not_equal(np.diff(ids), np.where(ids[:-1] < 0, 0, 1), out=is_first[1:])
    is_first[ends[:-1][ends[:-1] < len(ids)]] = True
    first = np.flatnonzero(is_first)
    pairs = np.stack([ids[first], np.diff(np.append(first, len(ids)))], axis=1)
    return IdSpans(pairs.astype(np.int64).reshape(-1), np.searchsorted(first, np.concatenate([[0], ends])))


def packed(array: npt.NDArray[Any], kind: str) -> str:
    """An array in base64."""
    return base64.b64encode(np.ascontiguousarray(array, dtype=kind).tobytes()).decode("ascii")
