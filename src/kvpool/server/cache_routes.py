"""`/v1/cache/...` and `/v1/prefill`: queries, pins and invalidation of the cache, and prompts for other servers.

A caller reaches only the cache of its own tenant. One server computes a prompt by `/v1/prefill`; another one loads it by
`/v1/cache/prefetch` and answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import ExitStack
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kvpool.config import Tier
from kvpool.engine.handover import Prefill
from kvpool.engine.params import SamplingParams
from kvpool.errors import KVPoolError
from kvpool.pools.arrays import Int32Array
from kvpool.scope import ReuseScope
from kvpool.server.answers import as_event
from kvpool.server.auth import Caller
from kvpool.server.completions import named_tokens
from kvpool.server.errors import Problem, problem_of
from kvpool.server.limits import Gate
from kvpool.server.parameters import session_name
from kvpool.server.pins import TenantPins
from kvpool.server.schema import CacheQuery, Invalidation, PinnedPrompt, PromptForOthers
from kvpool.server.served_model import ServedModel, scope_for_tenant
from kvpool.web import EventStream, unless_gone

ALIVE_SECONDS = 1.0  # a stream sends something at least so often, also while its prompt waits


class CacheRoutes:
    """Answers questions about the caches of a server's models."""

    def __init__(self, pins: TenantPins) -> None:
        self._pins = pins

    async def query(self, body: CacheQuery, model: ServedModel, caller: Caller) -> dict[str, Any]:
        """How much of a prompt is cached, and where. Changes nothing."""
        tokens = await named_tokens(model, body.prompt, body.messages)
        found = await cached_tokens(model, tokens, scope_for_tenant(caller.tenant, body.cache_salt))
        return {
            "prompt_tokens": len(tokens),
            "cached_tokens": sum(found.values()),
            "tiers": {tier.name: count for tier, count in found.items()},
        }

    async def pin(self, body: PinnedPrompt, model: ServedModel, caller: Caller) -> dict[str, Any]:
        """Keeps the cached blocks of a prompt until `unpin`, or for `ttl_seconds`."""
        tokens, scope = await _asked(body, model, caller)
        return await self._pins.pin(caller.tenant, model, tokens, scope, body.ttl_seconds)

    async def unpin(self, name: str, caller: Caller) -> dict[str, Any]:
        """Ends a pin of the caller's own."""
        return await self._pins.unpin(caller.tenant, name)

    async def pins(self, caller: Caller) -> dict[str, Any]:
        """The caller's own pins."""
        return {"pins": await self._pins.of(caller.tenant)}

    async def invalidate(self, body: Invalidation, model: ServedModel, caller: Caller) -> dict[str, Any]:
        """Forgets a prompt from its last whole block on, or what a session computed, or all of a salt, or everything."""
        if body.tenant is not None and body.tenant != caller.tenant:
            if not caller.is_admin:
                raise Problem(403, "the cache of another tenant needs an admin key", code="forbidden", param="tenant")
            caller = caller._replace(tenant=body.tenant)
        named = body.prompt is not None or body.messages is not None or bool(body.cache_salt)
        if (named, body.session_id is not None, body.everything).count(True) != 1:
            raise Problem(
                400,
                "give one: a prompt or messages, with the cache_salt that they had; a session_id; a cache_salt; or "
                "everything: true",
                code="invalid_value",
                param="everything",
            )
        engine = model.engine
        if body.session_id is not None:
            removed = await _quietly(lambda: engine.invalidate(session=session_name(caller, str(body.session_id))))
        elif body.prompt is None and body.messages is None:
            name, salt = caller.tenant, body.cache_salt
            what: dict[str, Any] = {"scope": await model.scope(name, salt)} if salt else {"tenant": name}
            removed = await _quietly(lambda: engine.invalidate(**what))
        else:
            tokens, scope = await _asked(body, model, caller)
            removed = await _quietly(lambda: engine.invalidate(tokens, scope=scope))
        return {"removed_blocks": removed}

    async def warm(self, body: CacheQuery, model: ServedModel, caller: Caller) -> dict[str, Any]:
        """Computes a prompt, so that the next request that begins with it finds it."""
        tokens = await named_tokens(model, body.prompt, body.messages)
        scope = scope_for_tenant(caller.tenant, body.cache_salt)
        running = model.start(tokens, SamplingParams(max_new_tokens=1), scope=scope, session=_session(body, caller))
        try:
            async for _ in running:
                pass
        finally:
            running.cancel()
        return {"prompt_tokens": len(tokens), "cached_tokens": running.generation.num_cached_tokens}

    def stats(self, models: list[ServedModel]) -> dict[str, Any]:
        """Everything that the caches count, per model."""
        return {model.name: model.engine.stats().cache.to_dict() for model in models}


