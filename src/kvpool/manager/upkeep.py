"""`manager.cache`: what concerns the cache as a whole. Keep content, drop it, move it between tiers, change the pools."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from kvpool.checks import as_count, as_duration, show
from kvpool.config import Tier
from kvpool.config.layers import MAX_BLOCKS
from kvpool.errors import InvalidArgumentError
from kvpool.manager.arguments import check_scope
from kvpool.manager.guard import Guard
from kvpool.manager.pins import Pins
from kvpool.pools.arrays import Int32Array
from kvpool.pools.pool import ResizeResult
from kvpool.prefix.cache import PrefixCache
from kvpool.prefix.node import NEVER, Node
from kvpool.prefix.orders import Quota, TenantQuota
from kvpool.prefix.readers import Pin
from kvpool.scope import ReuseScope
from kvpool.sequences.admission import AdmissionPlanner
from kvpool.sequences.handle import KVCacheHandle
from kvpool.sequences.prompt import DEFAULT_SCOPE, Items, Prompt, as_prompt
from kvpool.sequences.state import CacheState
from kvpool.sequences.swap import RunMover
from kvpool.stats import EvictionReason

if TYPE_CHECKING:
    from kvpool.manager.compaction import Compaction


class CacheUpkeep:
    """Verbs of operators and background tasks. Like those of the manager, each happens completely or changes nothing."""

    def __init__(self, state: CacheState, guard: Guard, admissions: AdmissionPlanner) -> None:
        self.pins = Pins(state)
        self._state = state
        self._guard = guard
        self._quotas = TenantQuotas(state.cache)
        self._moves = RunMover(state, admissions)
        self._invalidation = Invalidator(state, self.pins)

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
                row = self._state.any_row_of(tokens)
                scope, items = tokens.scope, None
                coded = self._state.rows.token_ids(row)[: int(self._state.rows.committed[row])]
            else:
                prompt = as_prompt(tokens, scope, multimodal)
                tokens, scope, items = prompt.tokens, prompt.scope, prompt.items
                coded = self._coded(prompt)
            pin = self.pins.pin(coded, scope, ttl)
            if self._guard.observers:
                self._guard.tell("pin", pin, tokens, scope, ttl, items)
            return pin

    def unpin(self, pin: Pin) -> None:
        """Ends a pin."""
        _check_pin(pin)
        with self._guard:
            self.pins.unpin(pin)
            if self._guard.observers:
                self._guard.tell("unpin", None, pin)

    def is_pinned(self, pin: Pin) -> bool:
        """Whether a pin still holds: it was not ended, its time is not over, its prefix was not invalidated."""
        _check_pin(pin)
        with self._guard.query:  # every operation begins with what is due
            return self.pins.active.get(pin.pin_id) is pin

    def set_quota(self, tenant: str, *, guaranteed: float | int = 0, maximum: float | int | None = None) -> None:
        """Limits a tenant's idle cache: blocks (int) or a fraction of each GPU pool (float).

        Up to `guaranteed`, other tenants' requests cannot evict it; beyond `maximum`, its own blocks go first. Call with
        neither to remove the quota.
        """
        if not isinstance(tenant, str):
            raise InvalidArgumentError(f"tenant must be a string, got {tenant!r}")
        limits: list[Any] = [n.item() if isinstance(n, np.generic) else n for n in (guaranteed, maximum)]
        with self._guard:
            self._quotas.set(tenant, *limits)
            if self._guard.observers:
                self._guard.tell("set_quota", None, tenant, *limits)

    def quotas(self) -> dict[str, TenantQuota]:
        """The quotas in force, by tenant, with what each tenant has cached."""
        with self._guard.query:
            return {tenant: quota.view() for tenant, quota in self._state.cache.orders.quotas.items()}

    def count_loaded(self, handle: KVCacheHandle, media: Mapping[int, Tier]) -> None:
        """Counts blocks of a prompt as found where they came from, such as a disk. They were put on the GPU for this request
        just before it was admitted, so it found them there.
        """
        if not isinstance(media, Mapping) or not all(
            isinstance(block, int) and block >= 0 and isinstance(tier, Tier) for block, tier in media.items()
        ):
            raise InvalidArgumentError(f"media must map numbers of blocks to tiers, got {show(media)}")
        with self._guard.query:
            self._state.any_row_of(handle)
            counters, size = self._state.counters, self._state.config.block_size
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
            chosen = self._state.pool(pool, tier)
            freed = self._state.cache.evict(chosen, num_blocks, None, EvictionReason.EXPLICIT)
            if self._guard.observers:
                self._guard.tell("evict", freed, num_blocks, chosen.index, tier)
            return freed

    def gc(self) -> int:
        """Drops cached runs and pins whose time is over; returns the number of blocks (positions) dropped."""
        with self._guard.query:  # every operation begins with what is due
            return self._guard.num_expired

    def next_deadline(self) -> float | None:
        """Seconds until the next time to live, priority or pin runs out; None when nothing does."""
        with self._guard.query:
            deadline = self._state.cache.expiry.calendar.next
            return None if deadline == NEVER else deadline - self._state.context.now

    def invalidate(
        self,
        prefix: Any = None,
        *,
        scope: ReuseScope | None = None,
        session: str | None = None,
        tenant: str | None = None,
        multimodal: Items | None = None,
    ) -> int:
        """Removes cached content that must not be reused: below a prefix, in a scope, made by a session, or of a tenant.

        `prefix` (with `scope`, default scope otherwise, and its items in `multimodal`) removes what follows its last full
        block match, that block included. What a session made goes with all that others built on it or copied from it. Live
        requests that hold or compute some of what is removed keep their blocks and go on; they publish nothing more.
        Of a tenant everything goes, whatever its adapters and salts. Returns the blocks removed.
        """
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
        with self._guard:
            if session is not None:
                removed = self._invalidation.of_session(session)
            elif tenant is not None:
                removed = self._invalidation.of_tenant(tenant)
            elif prompt is not None:
                removed = self._invalidation.below_prefix(self._coded(prompt), prompt.scope)
            else:
                assert scope is not None
                removed = self._invalidation.in_scope(scope)
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
            removed = self._invalidation.everything()
            if self._guard.observers:
                self._guard.tell("reset_prefix_cache", removed)
            return removed

    # --- tiers -------------------------------------------------------------------------------------------------------

    def offload(self, num_blocks: int, *, pool: int = 0, tier: Tier = Tier.GPU) -> int:
        """Moves up to `num_blocks` of the runs that would be evicted next one tier down; returns how many moved."""
        num_blocks = as_count(num_blocks, "num_blocks")
        with self._guard:
            chosen = self._state.pool(pool, tier)
            moved = self._moves.offload(chosen, num_blocks)
            if self._guard.observers:
                self._guard.tell("offload", moved, num_blocks, chosen.index, tier)
            return moved

    def onboard(self, tokens: Any, scope: ReuseScope = DEFAULT_SCOPE, multimodal: Items | None = None) -> int:
        """Brings the cached prefix of `tokens` up to the GPU ahead of its request; returns how many blocks move."""
        prompt = as_prompt(tokens, scope, multimodal)
        with self._guard:
            moved = self._moves.onboard(self._coded(prompt), prompt.scope)
            if self._guard.observers:
                self._guard.tell("onboard", moved, prompt.tokens, prompt.scope, prompt.items)
            return moved

    # --- the pools ---------------------------------------------------------------------------------------------------

    @property
    def _compaction(self) -> Compaction:
        """What moves blocks; few programs ever load it."""
        from kvpool.manager.compaction import Compaction

        return Compaction(self._state)

    def defragment(self, tier: Tier = Tier.GPU) -> int:
        """Plans the fewest moves that leave every pool's live blocks at its lowest ids; returns how many."""
        with self._guard:
            self._state.pool(0, tier)
            moved = self._compaction.defragment(tier)
            if self._guard.observers:
                self._guard.tell("defragment", moved, tier)
            return moved

    def resize(self, num_blocks: int, *, pool: int = 0, tier: Tier = Tier.GPU) -> ResizeResult:
        """Grows or shrinks a pool while requests run; says what had to be evicted and moved."""
        with self._guard:
            chosen = self._state.pool(pool, tier)
            least = 1 if tier == Tier.GPU else 0
            num_blocks = as_count(num_blocks, "num_blocks", least, MAX_BLOCKS)
            result = self._compaction.resize(chosen, num_blocks)
            self._state.cache.mover.find_lower_tiers()
            self._guard.calm_until = 0  # the level is measured anew
            if self._state.context.events.listening:
                self._state.context.events.created(self._state.pool_sizes())
            if self._guard.observers:
                self._guard.tell("resize", result, num_blocks, chosen.index, tier)
            return result

    def _coded(self, prompt: Prompt) -> Int32Array:
        """The tokens of a prompt as the tree holds them; symbols that nobody knows yet are not kept."""
        assert prompt.tokens is not None
        return self._state.rows.symbols.encode(prompt.tokens, prompt.items)[0] if prompt.items else prompt.tokens


