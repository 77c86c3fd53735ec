"""The sessions of an engine: what `KVCacheManager.sessions` does, between two steps."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

from kvpool.core.sessions import SessionInfo
from kvpool.engine.thread import EngineThread
from kvpool.manager.sessions import Sessions

T = TypeVar("T")


class EngineSessions:
    """Conversations that pause, are forked and end; `kvpool.manager.sessions.Sessions` says what each verb does."""

    def __init__(self, thread: EngineThread, sessions: Sessions) -> None:
        self._thread = thread
        self._sessions = sessions

    def pause(self, name: str, expected_seconds: float | None = None, *, tenant: str = "") -> int:
        """It waits; what only it uses may move to the host. Returns how many blocks move."""
        return self._ask(partial(self._sessions.pause, name, expected_seconds, tenant=tenant))

    def resume(self, name: str, *, tenant: str = "") -> int:
        """Its next request comes soon: brings it to the GPU if there is room. Returns how many blocks move."""
        return self._ask(partial(self._sessions.resume, name, tenant=tenant))

    def fork(self, name: str, child: str, *, tenant: str = "") -> None:
        """Begins the session `child`, which goes on from what `name` has."""
        self._ask(partial(self._sessions.fork, name, child, tenant=tenant))

    def end(self, name: str, *, tenant: str = "") -> int:
        """Gives up what only this session used; returns how many blocks that are."""
        return self._ask(partial(self._sessions.end, name, tenant=tenant))

    def get(self, name: str, *, tenant: str = "") -> SessionInfo:
        """What is cached of a session, and what it would cost to go on."""
        return self._ask(partial(self._sessions.get, name, tenant=tenant))

    def list(self, *, tenant: str | None = None, limit: int = 100) -> list[SessionInfo]:
        """Sessions that have not ended, those used last first."""
        return self._ask(partial(self._sessions.list, tenant=tenant, limit=limit))

    def _ask(self, question: Callable[[], T]) -> T:
        return self._thread.ask(question) if self._thread.has_started else question()
