"""TrackedRequest: what the scheduler's side remembers of one request of the engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvpool.integrations.connector.request_options import NO_WISHES, RequestOptions
from kvpool.pools.arrays import Int32Array
from kvpool.prefix.digests import chain_digests, root_digest
from kvpool.scope import MultimodalItem, ReuseScope
from kvpool.sequences.handle import KVCacheHandle
from kvpool.tiers.keys import scope_tag

_ROOM = 256  # tokens that the array of ids has to spare when it grows


def scope_of(request: Any, epoch: str, adapter: str) -> ReuseScope:
    """What must be equal besides the tokens: `cache_salt` is the tenant; `epoch` changes with every reset."""
    return ReuseScope(tenant=request.cache_salt or "", adapter=adapter, weights=epoch)


def items_of(request: Any) -> tuple[MultimodalItem, ...]:
    """Images and other inputs behind placeholder tokens."""
    return tuple(
        MultimodalItem(each.mm_position.offset, each.mm_position.length, each.identifier)
        for each in sorted(request.mm_features or (), key=lambda each: each.mm_position.offset)
    )


@dataclass
class Saving:
    """Rows of one request. Those below `num_published` may have been replaced by equal ones; ask the handle."""

    owner: TrackedRequest
    handle: KVCacheHandle
    num_ordered: int  # blocks from the first on that are there or were ordered
    num_published: int  # of them, that can be found
    rows: list[int] = field(default_factory=list)
    num_jobs: int = 0  # on their way
    is_spoiled: bool = False  # something went wrong: what is on its way is not published


@dataclass
class TrackedRequest:
    """A request as the scheduler's side sees it. Everything is counted in blocks unless it says tokens."""

    request: Any
    block_size: int
    scope: ReuseScope
    items: tuple[MultimodalItem, ...]
    wishes: RequestOptions = NO_WISHES
    is_cached: bool = True  # False: its tokens do not say what it computes
    was_looked_up: bool = False
    num_local: int = 0  # that the engine's own cache had at the last look-up
    num_below: int | None = None  # that tiers have, behind `asked_from`; None: not asked yet
    asked_from: int = 0
    holders: list[int] = field(default_factory=list)  # which tier has each of these, from `asked_from` on
    is_asking: bool = False
    answer_due: float = 0.0  # when they should have answered
    waits: bool = False  # the last look-up promised a load that takes a while
    num_loading: int = 0  # loads that no worker has reported yet
    has_lost: bool = False  # a load failed: tiers are not asked again
    hits: tuple[int, int, int] = (0, 0, 0)  # of the last load: from the host, the first tier, others
    pages: list[list[int]] = field(default_factory=list)  # of each layer group
    num_seen: int = 0  # whole blocks that were considered for storing
    saving: Saving | None = None
    is_over: bool = False  # the engine is done with it
    _ids: Int32Array = field(default_factory=lambda: np.empty(0, np.int32))
    _num_ids: int = 0
    _digests: list[bytes] = field(default_factory=list)
    _tag: bytes = b""

    @property
    def is_known(self) -> bool:
        """Whether its tokens and items say what it computes; a session may have got further images meanwhile."""
        return self.is_cached and len(self.request.mm_features or ()) == len(self.items)

    @property
    def num_ids(self) -> int:
        """Tokens whose ids the engine knows."""
        return len(self.request.all_token_ids)

    @property
    def num_prompt(self) -> int:
        """Tokens of its prompt."""
        return int(self.request.num_prompt_tokens)

    def tokens(self, upto: int | None = None) -> Int32Array:
        """The first `upto` ids, or all; a view that the next call may outgrow.

        What was asked for is taken as final, apart from the last id: an engine may take back what it sampled and did not use.
        """
        given = self.request.all_token_ids
        total, known = len(given) if upto is None else upto, self._num_ids
        if known > len(given) or (known and given[known - 1] != self._ids[known - 1]):
            self._num_ids = known = 0
            self._digests.clear()
        if total > known:
            if total > len(self._ids):
                grown = np.empty(total + max(_ROOM, total // 4), np.int32)
                grown[:known] = self._ids[:known]
                self._ids = grown
            self._ids[known:total] = given[known:total]
            self._num_ids = total
        return self._ids[:total]

    def items_within(self, num_tokens: int) -> tuple[MultimodalItem, ...] | None:
        """Those that begin among the first tokens."""
        return tuple(item for item in self.items if item.position < num_tokens) or None

    def digests(self, first: int, last: int) -> list[bytes]:
        """The digests of blocks, as the manager announces them; each is computed once."""
        done = len(self._digests)
        if done < last:
            size = self.block_size
            parent = self._digests[-1] if done else root_digest(self.scope)
            items = [item._replace(position=item.position - done * size) for item in self.items]
            self._digests += chain_digests(parent, self.tokens(last * size)[done * size :], size, items)
        return self._digests[first:last]

    def tier_digests(self, first: int, last: int) -> list[bytes]:
        """The same with the tag of their scope, as keys of tiers are made of."""
        if not self._tag:
            self._tag = scope_tag(self.scope)
        return [self._tag + digest for digest in self.digests(first, last)]
