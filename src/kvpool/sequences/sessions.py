"""A session pauses, goes on, and is looked at. It begins and ends in `prefix/sessions.py`."""

from __future__ import annotations

from kvpool.config import Tier
from kvpool.core.cache import Cache
from kvpool.core.node import Node
from kvpool.core.sessions import Session, SessionInfo, SessionState
from kvpool.pools.pool import GPU
from kvpool.prefix.blocks import is_usable
from kvpool.prefix.evict import demote
from kvpool.prefix.sessions import runs_of
from kvpool.sequences.swap import onboard_run


def pause_session(cache: Cache, session: Session, expected_seconds: float | None) -> int:
    """Notes when it is expected back, and moves what only it uses down if that pays; returns how many blocks moved."""
    session.paused = True
    session.returns_at = None if expected_seconds is None else cache.now + expected_seconds
    if expected_seconds is None:
        return 0
    own = [node for node in runs_of(cache, session) if node.owner is session and node.tier == GPU and not node.active]
    if not _pays(cache, session, own, expected_seconds):
        return 0
    own.sort(key=lambda node: -node.start)
    moved = 0
    for node in own:
        worth = node.priority >= cache.config.offload_min_priority and node.is_candidate()
        if worth and (not cache.by_block or is_usable(cache, node, 0, node.num_blocks)):
            num_blocks = node.num_blocks
            moved += num_blocks if demote(cache, node, num_blocks) is not None else 0
    return moved


def _pays(cache: Cache, session: Session, own: list[Node], expected_seconds: float) -> bool:
    """Whether its blocks would be evicted before it comes back: the GPU is full, and idle blocks last less long there.

    If its own blocks are next, they go down when room is needed, and stay where they are if none is.
    """
    if cache.lower_tier[GPU] is None or not cache.config.offload_on_evict or not own:
        return False
    for pool, num_own in zip(cache.gpu_pools, cache.blocks_per_pool(own), strict=True):
        if pool.num_free < num_own:
            victim = cache.orders.victim(pool, session.tenant)
            if victim is not None and victim.owner is not session:
                return cache.now - victim.last_access_at < expected_seconds
    return False


def resume_session(cache: Cache, session: Session) -> int:
    """It goes on soon: brings its last sequence to the GPU if there is room; returns how many blocks (positions) moved."""
    session.paused, session.returns_at = False, None
    tip = _tip(cache, session)
    return 0 if tip is None else onboard_run(cache, tip)


def _tip(cache: Cache, session: Session) -> Node | None:
    """The last run that its newest request published."""
    whole = (node for node in runs_of(cache, session) if not node.is_remainder)
    return max(whole, key=lambda node: (node.published_by, node.start), default=None)


def look_at_session(cache: Cache, session: Session, now: float) -> SessionInfo:
    """What is cached of it, and what it would cost to go on."""
    size, tip = cache.block_size, _tip(cache, session)
    by_tier: dict[Tier, int] = {}
    for node in () if tip is None else tip.path():
        node.sync()
        by_tier[node.tier] = by_tier.get(node.tier, 0) + node.num_blocks * size
    own = 0
    for node in runs_of(cache, session):
        if node.owner is session and not node.is_remainder:
            node.sync()
            own += node.num_blocks * size
    live = [handle for handle in cache.requests.values() if handle.user is session]
    lengths = [cache.rows.committed_of[handle.row] for handle in live]
    num_tokens = max(lengths, default=session.num_tokens)
    return SessionInfo(
        session.name,
        session.tenant,
        None if session.parent is None else session.parent.name,
        _state(session, bool(live)),
        None if session.returns_at is None else session.returns_at - now,
        0.0 if live else now - session.last_used_at,
        len(live),
        num_tokens,
        by_tier,
        max(0, num_tokens - sum(by_tier.values())),
        own,
    )


def _state(session: Session, is_live: bool) -> SessionState:
    if is_live:
        return SessionState.RUNNING
    if not session.num_open:
        return SessionState.ENDED
    return SessionState.PAUSED if session.paused else SessionState.IDLE
