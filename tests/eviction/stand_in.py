"""A cached run as the tree would show it to a policy."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvpool.eviction import Run


class StandInRun(Run):
    """What is not given is 0 or empty. `content` has a token for each of its blocks; else its fingerprint makes them."""

    def __init__(self, num_blocks: int = 1, *, content: tuple[int, ...] = (), **given: Any) -> None:
        self.entry = self.session = None
        self.turn = self.fan_out = self.hint = self.hits = self.start = self.created = self.last_access = 0
        self.last_access_at, self.priority, self.scope_hash, self.key = 0.0, 35, 0, b""
        self.parent, self.of_tenant, self.content = None, "", content
        self.known_fingerprint, self.num_blocks = 0, num_blocks
        for name, value in given.items():
            setattr(self, "of_tenant" if name == "tenant" else name, value)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__("known_fingerprint" if name == "fingerprint" else name, value)
        if name in ("fingerprint", "num_blocks", "start", "content") and hasattr(self, "num_blocks"):
            blocks = range(self.start, self.start + self.num_blocks)
            ids = self.content or [hash((self.fingerprint, block)) % 2**31 for block in blocks]
            self.tokens = np.array(ids, np.int32)

    @property
    def tenant(self) -> str:
        return self.of_tenant

    @property
    def above(self) -> Run | None:
        return self.parent if self.start else None
