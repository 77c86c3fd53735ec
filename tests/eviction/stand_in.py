"""A cached run as the tree would show it to a policy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


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
    tokens: tuple[int, ...] = ()  # the last ones of its blocks; by default those of its fingerprint

    def last_token_of(self, block: int) -> int:
        return self.tokens[block] if self.tokens else hash((self.fingerprint, block))
