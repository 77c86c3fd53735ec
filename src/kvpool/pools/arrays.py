"""Array types used all over the control plane, and the one place where token ids from outside are checked."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from kvpool.checks import show
from kvpool.errors import InvalidArgumentError

Int32Array: TypeAlias = npt.NDArray[np.int32]
Int64Array: TypeAlias = npt.NDArray[np.int64]
BoolArray: TypeAlias = npt.NDArray[np.bool_]

MAX_TOKEN_ID = 2**31 - 1
_INT32 = np.dtype(np.int32)


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


def as_token_array(tokens: Any, name: str = "tokens") -> Int32Array:
    """A one-dimensional int32 array of token ids, checked; int32 arrays pass through without a copy.

    >>> as_token_array([1, 2, 3]).dtype
    dtype('int32')
    """
    array = tokens if isinstance(tokens, np.ndarray) else as_array(tokens, name)
    if array.dtype is _INT32 and array.ndim == 1 and array.size and array.item(array.argmin()) >= 0:
        return array if array.flags.c_contiguous else array.copy()
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
