"""What operators and background tasks do: pins, quotas, tiers, invalidation, shape, time. Each function is one operation."""

from __future__ import annotations

from random import Random

from item_codes import tellable
from reference import cached_blocks
from wild_configs import TENANTS
from wild_machine import WildMachine
from wild_requests import draw_prompt

from kvpool import Tier
from kvpool.errors import InvalidArgumentError, OutOfBlocksError, PinBudgetError, SequenceStateError
from kvpool.prefix.tree import numbers_in_use

MAX_BLOCKS = 30
MOMENT = 0.0625  # seconds; exact, as all times here are


def draw_pool(m: WildMachine, rng: Random) -> tuple[int, Tier]:
    return rng.randrange(len(m.config.pools)), rng.choice((Tier.GPU, Tier.GPU, Tier.HOST, Tier.DISK))


# --- what stays -------------------------------------------------------------------------------------------------------


def pin(m: WildMachine, rng: Random) -> None:
    tokens, scope = draw_prompt(m, rng)
    request = m.pick(rng, swapped=None)
    of_request = request is not None and rng.random() < 0.4
    what = {"tokens": request.handle, "scope": scope} if of_request else m.naming(tokens, scope)
    ttl = rng.choice((None, None, 0.75, 5.0, 20.0))
    done, made = m.attempt(
        lambda: m.manager.cache.pin(**what, ttl=ttl), InvalidArgumentError, PinBudgetError, SequenceStateError
    )
    if done:
        m.pins.append(made)


def unpin(m: WildMachine, rng: Random) -> None:
    if m.pins:
        chosen = m.pins.pop(rng.randrange(len(m.pins)))
        is_active = chosen.pin_id in m.cache.pins
        done, _ = m.attempt(lambda: m.manager.cache.unpin(chosen), InvalidArgumentError)
        assert done == is_active


def set_quota(m: WildMachine, rng: Random) -> None:
    low, high = rng.choice((0, 0, 1, 3, 0.3)), rng.choice((None, 0, 2, 5, 0.5))
    m.attempt(
        lambda: m.manager.cache.set_quota(rng.choice(TENANTS), guaranteed=low, maximum=high), InvalidArgumentError
    )


def clear_quotas(m: WildMachine, rng: Random) -> None:
    for tenant in TENANTS:
        m.manager.cache.set_quota(tenant)


def wait(m: WildMachine, rng: Random) -> None:
    m.now += rng.choice((0.125, 1.0, 3.0, 6.0, 25.0))
    if rng.random() < 0.5:
        m.manager.cache.gc()
        assert all(pin.expires_at > m.now for pin in m.cache.pins.values())


def wait_for_a_deadline(m: WildMachine, rng: Random) -> None:
    """Nothing runs out before the next deadline."""
    seconds = m.ask(m.manager.cache.next_deadline)
    if seconds is None:
        return
    before = m.books()
    if seconds > MOMENT:
        m.now += seconds - MOMENT
        m.changed()
        assert m.books() == before, f"something ran out before its time, which comes {MOMENT} s later"
        m.now += MOMENT
    else:
        m.now += seconds
    m.manager.cache.gc()
    m.changed()
    seconds = m.ask(m.manager.cache.next_deadline)
    assert seconds is None or seconds > 0


def look(m: WildMachine, rng: Random) -> None:
    """Those who look at everything see the same, and change nothing."""
    stats, runs = m.ask(m.manager.stats), m.ask(m.manager.inspect.runs)
    drawn = m.ask(m.manager.inspect.runs_snapshot)
    columns = (drawn.number, drawn.start, drawn.num_blocks, drawn.tier, drawn.priority, drawn.is_pinned, drawn.is_read)
    seen = sorted(zip(*(column.tolist() for column in columns), strict=True))
    assert seen == sorted((r.number, r.start, r.num_blocks, r.tier, r.priority, r.is_pinned, r.is_read) for r in runs)
    for start, parent in zip(drawn.start.tolist(), drawn.parent.tolist(), strict=True):
        assert start == (drawn.start[parent] + drawn.num_blocks[parent] if parent >= 0 else 0)
    picture = m.ask(m.manager.inspect.snapshot)
    for pool in picture.pools:
        counted = stats.pool(pool.pool, pool.tier)
        seen = int(pool.is_free.sum()), pool.num_cached, pool.num_referenced, pool.num_pinned
        assert seen == (counted.free, counted.cached, counted.referenced, counted.pinned)
        if pool.num_blocks:
            block_id = rng.randrange(pool.num_blocks)
            block = m.ask(lambda pool=pool, at=block_id: m.manager.inspect.block(at, pool=pool.pool, tier=pool.tier))
            assert len(block.request_ids) == pool.num_holders[block_id]


# --- tiers and shape --------------------------------------------------------------------------------------------------


def evict(m: WildMachine, rng: Random) -> None:
    pool, tier = draw_pool(m, rng)
    before = m.manager.inspect.num_free_blocks(pool, tier)
    freed = m.manager.cache.evict(rng.randrange(6), pool=pool, tier=tier)
    assert m.manager.inspect.num_free_blocks(pool, tier) == before + freed


