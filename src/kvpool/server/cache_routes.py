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
from kvpool.engine.pictures import PicturedPrompt
from kvpool.errors import KVPoolError
from kvpool.scope import ReuseScope
from kvpool.server.answered import AnsweredRequests, span_in_json
from kvpool.server.answers import as_event
from kvpool.server.auth import Caller
from kvpool.server.errors import Problem, problem_of
from kvpool.server.limits import Gate
from kvpool.server.pins import TenantPins
from kvpool.server.prompts import CacheQuery, Invalidation, PinnedPrompt, PromptForOthers, named_prompt
from kvpool.server.served_model import ServedModel, scope_for_tenant
from kvpool.server.sessions import session_name
from kvpool.web import EventStream, unless_gone

ALIVE_SECONDS = 1.0  # a stream sends something at least so often, also while its prompt waits


class CacheRoutes:
    """Answers questions about the caches of a server's models."""

    def __init__(self, pins: TenantPins, gate: Gate, answered: AnsweredRequests) -> None:
        self._pins = pins
        self._answered = answered
        self._gate = gate

    async def query(self, body: CacheQuery, model: ServedModel, caller: Caller) -> dict[str, Any]:
        """How much of a prompt is cached, and where; and why the rest is not, if that is remembered. Changes nothing."""
        with ExitStack() as held:
            prompt = await named_prompt(body, model, caller, self._gate, held)
            scope = scope_for_tenant(caller.tenant, body.cache_salt)
            found = await cached_tokens(model, prompt, scope)
            asked = partial(model.engine.explain, prompt, scope=scope, adapter=model.adapter)
            missed = await _quietly(partial(asked, all_tenants=caller.is_admin))
        answer = {
            "prompt_tokens": len(prompt),
            "cached_tokens": sum(found.values()),
            "tiers": {tier.name: count for tier, count in found.items()},
        }
        if missed:
            answer["missed"] = [span_in_json(model, span) for span in missed]
        return answer

    def request(self, name: str, caller: Caller) -> dict[str, Any]:
        """What a request missed that was answered lately, and why. It was the answer for its tenant at that time."""
        return {"id": name, **self._answered.find(caller, name).in_json()}

    async def pin(self, body: PinnedPrompt, model: ServedModel, caller: Caller) -> dict[str, Any]:
        """Keeps the cached blocks of a prompt until `unpin`, or for `ttl_seconds`."""
        with ExitStack() as held:
            prompt = await named_prompt(body, model, caller, self._gate, held)
            scope = await model.scope(caller.tenant, body.cache_salt)
            return await self._pins.pin(caller.tenant, model, prompt, scope, body.ttl_seconds)

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
        if not body.names_prompt and body.model_extra:
            name = next(iter(body.model_extra))
            raise Problem(400, f"{name}: this path has no such field", code="invalid_value", param=name)
        named = body.names_prompt or bool(body.cache_salt)
        if (named, body.session_id is not None, body.everything).count(True) != 1:
            raise Problem(
                400,
                "give one: a prompt, messages or an input, with the cache_salt that it had; a session_id; a cache_salt; or "
                "everything: true",
                code="invalid_value",
                param="everything",
            )
        engine = model.engine
        model.given.forget(caller.tenant)
        if body.session_id is not None:
            removed = await _quietly(lambda: engine.invalidate(session=session_name(caller, str(body.session_id))))
        elif not body.names_prompt:
            name, salt = caller.tenant, body.cache_salt
            what: dict[str, Any] = {"scope": await model.scope(name, salt)} if salt else {"tenant": name}
            removed = await _quietly(lambda: engine.invalidate(**what))
        else:
            scope = await model.scope(caller.tenant, body.cache_salt)
            with ExitStack() as held:
                prompt = await named_prompt(body, model, caller, self._gate, held)
                if prompt.pictures is not None:
                    words = "a prompt with images cannot be forgotten by itself: give its session_id or its cache_salt"
                    raise Problem(400, words, code="unsupported", param="messages")
                removed = await _quietly(lambda: engine.invalidate(prompt.token_ids, scope=scope))
        return {"removed_blocks": removed}

    async def warm(self, body: CacheQuery, model: ServedModel, caller: Caller) -> dict[str, Any]:
        """Computes a prompt, so that the next request that begins with it finds it."""
        scope, session = scope_for_tenant(caller.tenant, body.cache_salt), _session(body, caller)
        with ExitStack() as held:
            prompt = await named_prompt(body, model, caller, self._gate, held)
            running = model.start(prompt, SamplingParams(max_new_tokens=1), scope=scope, session=session)
            try:
                async for _ in running:
                    pass
            finally:
                running.cancel()
        return {"prompt_tokens": len(prompt), "cached_tokens": running.generation.num_cached_tokens}

    async def prefetch(self, body: CacheQuery, model: ServedModel, caller: Caller) -> dict[str, Any]:
        """Brings what tiers have of a prompt into the cache."""
        scope, session = scope_for_tenant(caller.tenant, body.cache_salt), _session(body, caller)
        with ExitStack() as held:
            prompt = await named_prompt(body, model, caller, self._gate, held)
            begin = partial(model.engine.prefetch, prompt, scope=scope, adapter=model.adapter, session=session)
            try:
                found = await asyncio.to_thread(begin)
            except KVPoolError as error:
                raise problem_of(error) from error
            return {"prompt_tokens": len(prompt), "cached_tokens": await asyncio.wrap_future(found)}

    def stats(self, models: list[ServedModel]) -> dict[str, Any]:
        """Everything that the caches count, per model."""
        return {model.name: model.engine.stats().cache.to_dict() for model in models}


