"""What every block holds, byte by byte, who computed it, and what it should hold: the slow, obvious half of the wild machine.

The "bytes" that an engine writes for a token are a number that stands for everything they depend on: the scope, every
token before it as it was computed, the token itself, and how often that content was invalidated before it was written.
So two slots hold the same number exactly when one may be read for the other. Free blocks are wiped.

Beside each number stands its origin: the sessions of everybody who computed it, or something that it was computed from.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from item_codes import as_array, codes_of, items_of_run, raw
from reference import LOCAL_TIERS

from kvpool import CopyOp, GroupKind, KVCacheConfig, KVCacheHandle, KVCacheManager, ReuseScope, Tier
from kvpool.prefix.digests import chain_digests, root_digest


class Histories:
    """Numbers the bytes of tokens: `follow` says what comes after known bytes, `start` what comes before all."""

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}
        self._resets = 0
        self._scope_resets: dict[ReuseScope, int] = {}
        self._tenant_resets: dict[str, int] = {}
        self._renewed: dict[tuple[int, int], int] = {}  # (bytes before, token): how often it was invalidated
        self._chains: dict[tuple[int, bytes], Any] = {}
        self._digests: dict[tuple[int, bytes], list[bytes]] = {}

    def _number(self, key: Any) -> int:
        return self._numbers.setdefault(key, len(self._numbers) + 1)

    def start(self, scope: ReuseScope, encoder: Any = None) -> int:
        """What a sequence begins with; `encoder` is an input that its scope does not name."""
        resets = self._resets, self._tenant_resets.get(scope.tenant, 0), self._scope_resets.get(scope, 0)
        return self._number((scope, encoder, *resets))

    def follow(self, before: int, token: int) -> int:
        return self._number((before, token, self._renewed.get((before, token), 0)))

    def named(self, name: Any) -> int:
        """Bytes that depend on a name alone, such as an encoder's output."""
        return self._number(("named", name))

    def chain(self, before: int, tokens: Any) -> Any:
        """The bytes of `tokens` (codes, as an int32 array) that were computed behind `before`, as an array."""
        key = (before, tokens.tobytes())
        if key not in self._chains:
            values = []
            for token in tokens.tolist():
                before = self.follow(before, token)
                values.append(before)
            self._chains[key] = np.array(values, np.int64)
        return self._chains[key]

    def of_prompt(self, scope: ReuseScope, tokens: Sequence[int]) -> list[int]:
        """The bytes that a prompt has when it is computed, or found in the cache, now."""
        values: list[int] = self.chain(self.start(scope), np.array(tokens, np.int32)).tolist()
        return values

    def digests(self, before: bytes, values: Any, codes: Any, size: int) -> list[bytes]:
        """The digests of whole blocks; kept, because the model asks after every step."""
        key = (int(values[-1]), before)
        if key not in self._digests:
            tokens = as_array([raw(code) for code in codes.tolist()])
            self._digests[key] = chain_digests(before, tokens, size, items_of_run(codes.tolist()))
        return self._digests[key]

    def renew_everything(self) -> None:
        """All content was invalidated: what is computed from now on is different."""
        self._resets += 1
        self._chains.clear()

    def renew_scope(self, scope: ReuseScope) -> None:
        self._scope_resets[scope] = self._scope_resets.get(scope, 0) + 1

    def renew_tenant(self, tenant: str) -> None:
        self._tenant_resets[tenant] = self._tenant_resets.get(tenant, 0) + 1

    def renew_prefix(self, scope: ReuseScope, tokens: Sequence[int]) -> None:
        """What begins with `tokens` was invalidated; what is computed up to the last of them may still be used."""
        before = [self.start(scope), *self.of_prompt(scope, tokens[:-1])][-1]
        self._renewed[before, tokens[-1]] = self._renewed.get((before, tokens[-1]), 0) + 1
        self._chains.clear()


Session = tuple[str, int]  # a name, and how often that session had been invalidated before


class Sessions:
    """Numbers sets of sessions. What a session computed before it was invalidated is stale: nobody may find it any more."""

    def __init__(self) -> None:
        self._sets: list[frozenset[Session]] = [frozenset()]
        self._numbers: dict[frozenset[Session], int] = {frozenset(): 0}
        self._invalidated: dict[str, int] = {}

    def now(self, name: str | None) -> frozenset[Session]:
        """The origin of what a request of this session computes, if it begins now."""
        return frozenset() if name is None else frozenset({(name, self._invalidated.get(name, 0))})

    def invalidate(self, name: str) -> None:
        self._invalidated[name] = self._invalidated.get(name, 0) + 1

    def number(self, sessions: frozenset[Session]) -> int:
        if sessions not in self._numbers:
            self._numbers[sessions] = len(self._sets)
            self._sets.append(sessions)
        return self._numbers[sessions]

    def united(self, numbers: Any) -> frozenset[Session]:
        """The sessions of all these origins."""
        return frozenset().union(*(self._sets[number] for number in np.unique(numbers).tolist()))

    def stale(self, numbers: Any) -> list[Session]:
        """Sessions that were invalidated since something of these origins was computed."""
        return sorted(s for s in self.united(numbers) if s[1] < self._invalidated.get(s[0], 0))


