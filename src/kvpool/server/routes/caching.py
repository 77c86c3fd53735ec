"""`/v1/cache/...`: what would be reused, what is kept, what must be forgotten; of the caller's own cache only."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any, NamedTuple

from kvpool.engine.sampling.params import SamplingParams
from kvpool.errors import KVPoolError
from kvpool.manager.pins import Pin
from kvpool.pools.arrays import Int32Array
from kvpool.scope import ReuseScope
from kvpool.server.asking.access import Caller
from kvpool.server.asking.limits import Limits
from kvpool.server.asking.parameters import session_name
from kvpool.server.asking.problems import Problem, problem_of
from kvpool.server.asking.schema import CacheQuery
from kvpool.server.asking.served import ServedModel, scope_of
from kvpool.server.routes.completing import named_tokens


class _Kept(NamedTuple):
    """A pin that was asked for."""

    tenant: str
    model: ServedModel
    pin: Pin

    def holds(self) -> bool:
        return self.model.engine.manager.is_pinned(self.pin)


class CacheDesk:
    """Answers questions about the caches of a server's models, and remembers the pins that were asked for."""

    def __init__(self, limits: Limits) -> None:
        self._limit = limits.pins_per_tenant
        self._pins: dict[str, _Kept] = {}
        self._numbers = itertools.count(1)

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
        await self._forget_ended()
        if sum(kept.tenant == caller.tenant for kept in self._pins.values()) >= self._limit:
            raise Problem(
                429, f"{self._limit} pins hold, which is the limit; end one", code="too_many_pins", retry_after=1
            )
        pin = await _quietly(model.engine.manager.pin, tokens, scope, body.ttl_seconds)
        name = f"pin-{next(self._numbers)}"
        self._pins[name] = _Kept(caller.tenant, model, pin)
        return {"id": name, "pinned_tokens": pin.num_tokens}

    async def unpin(self, name: str, caller: Caller) -> dict[str, Any]:
        """Ends a pin of the caller's own."""
        await self._forget_ended()
        kept = self._pins.get(name)
        if kept is None or kept.tenant != caller.tenant:
            raise Problem(404, f"there is no pin {name!r}", code="not_found")
        del self._pins[name]
        await _quietly(kept.model.engine.manager.unpin, kept.pin)
        return {"id": name, "pinned_tokens": 0}

    async def _forget_ended(self) -> None:
        """Drops the pins that expired, or whose prompt was invalidated."""
        known = list(self._pins.items())
        ended = await asyncio.to_thread(lambda: [name for name, kept in known if not kept.holds()])
        for name in ended:
            self._pins.pop(name, None)

    async def invalidate(self, body: CacheQuery, model: ServedModel, caller: Caller) -> dict[str, Any]:
        """Forgets a prompt from its last whole block on, or what a session computed, or everything of the caller's (salt)."""
        engine = model.engine
        if body.session_id is not None:
            removed = await _quietly(lambda: engine.invalidate(session=session_name(caller, str(body.session_id))))
        elif body.prompt is None and body.messages is None:
            scope = scope_of(caller.tenant, body.cache_salt)
            removed = await _quietly(lambda: engine.invalidate(scope=scope))
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
