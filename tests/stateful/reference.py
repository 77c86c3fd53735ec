"""The slow, obvious model that the state machine compares the manager with.

Bytes are simulated: the keys and values of a token are its whole history (scope and every token up to it),
so two slots hold the same "bytes" exactly when reusing one for the other is right. Blocks on a free list are poisoned.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvpool import CopyOp, GroupKind, KVCacheConfig, KVCacheHandle, KVCacheManager, ReuseScope, Tier
from kvpool.blocks.hashing import chain_digests, root_digest
from kvpool.mirror import CacheMirror

LOCAL_TIERS = (Tier.GPU, Tier.HOST, Tier.DISK)
Place = tuple[int, int, int]  # tier, pool, block
CachedBlocks = dict[tuple[ReuseScope, tuple[int, ...]], dict[int, tuple[Tier, int, int]]]
"""Every cached block by the tokens up to its end: {group: (tier, priority, block id)}."""


@dataclass
class Sequence:
    """What the test knows of one live request."""

    handle: KVCacheHandle
    scope: ReuseScope
    tokens: list[int]  # those whose keys and values are written
    known: list[int]  # those whose ids the manager was told
    reserved: int
    committed: int
    num_prompt: int
    publishes: bool
    num_cross: int = 0
    cross_name: str = ""
    swapped: bool = False
    present: int = 0  # tokens whose keys and values are there; one more than written if the last is computed again

    @property
    def written(self) -> int:
        return len(self.tokens)

    def content(self, position: int) -> tuple[Any, ...]:
        return (self.scope, *self.tokens[: position + 1])


@dataclass
class Contents:
    """What every slot of every block holds."""

    block_size: int
    pools: dict[int, int]  # group -> pool
    slots: dict[Place, list[Any]] = field(default_factory=dict)

    def block(self, tier: Tier, pool: int, block: int) -> list[Any]:
        return self.slots.setdefault((int(tier), pool, block), [None] * self.block_size)

    def read(self, tier: Tier, group: int, block: int, offset: int) -> Any:
        return self.block(tier, self.pools[group], block)[offset]

    def write(self, group: int, slot: int, value: Any) -> None:
        self.block(Tier.GPU, self.pools[group], slot // self.block_size)[slot % self.block_size] = value

    def apply(self, copies: Iterable[CopyOp]) -> None:
        for op in copies:
            pool = self.pools[op.group]
            src, dst = op.src.tolist(), op.dst.tolist()
            assert len(src) == len(dst) == len(set(dst)), f"{op}: a destination stands twice"
            assert all(block >= 0 for block in (*src, *dst)), f"{op}: a block that does not exist"
            assert op.src_tier != op.dst_tier or not set(src) & set(dst), f"{op}: its pairs depend on each other"
            length = self.block_size if op.num_tokens is None else op.num_tokens
            assert 0 < length <= self.block_size, op
            for source, target in zip(src, dst, strict=True):
                self.block(op.dst_tier, pool, target)[:length] = self.block(op.src_tier, pool, source)[:length]

    def after(self, copies: Iterable[CopyOp]) -> Contents:
        """A copy of the contents with pending copies carried out."""
        later = Contents(self.block_size, self.pools, {place: slots[:] for place, slots in self.slots.items()})
        later.apply(copies)
        return later

    def poison(self, tier: Tier, pool: int, blocks: Iterable[int]) -> None:
        for block in blocks:
            self.slots.pop((int(tier), pool, block), None)


def mirror_for(config: KVCacheConfig) -> CacheMirror:
    """A mirror that knows which groups have windows: their blocks may be stored below a parent that is gone."""
    return CacheMirror({g.index: -(-g.window // config.block_size) + 1 for g in config.groups if g.window is not None})


def sink_blocks(config: KVCacheConfig, group: int) -> int:
    return -(-config.groups[group].sink_tokens // config.block_size)


def needed_positions(config: KVCacheConfig, group: int, query: int) -> set[int]:
    """The positions before `query` that the query at this position reads in a group."""
    spec = config.groups[group]
    sinks = set(range(min(spec.sink_tokens, query)))
    if spec.kind is GroupKind.SLIDING:
        assert spec.window is not None
        return sinks | set(range(max(0, query - spec.window + 1), query))
    if spec.kind is GroupKind.CHUNKED:
        assert spec.window is not None
        return sinks | set(range(query // spec.window * spec.window, query))
    return set(range(query))


def cached_blocks(manager: KVCacheManager) -> CachedBlocks:
    """What the tree holds, read off it node by node."""
    state = manager._state
    size = manager.config.block_size
    found: CachedBlocks = {}
    for scope, root in state.cache.roots.items():
        prefixes = {id(root): ()}
        for node in root.subtree():
            if node is root:
                continue
            state.cache.sync(node)
            prefix: tuple[int, ...] = prefixes[id(node.parent)]
            for index in range(node.num_blocks):
                prefix = prefix + tuple(node.tokens[index * size : (index + 1) * size].tolist())
                assert (scope, prefix) not in found, f"the tree holds {prefix} twice"
                found[scope, prefix] = {
                    group: (node.tier, node.priority, int(node.ids[group][index]))
                    for group in range(state.growing)
                    if node.ids[group][index] >= 0
                }
            prefixes[id(node)] = prefix
    return found


def mirror_of(manager: KVCacheManager, cached: CachedBlocks) -> dict[int, dict[bytes, tuple[Tier, int]]]:
    """What a subscriber should believe, with digests computed from the tokens alone."""
    blocks: dict[int, dict[bytes, tuple[Tier, int]]] = {}
    for (scope, prefix), groups in cached.items():
        tokens = np.array(prefix, np.int32)
        digest = chain_digests(root_digest(scope), tokens, manager.config.block_size)[-1]
        for group, (tier, priority, _) in groups.items():
            blocks.setdefault(group, {})[digest] = (tier, priority)
    return blocks


def _valid(config: KVCacheConfig, length: int, depths: list[dict[int, Any]], growing: int) -> bool:
    """Whether every group has the blocks that the query behind `length` reused tokens reads.

    Blocks count, not positions: of a sink or window that begins inside a block, the whole block must be there.
    """
    size = config.block_size
    for group in range(growing):
        blocks = {position // size for position in needed_positions(config, group, length)}
        blocks |= set(range(min(sink_blocks(config, group), -(-length // size))))
        if length % size:
            blocks.add(length // size)
        if any(group not in depths[block] for block in blocks):
            return False
    return True


def expected_hit(
    config: KVCacheConfig, cached: CachedBlocks, scope: ReuseScope, tokens: list[int], has_logits: bool
) -> set[int]:
    """How many tokens of a prompt can be reused: the longest length at which nothing is missing.

    Several answers are right when blocks that continue differently share the same beginning but not the same groups.
    """
    if not config.enable_prefix_caching:
        return {0}
    size = config.block_size
    growing = sum(group.kind is not GroupKind.CROSS for group in config.groups)
    depths: list[dict[int, Any]] = []
    while (len(depths) + 1) * size <= len(tokens) and (scope, tuple(tokens[: (len(depths) + 1) * size])) in cached:
        depths.append(cached[scope, tuple(tokens[: (len(depths) + 1) * size])])
    start = len(depths) * size
    best, options = 0, [{}]
    for (other, prefix), groups in cached.items():
        if other == scope and len(prefix) == start + size and list(prefix[:start]) == tokens[:start]:
            rest = tokens[start:]
            shared = next((i for i, (a, b) in enumerate(zip(rest, prefix[start:], strict=False)) if a != b), len(rest))
            if shared > best:
                best, options = shared, []
            if shared == best and shared:
                options.append(groups)
    results = set()
    for option in options or [{}]:
        full = [*depths, option] if best else depths
        longest = start + best
        if longest == len(tokens) and not has_logits:
            longest -= 1
        candidates = {longest, *range(0, longest, size)}
        # A last block that is cached as a whole is held as it is, though its last token must be computed again.
        if not config.partial_match and not (longest == len(tokens) - 1 and not best):
            candidates = {length for length in candidates if length % size == 0}
        results.add(max(length for length in candidates if _valid(config, length, full, growing)))
    return results


def snapshot(manager: KVCacheManager) -> Any:
    """Everything that a refused operation must leave as it was."""
    stats = manager.stats()
    groups = range(len(manager.config.groups))
    pools = [(p.pool, p.tier, p.total, p.free, p.referenced, p.cached, p.pinned) for p in stats.pools]
    requests = [
        (
            handle.request_id, handle.num_reserved, handle.num_written, handle.num_committed, handle.num_blocks,
            handle.token_ids.tolist(), handle.is_swapped, handle.num_cached_tokens,
            [ids.tolist() for ids in handle.swapped.ids] if handle.swapped is not None else None,
            [handle.block_ids(group).tolist() for group in groups],
        )
        for handle in manager.handles
    ]  # fmt: skip
    copies = [(op.kind, op.group, op.src.tolist(), op.dst.tolist(), op.num_tokens) for op in manager._state.copies]
    counters = stats.to_dict()
    for name in ("allocation_failures", "extend_failures", "pools", "num_cached_runs"):
        counters.pop(name)
    return pools, requests, cached_blocks(manager), copies, sorted(manager._pins.active), counters
