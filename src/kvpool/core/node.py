"""A node of the prefix tree: one run of tokens and the blocks that hold their keys and values."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from operator import attrgetter
from typing import Any, Final

import numpy as np

from kvpool.core.sessions import Owner
from kvpool.eviction import EvictionPolicy
from kvpool.eviction.policy import Run, checksum
from kvpool.pools.arrays import Int32Array, block_sums, num_common
from kvpool.pools.pool import GPU
from kvpool.pools.symbols import Symbols, is_first
from kvpool.scope import MultimodalItem, ReuseScope

Content = tuple[Int32Array, tuple[MultimodalItem, ...]]
Logits = dict[tuple[int, bytes], tuple[Any, tuple[str, ...]]]


DEFAULT_PRIORITY: Final = 35
MAX_PRIORITY: Final = 100
NEVER: Final = float("inf")  # the deadline of what has none


class Node(Run):
    """`num_blocks` full blocks of tokens that follow `parent`, all on one tier.

    `turn` and `fan_out` say where the request stood that published it: how many before it went the same way alone, and how
    many had reused the parent by then, itself included. `hint` is what was said about its continuation (`ReuseHint.code`).

    `active` counts the sequences whose deepest node this is plus the children that are active, so a node is unreferenced
    exactly when `active` is 0, and holding a path costs one step per node that was idle. `pins` counts in the same way.

    An *open* node (`open_row >= 0`) belongs to the sequence in that row, which still appends to it: its tokens and ids are
    read from the sequence's row (`sync`) and are copied here only when the node is closed. So decoding a token costs the tree
    nothing. It is a leaf. Whoever finds one on a way down the tree, or asks for the `tip_of` a row, gets it up to date.

    A *remainder* (`is_remainder`) is the last block of a sequence that ended inside it: a leaf of one block whose tokens do
    not fill it. It is found by partial matching alone, so it has no digest, and nothing ever follows it.
    """

    __slots__ = (
        *("end_sum", "active", "children", "copied_sessions", "created_at", "detached", "digests", "expires_at"),
        *("ids", "is_remainder", "logits", "num_remainders", "open_row", "owner", "parent", "pins"),
        *("priority_until", "published_by", "request_id", "root", "same_tier_children", "host_copy", "tier", "ttl"),
    )

    parent: Node
    root: Root
    children: Branch | None  # None if there are none
    digests: list[bytes] | None
    # By prompt length and the tokens behind the last full block: the logits, and the sessions of who computed them.
    logits: Logits | None
    ids: tuple[Int32Array, ...]  # by group
    host_copy: list[Int32Array] | None  # on the host, with the same data as `ids` on the GPU: `HostCopies`
    copied_sessions: tuple[str, ...]  # of those that computed some of it and did not publish it
    owner: Owner | None  # the smallest group of sessions that has all its users; None: everybody
    ttl: float | None
    detached: bool
    published_by: int  # `KVCacheHandle.serial` of the request that computed it; a root has none
    request_id: Hashable  # of that request
    end_sum: int  # the checksum of all tokens up to its end, once something behind it asked for it; -1 before

    def __init__(self, parent: Node, key: bytes, start: int, created: int, now: float) -> None:
        self.parent = parent
        self.root = parent.root
        self.scope_hash = parent.scope_hash
        self.key = key
        self.start = start
        self.num_blocks = 0
        self.is_remainder = False
        self.children = None
        self.num_remainders = 0  # of the children
        self.same_tier_children = 0
        self.active = 0
        self.pins = 0
        self.tier = GPU
        self.open_row = -1
        self.detached = parent.detached
        self.created = created
        self.last_access = created
        self.created_at = now
        self.last_access_at = now
        self.hits = 0
        self.fan_out = parent.hits
        self.hint = 0
        self.turn = parent.turn + 1 if start > 1 and parent.hits <= 1 else 0
        self.priority = DEFAULT_PRIORITY
        self.priority_until = NEVER
        self.ttl = None
        self.expires_at = NEVER
        self.known_fingerprint = None
        self.end_sum = -1
        self.session = None
        self.copied_sessions = ()
        self.owner = None
        self.digests = None
        self.host_copy = None
        self.logits = None
        self.entry = None

    @property
    def leaves(self) -> bool:
        """Whether all sessions that used it have ended."""
        return self.owner is not None and not self.owner.num_open

    @property
    def above(self) -> Node | None:
        """The run that it follows; None at the top."""
        return self.parent if self.start else None

    @property
    def sum_before(self) -> int:
        """The checksum of all tokens that precede this run. It does not depend on how they are divided into runs."""
        node = self.parent
        if node.end_sum >= 0:
            return node.end_sum
        behind = []
        while node.end_sum < 0:
            behind.append(node)
            node = node.parent
        sum_before = node.end_sum
        for node in reversed(behind):
            sum_before = node.end_sum = checksum(node.tokens.data, sum_before)
        return sum_before

    def sums_of(self, tokens: Int32Array, num_blocks: int) -> bytes:
        """A checksum of four bytes for each of so many blocks with these tokens."""
        return block_sums(tokens, num_blocks)

    @property
    def tenant(self) -> str:
        """Whose content this is."""
        return self.root.scope.tenant

    @property
    def sessions(self) -> tuple[str, ...]:
        """Every session of which something is in this run."""
        return self.copied_sessions if self.session is None else (self.session, *self.copied_sessions)

    @property
    def end(self) -> int:
        """Depth, in blocks, where this run ends."""
        return self.start + self.num_blocks

    def set_ids(self, group: int, ids: Int32Array) -> None:
        """Replaces the block ids of one group."""
        self.ids = (*self.ids[:group], ids, *self.ids[group + 1 :])

    def sync(self) -> None:
        """Brings an open node up to date with the row that still writes it."""
        row = self.open_row
        if row >= 0:
            rows, start = self.root.rows, self.start
            size, end = rows.block_size, rows.committed_of[row] // rows.block_size
            self.num_blocks = end - start
            self.tokens = rows.ids_between(row, start * size, end * size)
            tables = [table for group, table in zip(rows.groups, rows.tables, strict=True) if group.grows]
            self.ids = tuple([table[row, start:end] for table in tables])

    def only_child(self) -> Node | None:
        """The run that goes on where this one ends, if there is exactly one and it is no remainder."""
        below = () if self.children is None else self.children.below.values()
        if len(below) != 1 or self.num_remainders:
            return None
        (child,) = below
        if isinstance(child, Branch):
            return None
        child.sync()
        return child

    def add_child(self, key: bytes, child: Node) -> None:
        if self.children is None:
            self.children = Branch()
        self.children.put(key, child)
        if child.tier == self.tier:
            self.same_tier_children += 1
        if child.is_remainder:
            self.num_remainders += 1

    def remove_child(self, child: Node) -> None:
        children = self.children
        assert children is not None
        children.remove(child.key)
        if not children.below:
            self.children = None
        if child.tier == self.tier:
            self.same_tier_children -= 1
        if child.is_remainder:
            self.num_remainders -= 1

    def is_candidate(self) -> bool:
        """Whether the eviction policy has this node: an unread, unpinned leaf of its tier."""
        return not (self.active or self.pins or self.same_tier_children or self is self.root or self.detached)

    def path(self) -> list[Node]:
        """The nodes from just below the root down to this one."""
        node, path = self, []
        while node is not node.root:
            path.append(node)
            node = node.parent
        path.reverse()
        return path

    def outranks(self, other: Node) -> bool:
        """Whether its priority is above that of another run, and of all below that one, which would be lost with it."""
        return self.priority > other.priority and all(self.priority > part.priority for part in other.subtree())

    def subtree(self) -> Iterator[Node]:
        """This node and all below it, parents before children."""
        stack = [self]
        while stack:
            node = stack.pop()
            node.sync()
            yield node
            if node.children is not None:
                stack.extend(node.children.values())


class Root(Node):
    """The empty run at the top of one reuse scope."""

    __slots__ = ("digest", "policies", "quota", "rows", "scope")

    def __init__(self, scope: ReuseScope, policies: list[EvictionPolicy], quota: Any, rows: Any) -> None:
        self.detached = False
        self.hits = self.turn = 0
        self.root = self
        self.scope_hash = hash(scope)
        super().__init__(self, b"", 0, 0, 0.0)
        self.end_sum = 0
        self.scope = scope
        self.digest: bytes | None = None  # of the scope, once somebody asked for it
        self.policies = policies
        self.quota = quota
        self.rows = rows  # of all live sequences, whose open nodes read them
        self.tokens = np.empty(0, np.int32)
        self.ids = ()


class Branch:
    """Runs that follow a node, in a tree of branches by the bytes of their first blocks, divided where their tokens differ.

    All below begin with the bytes `shared`, and no two go on with the same token. (What ends here has no next token, and
    lies below `b""`.) So where most differ in their first token, one entry of one dictionary tells whether a block is there
    and which child begins like it. A node has the top of its tree.
    """

    __slots__ = ("below", "shared")

    below: dict[bytes, Node | Branch]  # by the next token

    def __init__(self, shared: bytes = b"") -> None:
        self.shared = shared
        self.below = {}

    def get(self, key: bytes) -> Node | None:
        """The child with this key, up to date."""
        found = self.below.get(key[:4])
        while isinstance(found, Branch):
            end = len(found.shared)
            found = found.below.get(key[end : end + 4])
        if found is None or found.key != key:
            return None
        if found.open_row >= 0:
            found.sync()
        return found

    def values(self) -> list[Node]:
        """All of them, the oldest first."""
        children: list[Node] = []
        branches = [self]
        while branches:
            for found in branches.pop().below.values():
                if isinstance(found, Branch):
                    branches.append(found)
                else:
                    children.append(found)
        children.sort(key=_BY_AGE)
        return children

    def put(self, key: bytes, child: Node) -> None:
        """Adds a child, or replaces the one that has this key."""
        branch = self
        end = 0
        while True:
            token = key[end : end + 4]
            found = branch.below.get(token)
            if found is None:
                break
            beginning = found.shared if isinstance(found, Branch) else found.key
            common = num_common(beginning, key) // 4 * 4  # whole tokens
            if isinstance(found, Branch) and common == len(beginning):
                branch, end = found, common
            elif beginning == key:
                break
            else:
                parting = branch.below[token] = Branch(key[:common])
                parting.below[beginning[common : common + 4]] = found
                branch, end = parting, common
        branch.below[token] = child

    def remove(self, key: bytes) -> None:
        """Takes out the child with this key."""
        above = below = self.below
        branched_at = token = key[:4]
        found = below[token]
        while isinstance(found, Branch):
            above, below, branched_at = below, found.below, token
            end = len(found.shared)
            token = key[end : end + 4]
            found = below[token]
        del below[token]
        if len(below) == 1 and below is not above:
            (above[branched_at],) = below.values()

    def nearest(self, query: bytes) -> tuple[Node | None, int]:
        """The child whose key shares the longest beginning with `query`, and how many bytes they share (0 if no token).

        Several may share equally many tokens. The answer is then the one that came last to the branch that came last: it
        depends on the order in which they came and on where they part, not on what their tokens are.
        """
        found: Node | Branch | None = self.below.get(query[:4])
        if found is None:
            return None, 0
        while isinstance(found, Branch):
            common = num_common(found.shared, query)
            below = found.below.get(query[common : common + 4]) if common == len(found.shared) else None
            if below is None:
                while isinstance(found, Branch):
                    found = next(reversed(found.below.values()))
                found.sync()
                return found, common
            found = below
        found.sync()
        return found, num_common(found.key, query)


def path_ids(path: list[Node], num_blocks: int, group: int) -> Int32Array:
    """The block ids of a group along a path of synced nodes, cut to `num_blocks`."""
    if len(path) == 1:
        return path[0].ids[group][:num_blocks]
    if not path:
        return _NO_IDS
    return np.concatenate([node.ids[group] for node in path])[:num_blocks]


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
    before = node.tokens[:index]
    while len(before) < count and node.parent is not node.root:
        node = node.parent
        before = np.concatenate((node.tokens, before))
    return before


_BY_AGE = attrgetter("created")
_NO_IDS: Int32Array = np.empty(0, np.int32)
