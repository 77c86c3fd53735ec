"""Values that hardly any parameter takes, for tests that put each of them everywhere."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from kvpool import KVCacheHandle, ReuseScope, Tier


class Raises:
    """An object that raises in one of its methods."""

    def __init__(self, method: str) -> None:
        self.method = method

    def _fail(self, method: str) -> None:
        if self.method == method:
            raise RuntimeError(f"no {method}")

    def __hash__(self) -> int:
        self._fail("hash")
        return 1

    def __eq__(self, other: object) -> bool:
        self._fail("eq")
        return self is other

    def __bool__(self) -> bool:
        self._fail("bool")
        return True

    def __len__(self) -> int:
        self._fail("len")
        return 1

    def __iter__(self) -> Iterator[int]:
        self._fail("iter")
        return iter([1])

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        self._fail("array")
        return np.array([1])

    def __repr__(self) -> str:
        return f"Raises({self.method!r})"


NASTY: list[Any] = [
    *(None, True, False, 0, -1, 3, 1.5, float("nan"), float("inf"), 1j, "x", b"x", (), [], [1, 2], [[1], [2, 3]]),
    *(2**31, 2**70, [None], [1, "x"], [2**70], [-1], {}, {"x": 1}, set(), object(), object, len),
    *(Tier.HOST, Tier.REMOTE, ReuseScope(), KVCacheHandle),
    *(np.array([1, 2]), np.array([]), np.array(3), np.array([True, False]), np.array([[1], [2]]), np.array(["x"])),
    *(np.array([1.5]), np.array([None]), np.float64(2.5), np.int64(2), np.uint64(2**63), np.bool_(True)),
    *(Raises(method) for method in ("hash", "eq", "bool", "len", "iter", "array")),
]
