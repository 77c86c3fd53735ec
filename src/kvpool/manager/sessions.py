"""`manager.sessions`: conversations that pause, are forked and end."""

from __future__ import annotations

from kvpool.checks import as_count, show
from kvpool.core.cache import Cache
from kvpool.core.sessions import Session, SessionInfo
from kvpool.errors import InvalidArgumentError
from kvpool.manager.guard import Guard
from kvpool.prefix.sessions import end_session, fork_session, known_session
from kvpool.sequences.sessions import look_at_session, pause_session, resume_session


class Sessions:
    """A session begins with the first request that names it: `allocate(..., session="chat 7")`. Its name is its tenant's own.

    >>> from kvpool import KVCacheConfig, KVCacheManager, LayerSpec
    >>> manager = KVCacheManager(KVCacheConfig([LayerSpec(kv_heads=8, head_dim=128)], block_size=4, gpu_blocks=8))
    >>> handle = manager.allocate("turn 1", list(range(9)), session="chat 7")
    >>> manager.commit(handle)
    >>> manager.free(handle)
    >>> manager.sessions.get("chat 7").own_tokens, manager.sessions.end("chat 7")
    (8, 2)
    """

    def __init__(self, cache: Cache, guard: Guard) -> None:
        self._cache = cache
        self._guard = guard

    def pause(self, name: str, expected_seconds: float | None = None, *, tenant: str = "") -> int:
        """It waits, for a tool or a person, and is expected back in so many seconds. Returns how many blocks moved.

        What only it uses moves one tier down if the GPU is full and blocks that nobody reads leave it sooner than that.
        """
        self._check(name, tenant)
        if expected_seconds is not None:
            good = type(expected_seconds) in (int, float) and expected_seconds >= 0  # not-a-number is not
            if not good:
                raise InvalidArgumentError(
                    f"expected_seconds={show(expected_seconds)} must be a number of seconds, not negative"
                )
        with self._guard:
            moved = pause_session(self._cache, self._open(name, tenant), expected_seconds)
            self._guard.tell("session", moved, "pause", tenant, name, expected_seconds, None)
            return moved

    def resume(self, name: str, *, tenant: str = "") -> int:
        """Its next request comes soon: brings its last sequence to the GPU, if there is room. Returns how many blocks move.

        A request resumes its session by itself; this makes it wait less.
        """
        self._check(name, tenant)
        with self._guard:
            moved = resume_session(self._cache, self._open(name, tenant))
            self._guard.tell("session", moved, "resume", tenant, name, None, None)
            return moved

    def fork(self, name: str, child: str, *, tenant: str = "") -> None:
        """Begins the session `child`, which goes on from what `name` has, as a sub-agent does.

        What both use is given up once both have ended. Say it before the first request of `child`.
        """
        self._check(name, tenant)
        self._check(child, tenant)
        with self._guard:
            fork_session(self._cache, tenant, name, child)
            self._guard.tell("session", None, "fork", tenant, name, None, child)

    def end(self, name: str, *, tenant: str = "") -> int:
        """Gives up what only this session used, on all tiers: it goes before anything else when room is needed.

        Returns how many blocks that are now; those of requests that are still live follow. Nothing goes that others use or
        have used. A request that names the session again takes up what is left. To make sure that nothing of it is ever
        found again, call `manager.cache.invalidate(session=...)`, which takes along what others built on it.
        """
        self._check(name, tenant)
        with self._guard:
            given_up = end_session(self._cache, known_session(self._cache, tenant, name))
            self._guard.tell("session", given_up, "end", tenant, name, None, None)
            return given_up

    def get(self, name: str, *, tenant: str = "") -> SessionInfo:
        """What is cached of a session, and what it would cost to go on. Raises `UnknownSessionError`."""
        self._check(name, tenant)
        with self._guard.query:
            return look_at_session(self._cache, known_session(self._cache, tenant, name), self._cache.now)

    def list(self, *, tenant: str | None = None, limit: int = 100) -> list[SessionInfo]:
        """Sessions that have not ended, those used last first; of one tenant, or (None) of all."""
        limit = as_count(limit, "limit")
        if tenant is not None:
            self._check("", tenant)
        with self._guard.query:
            found = [
                session
                for session in self._cache.known_sessions.values()
                if session.num_open and tenant in (None, session.tenant)
            ]
            found.sort(key=lambda session: -session.last_used_at)
            return [look_at_session(self._cache, session, self._cache.now) for session in found[:limit]]

    def _open(self, name: str, tenant: str) -> Session:
        """A known session that has not ended."""
        session = known_session(self._cache, tenant, name)
        if not session.num_open:
            raise InvalidArgumentError(f"session {name!r} has ended; a request that names it begins it again")
        return session

    def _check(self, name: str, tenant: str) -> None:
        for what, value in (("session", name), ("tenant", tenant)):
            if not isinstance(value, str):
                raise InvalidArgumentError(f"{what} must be a string, got {value!r}")