class Invalidator:
    """`invalidate` and `reset`. Each method returns how many blocks (positions) left the index."""

    def __init__(self, state: CacheState, pins: Pins) -> None:
        self.state = state
        self.cache = state.cache
        self.tree = state.cache.tree
        self.logits = state.cache.logits
        self.rows = state.rows
        self.in_flight = state.in_flight
        self.pins = pins

    def everything(self) -> int:
        """All scopes, on all tiers."""
        roots = list(self.tree.roots.values())
        for root in roots:
            root.logits = None
        nodes = [node for root in roots for node in (root.children or {}).values()]
        return self._remove(nodes, lambda handle: True, EvictionReason.RESET)

    def in_scope(self, scope: ReuseScope) -> int:
        """All content of one scope."""
        root = self.tree.roots.get(scope)
        nodes: list[Node] = []
        if root is not None:
            root.logits = None
            nodes = list((root.children or {}).values())
        return self._remove(nodes, lambda handle: handle.scope == scope, EvictionReason.INVALIDATED)

    def of_tenant(self, tenant: str) -> int:
        """All content of a tenant, in all its scopes."""
        nodes: list[Node] = []
        for scope, root in self.tree.roots.items():
            if scope.tenant == tenant:
                root.logits = None
                nodes += (root.children or {}).values()
        return self._remove(nodes, lambda handle: handle.scope.tenant == tenant, EvictionReason.INVALIDATED)

    def of_session(self, session: str) -> int:
        """What the requests of a session published, and blocks for which others took over a part of it."""
        nodes = sorted(self.tree.sessions.get(session, ()), key=lambda n: (n.start, n.created))

        def affected(handle: KVCacheHandle) -> bool:
            return session in handle.sessions

        for node in nodes:
            self.logits.forget_inside(node.parent, node.start, node.key)
        self.logits.forget_made_by(session, self.tree.roots.values())
        return self._remove(nodes, affected, EvictionReason.INVALIDATED)

    def below_prefix(self, prefix: Int32Array, scope: ReuseScope) -> int:
        """The last full block of a prefix and everything that follows it."""
        size = self.state.context.block_size
        last = len(prefix) // size - 1
        if last < 0:
            return 0
        start = last * size
        before = self.tree.match(scope, prefix[:start])
        if before.root is not None and before.num_blocks == last:
            parent = before.path[-1] if before.path else before.root
            self.logits.forget_inside(parent, last, prefix[start : start + size].tobytes())

        def affected(handle: KVCacheHandle) -> bool:
            """Whether it has, or is computing, a token of the block: its ids agree with the prefix as far as they go."""
            if handle.scope != scope or int(self.rows.reserved[handle.row]) <= start:
                return False
            known = self.rows.token_ids(handle.row)[: start + 1]
            return bool((known == prefix[: len(known)]).all())

        return self._remove(self._nodes_from(prefix, last, scope), affected, EvictionReason.INVALIDATED)

    def _nodes_from(self, prefix: Int32Array, last: int, scope: ReuseScope) -> list[Node]:
        """The node that starts at block `last` of a prefix, cut free from what comes before it."""
        match = self.tree.match(scope, prefix[: (last + 1) * self.state.context.block_size])
        if match.num_blocks <= last:
            return []
        node = match.path[-1]
        if node.start < last:
            self.tree.split(node, last - node.start)
        return [node]

    def _remove(self, nodes: Sequence[Node], affected: Callable[[KVCacheHandle], bool], reason: EvictionReason) -> int:
        doomed = {part for node in nodes for part in node.subtree()}
        self._silence(lambda handle: self.rows.tips[handle.row] in doomed or affected(handle))
        self.pins.void(doomed)
        return sum(self.cache.detach(node, reason) for node in nodes if not node.detached)

    def _silence(self, affected: Callable[[KVCacheHandle], bool]) -> None:
        """These requests publish nothing more; what they were computing may be in the hands of others."""
        handles = [handle for handle in self.state.requests.values() if handle.publishes]
        silenced = [handle for handle in handles if affected(handle)]
        for handle in silenced:
            if self.rows.has_open_tip(handle.row):
                self.state.publisher.close(handle.row)
            handle.publishes = False
            self.state.encoded.pop((handle.scope, handle.encoder_tokens), None)
            self.in_flight.untrack(handle)
        for handle in handles if silenced else ():
            if handle.publishes and handle.inflight is None and handle.swapped is None:
                self.in_flight.track(handle.row)


