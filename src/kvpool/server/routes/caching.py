"""`/v1/cache/...`: what would be reused, what is kept, what must be forgotten; of the caller's own cache only."""

from __future__ import annotations

import asyncio
from typing import Any

from kvpool.engine.params import SamplingParams
from kvpool.errors import KVPoolError
from kvpool.pools.arrays import Int32Array
from kvpool.scope import ReuseScope
from kvpool.server.auth import Caller
from kvpool.server.errors import Problem, problem_of
from kvpool.server.parameters import session_name
from kvpool.server.pins import PinBook
from kvpool.server.routes.completing import named_tokens
from kvpool.server.schema import CacheQuery, Invalidation
from kvpool.server.served_model import ServedModel, scope_of


class CacheRoutes:
    """Answers questions about the caches of a server's models."""

    def __init__(self, pins: PinBook) -> None:
        self._pins = pins

    async def query(self, body: CacheQuery, model: ServedModel, caller: Caller) -> dict[str, Any]:
        """How much of a prompt is cached, and where. Changes nothing."""
        tokens, scope = await _asked(body, model, caller)
        match = await _quietly(model.engine.manager.match_prefix, tokens, scope)
        return {
            "prompt_tokens": len(tokens),
            "cached_tokens": match.num_tokens,
            "tiers": {tier.name: count for tier, count in match.tokens_by_tier.items() if count},
        }

    async def pin(self, body: CacheQuery, model: ServedModel, caller: Caller) -> dict[str, Any]:
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
        """Forgets a prompt from its last whole block on, or what a session computed, or everything (of a salt)."""
        if body.tenant is not None and body.tenant != caller.tenant:
            if not caller.is_admin:
                raise Problem(403, "the cache of another tenant needs an admin key", code="forbidden", param="tenant")
            caller = caller._replace(tenant=body.tenant)
        engine = model.engine
        if body.session_id is not None:
            removed = await _quietly(lambda: engine.invalidate(session=session_name(caller, str(body.session_id))))
        elif body.prompt is None and body.messages is None:
            name, salt = caller.tenant, body.cache_salt
            what: dict[str, Any] = {"scope": scope_of(name, salt)} if salt else {"tenant": name}
            removed = await _quietly(lambda: engine.invalidate(**what))
        else:
            tokens, scope = await _asked(body, model, caller)
            removed = await _quietly(lambda: engine.invalidate(tokens, scope=scope))
        return {"removed_blocks": removed}

    async def warm(self, body: CacheQuery, model: ServedModel, caller: Caller) -> dict[str, Any]:
        """Computes a prompt, so that the next request that begins with it finds it."""
        tokens, scope = await _asked(body, model, caller)
        running = model.start(tokens, SamplingParams(max_new_tokens=1), scope=scope)
        try:
            async for _ in running:
                pass
        finally:
            running.cancel()
        return {"prompt_tokens": len(tokens), "cached_tokens": running.generation.num_cached_tokens}

    def stats(self, models: list[ServedModel]) -> dict[str, Any]:
        """Everything that the caches count, per model."""
        return {model.name: model.engine.stats().cache.to_dict() for model in models}


async def _asked(body: CacheQuery, model: ServedModel, caller: Caller) -> tuple[Int32Array, ReuseScope]:
    """The prompt of a body, and the scope in which the caller may look."""
    return await named_tokens(model, body.prompt, body.messages), scope_of(caller.tenant, body.cache_salt)


async def _quietly(call: Any, *arguments: Any) -> Any:
    """The manager's answer; in a thread, since its lock may be held for a moment."""
    try:
        return await asyncio.to_thread(call, *arguments)
    except KVPoolError as error:
        raise problem_of(error) from error
