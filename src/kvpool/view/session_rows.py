"""What the page shows of sessions: those used last, a row each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kvpool.config import Tier
from kvpool.core.sessions import SessionInfo
from kvpool.view.frames import MAX_NAME

MOST_SESSIONS = 30


def session_rows(sessions: Sequence[SessionInfo], name_of: Callable[[SessionInfo], str]) -> list[dict[str, Any]]:
    """The rows as the page gets them: where the tokens of each lie, what it must compute again, and what an end gives up."""
    return [
        {
            "name": name_of(info)[:MAX_NAME],
            "tenant": info.tenant[:MAX_NAME],
            "state": info.state.value,
            "here": info.tokens_by_tier.get(Tier.GPU, 0),
            "below": sum(count for tier, count in info.tokens_by_tier.items() if tier != Tier.GPU),
            "missing": info.missing_tokens,
            "own": info.own_tokens,
            "returns": None if info.returns_in is None else round(min(info.returns_in, 1e9), 1),
            "idle": round(info.idle_seconds, 1),
        }
        for info in sessions
    ]
