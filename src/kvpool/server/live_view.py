"""`/` and `/view/...`: the live view of the served models. Its stream shows all tenants, so it needs an admin key."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import ExitStack
from operator import itemgetter
from typing import Any

from starlette.responses import Response

from kvpool.errors import KVPoolError
from kvpool.sequences.missed import MissedSpan
from kvpool.server.auth import Caller
from kvpool.server.cache_routes import cached_tokens
from kvpool.server.errors import Problem, problem_of
from kvpool.server.latencies import Latencies, ModelLatencies
from kvpool.server.limits import Gate
from kvpool.server.prompts import CacheQuery, named_prompt
from kvpool.server.served_model import ServedModel, scope_for_tenant
from kvpool.server.sessions import told_name
from kvpool.stats import MissCause
from kvpool.view.frames import MAX_NAME, Names
from kvpool.view.http import HEADERS, asset, block_details
from kvpool.view.hub import Hub, Viewer
from kvpool.view.session_rows import MOST_SESSIONS, session_rows
from kvpool.view.tier_rows import tier_row
from kvpool.web import EventStream

_MAX_TOLD = 100  # waiting requests that are shown
_TIER_SECONDS = 2.0  # how often tiers are asked how full they are
_ASK_SECONDS = 0.5  # how often waiting requests are read, and until a stream notices that the server ends


class LiveViews:
    """The live views of a server's models. A model is sampled only while somebody watches it."""

    def __init__(self, models: Sequence[ServedModel], latencies: Latencies, gate: Gate) -> None:
        self._gate = gate
        names = [model.name for model in models]
        self._hubs = {
            model.name: Hub(
                model.engine.manager,
                title=model.name,
                more=_EngineStatus(model, latencies.of(model.name)),
                about={
                    "model": model.name,
                    "models": names,
                    "chat": model.engine.tokenizer is not None,
                    "device": "CPU" if model.engine.plane.device.type == "cpu" else "GPU",
                },
                names=Names(model.name_of, model.missed_of),
            )
            for model in models
        }

    def page(self, path: str) -> Response:
        """The page, or a file that it loads."""
        found = asset(path)
        if found is None:
            raise Problem(404, f"there is nothing at {path}", code="not_found")
        return Response(found.content, media_type=found.kind, headers=HEADERS)

    async def stream(self, model: ServedModel, caller: Caller) -> Response:
        """The stream of everything that happens in the cache of a model."""
        _require_admin(caller)
        hub, news, loop = self._hubs[model.name], asyncio.Event(), asyncio.get_running_loop()

        def wake() -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(news.set)

        try:
            viewer = await asyncio.to_thread(hub.join, wake)
        except KVPoolError as error:
            raise Problem(503, str(error), code="too_many_viewers", retry_after=5) from error
        return EventStream(self._messages(viewer, news), lambda: hub.leave(viewer), self._gate.limits.send_seconds)

    async def _messages(self, viewer: Viewer, news: asyncio.Event) -> AsyncIterator[bytes]:
        while not self._gate.is_draining:
            try:
                await asyncio.wait_for(news.wait(), _ASK_SECONDS)
            except asyncio.TimeoutError:  # another class than TimeoutError in Python 3.10
                continue
            news.clear()
            yield viewer.take()

    def block(self, model: ServedModel, caller: Caller, pool: int, tier: str, block_id: int) -> dict[str, Any]:
        """Which sequences and runs hold a block."""
        _require_admin(caller)
        try:
            return block_details(self._hubs[model.name], pool, tier, block_id)
        except KVPoolError as error:
            raise problem_of(error) from error

    async def prompt(self, body: CacheQuery, model: ServedModel, caller: Caller) -> dict[str, Any]:
        """The pieces of a prompt of the caller's own, and how many of the first come from which tier."""
        with ExitStack() as held:
            prompt = await named_prompt(body, model, caller, self._gate, held)
            found = await cached_tokens(model, prompt, scope_for_tenant(caller.tenant, body.cache_salt))
        tiers = [[tier.name, count] for tier, count in found.items()]
        pieces = await asyncio.to_thread(lambda: [model.text_of([token]) for token in prompt.token_ids.tolist()])
        return {"pieces": pieces, "tiers": tiers}


def _require_admin(caller: Caller) -> None:
    if not caller.is_admin:
        raise Problem(403, "the live view tells of all tenants: it needs an admin key", code="forbidden")


class _EngineStatus:
    """What the page shows of an engine besides its manager: waiting requests, how long requests take, and its tiers."""

    def __init__(self, model: ServedModel, latencies: ModelLatencies) -> None:
        self._model = model
        self._engine = model.engine
        self._latencies = latencies
        self._due = self._tiers_due = 0.0
        self._known: Mapping[str, Any] = {}
        self._tiers: list[dict[str, Any]] = []
        self._sessions: list[dict[str, Any]] = []

    def __call__(self) -> Mapping[str, Any]:
        if time.monotonic() >= self._due:
            waiting = self._engine.waiting()
            self._look_again()
            told = [
                [self._model.name_of(one.request_id)[:MAX_NAME], one.tenant, one.num_tokens, round(one.seconds, 1)]
                for one in waiting[:_MAX_TOLD]
            ]
            self._known = {
                "waiting": told,
                "num_waiting": len(waiting),
                "latency": self._latencies.recent(),
                "generated": self._latencies.num_generated,
                "missed": self._told_missed(),
                "tiers": self._tiers,
                "sessions": self._sessions,
            }
            self._due = time.monotonic() + _ASK_SECONDS
        return self._known

    def _told_missed(self) -> dict[str, Any] | None:
        """What the prompts of the last hour missed, by cause, and what helps; None where that is not remembered."""
        counts = self._latencies.prompts.counts()
        missed = [
            [cause.value, counts[cause.value], MissedSpan(0, 1, cause).words]
            for cause in MissCause
            if counts[cause.value]
        ]
        missed.sort(key=itemgetter(1), reverse=True)
        return {"prompt": counts["prompt"], "cached": counts["cached"], "missed": missed} if missed else None

    def _look_again(self) -> None:
        """Reads what changes slowly: how full the tiers that outlive the engine are, and by whom; and the sessions."""
        if time.monotonic() >= self._tiers_due:
            found = self._engine.stats().tiers
            self._tiers = [] if found is None else [tier_row(measured.stats) for measured in found.tiers]
            self._sessions = session_rows(self._engine.sessions.list(limit=MOST_SESSIONS), told_name)
            self._tiers_due = time.monotonic() + _TIER_SECONDS