def _session(body: CacheQuery, caller: Caller) -> str | None:
    """The name of the session that a body names, with its tenant."""
    return session_name(caller, body.session_id) if body.session_id else None


async def cached_tokens(model: ServedModel, prompt: PicturedPrompt, scope: ReuseScope) -> dict[Tier, int]:
    """How many tokens of a prompt are cached on which tier."""
    return dict(await _quietly(partial(model.engine.cached_tokens, prompt, adapter=model.adapter, scope=scope)))


async def _quietly(call: Any, *arguments: Any) -> Any:
    """Asks the manager in a thread, because its lock may be held for a moment."""
    try:
        return await asyncio.to_thread(call, *arguments)
    except KVPoolError as error:
        raise problem_of(error) from error


async def prefill(request: Request, body: PromptForOthers, model: ServedModel, caller: Caller, gate: Gate) -> Response:
    """Computes a prompt for others. Answers when all of it is in the tier, or streams how much is there so far."""
    stack = ExitStack()
    try:
        prompt = await named_prompt(body, model, caller, gate, stack)
        if len(prompt) > gate.limits.prompt_tokens:
            limit = gate.limits.prompt_tokens
            raise Problem(
                400, f"the prompt has {len(prompt)} tokens, the limit is {limit}", code="context_length_exceeded"
            )
        stack.enter_context(gate.passed(caller.key))
        running = await _RunningPrefill.start(model, prompt, body, caller)
        stack.callback(running.prefill.cancel)
        if body.stream:
            return EventStream(running.events(), stack.close, gate.limits.send_seconds)
        whole = await unless_gone(request, running.whole())
    except BaseException:
        stack.close()
        raise
    stack.close()
    return JSONResponse(whole)


class _RunningPrefill:
    """A prefill as an event loop sees it."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._news = asyncio.Event()
        self.prefill: Prefill

    @classmethod
    async def start(
        cls, model: ServedModel, prompt: PicturedPrompt, body: PromptForOthers, caller: Caller
    ) -> _RunningPrefill:
        """Begins it; in a thread, since keys of a long prompt take a while."""
        running = cls(asyncio.get_running_loop())
        begin = partial(
            model.engine.prefill,
            prompt,
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
