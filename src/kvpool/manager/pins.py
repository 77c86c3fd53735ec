"""Pinned prefixes: cached runs that eviction passes over, within a budget of tokens and for a limited time if asked."""

from __future__ import annotations

import itertools

import numpy as np

from kvpool.config import Tier
from kvpool.errors import InvalidArgumentError, PinBudgetError
from kvpool.pools.arrays import Int32Array
from kvpool.pools.groups import Group
from kvpool.prefix.node import NEVER, Node, path_ids
from kvpool.prefix.readers import Pin
from kvpool.scope import ReuseScope
from kvpool.sequences.state import CacheState


class Pins:
    """Makes and ends pins, and counts what they hold."""

    def __init__(self, state: CacheState) -> None:
        self.state = state
        self.cache = state.cache
        self.context = state.context
        self.tree = state.cache.tree
        self.readers = state.cache.readers
        self.windows = state.cache.windows
        self.active = state.cache.windows.pins
        self._ids = itertools.count(1)

    def pinned_tokens(self) -> int:
        """Tokens that pins keep, shared ones counted once."""
        return self.readers.pinned_blocks * self.context.block_size

    def pin(self, tokens: Int32Array, scope: ReuseScope, ttl: float | None) -> Pin:
        """Pins the full cached blocks that `tokens` starts with."""
        cache, size = self.cache, self.context.block_size
        match = self.tree.match(scope, tokens)
        if not match.num_blocks:
            raise InvalidArgumentError(f"no full block of these {len(tokens)} tokens is cached; commit them first")
        fresh = sum(min(n.end, match.num_blocks) - n.start for n in match.path if not n.pins) * size
        limit = self.state.config.pinned_tokens_limit
        if self.pinned_tokens() + fresh > limit:
            raise PinBudgetError(
                f"pinning {fresh} more tokens would exceed max_pinned_tokens={limit} "
                f"({self.pinned_tokens()} are pinned); unpin something or raise the limit"
            )
        node = match.path[-1]
        if node.end > match.num_blocks:
            node = self.tree.split(node, match.num_blocks - node.start)
        elif node.open_row >= 0:
            self.state.publisher.close(node.open_row)
        self.readers.pin(node)
        pin = Pin(next(self._ids), match.num_blocks * size, NEVER if ttl is None else self.context.now + ttl, node)
        for group in self.context.windowed:
            self._pin_window(pin, group, match.num_blocks)
        self.active[pin.pin_id] = pin
        if ttl is not None:
            cache.expiry.calendar.schedule(pin.pin_id, pin.expires_at, lambda: self._time_is_up(pin))
        return pin

    def _pin_window(self, pin: Pin, group: Group, num_blocks: int) -> None:
        """Keeps the windowed blocks that a request continuing right behind the prefix would read."""
        if group.keeps_state:
            num_blocks = group.longest_valid(
                path_ids(pin.node.path(), num_blocks, group.index) >= 0, num_blocks * self.context.block_size
            )
            num_blocks //= self.context.block_size
        read = group.reads(np.arange(num_blocks), num_blocks * self.context.block_size)
        for depth in np.flatnonzero(read).tolist():
            node, block = self.windows.block_of(pin.node, group, depth)
            if block >= 0:
                pin.windowed.append((group, depth))
                if node.tier == Tier.GPU:
                    self.windows.pin(node.root, group, block)

    def unpin(self, pin: Pin) -> None:
        """Ends a pin; its blocks stay cached and may be evicted again."""
        if self.active.pop(pin.pin_id, None) is not pin:
            raise InvalidArgumentError(
                f"pin {pin.pin_id} is not active here; it was unpinned, expired or made elsewhere"
            )
        self._let_go(pin)
        self.cache.enforce_quota(pin.node.root)

    def _let_go(self, pin: Pin) -> None:
        for group, depth in pin.windowed:
            node, block = self.windows.block_of(pin.node, group, depth)
            if node.tier == Tier.GPU:
                self.windows.unpin(pin.node.root, group, block)
        self.readers.unpin(pin.node)

    def _time_is_up(self, pin: Pin) -> int:
        if pin.pin_id in self.active:
            self.unpin(pin)
        return 0

    def void(self, doomed: set[Node]) -> None:
        """Ends the pins on nodes that are about to be invalidated."""
        for pin in [pin for pin in self.active.values() if pin.node in doomed]:
            del self.active[pin.pin_id]
            self._let_go(pin)
