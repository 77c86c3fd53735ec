"""What the state machines compare the manager with: what a query reads, what is cached, what a prompt can reuse."""

from __future__ import annotations

from typing import Any

import numpy as np
from item_codes import codes_of

from kvpool import GroupKind, KVCacheConfig, KVCacheManager, ReuseScope, Tier
from kvpool.events.mirror import CacheMirror

LOCAL_TIERS = (Tier.GPU, Tier.HOST, Tier.DISK)
CachedBlocks = dict[tuple[ReuseScope, tuple[int, ...]], dict[int, tuple[Tier, int, int]]]
"""Every cached block by the tokens (as codes, see `item_codes`) up to its end: {group: (tier, priority, block id)}."""


def mirror_for(config: KVCacheConfig) -> CacheMirror:
    """A mirror that knows which groups have windows: their blocks may be stored below a parent that is gone."""
    windows = {g.index: -(-g.window // config.block_size) + 1 for g in config.groups if g.window is not None}
    return CacheMirror(windows | {g.index: 1 for g in config.groups if g.kind is GroupKind.STATE})


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
    state = manager._cache
    size = manager.config.block_size
    found: CachedBlocks = {}
    for scope, root in state.roots.items():
        prefixes = {id(root): ()}
        for node in root.subtree():
            if node is root:
                continue
            prefix: tuple[int, ...] = prefixes[id(node.parent)]
            codes = codes_of(state.rows.symbols, node.tokens, prefix[-1] if prefix else 0)
            for index in range(node.num_blocks):
                prefix = prefix + tuple(codes[index * size : (index + 1) * size])
                assert (scope, prefix) not in found, f"the tree holds {prefix} twice"
                found[scope, prefix] = {
                    group: (node.tier, node.priority, int(node.ids[group][index]))
                    for group in range(len(state.growing))
                    if node.ids[group][index] >= 0
                }
            prefixes[id(node)] = prefix
    return found


def takeable_blocks(manager: KVCacheManager) -> set[tuple[ReuseScope, tuple[int, ...]]]:
    """The last blocks of runs on the GPU that nobody reads, has pinned or follows: by the tokens up to their end."""
    cache = manager._cache
    found = set()
    for scope, root in cache.roots.items():
        for node in root.subtree():
            if node is not root and node.tier == Tier.GPU and not (node.children or node.active or node.pins):
                tokens = np.concatenate([part.tokens for part in node.path()])
                found.add((scope, tuple(codes_of(manager._cache.rows.symbols, tokens, 0))))
    return found


def _valid(config: KVCacheConfig, length: int, depths: list[dict[int, Any]], growing: int) -> bool:
    """Whether every group has the blocks that the query behind `length` reused tokens reads.

    Blocks count, not positions: of a sink or window that begins inside a block, the whole block must be there.
    """
    size = config.block_size
    for group in range(growing):
        if config.groups[group].kind is GroupKind.STATE:
            if length and (length % size or group not in depths[length // size - 1]):
                return False
            continue
        blocks = {position // size for position in needed_positions(config, group, length)}
        blocks |= set(range(min(sink_blocks(config, group), -(-length // size))))
        if length % size:
            blocks.add(length // size)
        if any(group not in depths[block] for block in blocks):
            return False
    return True


def expected_hit(
    config: KVCacheConfig,
    cached: CachedBlocks,
    scope: ReuseScope,
    tokens: list[int],
    has_logits: bool,
    takeable: set[tuple[ReuseScope, tuple[int, ...]]],
) -> set[int]:
    """How many tokens of a prompt can be reused: the longest length at which nothing is missing.

    Several answers are right when blocks that continue differently share the same beginning but not the same groups.
    Without copies a block is reused in part only if it is `takeable`.
    """
    if not config.enable_prefix_caching:
        return {0}
    size = config.block_size
    growing = sum(group.kind is not GroupKind.CROSS for group in config.groups)
    depths: list[dict[int, Any]] = []
    while (len(depths) + 1) * size <= len(tokens) and (scope, tuple(tokens[: (len(depths) + 1) * size])) in cached:
        depths.append(cached[scope, tuple(tokens[: (len(depths) + 1) * size])])
    start = len(depths) * size
    best, options = 0, [({}, tuple(tokens[:start]))]
    for (other, prefix), groups in cached.items():
        if other == scope and start < len(prefix) <= start + size and list(prefix[:start]) == tokens[:start]:
            pairs = list(zip(tokens[start:], prefix[start:], strict=False))  # of a whole block, or of an unfilled one
            shared = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
            if shared > best:
                best, options = shared, []
            if shared == best and shared:
                options.append((groups, prefix))
    results = set()
    for option, source in options:
        full = [*depths, option] if best else depths
        longest = start + best
        if longest == len(tokens) and not has_logits:
            longest -= 1
        candidates = {longest, *range(0, longest, size)}
        # A last block that is cached as a whole is held as it is, though its last token must be computed again.
        copies = config.copy_on_partial_reuse or (scope, source) in takeable
        has_states = any(group.kind is GroupKind.STATE for group in config.groups)
        held = longest == len(tokens) - 1 and not best and not has_states
        if not (config.partial_match and copies) and not held:
            candidates = {length for length in candidates if length % size == 0}
        results.add(max(length for length in candidates if _valid(config, length, full, growing)))
    return results