def _session(body: CacheQuery, caller: Caller) -> str | None:
    """The name of the session that a body names, with its tenant."""
    return session_name(caller, body.session_id) if body.session_id else None


async def _asked(body: CacheQuery, model: ServedModel, caller: Caller) -> tuple[Int32Array, ReuseScope]:
    """The prompt of a body, and the scope in which the caller's requests find it."""
    tokens = await named_tokens(model, body.prompt, body.messages)
    return tokens, await model.scope(caller.tenant, body.cache_salt)


async def cached_tokens(model: ServedModel, tokens: Int32Array, scope: ReuseScope) -> dict[Tier, int]:
    """How many tokens of a prompt are cached on which tier."""
    return dict(await _quietly(partial(model.engine.cached_tokens, tokens, adapter=model.adapter, scope=scope)))


async def _quietly(call: Any, *arguments: Any) -> Any:
    """Asks the manager in a thread, because its lock may be held for a moment."""
    try:
        return await asyncio.to_thread(call, *arguments)
    except KVPoolError as error:
        raise problem_of(error) from error


async def prefill(request: Request, body: PromptForOthers, model: ServedModel, caller: Caller, gate: Gate) -> Response:
    """Computes a prompt for others. Answers when all of it is in the tier, or streams how much is there so far."""
    tokens = await named_tokens(model, body.prompt, body.messages)
    if len(tokens) > gate.limits.prompt_tokens:
        limit = gate.limits.prompt_tokens
        raise Problem(400, f"the prompt has {len(tokens)} tokens, the limit is {limit}", code="context_length_exceeded")
    stack = ExitStack()
    stack.enter_context(gate.passed(caller.key))
    try:
        running = await _RunningPrefill.start(model, tokens, body, caller)
        stack.callback(running.prefill.cancel)
        if body.stream:
            return EventStream(running.events(), stack.close, gate.limits.send_seconds)
        whole = await unless_gone(request, running.whole())
    except BaseException:
        stack.close()
        raise
    stack.close()
    return JSONResponse(whole)


async def prefetch(body: CacheQuery, model: ServedModel, caller: Caller) -> dict[str, Any]:
    """Brings what tiers have of a prompt into the cache."""
    tokens = await named_tokens(model, body.prompt, body.messages)
    scope, session = scope_for_tenant(caller.tenant, body.cache_salt), _session(body, caller)
    begin = partial(model.engine.prefetch, tokens, scope=scope, adapter=model.adapter, session=session)
    try:
        found = await asyncio.to_thread(begin)
    except KVPoolError as error:
        raise problem_of(error) from error
    return {"prompt_tokens": len(tokens), "cached_tokens": await asyncio.wrap_future(found)}


class _RunningPrefill:
    """A prefill as an event loop sees it."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._news = asyncio.Event()
        self.prefill: Prefill

    @classmethod
    async def start(
        cls, model: ServedModel, tokens: Int32Array, body: PromptForOthers, caller: Caller
    ) -> _RunningPrefill:
        """Begins it; in a thread, since keys of a long prompt take a while."""
        running = cls(asyncio.get_running_loop())
        begin = partial(
            model.engine.prefill,
            tokens,
            on_progress=lambda num_tokens: running._tell(),
            on_end=running._tell,
            priority=body.priority,
            scope=scope_for_tenant(caller.tenant, body.cache_salt),
            adapter=model.adapter,
            deadline=None if body.deadline_ms is None else body.deadline_ms / 1e3,
            session=_session(body, caller),
        )
        try:
            running.prefill = await asyncio.to_thread(begin)
        except KVPoolError as error:
            raise problem_of(error) from error
        return running

    def _tell(self) -> None:  # in any thread
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._news.set)

    async def whole(self) -> dict[str, Any]:
        """The answer, when it is over."""
        while not self.prefill.is_over:
            await self._news.wait()
            self._news.clear()
        try:
            done = self.prefill.result(0)
        except KVPoolError as error:
            raise problem_of(error) from error
        usage = {"prompt_tokens": done.num_tokens, "prompt_tokens_details": {"cached_tokens": done.num_cached_tokens}}
        return {"object": "prefill", "stored_tokens": done.num_stored_tokens, "usage": usage}

    async def events(self) -> AsyncIterator[bytes]:
        """An event whenever more tokens are in the tier, and at least every second; the last event is the answer."""
        while not self.prefill.is_over:
            yield as_event({"object": "prefill.progress", "stored_tokens": self.prefill.num_stored_tokens})
            try:
                await asyncio.wait_for(self._news.wait(), ALIVE_SECONDS)
            except (TimeoutError, asyncio.TimeoutError):
                continue
            self._news.clear()
        try:
            yield as_event(await self.whole()) + b"data: [DONE]\n\n"
        except Problem as problem:
            yield as_event(problem.body())
