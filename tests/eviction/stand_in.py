"""A cached run as the tree would show it to a policy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclass(eq=False, slots=True)
class StandInRun:
    num_blocks: int = 1
    start: int = 0
    created: int = 0
    last_access: int = 0
    last_access_at: float = 0.0
    hits: int = 0
    priority: int = 35
    fingerprint: int = 0
    turn: int = 0
    fan_out: int = 0
    hint: int = 0
    session: str | None = None
    tenant: str = ""
    parent: Any = None
    entry: Any = None
    content: tuple[int, ...] = ()  # a token for each of its blocks; by default those of its fingerprint

    @property
    def tokens(self) -> npt.NDArray[np.int32]:
        blocks = range(self.start, self.start + self.num_blocks)
        return np.array(self.content or [hash((self.fingerprint, block)) % 2**31 for block in blocks], np.int32)

    @property
    def sum_before(self) -> int:
        return 0

    def fingerprint_of(self, start: int, sum_before: int, key: bytes) -> int:
        return hash((start, key))
