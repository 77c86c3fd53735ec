"""The prefix tree: token runs found by what they hold, cut in two, added, read and taken out.

A node is a run of full blocks, or the unfilled last block of a sequence that ended (a remainder). Matching compares whole
runs of tokens, so a hit is exact and costs one vector operation per node. When a run leaves and where to is the business of
`evict.py`.

A sequence holds a path by its deepest node. `ref` and `unref` walk up only while a node changes between idle and active.
Idle leaves are offered to the eviction policy, and taken back when they are used again. `num_cached` and `num_pinned` of
pools and quotas are changed here, and by host copies. Blocks of full groups count with their run. Those read one by one
count by themselves on the GPU, with the sequences that read them; below it they count with their run, because nobody reads
one of them alone there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final

import numpy as np

from kvpool.config import Tier
from kvpool.core.cache import Cache
from kvpool.core.handle import KVCacheHandle
from kvpool.core.kind import ByBlock
from kvpool.core.node import NEVER, Node, Root
from kvpool.core.prompt import Match
from kvpool.pools.arrays import Int32Array, as_bytes, copied
from kvpool.pools.pool import GPU, BlockPool
from kvpool.pools.symbols import Fresh, numbers_in
from kvpool.scope import ReuseScope

IN_COMMON: Final = (  # what both parts of a divided run have
    *("tier", "detached", "last_access", "last_access_at", "hits", "turn", "fan_out", "hint"),
    *("priority", "priority_until", "ttl", "expires_at", "published_by", "request_id", "owner"),
)
SHORT_RUN: Final = 8192  # tokens up to which comparing copies of the bytes beats an array of differences


# --- roots -----------------------------------------------------------------------------------------------------------


def root_for(cache: Cache, scope: ReuseScope) -> Root:
    """The root of a scope, made if it is not there."""
    root = cache.roots.get(scope)
    if root is None:
        quota = cache.orders.quotas.get(scope.tenant)
        policies = cache.orders.policies if quota is None else quota.policies
        root = cache.roots[scope] = Root(scope, policies, quota, cache.rows)
    return root


def forget_root(cache: Cache, root: Root) -> None:
    """Drops the root of a scope that nobody uses any more."""
    if root.children is None and not root.active and cache.roots.get(root.scope) is root:
        del cache.roots[root.scope]
        cache.last_root = None


def all_nodes(cache: Cache) -> Iterator[Node]:
    """Every node that owns blocks, up to date: those in the tree, and detached ones that live sequences still hold."""
    seen: set[int] = set()
    for root in list(cache.roots.values()):
        for node in root.subtree():
            if node is not root:
                seen.add(id(node))
                yield node
    for tip in cache.rows.tips:
        held = tip
        while held is not None and held.detached and id(held) not in seen and not isinstance(held, Root):
            seen.add(id(held))
            yield held
            held = held.parent


# --- matching --------------------------------------------------------------------------------------------------------


def match_tokens(
    cache: Cache, scope: ReuseScope, tokens: Int32Array, only_tier: Tier | None = None, partial: bool = False
) -> Match:
    """The longest run of blocks, and with `partial` of tokens inside one more, that `tokens` shares with the tree."""
    path: list[Node] = []
    root = cache.last_root
    if root is None or root.scope is not scope:
        root = cache.roots.get(scope)
        if root is None:
            size = cache.block_size
            first = as_bytes(tokens, 0, size) if len(tokens) >= size else None
            return Match(None, path, 0, None, 0, first)
        cache.last_root = root
    size = cache.block_size
    position, total = 0, len(tokens)
    node: Node = root
    key = as_bytes(tokens, 0, size)
    while node.children is not None and total - position >= size:
        child = node.children.get(key)
        if child is None or (only_tier is not None and child.tier != only_tier):
            break
        equal = common_tokens(cache, child, tokens[position:] if position else tokens)
        blocks = equal // size
        path.append(child)
        position += blocks * size
        if blocks < child.num_blocks:
            extra = equal - blocks * size if partial else 0
            return Match(root, path, position // size, child if extra else None, extra)
        if position == total:
            return Match(root, path, position // size)
        node = child
        key = as_bytes(tokens, position, position + size)
    next_key = key if len(key) == 4 * size else None
    if partial and node.children is not None and position < total:
        near, shared = node.children.nearest(key)
        if near is not None:
            return Match(root, path, position // size, near, shared // 4, next_key)
    return Match(root, path, position // size, None, 0, next_key)


def common_tokens(cache: Cache, node: Node, tokens: Int32Array) -> int:
    """How many leading tokens a node and a prompt share; the first block is known to be equal."""
    length = min(node.num_blocks * cache.block_size, len(tokens))
    if length <= cache.block_size:
        return length
    mine = node.tokens if length == len(node.tokens) else node.tokens[:length]
    theirs = tokens if length == len(tokens) else tokens[:length]
    if length <= SHORT_RUN and mine.tobytes() == theirs.tobytes():
        return length
    differs = mine != theirs
    first = int(differs.argmax())
    return first if differs[first] else length


# --- shape -----------------------------------------------------------------------------------------------------------


def new_child(cache: Cache, parent: Node, key: bytes, handle: KVCacheHandle, is_remainder: bool = False) -> Node:
    """A new node in the tree below `parent`, for blocks that a sequence publishes; the caller says at once what they are."""
    counters = cache.counters
    counters.nodes_created += 1
    node = Node(parent, key, parent.start + parent.num_blocks, counters.nodes_created, cache.now)
    node.last_access = cache.tick
    node.ttl = handle.ttl
    node.published_by, node.request_id = handle.serial, handle.request_id
    node.is_remainder = is_remainder
    if handle.session is not None or handle.copied_sessions:
        node.session, node.owner = handle.session, handle.user
        add_sessions(cache, node, handle.sessions)
    parent.add_child(key, node)
    cache.num_runs += 1
    return node


def remove_node(cache: Cache, node: Node) -> None:
    """Takes a leaf out: nobody finds it any more, and its parent may be a leaf now, or the root of an empty scope."""
    node.detached = True
    parent = node.parent
    parent.remove_child(node)
    cache.num_runs -= 1
    cache.calendar.forget(node)
    if node.session is not None or node.copied_sessions:
        for session in node.sessions:
            tagged = cache.sessions.get(session, set())
            tagged.discard(node)
            if not tagged:
                cache.sessions.pop(session, None)
    if parent is not parent.root:
        if parent.tier == node.tier:
            offer(cache, parent)
    elif parent.children is None:
        forget_root(cache, parent.root)


def split(cache: Cache, node: Node, num_blocks: int) -> Node:
    """Cuts a run in two and returns the upper part, a new node; readers and the open row stay with the lower part.

    The caller made sure that `0 < num_blocks < node.num_blocks`.
    """
    node.sync()
    candidate = node.is_candidate()
    policy = node.root.policies[node.tier]
    if candidate:
        policy.remove(node)
    upper = _twin(cache, node)
    upper.active, upper.pins = int(node.active > 0), int(node.pins > 0)
    if not node.detached:
        node.parent.add_child(node.key, upper)  # takes the place of `node`
        node.parent.same_tier_children -= int(node.tier == node.parent.tier)
    node.parent = upper
    _divide(cache, node, upper, node, num_blocks)
    if not node.detached:
        upper.add_child(node.key, node)
        cache.num_runs += 1
    watch(cache, upper)
    if candidate:
        policy.add(node)
    return upper


def cut_off(cache: Cache, node: Node, num_blocks: int) -> Node:
    """Leaves a candidate its first `num_blocks` and returns the rest, a new node, which the run's children follow now.

    The policy is told nothing: `node` is the run that it knows, which is `trimmed` once the rest has moved.
    """
    lower = _twin(cache, node)
    lower.parent = node
    lower.children, lower.num_remainders = node.children, node.num_remainders
    for child in lower.children.values() if lower.children is not None else ():
        child.parent = lower
    node.children, node.num_remainders = None, 0
    _divide(cache, node, node, lower, num_blocks)
    node.add_child(lower.key, lower)
    cache.num_runs += 1
    watch(cache, lower)
    return lower


def _twin(cache: Cache, node: Node) -> Node:
    """A new node for one part of a run, with what both parts have in common."""
    twin = Node(node.parent, node.key, node.start, node.created, node.created_at)
    for name in IN_COMMON:
        setattr(twin, name, getattr(node, name))
    if node.session is not None or node.copied_sessions:
        twin.session = node.session
        add_sessions(cache, twin, node.sessions)
    return twin


def _divide(cache: Cache, whole: Node, upper: Node, lower: Node, num_blocks: int) -> None:
    """Gives two parts of a run, one of which is the run itself, what each of them holds."""
    cut = num_blocks * cache.block_size
    start, end, tokens, ids, digests = whole.start, whole.end, whole.tokens, whole.ids, whole.digests
    upper.num_blocks, lower.start, lower.num_blocks = num_blocks, start + num_blocks, end - start - num_blocks
    upper.tokens, lower.tokens = tokens[:cut], tokens[cut:]
    upper.ids = tuple([of_group[:num_blocks] for of_group in ids])
    if whole.open_row >= 0:  # they are a view of its row
        upper.ids = tuple([of_group.copy() for of_group in upper.ids])
    lower.ids = tuple([of_group[num_blocks:] for of_group in ids])
    lower.key = tokens[cut : cut + cache.block_size].tobytes()
    upper.known_fingerprint, lower.known_fingerprint = whole.known_fingerprint, None
    upper.end_sum, lower.end_sum = -1, whole.end_sum
    if digests is not None:
        upper.digests, lower.digests = digests[:num_blocks], digests[num_blocks:]
    if whole.logits is not None:
        stored, end = (
            whole.logits,
            lower.start * cache.block_size + cache.block_size,
        )  # behind the last prompt of `upper`
        upper.logits = {key: value for key, value in stored.items() if key[0] < end}
        lower.logits = {key: value for key, value in stored.items() if key[0] >= end}
    if whole.host_copy is not None:
        cache.host_copies.divide(whole.host_copy, upper, lower)


def watch(cache: Cache, node: Node) -> None:
    """Notes when a node's time to live or priority ends, if it does."""
    if node.expires_at != NEVER:
        cache.calendar.schedule(node, node.expires_at)
    if node.priority_until != NEVER:
        cache.calendar.schedule(node, node.priority_until)