class TenantQuotas:
    """Sets the limits that `Quota` describes, on a prefix cache that is in use."""

    def __init__(self, cache: PrefixCache) -> None:
        self.cache = cache
        self.context = cache.context
        self.tree = cache.tree
        self.windows = cache.windows
        self.orders = cache.orders

    def set(self, tenant: str, guaranteed: float | int, maximum: float | int | None) -> None:
        """Checks a quota against its pools and the other guarantees, then installs it; with neither it removes one."""
        pools = [tiers[Tier.GPU] for tiers in self.context.pools]
        low = [_share(guaranteed, pool.num_blocks, "guaranteed") for pool in pools]
        high = [None if maximum is None else _share(maximum, pool.num_blocks, "maximum") for pool in pools]
        for floor, limit in zip(low, high, strict=True):
            if limit is not None and floor > limit:
                raise InvalidArgumentError(f"guaranteed={guaranteed} is more than maximum={maximum} for {tenant!r}")
        others = [quota for quota in self.orders.quotas.values() if quota.tenant != tenant]
        for index, pool in enumerate(pools):
            promised = low[index] + sum(quota.guaranteed[index] for quota in others)
            if low[index] and promised > pool.num_blocks:  # a pool that shrank may be short of what was promised
                raise InvalidArgumentError(
                    f"guarantees of pool {index} would add up to {promised} blocks of {pool.num_blocks}; lower one"
                )
        self._install(tenant, low, high)

    def _install(self, tenant: str, low: list[int], high: list[int | None]) -> None:
        orders = self.orders
        remove = not any(low) and all(limit is None for limit in high)
        quota = None if remove else Quota(tenant, low, high, orders.new_policies())
        orders.quotas.pop(tenant, None)
        if quota is not None:
            orders.quotas[tenant] = quota
        roots = [root for root in self.tree.roots.values() if root.scope.tenant == tenant]
        for root in roots:
            candidates = [n for n in root.subtree() if n.is_candidate()]
            for node in candidates:
                root.policies[node.tier].remove(node)
                node.entry = None
            root.policies = orders.policies if quota is None else quota.policies
            root.quota = quota
            for node in candidates:
                root.policies[node.tier].add(node)
        if quota is not None:
            quota.cached, quota.pinned = self._idle_blocks(tenant)
            for root in roots:
                self.cache.enforce_quota(root)

    def _idle_blocks(self, tenant: str) -> tuple[list[int], list[int]]:
        """Recounts the unread GPU blocks that a tenant's runs hold, and how many of them are pinned."""
        counts, pinned = [0] * len(self.context.pools), [0] * len(self.context.pools)
        for node in self.tree.nodes():
            if node.root.scope.tenant == tenant and node.tier == Tier.GPU:
                self.context.sync(node)
                for group in self.context.cached:
                    idle, kept = self.windows.idle_blocks(node, group)
                    counts[group.pool] += idle
                    pinned[group.pool] += kept
        return counts, pinned


def _share(value: float | int, num_blocks: int, name: str) -> int:
    """Blocks out of an int (blocks) or a float (fraction of the pool)."""
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer)):
        raise InvalidArgumentError(f"{name} must be a number of blocks or a fraction, got {value!r}")
    if not 0 <= value <= (1.0 if isinstance(value, float) else num_blocks):
        raise InvalidArgumentError(f"{name}={value} is outside the pool of {num_blocks} blocks")
    return round(value * num_blocks) if isinstance(value, float) else int(value)


def _check_pin(pin: object) -> None:
    if not isinstance(pin, Pin):
        raise InvalidArgumentError(f"a pin is what pin() returned, got {pin!r}")
