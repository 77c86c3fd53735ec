"""Forgets content that must not be used again: in the cache, in tiers, and what an encoder made of images."""

from __future__ import annotations

import logging

from kvpool.engine.pictures import EncoderCache
from kvpool.engine.step_part import StepPart
from kvpool.manager import KVCacheManager
from kvpool.model.private_copy import SharedWeights
from kvpool.pools.arrays import Int32Array
from kvpool.scheduling import Scheduler
from kvpool.scope import ReuseScope
from kvpool.tiers.transport.tier_transport import TierInvalidator

log = logging.getLogger("kvpool")


class Forgetting:
    """Forgets content in all places where an engine keeps any. From any thread."""

    def __init__(
        self, manager: KVCacheManager, encoded: EncoderCache | None, invalidator: TierInvalidator | None
    ) -> None:
        self._cache = manager.cache
        self._encoded = encoded
        self._invalidator = invalidator

    def everything(self, *, remove: bool = True) -> int:
        """Forgets all content, and has tiers `remove` it. Returns how many blocks left the cache."""
        if self._encoded is not None:
            self._encoded.forget()
        drop = self._cache.reset
        return drop() if self._invalidator is None else self._invalidator.everything(drop, remove=remove)

    def content(
        self, prefix: Int32Array | None, scope: ReuseScope | None, session: str | None, tenant: str | None
    ) -> int:
        """Forgets what `KVCacheManager.invalidate` forgets. Returns how many blocks left the cache."""

        def drop() -> int:
            removed = self._cache.invalidate(prefix, scope=scope, session=session, tenant=tenant)
            if self._encoded is not None:
                in_scope = scope if prefix is None else scope or ReuseScope()
                self._encoded.forget(in_scope, session=session, tenant=tenant)
            return removed

        if self._invalidator is None:
            return drop()
        if tenant is not None:
            return self._invalidator.of_tenant(drop, tenant)
        return self._invalidator.content(drop, prefix, scope, session)


class WeightsWatch(StepPart):
    """Forgets what is cached if the weights have changed, and takes no requests if they were replaced."""

    def __init__(self, weights: SharedWeights, scheduler: Scheduler, forgetting: Forgetting) -> None:
        self._weights = weights
        self._scheduler = scheduler
        self._forgetting = forgetting
        self._are_checked = False  # since the last step

    def planning(self) -> None:
        """They may change during a step."""
        self._are_checked = False

    def adding(self) -> None:
        """Looks at them, once between two steps."""
        if self._are_checked:
            return
        compare = not self._scheduler.has_work  # comparing numbers waits for the device
        if self._weights.changed(compare=compare):
            log.warning("the weights of the model have changed: cached prefixes are forgotten")
            self._forgetting.everything(remove=False)
        self._are_checked = True
