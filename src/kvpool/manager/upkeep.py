"""`manager.cache`: what concerns the cache as a whole. Keep content, drop it, move it between tiers, change the pools."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, overload

import numpy as np

from kvpool.checks import as_count, as_duration, as_flag, show
from kvpool.config import Tier
from kvpool.config.layers import MAX_BLOCKS
from kvpool.core.cache import Cache, Pin
from kvpool.core.handle import KVCacheHandle, any_row_of
from kvpool.core.node import NEVER
from kvpool.core.orders import TenantQuota
from kvpool.core.prompt import DEFAULT_SCOPE, Items, Prompt, as_prompt
from kvpool.errors import InvalidArgumentError
from kvpool.manager.compaction import defragment, resize
from kvpool.manager.guard import Guard
from kvpool.pools.arrays import Int32Array
from kvpool.pools.pool import ResizeResult
from kvpool.prefix.evict import evict
from kvpool.prefix.keeping import pin_prefix, set_quota, unpin
from kvpool.scope import ReuseScope, check_scope
from kvpool.sequences.publish import (
    WouldRemove,
    invalidate_below_prefix,
    invalidate_scopes,
    invalidate_session,
    invalidation_of,
)
from kvpool.sequences.swap import offload, onboard
from kvpool.stats import EvictionReason


class CacheUpkeep:
    """Verbs of operators and background tasks. Like those of the manager, each happens completely or changes nothing."""

    def __init__(self, cache: Cache, guard: Guard) -> None:
        self._cache = cache
        self._guard = guard

    # --- what stays, what goes ---------------------------------------------------------------------------------------

    def pin(
        self, tokens: Any, scope: ReuseScope = DEFAULT_SCOPE, ttl: float | None = None, multimodal: Items | None = None
    ) -> Pin:
        """Keeps the cached full blocks of `tokens` (or of a handle's committed tokens) from eviction, until `unpin` or `ttl`.

        Raises `PinBudgetError` when more than `max_pinned_tokens` would be pinned.
        """
        as_duration(ttl, "ttl")
        with self._guard:
            if isinstance(tokens, KVCacheHandle):
                check_scope(scope)
                if multimodal is not None:
                    raise InvalidArgumentError(
                        "the multimodal items of a request are known; give them with tokens only"
                    )
                row = any_row_of(self._cache.rows, tokens)
                scope, items = tokens.scope, None
                coded = self._cache.rows.token_ids(row)[: int(self._cache.rows.committed[row])]
            else:
                prompt = as_prompt(tokens, scope, multimodal)
                tokens, scope, items = prompt.tokens, prompt.scope, prompt.items
                coded = self._coded(prompt)
            pin = pin_prefix(self._cache, coded, scope, ttl)
            self._guard.tell("pin", pin, tokens, scope, ttl, items)
            return pin

    def unpin(self, pin: Pin) -> None:
        """Ends a pin."""
        _check_pin(pin)
        with self._guard:
            unpin(self._cache, pin)
            self._guard.tell("unpin", None, pin)

    def is_pinned(self, pin: Pin) -> bool:
        """Whether a pin still holds: it was not ended, its time is not over, its prefix was not invalidated."""
        _check_pin(pin)
        with self._guard.query:  # every operation begins with what is due
            return self._cache.pins.get(pin.pin_id) is pin

    def set_quota(self, tenant: str, *, guaranteed: float | int = 0, maximum: float | int | None = None) -> None:
        """Limits a tenant's idle cache: blocks (int) or a fraction of each GPU pool (float).

        Up to `guaranteed`, other tenants' requests cannot evict it; beyond `maximum`, its own blocks go first. Call with
        neither to remove the quota.
        """
        if not isinstance(tenant, str):
            raise InvalidArgumentError(f"tenant must be a string, got {tenant!r}")
        limits: list[Any] = [n.item() if isinstance(n, np.generic) else n for n in (guaranteed, maximum)]
        with self._guard:
            set_quota(self._cache, tenant, *limits)
            self._guard.tell("set_quota", None, tenant, *limits)

    def quotas(self) -> dict[str, TenantQuota]:
        """The quotas in force, by tenant, with what each tenant has cached."""
        with self._guard.query:
            return {tenant: quota.view() for tenant, quota in self._cache.orders.quotas.items()}

    def count_loaded(self, handle: KVCacheHandle, media: Mapping[int, Tier]) -> None:
        """Counts blocks of a prompt as found where they came from, such as a disk. They were put on the GPU for this request
        just before it was admitted, so it found them there.
        """
        if not isinstance(media, Mapping) or not all(
            isinstance(block, int) and block >= 0 and isinstance(tier, Tier) for block, tier in media.items()
        ):
            raise InvalidArgumentError(f"media must map numbers of blocks to tiers, got {show(media)}")
        with self._guard.query:
            any_row_of(self._cache.rows, handle)
            counters, size = self._cache.counters, self._cache.config.block_size
            for block, tier in media.items():
                num_tokens = min(size, handle.num_cached_tokens - block * size)
                if num_tokens > 0:
                    counters.hit_tokens[Tier.GPU] -= num_tokens
                    counters.hit_tokens[tier] += num_tokens
                    handle.stats.cached_tokens_from_lower_tiers += num_tokens
                if block < handle.num_cached_blocks:
                    counters.hit_blocks[Tier.GPU] -= 1
                    counters.hit_blocks[tier] += 1

    def evict(self, num_blocks: int, *, pool: int = 0, tier: Tier = Tier.GPU) -> int:
        """Evicts up to `num_blocks` cached blocks now, in the order of the policy; returns how many became free."""
        num_blocks = as_count(num_blocks, "num_blocks")
        with self._guard:
            chosen = self._cache.pool(pool, tier)
            freed = evict(self._cache, chosen, chosen.num_free + num_blocks, None, EvictionReason.EXPLICIT)
            self._guard.tell("evict", freed, num_blocks, chosen.index, tier)
            return freed

    def gc(self) -> int:
        """Drops cached runs and pins whose time is over; returns the number of blocks (positions) dropped."""
        with self._guard.query:  # every operation begins with what is due
            return self._guard.num_expired

    def next_deadline(self) -> float | None:
        """Seconds until the next time to live, priority or pin runs out; None when nothing does."""
        with self._guard.query:
            deadline = self._cache.calendar.next
            return None if deadline == NEVER else deadline - self._cache.now

    @overload
    def invalidate(
        self,
        prefix: Any = None,
        *,
        scope: ReuseScope | None = None,
        session: str | None = None,
        tenant: str | None = None,
        multimodal: Items | None = None,
        dry_run: Literal[False] = False,
    ) -> int: ...
    @overload
    def invalidate(self, *, session: str, dry_run: Literal[True]) -> WouldRemove: ...
    def invalidate(
        self,
        prefix: Any = None,
        *,
        scope: ReuseScope | None = None,
        session: str | None = None,
        tenant: str | None = None,
        multimodal: Items | None = None,
        dry_run: bool = False,
    ) -> int | WouldRemove:
        """Removes cached content that must not be reused: below a prefix, in a scope, made by a session, or of a tenant.

        `prefix` (with `scope`, default scope otherwise, and its items in `multimodal`) removes what follows its last full
        block match, that block included. What a session made goes with all that others built on it or copied from it. Live
        requests that hold or compute some of what is removed keep their blocks and go on; they publish nothing more.
        Of a tenant everything goes, whatever its adapters and salts. Returns the blocks removed.

        It is for content that must never be found again, such as a secret. A conversation that is over ends by
        `manager.sessions.end`, which takes nothing from others. With `dry_run` nothing is removed: the answer says what
        `session` would take, and how much of that others use.
        """
        if as_flag(dry_run, "dry_run") and session is None:
            raise InvalidArgumentError("dry_run says what a session would take: give session=")
        given = [prefix is not None or scope is not None, session is not None, tenant is not None]
        if sum(given) != 1:
            raise InvalidArgumentError(
                "invalidate takes a prefix, a scope, a prefix with its scope, a session, or a tenant"
            )
        for name, value in (("session", session), ("tenant", tenant)):
            if value is not None and not isinstance(value, str):
                raise InvalidArgumentError(f"{name} must be a string, got {value!r}")
        if scope is not None:
            check_scope(scope)
        if prefix is None and multimodal is not None:
            raise InvalidArgumentError("multimodal items need the ids of the tokens that stand for them: give a prefix")
        prompt = None if prefix is None else as_prompt(prefix, scope or DEFAULT_SCOPE, multimodal)
        if dry_run:
            assert session is not None
            with self._guard.query:
                return invalidation_of(self._cache, session)
        with self._guard:
            if session is not None:
                removed = invalidate_session(self._cache, session)
            elif prompt is not None:
                removed = invalidate_below_prefix(self._cache, self._coded(prompt), prompt.scope)
            else:
                removed = invalidate_scopes(
                    self._cache,
                    lambda each: each == scope if tenant is None else each.tenant == tenant,
                    EvictionReason.INVALIDATED,
                )
            if self._guard.observers:
                ids, items = (None, None) if prompt is None else (prompt.tokens, prompt.items)
                self._guard.tell(
                    "invalidate", removed, ids, scope if prompt is None else prompt.scope, session, items, tenant
                )
            return removed

    def reset(self) -> int:
        """Forgets everything cached, on all tiers, also under live requests. Returns the blocks removed.

        What live requests have computed so far, and what they go on to compute with it, is not published either.
        """
        with self._guard:
            removed = invalidate_scopes(self._cache, lambda scope: True, EvictionReason.RESET)
            self._guard.tell("reset_prefix_cache", removed)
            return removed

    # --- tiers -------------------------------------------------------------------------------------------------------

    def offload(self, num_blocks: int, *, pool: int = 0, tier: Tier = Tier.GPU) -> int:
        """Moves up to `num_blocks` of the runs that would be evicted next one tier down; returns how many moved."""
        num_blocks = as_count(num_blocks, "num_blocks")
        with self._guard:
            chosen = self._cache.pool(pool, tier)
            moved = offload(self._cache, chosen, num_blocks)
            self._guard.tell("offload", moved, num_blocks, chosen.index, tier)
            return moved

    def onboard(self, tokens: Any, scope: ReuseScope = DEFAULT_SCOPE, multimodal: Items | None = None) -> int:
        """Brings the cached prefix of `tokens` up to the GPU ahead of its request; returns how many blocks move."""
        prompt = as_prompt(tokens, scope, multimodal)
        with self._guard:
            moved = onboard(self._cache, self._coded(prompt), prompt.scope)
            self._guard.tell("onboard", moved, prompt.tokens, prompt.scope, prompt.items)
            return moved

    # --- the pools ---------------------------------------------------------------------------------------------------

    def defragment(self, tier: Tier = Tier.GPU) -> int:
        """Plans the fewest moves that leave every pool's live blocks at its lowest ids; returns how many."""
        with self._guard:
            self._cache.pool(0, tier)
            moved = defragment(self._cache, tier)
            self._guard.tell("defragment", moved, tier)
            return moved

    def resize(self, num_blocks: int, *, pool: int = 0, tier: Tier = Tier.GPU) -> ResizeResult:
        """Grows or shrinks a pool while requests run; says what had to be evicted and moved."""
        with self._guard:
            chosen = self._cache.pool(pool, tier)
            least = 1 if tier == Tier.GPU else 0
            num_blocks = as_count(num_blocks, "num_blocks", least, MAX_BLOCKS)
            result = resize(self._cache, chosen, num_blocks)
            self._cache.note_sizes()
            self._guard.calm_until = 0  # the level is measured anew
            if self._cache.events.listening:
                self._cache.events.created(self._cache.pool_sizes())
            self._guard.tell("resize", result, num_blocks, chosen.index, tier)
            return result

    def _coded(self, prompt: Prompt) -> Int32Array:
        """The tokens of a prompt as the tree holds them; symbols that nobody knows yet are not kept."""
        assert prompt.tokens is not None
        return self._cache.rows.symbols.encode(prompt.tokens, prompt.items)[0] if prompt.items else prompt.tokens


def _check_pin(pin: object) -> None:
    if not isinstance(pin, Pin):
        raise InvalidArgumentError(f"a pin is what pin() returned, got {pin!r}")
