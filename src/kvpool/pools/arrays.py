"""Array types used all over the control plane, and the one place where token ids from outside are checked."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from kvpool.checks import as_count, show
from kvpool.errors import InvalidArgumentError

Int32Array: TypeAlias = npt.NDArray[np.int32]
Int64Array: TypeAlias = npt.NDArray[np.int64]
BoolArray: TypeAlias = npt.NDArray[np.bool_]

MAX_TOKEN_ID = 2**31 - 1
_INT32 = np.dtype(np.int32)
_FACTOR = 2654435761  # of checksums: odd, with many bits


# --- short arrays: from C where that was compiled --------------------------------------------------------------------


def _are_ids(given: Any) -> bool:
    return (
        isinstance(given, np.ndarray)
        and given.dtype is _INT32
        and given.ndim == 1
        and given.size > 0
        and smallest(given) >= 0
        and given.flags.c_contiguous
    )


def _copied(array: Int32Array, start: int, stop: int) -> Int32Array:
    return array[start:stop].copy()


def _put(target: Int32Array, at: int, source: Int32Array, start: int, stop: int) -> None:
    target[at : at + stop - start] = source[start:stop]


def _as_bytes(array: Int32Array, start: int, stop: int) -> bytes:
    return array[start:stop].tobytes()


def _num_common(left: bytes, right: bytes) -> int:
    length = min(len(left), len(right))
    if left[:length] == right[:length]:
        return length
    # The highest differing byte of the big-endian difference is the first differing byte of the strings.
    difference = int.from_bytes(left[:length], "big") ^ int.from_bytes(right[:length], "big")
    return length - (difference.bit_length() + 7) // 8


def _block_sums(array: Int32Array, num_blocks: int) -> bytes:
    size = len(array) // num_blocks
    if size == 1:
        return array.tobytes()
    return (array.reshape(num_blocks, size).view(np.uint32) @ _powers(size)).tobytes()


@cache
def _powers(size: int) -> npt.NDArray[np.uint32]:
    return np.array([pow(_FACTOR, size - 1 - index, 2**32) for index in range(size)], np.uint32)


def _compiled(name: str, otherwise: Callable[..., Any]) -> Callable[..., Any]:
    """The function of this name in `_short_arrays.c`, which does the same as `otherwise`, if it was compiled."""
    try:
        from kvpool.pools import _short_arrays
    except ImportError:
        return otherwise
    found: Callable[..., Any] = getattr(_short_arrays, name, otherwise)  # a checkout may have compiled an older file
    return found


are_ids: Callable[[Any], bool] = _compiled("are_ids", _are_ids)
"""Whether an object is an array of token ids as `as_token_array` returns them, with one at least."""

copied: Callable[[Int32Array, int, int], Int32Array] = _compiled("copied", _copied)
"""A copy of the elements `start..stop` of an array."""

put: Callable[[Int32Array, int, Int32Array, int, int], None] = _compiled("put", _put)
"""Writes the elements `start..stop` of a second array into a first one, from its element `at` on."""

as_bytes: Callable[[Int32Array, int, int], bytes] = _compiled("as_bytes", _as_bytes)
"""The bytes of the elements `start..stop` of an array."""

num_common: Callable[[bytes, bytes], int] = _compiled("num_common", _num_common)
"""How many leading bytes two strings share."""

block_sums: Callable[[Int32Array, int], bytes] = _compiled("block_sums", _block_sums)
"""A checksum of four bytes for each of so many blocks of an array; one element is its own."""


def smallest(array: npt.NDArray[Any]) -> int:
    """The least number of an array that is not empty. On short arrays several times faster than `array.min()`."""
    least: int = array.item(array.argmin())
    return least


def largest(array: npt.NDArray[Any]) -> int:
    """The greatest number of an array that is not empty. On short arrays several times faster than `array.max()`."""
    greatest: int = array.item(array.argmax())
    return greatest


def within(counts: Int64Array) -> Int64Array:
    """0, 1, ... inside each run of so many."""
    ends = np.cumsum(counts)
    index: Int64Array = np.arange(int(ends[-1]) if len(ends) else 0) - np.repeat(ends - counts, counts)
    return index


def as_array(values: Any, name: str) -> npt.NDArray[Any]:
    """`np.asarray`, with an error of ours for what numpy cannot make an array of."""
    try:
        return np.asarray(values)
    except Exception as error:  # numpy's own, or whatever the object raises when it is asked for its values
        raise InvalidArgumentError(f"{name}={show(values)} is not a rectangular array: {error}") from None


def as_counts(num_tokens: Any, batch_size: int) -> int | Int64Array:
    """Token counts: one for all sequences of a batch, or an int64 array with one per sequence."""
    if type(num_tokens) is int or isinstance(num_tokens, (int, np.integer)):
        return as_count(num_tokens, "num_tokens")
    array = as_array(num_tokens, "num_tokens")
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise InvalidArgumentError(f"num_tokens must be an int or one int per sequence, got {num_tokens!r}")
    if array.size and (int(array.min()) < 0 or int(array.max()) > 2**40):
        raise InvalidArgumentError(f"num_tokens must not be negative or huge, got {array.tolist()[:8]}")
    if len(array) != batch_size:
        raise InvalidArgumentError(f"got {len(array)} counts for a batch of {batch_size} sequences")
    return array.astype(np.int64)


def as_token_array(tokens: Any, name: str = "tokens") -> Int32Array:
    """A one-dimensional int32 array of token ids, checked; int32 arrays pass through without a copy.

    >>> as_token_array([1, 2, 3]).dtype
    dtype('int32')
    """
    if are_ids(tokens):
        return tokens  # type: ignore[no-any-return]
    array = tokens if isinstance(tokens, np.ndarray) else as_array(tokens, name)
    if array.ndim != 1:
        raise InvalidArgumentError(f"{name} must be one-dimensional, got {show(tokens)} of shape {array.shape}")
    if array.size == 0:
        return np.empty(0, np.int32)
    if array.dtype.kind not in "iu":
        raise InvalidArgumentError(
            f"{name} must hold integers, got {show(tokens)} of dtype {array.dtype}; convert with .astype('int32')"
        )
    if (array.dtype.itemsize > 4 or array.dtype.kind == "u") and int(array.max()) > MAX_TOKEN_ID:
        raise InvalidArgumentError(f"{name} holds {int(array.max())}; token ids must be below 2**31")
    if array.dtype.kind == "i" and smallest(array) < 0:
        raise InvalidArgumentError(f"{name} holds {int(array.min())}; token ids cannot be negative")
    return np.ascontiguousarray(array, dtype=np.int32)
