"""Content that leaves the index: tails of idle runs, whole subtrees, also under live sequences."""

from __future__ import annotations

from kvpool.prefix.announcer import Announcer
from kvpool.prefix.context import CacheContext
from kvpool.prefix.expiry import Expiry
from kvpool.prefix.ledger import IdleLedger
from kvpool.prefix.logits import trim_logits
from kvpool.prefix.node import Node
from kvpool.prefix.path_readers import PathReaders
from kvpool.prefix.tree import RunTree
from kvpool.prefix.window_readers import WindowReaders
from kvpool.stats import EvictionReason


class Removal:
    """Frees what leaves, keeps the books, and tells subscribers exactly once. What leaves, and when, others decide."""

    def __init__(
        self,
        context: CacheContext,
        tree: RunTree,
        ledger: IdleLedger,
        windows: WindowReaders,
        readers: PathReaders,
        announcer: Announcer,
        expiry: Expiry,
    ) -> None:
        self.context = context
        self.block_size = context.block_size
        self.tree = tree
        self.ledger = ledger
        self.windows = windows
        self.readers = readers
        self.announcer = announcer
        self.expiry = expiry

    def drop_tail(self, node: Node, num_blocks: int, reason: EvictionReason, evicted: bool = False) -> None:
        """Removes the last `num_blocks` of an idle leaf from the index and frees them; lower-tier children go with it."""
        if node.children is not None:
            for child in list(node.children.values()):
                self.drop_subtree(child, reason)
        context = self.context
        policy = node.root.policies[node.tier]
        keep = node.num_blocks - num_blocks
        if node.shadow is not None:
            context.shadows.trim(node, keep)
        if not keep and (evicted or node.is_candidate()):
            if evicted:
                policy.evicted(node)
            policy.remove(node)
        self._note_departure(node, num_blocks, reason)
        leaving = [ids[keep:] for ids in node.ids] if keep else node.ids
        for group in context.full:
            group.tiers[node.tier].give(leaving[group.index])
        self.ledger.count_positions(node, -num_blocks)
        for group in context.windowed:
            self.windows.free(node, group, leaving[group.index])
        node.num_blocks = keep
        if not keep:
            self._unlink(node)
            return
        rest = 2 * keep < keep + num_blocks  # a short rest must not keep the memory of a long run
        node.ids = [ids[:keep].copy() if rest else ids[:keep] for ids in node.ids]
        tokens = node.tokens[: keep * self.block_size]
        node.tokens = tokens.copy() if rest else tokens
        node.lose_end()
        if node.digests is not None:
            del node.digests[keep:]
        trim_logits(node, self.block_size)
        policy.trimmed(node)

    def _note_departure(self, node: Node, num_blocks: int, reason: EvictionReason) -> None:
        context = self.context
        counters, now = context.counters, context.now
        if context.windowed:
            present = context.num_present(node, node.num_blocks - num_blocks)
        else:
            present = num_blocks * len(context.full)
        counters.evictions[reason._value_] += present
        counters.lifetime.add(now - node.created_at, num_blocks)
        counters.idle_before_eviction.add(now - node.last_access_at, num_blocks)
        if context.events.listening and node.digests:
            self.announcer.removed(node, node.num_blocks - num_blocks, node.num_blocks, reason)

    def _unlink(self, node: Node) -> None:
        """Takes a leaf out of the tree; its parent may become a leaf."""
        self.expiry.forget(node)
        self.tree.remove(node)
        parent = node.parent
        if parent is not parent.root and parent.tier == node.tier:
            self.readers.offer(parent)

    def drop_subtree(self, node: Node, reason: EvictionReason) -> None:
        """Drops an idle node with everything below it, deepest first."""
        for part in reversed(list(node.subtree())):
            self.drop_tail(part, part.num_blocks, reason)

    def drop_covered(self, parent: Node, key: bytes) -> None:
        """Drops the remainders below `parent` that hold nothing but a beginning of the block `key`, which is cached now."""
        for length in range(4, len(key), 4):
            covered = parent.children.get(key[:length]) if parent.children is not None else None
            if covered is not None and covered.is_candidate():
                self.drop_tail(covered, 1, EvictionReason.CONTINUED)

    def take_over(self, node: Node) -> list[int]:
        """The last block of an idle leaf on the GPU leaves the index and is a request's own; returns its id per group."""
        ids = [int(of_group[-1]) for of_group in node.ids]
        self.drop_tail(node, 1, EvictionReason.CONTINUED)
        for group, block in zip(self.context.cached, ids, strict=True):
            group.gpu.take(1)  # all of them lie on top of the free stack, in some order
            group.own(block)
        return ids

    def detach(self, node: Node, reason: EvictionReason) -> int:
        """Takes a subtree out of the index, also under live sequences: they keep their blocks and publish nothing more.

        Idle nodes are dropped; nodes that are read become detached and free their blocks with their last reader. The
        caller ended the pins on them. Returns how many blocks (positions) left the index.
        """
        context = self.context
        removed = 0
        parts = list(node.subtree())
        for part in reversed(parts):
            context.sync(part)
            removed += part.num_blocks
            if not part.active:
                if part.num_blocks:
                    self.drop_tail(part, part.num_blocks, reason)
                continue
            if context.events.listening and part.digests:
                self.announcer.removed(part, 0, part.num_blocks, reason)
            context.counters.evictions[reason.value] += context.num_present(part, 0)
            part.digests = part.logits = None
            context.shadows.drop(part)
        for part in parts:
            if part.active and not part.detached:
                self._unlink(part)
        return removed
