"""Keys of the blocks of one cache, and how content is forgotten: after `invalidate`, a tier must not bring it back.

A tier cannot list the blocks that follow another one. So forgetting changes keys: every digest that follows a forgotten one
is mixed with random bytes (a salt) before it becomes a key, and nobody asks for the old key again. If this process still
knows the old keys, it also removes the values from the tiers, so that other processes do not find them either.
"""

from __future__ import annotations

import hashlib
import secrets
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kvpool.config import KVCacheConfig, Tier
from kvpool.core.kind import Group
from kvpool.kinds import kind_of
from kvpool.pools.arrays import Int32Array
from kvpool.pools.pool import BlockPool
from kvpool.prefix.digests import chain_digests, root_digest
from kvpool.scope import MultimodalItem, ReuseScope
from kvpool.tiers.keys import KeySpace, named, tenant_digest

MAX_MARKS = 65_536
MAX_KNOWN = 65_536


class _Marks(NamedTuple):
    """One state of `Forgotten`. It is replaced as a whole, so that readers need no lock."""

    version: int
    salt: bytes | None  # of everything
    salts: dict[bytes, bytes]  # of what follows a digest, itself included


class Forgotten:
    """Digests that were forgotten with all that follows them. If there are too many, everything stored is forgotten.

    >>> forgotten = Forgotten()
    >>> root, first, second = (bytes([number]) * 32 for number in range(3))
    >>> forgotten.forget([second])
    >>> used, salt = forgotten.renamed(forgotten.salt_of(root), [first, second])
    >>> used[0] == first, used[1] == second
    (True, False)
    """

    def __init__(self, limit: int = MAX_MARKS) -> None:
        self._limit = limit
        self._marks = _Marks(0, None, {})
        self._lock = threading.Lock()

    @property
    def version(self) -> int:
        """Grows each time something is forgotten. Keys that were made at an earlier version may be outdated."""
        return self._marks.version

    def forget(self, digests: Iterable[bytes]) -> None:
        """Forgets blocks, scopes (by their root) or tenants (`tenant_digest`), with all that follows them."""
        with self._lock:
            salts = {**self._marks.salts, **{digest: secrets.token_bytes(32) for digest in digests}}
            if len(salts) <= self._limit:
                self._marks = _Marks(self._marks.version + 1, self._marks.salt, salts)
                return
        self.forget_all()

    def forget_all(self) -> None:
        """Forgets everything that was stored before."""
        with self._lock:
            self._marks = _Marks(self._marks.version + 1, secrets.token_bytes(32), {})

    def salt_of(self, *roots: bytes) -> bytes | None:
        """The salt for digests that follow these roots (of a tenant and of a scope); None if there is none."""
        marks = self._marks
        salt = marks.salt
        for root in roots:
            if root in marks.salts:
                salt = _mixed(salt, marks.salts[root])
        return salt

    def renamed(self, salt: bytes | None, digests: Sequence[bytes]) -> tuple[Sequence[bytes], bytes | None]:
        """Consecutive digests, mixed with their salts, and the salt for those that follow. `salt` is that of the first."""
        salts = self._marks.salts
        if salt is None and not salts:
            return digests, None
        renamed = []
        for digest in digests:
            if digest in salts:
                salt = _mixed(salt, salts[digest])
            renamed.append(digest if salt is None else _mixed(salt, digest))
        return renamed, salt


def _mixed(salt: bytes | None, digest: bytes) -> bytes:
    return hashlib.sha256((salt or b"") + digest).digest()


class PromptKeys(NamedTuple):
    """The keys of a prompt in tiers."""

    num_tokens: int
    keys: tuple[list[bytes], ...]  # per layer group, one per whole block
    version: int = 0  # of `Forgotten` when the keys were made

    @property
    def num_blocks(self) -> int:
        return len(self.keys[0])


