"""Pins of clients. Each has a name, belongs to a tenant, and is forgotten when it has ended."""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from typing import Any, NamedTuple

from kvpool.core.cache import Pin
from kvpool.engine.pictures import PicturedPrompt
from kvpool.errors import KVPoolError
from kvpool.scope import ReuseScope
from kvpool.server.errors import Problem, problem_of
from kvpool.server.served_model import ServedModel


class _TenantPin(NamedTuple):
    """A pin of a client."""

    tenant: str
    model: ServedModel
    pin: Pin

    def holds(self) -> bool:
        return self.model.engine.manager.cache.is_pinned(self.pin)


class TenantPins:
    """The pins of a server's models; a tenant has `limit` at most."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._pins: dict[str, _TenantPin] = {}
        self._making: Counter[str] = Counter()  # pins that are being made, by tenant

    async def check_room(self, tenant: str) -> None:
        """Raises a `Problem` if the tenant has as many pins as it may have."""
        await self._forget_ended()
        if sum(kept.tenant == tenant for kept in self._pins.values()) + self._making[tenant] >= self._limit:
            raise Problem(
                429, f"{self._limit} pins hold, which is the limit; end one", code="too_many_pins", retry_after=1
            )

    async def pin(
        self, tenant: str, model: ServedModel, prompt: PicturedPrompt, scope: ReuseScope, seconds: float | None
    ) -> dict[str, Any]:
        """Keeps the cached blocks of a prompt until `unpin`, or for so many seconds."""
        await self.check_room(tenant)
        self._making[tenant] += 1
        cache = model.engine.manager.cache
        items = prompt.pictures.items if prompt.pictures else None
        making = asyncio.ensure_future(_in_thread(cache.pin, prompt.token_ids, scope, seconds, items))
        try:
            pin = await asyncio.shield(making)
        except asyncio.CancelledError:  # the client has left, and nobody would know the name of what the thread makes
            await _in_thread(cache.unpin, await making)
            raise
        finally:
            self._making[tenant] -= 1
            self._making += Counter()  # keeps those above 0
        name = f"pin-{secrets.token_hex(8)}"  # servers behind one router must not give the same name
        self._pins[name] = _TenantPin(tenant, model, pin)
        return self._told(name)

    async def unpin(self, tenant: str, name: str) -> dict[str, Any]:
        """Ends a pin of the tenant's own."""
        await self._forget_ended()
        kept = self._pins.get(name)
        if kept is None or kept.tenant != tenant:
            raise Problem(404, f"there is no pin {name!r}", code="not_found")
        del self._pins[name]
        await _in_thread(kept.model.engine.manager.cache.unpin, kept.pin)
        return {"id": name, "model": kept.model.name, "pinned_tokens": 0}

    async def of(self, tenant: str) -> list[dict[str, Any]]:
        """The pins of a tenant, oldest first."""
        await self._forget_ended()
        return [self._told(name) for name, kept in self._pins.items() if kept.tenant == tenant]

    def _told(self, name: str) -> dict[str, Any]:
        kept = self._pins[name]
        return {"id": name, "model": kept.model.name, "pinned_tokens": kept.pin.num_tokens}

    async def _forget_ended(self) -> None:
        """Drops the pins that expired, or whose prompt was invalidated."""
        known = list(self._pins.items())
        ended = await asyncio.to_thread(lambda: [name for name, kept in known if not kept.holds()])
        for name in ended:
            self._pins.pop(name, None)


async def _in_thread(call: Any, *arguments: Any) -> Any:
    """Asks the manager in a thread, because its lock may be held for a moment."""
    try:
        return await asyncio.to_thread(call, *arguments)
    except KVPoolError as error:
        raise problem_of(error) from error
