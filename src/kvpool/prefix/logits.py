"""Logits kept behind cached prompts, so that the same prompt, fully cached, needs no forward pass at all.

They hang on the node that holds the last full block of their prompt, and leave with that block.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kvpool.pools.arrays import Int32Array
from kvpool.prefix.context import CacheContext
from kvpool.prefix.node import Node, Root

MAX_LOGITS = 64  # prompts that end in one run and have their logits stored; the oldest gives way


class StoredLogits:
    """Finds, stores and forgets them. `are_stored`: whether any ever were; without, nobody looks for them.

    They stand with the sessions of the request that computed them: those need not be the sessions of the run.
    """

    def __init__(self, context: CacheContext) -> None:
        self.context = context
        self.block_size = context.block_size
        self.are_stored = False

    def find(self, root: Root | None, path: list[Node], tokens: Int32Array) -> Any:
        """What was stored for exactly these tokens, all of which match along `path`; None if nothing was."""
        size = self.block_size
        blocks = len(tokens) // size
        node: Node | None = next((n for n in reversed(path) if n.start < blocks <= n.end), root)
        if node is None or node.logits is None:
            return None
        found = node.logits.get((len(tokens), tokens[blocks * size :].tobytes()))
        return None if found is None else found[0]

    def store(self, tip: Node, tokens: Int32Array, logits: Any, sessions: tuple[str, ...]) -> bool:
        """Keeps the logits behind `tokens`, which lie on the path to `tip`; False if their last full block is not cached."""
        blocks = len(tokens) // self.block_size
        node = tip
        self.context.sync(node)
        while node is not node.root and node.start >= blocks:
            node = node.parent
        if node.end < blocks:
            return False
        self.are_stored = True
        if node.logits is None:
            node.logits = {}
        elif len(node.logits) >= MAX_LOGITS:
            del node.logits[next(iter(node.logits))]
        node.logits[len(tokens), tokens[blocks * self.block_size :].tobytes()] = logits, sessions
        return True

    def forget_made_by(self, session: str, roots: Iterable[Root]) -> None:
        """Forgets the logits that requests with content of a session computed, wherever they are kept."""
        for node in (node for root in roots if self.are_stored for node in root.subtree()):
            if node.logits:
                node.logits = {key: stored for key, stored in node.logits.items() if session not in stored[1]}

    def forget_inside(self, node: Node, depth: int, key: bytes) -> None:
        """Forgets the logits of prompts that end inside the block `key` behind `node`, at `depth`."""
        if node.logits:
            for length, tail in list(node.logits):
                if tail and length // self.block_size == depth and key.startswith(tail):
                    del node.logits[length, tail]


def divide_logits(node: Node, upper: Node, end: int, block_size: int) -> None:
    """A run is cut in two at depth `end`: `upper` takes those of prompts whose last full block it holds."""
    if node.logits is not None:
        stored = node.logits
        upper.logits = {key: value for key, value in stored.items() if key[0] // block_size <= end}
        node.logits = {key: value for key, value in stored.items() if key[0] // block_size > end}


def trim_logits(node: Node, block_size: int) -> None:
    """A run lost its tail, and with it the logits of prompts that ended there."""
    if node.logits is not None:
        node.logits = {key: value for key, value in node.logits.items() if key[0] // block_size <= node.end}
