"""An oracle for `manager.inspect.explain`: it keeps all that ever was cached, and looks at all of it.

It reads what the manager tells subscribers, block by block, and knows nothing of runs, trees and memory. Blocks that never
were cached behind the tokens before them are one class for it (`NEVER`): which of their tokens an earlier prompt had, too, is
a matter of that prompt, and `check_divergence` looks at it.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np

from kvpool import KVCacheManager, ReuseScope
from kvpool.events.kinds import Removed, Stored
from kvpool.prefix.digests import chain_digests, root_digest
from kvpool.sequences.divergence import AROUND, WINDOW
from kvpool.sequences.missed import Divergence, MissedSpan
from kvpool.stats import MissCause

NEVER = "never"
HELD = "held"  # cached, and not reused
SAME = {
    MissCause.FIRST_SEEN: NEVER,
    MissCause.DIVERGED: NEVER,
    MissCause.NO_STATE: HELD,
    MissCause.ON_TIER: HELD,
}
CAUSES = {"expired": MissCause.EXPIRED, "invalidated": MissCause.INVALIDATED, "reset": MissCause.INVALIDATED}


class Everything:
    """All blocks that ever were cached by one manager, and all tokens of its requests."""

    def __init__(self, manager: KVCacheManager, group: int = 0) -> None:
        self.manager = manager
        self.size = manager.config.block_size
        self.group = group  # whose blocks stay as long as their run does
        self.subscription = manager.subscribe()
        self.left: dict[bytes, str | None] = {}  # why a block left; None while it is cached
        self.left_now = (
            self.left
        )  # the same where `left` is of an earlier moment: other scopes are looked at when asked
        self.told: dict[Hashable, tuple[ReuseScope, list[int]]] = {}  # every request that ever was: all its tokens
        self.handles: dict[Hashable, Any] = {}

    def note(self, handle: Any, tokens: list[int]) -> None:
        """A request has these tokens now."""
        self.told[handle.request_id] = handle.scope, list(tokens)
        self.handles[handle.request_id] = handle

    def look(self) -> None:
        """Reads what happened."""
        for event in self.subscription.poll().events:
            if isinstance(event, Stored) and event.group == self.group:
                self.left |= dict.fromkeys(event.digests)
            elif isinstance(event, Removed) and event.group == self.group:
                self.left |= dict.fromkeys(event.digests, event.reason)

    def digests(self, tokens: list[int], scope: ReuseScope) -> list[bytes]:
        whole = np.array(tokens[: len(tokens) // self.size * self.size], np.int32)
        return chain_digests(root_digest(scope), whole, self.size)

    def num_cached(self, tokens: list[int], scope: ReuseScope, left: dict[bytes, str | None]) -> int:
        """Blocks that are cached, one behind the other."""
        blocks = self.digests(tokens, scope)
        return next((i for i, block in enumerate(blocks) if left.get(block, "") is not None), len(blocks))

    def causes(
        self, tokens: list[int], scope: ReuseScope, hit: int, me: Any = None, all_tenants: bool = False
    ) -> list[Any]:
        """The cause of every token from `hit` on."""
        size, total = self.size, len(tokens)
        blocks = self.digests(tokens, scope)
        cached = self.num_cached(tokens, scope, self.left)
        busy = max([cached, *(self._shared(tokens, scope, handle) for handle in self._computing(me))])
        known = busy
        while known < len(blocks) and self.left.get(blocks[known]) is not None:
            known += 1
        elsewhere = known
        for other in {other for other, _ in self.told.values()} - {scope}:
            if all_tenants or other.tenant == scope.tenant:
                elsewhere = max(elsewhere, self.num_cached(tokens, other, self.left_now))
        found: list[Any] = []
        for token in range(hit, total):
            block = token // size
            if token == total - 1 and block < cached:
                found.append(MissCause.REST_OF_BLOCK)
            elif block < cached:
                found.append(HELD)
            elif block < busy:
                found.append(MissCause.IN_FLIGHT)
            elif block < known:
                found.append(CAUSES.get(str(self.left[blocks[block]]), MissCause.EVICTED))
            elif known == len(blocks):
                found.append(MissCause.REST_OF_BLOCK)
            else:
                found.append(MissCause.OTHER_SCOPE if block < elsewhere else NEVER)
        return found

    def _computing(self, me: Any) -> list[Any]:
        handles = [handle for handle in self.manager.handles if handle.publishes and not handle.is_swapped]
        return [handle for handle in handles if me is None or handle.serial < me.serial]

    def _shared(self, tokens: list[int], scope: ReuseScope, handle: Any) -> int:
        if handle.scope != scope:
            return 0
        ids = handle.token_ids.tolist()
        same = next(
            (i for i, (a, b) in enumerate(zip(ids, tokens, strict=False)) if a != b), min(len(ids), len(tokens))
        )
        return same // self.size

    def check(
        self,
        spans: list[MissedSpan],
        tokens: list[int],
        scope: ReuseScope,
        hit: int,
        forgets: bool = False,
        **options: Any,
    ) -> int:
        """Compares an answer with what was, token by token; returns how many tokens are forgotten."""
        assert [span.start for span in spans] == [hit, *(span.end for span in spans[:-1])][: len(spans)], spans
        assert (spans[-1].end if spans else hit) == len(tokens), spans
        assert all(span.start < span.end for span in spans), spans
        told = [SAME.get(span.cause, span.cause) for span in spans for _ in range(span.start, span.end)]
        wanted = self.causes(tokens, scope, hit, **options)
        num_forgotten = 0
        for position, (cause, right) in enumerate(zip(told, wanted, strict=True), hit):
            if cause is MissCause.FORGOTTEN:
                assert forgets, (position, spans, wanted)
                assert right not in (HELD, MissCause.IN_FLIGHT), (position, spans, wanted)
                num_forgotten += 1
            elif cause is MissCause.REST_OF_BLOCK and right in (NEVER, HELD):
                self.check_rest(spans, position, tokens, scope)
            else:
                assert cause == right, f"token {position} is {right}: {spans}"
        for span in spans:
            if span.cause is MissCause.DIVERGED:
                self.check_divergence(span, tokens, scope)
        return num_forgotten

    def check_rest(self, spans: list[MissedSpan], position: int, tokens: list[int], scope: ReuseScope) -> None:
        """An earlier prompt had the token in its place behind the same tokens, but not the whole block of it."""
        beginning = tokens[: position + 1]
        assert any(other == scope and earlier[: position + 1] == beginning for other, earlier in self.told.values()), (
            f"nobody had token {position}: {spans}"
        )

    def check_divergence(self, span: MissedSpan, tokens: list[int], scope: ReuseScope) -> None:
        """The earlier prompt is what is said of it; its tokens, or those that went on from it, come again."""
        detail = span.detail
        assert isinstance(detail, Divergence)
        other, earlier = self.told[detail.request_id]
        assert other == scope
        assert earlier[: detail.at] == tokens[: detail.at]
        assert earlier[detail.at : detail.at + 1] != tokens[detail.at : detail.at + 1]
        assert tuple(tokens[: detail.at][-len(detail.before) :]) == detail.before or not detail.before
        assert tuple(tokens[detail.at :][: len(detail.here)]) == detail.here
        alike = {
            tuple(other[detail.at // self.size * self.size :][:AROUND])
            for own, other in self.told.values()
            if own == scope
            and other[: detail.at // self.size * self.size] == tokens[: detail.at // self.size * self.size]
        }
        assert 1 <= detail.num_alike <= len(alike), (detail, alike)
        past = [list(map(int, seq)) for own, seq in self.told.values() if own == scope]
        windows = {tuple(seq[i : i + WINDOW]) for seq in past for i in range(len(seq) - WINDOW + 1)}
        for position in range(span.start, span.end):
            around = (tuple(tokens[i : i + WINDOW]) for i in range(position - WINDOW + 1, position + 1) if i >= 0)
            assert any(window in windows for window in around), f"token {position} never came before: {span}"