class BlockKeys:
    """Keys of the blocks of one cache: `groups` are those that enter the prefix tree, all but cross attention."""

    def __init__(self, space: KeySpace, config: KVCacheConfig) -> None:
        self.space = space
        self.block_size = config.block_size
        self.groups = cached_groups(config)
        self.forgotten = Forgotten()

    def of_prompt(self, tokens: Int32Array, scope: ReuseScope, multimodal: Sequence[MultimodalItem] = ()) -> PromptKeys:
        """The keys of all whole blocks of a prompt, with the images in it."""
        version, root = self.forgotten.version, root_digest(scope)
        used, _ = self.forgotten.renamed(self.salt_of(scope, root), self.digests(root, tokens, multimodal))
        return PromptKeys(len(tokens), self.of_digests(named(scope, used)), version)

    def salt_of(self, scope: ReuseScope, root: bytes) -> bytes | None:
        """The salt of a scope whose root has the digest `root`."""
        return self.forgotten.salt_of(tenant_digest(scope.tenant), root)

    def plain(
        self, tokens: Int32Array, scope: ReuseScope, multimodal: Sequence[MultimodalItem] = ()
    ) -> tuple[list[bytes], ...]:
        """The keys in processes that have forgotten nothing."""
        return self.of_digests(named(scope, self.digests(root_digest(scope), tokens, multimodal)))

    def digests(self, parent: bytes, tokens: Int32Array, multimodal: Sequence[MultimodalItem] = ()) -> list[bytes]:
        """Digests of the whole blocks of tokens that follow `parent`; items have positions in `tokens`."""
        whole = tokens[: len(tokens) // self.block_size * self.block_size]
        return chain_digests(parent, whole, self.block_size, multimodal)

    def of_digests(self, digests: Sequence[bytes]) -> tuple[list[bytes], ...]:
        """Keys of blocks, per layer group, from digests with the tag of their scope (`named`)."""
        return tuple(self.space.keys(digests, group.index) for group in self.groups)


def cached_groups(config: KVCacheConfig) -> tuple[Group, ...]:
    """The layer groups whose blocks can be stored. They have no pools: they only say which blocks are read."""
    nothing = [BlockPool(0, tier, 0) for tier in Tier]
    return tuple(kind_of(spec)(spec, config.block_size, nothing) for spec in config.groups if kind_of(spec).grows)


class Lineage:
    """The blocks that this process offered to tiers lately: which follows which, and with which each session begins."""

    def __init__(self, limit: int = MAX_KNOWN) -> None:
        self._limit = limit
        # Digest: its parent's, and as it was renamed
        self._blocks: OrderedDict[bytes, tuple[bytes, bytes]] = OrderedDict()
        self._sessions: OrderedDict[str, dict[bytes, None]] = OrderedDict()
        self._begun: dict[bytes, dict[str, None]] = {}  # the same by digest
        self._num_begun = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._blocks)

    def note(self, parent: bytes, digests: Sequence[bytes], renamed: Sequence[bytes]) -> None:
        """Adds blocks: the first follows `parent`, each other one the block before it."""
        with self._lock:
            for digest, used in zip(digests, renamed, strict=True):
                self._blocks[digest] = parent, used
                self._blocks.move_to_end(digest)
                parent = digest
            while len(self._blocks) > self._limit:
                self._blocks.popitem(last=False)

    def begin(self, session: str, digest: bytes) -> None:
        """A request of the session computed this block and those that follow it."""
        with self._lock:
            begun = self._sessions.setdefault(session, {})
            self._sessions.move_to_end(session)
            self._num_begun += digest not in begun
            begun[digest] = None
            self._begun.setdefault(digest, {})[session] = None
            while self._num_begun > self._limit and len(self._sessions) > 1:
                self._forget_session()

    def _forget_session(self) -> None:
        """Forgets the session of which nothing was offered for longest."""
        session, digests = self._sessions.popitem(last=False)
        self._num_begun -= len(digests)
        for digest in digests:
            of_digest = self._begun[digest]
            del of_digest[session]
            if not of_digest:
                del self._begun[digest]

    def of_session(self, session: str) -> list[bytes]:
        """The blocks with which content of a session begins."""
        with self._lock:
            return list(self._sessions.get(session, ()))

    @property
    def has_sessions(self) -> bool:
        """Whether any session computed something."""
        return bool(self._begun)

    def sessions_of(self, digests: Iterable[bytes]) -> tuple[str, ...]:
        """The sessions that computed some of these blocks, the first of which begins a prompt."""
        with self._lock:
            return tuple(dict.fromkeys(name for digest in digests for name in self._begun.get(digest, ())))

    def take_tagged(self, tag: bytes) -> list[bytes]:
        """Takes out all blocks whose renamed digest begins with `tag`; returns these digests."""
        with self._lock:
            doomed = [digest for digest, (_, used) in self._blocks.items() if used.startswith(tag)]
            return [self._blocks.pop(digest)[1] for digest in doomed]

    def take(self, marks: Iterable[bytes] | None) -> list[bytes]:
        """Takes out these blocks and all that follow them (None: everything); returns their renamed digests."""
        with self._lock:
            if marks is None:
                doomed = list(self._blocks)
            else:
                children: dict[bytes, list[bytes]] = {}
                for digest, (parent, _) in self._blocks.items():
                    children.setdefault(parent, []).append(digest)
                left, doomed = list(dict.fromkeys(marks)), []
                while left:
                    digest = left.pop()
                    left += children.pop(digest, ())
                    if digest in self._blocks:
                        doomed.append(digest)
            return [self._blocks.pop(digest)[1] for digest in dict.fromkeys(doomed)]
