"""Pinned prefixes: cached runs that eviction passes over, within a budget of tokens and for a limited time if asked."""

from __future__ import annotations

from kvpool.config import Tier
from kvpool.core.cache import Cache, Pin
from kvpool.core.kind import ByBlock
from kvpool.core.node import NEVER, Node, path_ids
from kvpool.errors import InvalidArgumentError, PinBudgetError
from kvpool.pools.arrays import Int32Array
from kvpool.prefix.blocks import block_of, pin_block, unpin_block
from kvpool.prefix.evict import enforce_quota
from kvpool.prefix.readers import pin_path, unpin_path
from kvpool.prefix.tree import end_at, match_tokens
from kvpool.scope import ReuseScope


def pinned_tokens(cache: Cache) -> int:
    """Tokens that pins keep, shared ones counted once."""
    return cache.pinned_positions * cache.block_size


def pin_prefix(cache: Cache, tokens: Int32Array, scope: ReuseScope, ttl: float | None) -> Pin:
    """Pins the full cached blocks that `tokens` starts with."""
    size = cache.block_size
    match = match_tokens(cache, scope, tokens)
    if not match.num_blocks:
        raise InvalidArgumentError(f"no full block of these {len(tokens)} tokens is cached; commit them first")
    fresh = sum(min(n.end, match.num_blocks) - n.start for n in match.path if not n.pins) * size
    limit = cache.config.pinned_tokens_limit
    if pinned_tokens(cache) + fresh > limit:
        raise PinBudgetError(
            f"pinning {fresh} more tokens would exceed max_pinned_tokens={limit} "
            f"({pinned_tokens(cache)} are pinned); unpin something or raise the limit"
        )
    node = end_at(cache, match.path[-1], match.num_blocks)
    pin_path(cache, node)
    made = Pin(next(cache.pin_ids), match.num_blocks * size, NEVER if ttl is None else cache.now + ttl, node)
    for group in cache.by_block:
        _pin_blocks(cache, made, group, match.num_blocks)
    cache.pins[made.pin_id] = made
    if ttl is not None:
        cache.calendar.schedule(made, made.expires_at)
    return made


def _pin_blocks(cache: Cache, pin: Pin, group: ByBlock, num_blocks: int) -> None:
    """Keeps the blocks that a request going on right behind the prefix would read."""
    present = path_ids(pin.node.path(), num_blocks, group.index) >= 0
    for depth in group.pinned_columns(present).tolist():
        node, block = block_of(cache, pin.node, group, depth)
        if block >= 0:
            pin.blocks.append((group, depth))
            if node.tier == Tier.GPU:
                pin_block(cache, node.root, group, block)


def unpin(cache: Cache, pin: Pin) -> None:
    """Ends a pin; its blocks stay cached and may be evicted again."""
    if cache.pins.pop(pin.pin_id, None) is not pin:
        raise InvalidArgumentError(f"pin {pin.pin_id} is not active here; it was unpinned, expired or made elsewhere")
    _end_pin(cache, pin)
    enforce_quota(cache, pin.node.root)


def _end_pin(cache: Cache, pin: Pin) -> None:
    for group, depth in pin.blocks:
        node, block = block_of(cache, pin.node, group, depth)
        if node.tier == Tier.GPU:
            unpin_block(cache, pin.node.root, group, block)
    unpin_path(cache, pin.node)


def void_pins(cache: Cache, doomed: set[Node]) -> None:
    """Ends the pins on nodes that are about to be invalidated."""
    for pin in [pin for pin in cache.pins.values() if pin.node in doomed]:
        del cache.pins[pin.pin_id]
        _end_pin(cache, pin)