def end_at(cache: Cache, node: Node, depth: int) -> Node:
    """The run of `node` that ends at `depth` and has an end that others may follow: cut there, or closed."""
    if node.start + node.num_blocks > depth:
        return split(cache, node, depth - node.start)
    if node.open_row >= 0:
        close(cache, node)
    return node


def tip_of(cache: Cache, row: int) -> Node:
    """The deepest node that a row holds, up to date."""
    tip = cache.rows.tips[row]
    tip.sync()
    return tip


def close(cache: Cache, node: Node) -> None:
    """Ends the growth of a node, if it is open: it gets arrays of its own and may have other readers."""
    row = node.open_row
    if row < 0:
        return
    rows, size = cache.rows, cache.block_size
    start, end = node.start, rows.committed_of[row] // size
    node.open_row = -1
    node.num_blocks = end - start
    node.tokens = rows.final_token_ids(row, start * size, end * size, rows.num_history_of[row])
    if len(cache.growing) == 1:
        place = row * rows.num_columns
        node.ids = (copied(rows.first_table, place + start, place + end),)
    else:
        node.ids = tuple([rows.tables[group.index][row, start:end].copy() for group in cache.growing])
    rows.grows_alone_of[row] = False


# --- readers and pins ------------------------------------------------------------------------------------------------