def offload(m: WildMachine, rng: Random) -> None:
    pool, tier, count = (
        rng.randrange(len(m.config.pools)),
        rng.choice((Tier.GPU, Tier.GPU, Tier.HOST)),
        rng.randrange(6),
    )
    m.attempt(lambda: m.manager.cache.offload(count, pool=pool, tier=tier), InvalidArgumentError)


def onboard(m: WildMachine, rng: Random) -> None:
    tokens, scope = draw_prompt(m, rng)
    done, _ = m.attempt(lambda: m.manager.cache.onboard(**m.naming(tokens, scope)), OutOfBlocksError)
    if done and m.config.enable_prefix_caching and not m.cache.orders.quotas:
        assert set(m.manager.match_prefix(**m.naming(tokens, scope)).tokens_by_tier) <= {Tier.GPU}


def defragment(m: WildMachine, rng: Random) -> None:
    _, tier = draw_pool(m, rng)
    m.manager.cache.defragment(tier)
    for tiers in m.cache.pools:
        pool = tiers[tier]
        in_use = pool.num_blocks - pool.num_free
        assert all(block >= in_use for block in pool.free_ids().tolist()), "a hole is left"


def resize(m: WildMachine, rng: Random) -> None:
    """Also to nothing at all on the lower tiers, and back."""
    pool, tier = draw_pool(m, rng)
    current = m.cache.pools[pool][tier].num_blocks
    wanted = max(0 if tier > Tier.GPU else 1, min(current + rng.randrange(-4, 5), MAX_BLOCKS))
    if tier > Tier.GPU and rng.random() < 0.2:
        wanted = rng.choice((0, 1, 5))
    done, result = m.attempt(lambda: m.manager.cache.resize(wanted, pool=pool, tier=tier), OutOfBlocksError)
    if done:
        assert m.cache.pools[pool][tier].num_blocks == result.num_blocks == wanted
        m.bytes.cells(m.bytes.pools.index(pool), tier)  # it grows at once: copies may use what the next resize takes


def run_copies(m: WildMachine, rng: Random) -> None:
    m.run_copies()


# --- invalidation -----------------------------------------------------------------------------------------------------


def invalidate(m: WildMachine, rng: Random) -> None:
    tokens, scope = draw_prompt(m, rng)
    if m.live and rng.random() < 0.3:
        request = rng.choice(list(m.live.values()))
        tokens = tellable(request.tokens[: rng.randrange(len(request.tokens) + 1)]) or tokens
        scope = request.scope
    cached, ends = cached_blocks(m.manager), m.cached_ends()
    kind = rng.random()
    if kind < 0.4:
        cut = tuple(tokens[: len(tokens) // m.size * m.size])
        gone = {key for key in cached if cut and key[0] == scope and key[1][: len(cut)] == cut}
        removed = m.manager.cache.invalidate(**m.naming(tokens, scope, "prefix"))
        if cut:
            m.histories.renew_prefix(scope, cut)
    elif kind < 0.6:
        gone = {key for key in cached if key[0] == scope}
        removed = m.manager.cache.invalidate(scope=scope)
        m.histories.renew_scope(scope)
    elif kind < 0.7:
        gone = {key for key in cached if key[0].tenant == scope.tenant}
        removed = m.manager.cache.invalidate(tenant=scope.tenant)
        m.histories.renew_tenant(scope.tenant)
    elif kind < 0.85:
        session = rng.choice(("s", "t", ""))
        removed = m.manager.cache.invalidate(session=session)
        m.sessions.invalidate(session)
        gone = set(cached) - set(cached_blocks(m.manager))
    else:
        gone = set(cached)
        removed = m.manager.cache.reset()
        m.histories.renew_everything()
    assert set(cached_blocks(m.manager)) == set(cached) - gone
    assert removed == len(gone), f"{removed} removed, {len(gone)} gone"
    m.note_invalidation(ends)


def forget_items(m: WildMachine, rng: Random) -> None:
    """What nobody holds is forgotten, what somebody holds is not."""
    with m.manager._guard:  # as every operation that may change something
        m.cache.rows.symbols.forget_all_but(numbers_in_use(m.cache))


def listen_again(m: WildMachine, rng: Random) -> None:
    """A subscriber leaves, and another one begins with a snapshot."""
    if m.subscription is not None:
        m.subscription.close()
        m.subscription = m.mirror = None
        m.changed()
    if m.config.event_buffer_size and rng.random() < 0.6:
        m.listen()


OPERATIONS = {
    pin: 3,
    unpin: 2,
    set_quota: 1,
    clear_quotas: 1,
    wait: 2,
    wait_for_a_deadline: 1,
    look: 1,
    evict: 3,
    offload: 5,
    onboard: 3,
    defragment: 2,
    resize: 2,
    run_copies: 2,
    invalidate: 3,
    listen_again: 1,
    forget_items: 1,
}
