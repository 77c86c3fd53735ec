"""Sessions: conversations that begin, pause, fork and end, and who of them used a cached run.

A run belongs to the smallest group that has all its users: one session, a session with those forked from it, or everybody.
So it costs one reference to know who used a run, however many did.
"""

from __future__ import annotations

from enum import Enum
from typing import Final, NamedTuple

from kvpool.config import Tier

MAX_DEPTH: Final = 16  # forks of forks
FEW_SESSIONS: Final = 1024


class SessionState(str, Enum):
    """What a session does at the moment."""

    RUNNING = "running"  # a request of it is live
    IDLE = "idle"  # none is
    PAUSED = "paused"  # none is, and somebody said so
    ENDED = "ended"  # what only it used goes first


class SessionInfo(NamedTuple):
    """A session as it stands now. Tokens are those of whole cached blocks."""

    name: str
    tenant: str
    parent: str | None  # the session that it was forked from
    state: SessionState
    returns_in: float | None  # seconds until its next request is expected; negative if that is over
    idle_seconds: float  # since its last request came or ended
    num_requests: int  # that are live
    num_tokens: int  # of its last sequence
    tokens_by_tier: dict[Tier, int]  # of these, cached ones; those below the GPU must be loaded when it goes on
    missing_tokens: int  # of these, the ones that must be computed again when it goes on
    own_tokens: int  # cached, on all tiers, that nobody else used: `end` gives them up


class Owner:
    """Some who used a run. `num_open` counts the sessions among them that have not ended; at 0 the run is given up.

    >>> chat = Session("", "chat", None)
    >>> first, second = Session("", "first", chat), Session("", "second", chat)
    >>> common_owner(first, second) is chat.family, common_owner(first, Session("", "other", None))
    (True, None)
    """

    __slots__ = ("above", "depth", "num_open")

    def __init__(self, above: Owner | None) -> None:
        self.above = above
        self.depth: int = 1 if above is None else above.depth + 1
        self.num_open = 0


class Session(Owner):
    """One session by itself. Its family is everybody who was forked from it, itself included."""

    __slots__ = ("children", "family", "last_used_at", "name", "num_tokens", "parent", "paused", "returns_at", "tenant")

    family: Owner

    def __init__(self, tenant: str, name: str, parent: Session | None) -> None:
        family = Owner(None if parent is None else parent.family)
        super().__init__(family)
        self.family = family
        self.tenant = tenant
        self.name = name
        self.parent = parent
        self.children: dict[Session, None] = {}
        self.paused = False
        self.returns_at: float | None = None  # when its next request is expected
        self.last_used_at = 0.0
        self.num_tokens = 0  # of its last sequence that ended
        if parent is not None:
            parent.children[self] = None
        self.count(1)

    def count(self, change: int) -> list[Owner]:
        """It is open (1) or has ended (-1). Returns the groups of which nobody, or the first one, is open now."""
        changed = []
        owner: Owner | None = self
        while owner is not None:
            owner.num_open += change
            if owner.num_open == max(change, 0):
                changed.append(owner)
            owner = owner.above
        return changed

    def used(self, now: float, num_tokens: int) -> None:
        """A request of it ended with so many tokens."""
        self.last_used_at, self.num_tokens = now, num_tokens

    def members(self) -> list[Session]:
        """It and all that were forked from it, directly or not."""
        found = [self]
        for session in found:
            found.extend(session.children)
        return found


def common_owner(one: Owner | None, other: Owner | None) -> Owner | None:
    """The smallest group that both are part of; None is everybody."""
    while one is not other:
        if one is None or other is None:
            return None
        if one.depth < other.depth:
            one, other = other, one
        one = one.above
    return one