def ref(cache: Cache, node: Node) -> None:
    """One more sequence (or one more active child) reads this node."""
    while True:
        node.active += 1
        if node.active > 1 or node is node.root:
            return
        if not (node.pins or node.same_tier_children):
            node.root.policies[node.tier].remove(node)
        count_run(cache, node, -1, -1 if node.pins else 0)
        node = node.parent


def unref(cache: Cache, node: Node, used: bool = True) -> None:
    """A sequence lets go of its deepest node; nodes that nobody reads any more become cached, or free if detached.

    Unless it only held them (`used` is False), this was their last use.
    """
    waiting = cache.host_copies.waiting if used else None
    while True:
        node.active -= 1
        if node.active:
            return
        if node is node.root:
            if node.children is None:
                forget_root(cache, node.root)
            return
        parent = node.parent
        if used:
            node.last_access = cache.tick
            node.last_access_at = cache.now
        if node.detached:
            for group in cache.full:
                group.on(node.tier).give(node.ids[group.index])
            for each in cache.by_block:
                free_blocks(cache, node, each, node.ids[each.index])
            node.num_blocks = 0
        else:
            count_run(cache, node, 1, 1 if node.pins else 0)
            if waiting is not None:
                waiting.append(node)
            if node.ttl is not None:
                node.expires_at = cache.now + node.ttl
                watch(cache, node)
            if not (node.pins or node.same_tier_children):
                node.root.policies[node.tier].add(node)
        node = parent


def offer(cache: Cache, node: Node) -> None:
    """Gives a node to the eviction policy if it is a candidate now."""
    if node.is_candidate():
        if node.expires_at <= cache.now:
            watch(cache, node)
        node.root.policies[node.tier].add(node)


def pin_path(cache: Cache, node: Node) -> None:
    """Protects a path from eviction; counts like `hold`."""
    while node is not node.root:
        node.pins += 1
        if node.pins > 1:
            return
        cache.pinned_positions += node.num_blocks
        if not node.active:
            if not node.same_tier_children:
                node.root.policies[node.tier].remove(node)
            count_run(cache, node, 0, 1)
        node = node.parent


def unpin_path(cache: Cache, node: Node) -> None:
    """One pin less on a path."""
    while node is not node.root:
        node.pins -= 1
        if node.pins:
            return
        cache.pinned_positions -= node.num_blocks
        if not node.active:
            count_run(cache, node, 0, -1)
            offer(cache, node)
        node = node.parent


# --- what nobody reads -----------------------------------------------------------------------------------------------


