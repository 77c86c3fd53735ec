"""Cross-attention: the blocks of an encoder's tokens."""

from __future__ import annotations

from typing import Any, ClassVar, TypeVar

import numpy as np

from kvpool.config import LayerGroup
from kvpool.config.layers import ceil_div
from kvpool.core.cache import Cache
from kvpool.core.handle import KVCacheHandle, Rows
from kvpool.core.kind import Group
from kvpool.core.node import Node
from kvpool.core.prompt import AdmissionPlan, Prompt
from kvpool.pools.arrays import Int32Array, Int64Array
from kvpool.pools.pool import BlockPool
from kvpool.scope import ReuseScope

T = TypeVar("T")


class CrossGroup(Group):
    """All taken at admission, given back at the end, never in the prefix cache.

    Sequences whose scope names the same input of the encoder have one set of blocks for it: `holders` knows their rows.
    """

    grows: ClassVar[bool] = False
    has_slots: ClassVar[bool] = False
    single_owner: ClassVar[int] = 1

    def __init__(self, spec: LayerGroup, block_size: int, tiers: list[BlockPool]) -> None:
        super().__init__(spec, block_size, tiers)
        self.holders: dict[tuple[ReuseScope, int], set[int]] = {}  # by scope and the number of the encoder's tokens

    @classmethod
    def pick(cls, of_sequence: T, of_encoder: T) -> T:
        return of_encoder

    def held_at_once(self, num_blocks: int, num_fixed: int, num_reused: int, num_reused_tokens: int) -> int:
        return num_fixed

    def needs(self, prompt: Prompt, num_blocks: int, num_reused: int) -> int:
        is_there = (prompt._scope, prompt._fixed_tokens) in self.holders
        return 0 if is_there else ceil_div(prompt._fixed_tokens, self.block_size)

    def begin(self, cache: Cache, row: int, tip: Node, plan: AdmissionPlan, first: int) -> int:
        table, handle, end = cache.rows.tables[self.index], cache.rows.handles[row], plan.num_fixed
        if not end:
            return 0
        holders = self.holders.get((handle.scope, handle.num_fixed_tokens))
        if holders is None:
            table[row, :end] = self.take(end)
        else:
            table[row, :end] = table[next(iter(holders)), :end]
            self.ref(table[row, :end])
            handle.num_cached_fixed_tokens = handle.num_fixed_tokens
        if handle.publishes:
            self.holders.setdefault((handle.scope, handle.num_fixed_tokens), set()).add(row)
        return 0

    def fork(self, cache: Cache, source: int, row: int, tip: Node) -> None:
        super().fork(cache, source, row, tip)
        handle = cache.rows.handles[row]
        holders = self.holders.get((handle.scope, handle.num_fixed_tokens))
        if holders is not None and source in holders:
            holders.add(row)

    def end(self, cache: Cache, handle: KVCacheHandle, row: int, tip: Node, published: int, used: int) -> None:
        self.unref(cache.rows.all_blocks(self.index, row), handle.family is not None)
        key = handle.scope, handle.num_fixed_tokens
        holders = self.holders.get(key)
        if holders is not None:
            holders.discard(row)
            if not holders:
                del self.holders[key]

    def silence(self, handle: KVCacheHandle) -> None:
        self.holders.pop((handle.scope, handle.num_fixed_tokens), None)

    def written_ids(self, rows: Rows, row: int) -> Int32Array:
        return rows.visible_blocks(self.index, row).copy()

    def fresh_columns(self, rows: Rows, row: int) -> Int64Array:
        return np.empty(0, np.int64)

    def lengths(self, rows: Rows, selection: Any, handles: tuple[KVCacheHandle, ...]) -> Int64Array:
        return np.array([handle.num_fixed_tokens for handle in handles], np.int64)

    def check(self, rows: Rows) -> str | None:
        for (scope, num_tokens), holders in self.holders.items():
            if not holders:
                return f"nobody has the blocks for the encoder's input {scope.encoder!r}"
            tables = [rows.visible_blocks(self.index, row).tolist() for row in sorted(holders)]
            needed = ceil_div(num_tokens, self.block_size)
            if not all(table == tables[0] and len(table) == needed for table in tables):
                return f"rows {sorted(holders)} have different blocks for the encoder's input: {tables}"
        return None
