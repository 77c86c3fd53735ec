"""Multimodal items as the tree holds them: which of them a run has placeholders of, and which symbols are in use at all."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from kvpool.pools.arrays import Int32Array
from kvpool.pools.symbols import Symbols, is_first, numbers_in
from kvpool.prefix.node import Node
from kvpool.scope import MultimodalItem

Content = tuple[Int32Array, tuple[MultimodalItem, ...]]


def run_content(symbols: Symbols, node: Node, begin: int, end: int) -> Content:
    """Tokens `begin..end` of a synced node as their caller gave them, and the items that they are placeholders of.

    Positions count from `begin`; an item that began before it has a negative one.
    """
    ids = node.tokens[begin:end]
    if not symbols.placeholders or not len(ids) or int(ids.min()) >= 0:
        return ids, ()
    items = symbols.items(ids)
    first = int(ids[0])
    if first < 0 and not (items and items[0].position == 0):
        placeholder = symbols.placeholder(first)
        before = _tokens_before(node, begin, placeholder.length)
        start = int(np.flatnonzero(is_first(before))[-1]) - len(before)
        items.insert(0, MultimodalItem(start, placeholder.length, placeholder.key))
    return symbols.decode(ids), tuple(items)


def _tokens_before(node: Node, index: int, count: int) -> Int32Array:
    """At least `count` tokens before one of a node, on the path to it, or all there are."""
    parts = [node.tokens[max(0, index - count) : index]]
    found = len(parts[0])
    while found < count and node.parent is not node.root:
        node = node.parent
        parts.append(node.tokens[-(count - found) :])
        found += len(parts[-1])
    return np.concatenate(parts[::-1])


def numbers_in_tree(nodes: Iterable[Node]) -> set[int]:
    """The numbers of all symbols that these synced nodes hold, in tokens or in the ends of prompts with stored logits."""
    used: set[int] = set()
    for node in nodes:
        used |= numbers_in(node.tokens)
        for _, tail in node.logits or ():
            used |= numbers_in(np.frombuffer(tail, np.int32))
    return used