def add_idle(root: Root, pool: BlockPool, idle: int, pinned: int = 0) -> None:
    """So many blocks became idle, so many idle ones pinned; or, where negative, stopped being so."""
    pool.num_cached += idle
    pool.num_pinned += pinned
    if root.quota is not None and pool.tier == GPU:
        root.quota.cached[pool.index] += idle
        root.quota.pinned[pool.index] += pinned


def count_run(cache: Cache, node: Node, idle: int, pinned: int) -> None:
    """The blocks that count with a run became idle (1), stopped being so (-1), or neither (0); `pinned` likewise."""
    root, tier, length = node.root, node.tier, node.num_blocks
    if cache.only_pools is not None and root.quota is None:
        pool = cache.only_pools[tier]
        pool.num_cached += idle * length
        if pinned:
            pool.num_pinned += pinned * length
        return
    for index, per_position in cache.full_per_pool:
        num_blocks = length * per_position
        add_idle(root, cache.pools[index][tier], idle * num_blocks, pinned * num_blocks)
    for group in cache.by_block if tier != GPU else ():
        num_blocks = int((node.ids[group.index] >= 0).sum())
        add_idle(root, group.on(tier), idle * num_blocks, pinned * num_blocks)


def free_blocks(cache: Cache, node: Node, group: ByBlock, ids: Int32Array) -> None:
    """Frees published, unread blocks (-1: none) of a run; pinned ones only below the GPU, where their run is pinned."""
    held = ids[ids >= 0]
    pool = group.on(node.tier)
    pool.give(held)
    add_idle(node.root, pool, -len(held), -len(held) if node.pins and node.tier != GPU else 0)


# --- sessions --------------------------------------------------------------------------------------------------------


def add_sessions(cache: Cache, node: Node, names: tuple[str, ...]) -> None:
    """Something in a run was computed by requests of these sessions."""
    for name in names:
        tagged = cache.sessions.setdefault(name, set())
        if node not in tagged:
            tagged.add(node)
            if name != node.session:
                node.copied_sessions = (*node.copied_sessions, name)


MAX_LOGITS = 64  # prompts that end in one run and have their logits stored; the oldest gives way


def find_logits(cache: Cache, root: Root | None, path: list[Node], tokens: Int32Array) -> Any:
    """What was stored for exactly these tokens, all of which match along `path`; None if nothing was."""
    size = cache.block_size
    blocks = len(tokens) // size
    node: Node | None = next((n for n in reversed(path) if n.start < blocks <= n.end), root)
    if node is None or node.logits is None:
        return None
    found = node.logits.get((len(tokens), tokens[blocks * size :].tobytes()))
    return None if found is None else found[0]


def store_logits(cache: Cache, tip: Node, tokens: Int32Array, logits: Any, sessions: tuple[str, ...]) -> bool:
    """Keeps the logits behind `tokens`, which lie on the path to `tip`; False if their last full block is not cached."""
    blocks = len(tokens) // cache.block_size
    node = tip
    while node is not node.root and node.start >= blocks:
        node = node.parent
    if node.end < blocks:
        return False
    cache.has_logits = True
    if node.logits is None:
        node.logits = {}
    elif len(node.logits) >= MAX_LOGITS:
        del node.logits[next(iter(node.logits))]
    node.logits[len(tokens), tokens[blocks * cache.block_size :].tobytes()] = logits, sessions
    return True


def forget_logits_of(cache: Cache, session: str, roots: Iterable[Root]) -> None:
    """Forgets the logits that requests with content of a session computed, wherever they are kept."""
    for node in (node for root in roots if cache.has_logits for node in root.subtree()):
        if node.logits:
            node.logits = {key: stored for key, stored in node.logits.items() if session not in stored[1]}


def forget_logits_inside(cache: Cache, node: Node, depth: int, key: bytes) -> None:
    """Forgets the logits of prompts that end inside the block `key` behind `node`, at `depth`."""
    if node.logits:
        for length, tail in list(node.logits):
            if tail and length // cache.block_size == depth and key.startswith(tail):
                del node.logits[length, tail]


# --- symbols of multimodal items ---------------------------------------------------------------------------------------


def keep_symbols(cache: Cache, fresh: Fresh) -> None:
    """Notes the symbols of multimodal items that are in a row now, and forgets old ones if there are too many."""
    symbols = cache.rows.symbols
    if symbols.keep(fresh):
        symbols.forget_all_but(numbers_in_use(cache))


def numbers_in_use(cache: Cache) -> set[int]:
    """The numbers of all symbols in rows and in the tree. Looks at every token."""
    used: set[int] = set()
    for node in (node for root in cache.roots.values() for node in root.subtree()):
        used |= numbers_in(node.tokens)
        for _, tail in node.logits or ():  # of prompts that end in the run
            used |= numbers_in(np.frombuffer(tail, np.int32))
    for row in cache.rows.live_rows():
        used |= numbers_in(cache.rows.token_ids(row))
    return used
