"""What is said of tokens that were not served from the cache: spans with one cause each, and words for people."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Final, NamedTuple, TypeAlias

from kvpool.scope import ReuseScope
from kvpool.stats import EvictionReason, MissCause

OFTEN: Final = 3  # so many earlier prompts that part at one place show that they always do


class Departure(NamedTuple):
    """Of what left: why, how long ago, and for which request room was made, if one was admitted then.

    Of another tenant's request only "others" is said, unless an admin asks.
    """

    reason: EvictionReason
    seconds_ago: float
    tenant: str | None
    request_id: Hashable


class Divergence(NamedTuple):
    """Of what an earlier prompt had, too: where the two part, and how."""

    at: int  # the first token that differs
    request_id: Hashable  # of the earlier prompt
    session: str | None
    before: tuple[int, ...]  # a few tokens that both have before it
    here: tuple[int, ...]  # a few tokens of this prompt from there on
    there: tuple[int, ...]  # and of the earlier one
    moved_by: int  # how much farther back the first of the tokens that come again stands now
    again: int  # that token
    num_alike: int  # earlier prompts that part there, each with tokens of its own, and have the same text behind


class Elsewhere(NamedTuple):
    """Of what another scope holds: which one, and in which fields it differs. A salt is shown to nobody but an admin."""

    scope: ReuseScope
    differs_in: tuple[str, ...]


Detail: TypeAlias = Departure | Divergence | Elsewhere | Hashable | None


class MissedSpan(NamedTuple):
    """Tokens `start..end` of a prompt that were not served from the cache, all for the same cause.

    `detail` is a `Departure` of what was evicted, invalidated or expired; a `Divergence` of what diverged; `Elsewhere` for
    another scope; the id of the request that computes what is in flight; of what was first seen the time in seconds for
    which the memory tells it from what was forgotten (None: for ever). Else None.
    """

    start: int
    end: int
    cause: MissCause
    detail: Detail = None

    @property
    def words(self) -> str:
        """The cause and what helps, for people. It tells no more than the detail."""
        detail = self.detail
        if isinstance(detail, Divergence):
            if detail.num_alike >= OFTEN:
                return (
                    f"tokens {detail.at} to {detail.again} differ in each request ({detail.num_alike} earlier ones and this "
                    "one), and this behind them is the same: take them out, or put them behind what stays"
                )
            moved = "" if not detail.moved_by else f", {abs(detail.moved_by)} tokens {_TO[detail.moved_by > 0]}"
            return (
                f"an earlier prompt (request {detail.request_id}) has this, too{moved}, but differs from token {detail.at} "
                "on: put what changes, as a date, behind what stays; keep tools in one order; cut a history at its end"
            )
        if isinstance(detail, Departure):
            whose = detail.request_id if detail.request_id is not None else detail.tenant
            room = "" if whose is None else f" to make room for {whose}"
            return f"left the cache {detail.seconds_ago:.0f} s ago ({detail.reason.value}){room}: {_HELP[self.cause]}"
        if isinstance(detail, Elsewhere):
            names = " and ".join("cache_salt" if name == "salt" else name for name in detail.differs_in)
            return f"is cached for another {names}: {_HELP[self.cause]}"
        return _HELP[self.cause]


def tokens_by_cause(spans: Iterable[MissedSpan]) -> dict[MissCause, int]:
    """How many tokens missed for each cause."""
    missed: dict[MissCause, int] = {}
    for span in spans:
        missed[span.cause] = missed.get(span.cause, 0) + span.end - span.start
    return missed


_TO: Final = ("nearer to its beginning", "farther back")  # where text stands that moved
_HELP: Final = {
    MissCause.FIRST_SEEN: "was never computed behind the tokens before it: it is new",
    MissCause.DIVERGED: "an earlier prompt has it, and differs before it: put what changes, as a date, behind what stays",
    MissCause.EVICTED: "more blocks, a host tier or a pin would keep it",
    MissCause.EXPIRED: "a longer time to live would keep it",
    MissCause.INVALIDATED: "somebody asked to forget it",
    MissCause.OTHER_SCOPE: "what should share a prefix must name the same tenant, adapter, weights, encoder and cache_salt",
    MissCause.IN_FLIGHT: "another request computes it now: wait for that one",
    MissCause.ON_TIER: "lies on a lower tier, and the GPU has no room for it: give it more blocks",
    MissCause.NO_STATE: "is cached, but a layer keeps no state or window there: set checkpoint_every",
    MissCause.REST_OF_BLOCK: "does not fill a block, or is the last token, which is always computed",
    MissCause.FORGOTTEN: "may have been cached once: remember more blocks",
}