@dataclass
class Request:
    """What the model knows of one live request."""

    handle: KVCacheHandle
    scope: ReuseScope
    tokens: list[int]  # codes of those whose keys and values are written
    values: list[int]  # and their bytes
    known: list[int]  # those whose ids the manager was told
    reserved: int
    committed: int
    num_prompt: int
    publishes: bool
    num_cross: int = 0
    encoder: Any = None  # what the encoder read: its name in the scope, or this request alone knows
    sessions: frozenset[Session] = frozenset()
    swapped: bool = False
    narrowed: int = 0  # it promised that only queries from this position on will read
    ready: list[int] = field(default_factory=list)  # bytes behind the written ones that are there and not written again

    @property
    def written(self) -> int:
        return len(self.tokens)

    def forked(self, handle: KVCacheHandle) -> Request:
        return Request(
            handle,
            self.scope,
            self.tokens[:],
            self.values[:],
            self.known[:],
            self.reserved,
            self.committed,
            self.num_prompt,
            self.publishes,
            self.num_cross,
            self.encoder,
            self.sessions,
            narrowed=self.narrowed,
            ready=self.ready[:],
        )


class Bytes:
    """The fake data plane: two numbers, bytes and origin, per token slot of every block of every pool on every tier."""

    def __init__(self, manager: KVCacheManager) -> None:
        self.config: KVCacheConfig = manager.config
        self.size = manager.config.block_size
        self.pools = [group.pool for group in manager.config.groups]
        self._pools = manager._cache.pools
        self._cells: dict[tuple[int, Tier], Any] = {}

    def cells(self, group: int, tier: Tier) -> Any:
        """[block, offset] of the pool that a group's blocks come from: bytes."""
        return self.both(group, tier)[:, :, 0]

    def origins(self, group: int, tier: Tier) -> Any:
        """[block, offset]: the numbers of their origins."""
        return self.both(group, tier)[:, :, 1]

    def both(self, group: int, tier: Tier) -> Any:
        """[block, offset, bytes and origin]; it follows the pool's size."""
        pool = self.pools[group]
        wanted = self._pools[pool][tier].num_blocks
        cells = self._cells.get((pool, tier))
        if cells is None or len(cells) < wanted:
            larger = np.zeros((wanted, self.size, 2), np.int64)
            if cells is not None:
                larger[: len(cells)] = cells
            cells = self._cells[pool, tier] = larger
        return cells

    def marked(self, group: int, values: Any) -> Any:
        """Each group writes its own bytes: those of another group's layers are wrong."""
        return np.asarray(values, np.int64) * len(self.pools) + group

    def write(self, group: int, slots: Any, values: Any, origin: int = 0) -> None:
        self.cells(group, Tier.GPU)[slots // self.size, slots % self.size] = self.marked(group, values)
        self.origins(group, Tier.GPU)[slots // self.size, slots % self.size] = origin

    def read(self, group: int, tier: Tier, blocks: Any, offsets: Any) -> Any:
        return self.cells(group, tier)[blocks, offsets]

    def run(self, copies: Iterable[CopyOp]) -> None:
        """Carries out planned copies, one after the other, exactly as they say."""
        for op in copies:
            assert len(op.src) == len(op.dst) == len(set(op.dst.tolist())), f"{op}: a destination stands twice"
            assert min(int(op.src.min()), int(op.dst.min())) >= 0, f"{op}: a block that does not exist"
            same_tier = op.src_tier == op.dst_tier
            assert not same_tier or not set(op.src.tolist()) & set(op.dst.tolist()), (
                f"{op}: its pairs depend on each other"
            )
            length = self.size if op.num_tokens is None else op.num_tokens
            assert 0 < length <= self.size, op
            source, target = self.both(op.group, op.src_tier), self.both(op.group, op.dst_tier)
            target[op.dst, :length] = source[op.src, :length]

    def wipe_free_blocks(self) -> None:
        for group in range(len(self.pools)):
            for tier in LOCAL_TIERS:
                self.both(group, tier)[self._pools[self.pools[group]][tier].free_ids()] = 0


def positions_read(config: KVCacheConfig, group: int, query: int, stop: int) -> Any:
    """What the queries at `query` and behind it read of the positions before `stop`, in a group that grows."""
    spec = config.groups[group]
    if spec.window is None:
        return np.arange(stop)
    sliding = spec.kind is GroupKind.SLIDING
    start = max(0, query - spec.window + 1) if sliding else query // spec.window * spec.window
    sinks = min(spec.sink_tokens, start, stop)
    return np.concatenate([np.arange(sinks), np.arange(start, stop)]) if sinks else np.arange(start, stop)


def read_tree(manager: KVCacheManager, histories: Histories) -> list[tuple[Any, Any, list[bytes]]]:
    """(node, the bytes that its tokens should have, its digests) for every run in the index, parents first."""
    cache, size = manager._cache, manager.config.block_size
    listening = manager.events.listening
    found: list[tuple[Any, Any, list[bytes]]] = []
    for scope, root in cache.roots.items():
        before = {id(root): (histories.start(scope), root_digest(scope) if listening else b"", 0)}
        for node in root.subtree():
            if node is root:
                continue
            value, digest, code = before[id(node.parent)]
            codes = as_array(codes_of(manager._cache.rows.symbols, node.tokens, code))
            values = histories.chain(value, codes)
            digests = histories.digests(digest, values, codes, size) if listening and not node.is_remainder else []
            before[id(node)] = int(values[-1]), digests[-1] if digests else b"", int(codes[-1])
            found.append((node, values, digests))
    return found
