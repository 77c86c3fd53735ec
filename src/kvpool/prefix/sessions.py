"""Sessions begin, are forked, and end; what only ended ones used is given up.

It then goes before anything else when room is needed, and to no lower tier. If a session comes back before that, its blocks
are its own again.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvpool.core.cache import Cache
from kvpool.core.node import Node
from kvpool.core.sessions import FEW_SESSIONS, MAX_DEPTH, Owner, Session
from kvpool.errors import InvalidArgumentError, UnknownSessionError


def session_for(cache: Cache, tenant: str, name: str) -> Session:
    """The session of a request that is admitted now: it begins, goes on, or comes back after its end."""
    session = cache.known_sessions.get((tenant, name))
    if session is None:
        session = _begin(cache, tenant, name, None)
    elif not session.num_open:
        _change(cache, session, 1)
    session.paused, session.returns_at = False, None
    session.last_used_at = cache.now
    return session


def _begin(cache: Cache, tenant: str, name: str, parent: Session | None) -> Session:
    if len(cache.known_sessions) >= cache.sessions_limit:
        _forget_gone(cache)
    session = cache.known_sessions[tenant, name] = Session(tenant, name, parent)
    session.last_used_at = cache.now
    return session


def _forget_gone(cache: Cache) -> None:
    """Forgets sessions of which nothing is cached, live or waited for."""
    live = {handle.user for handle in cache.requests.values()}
    for session in reversed(list(cache.known_sessions.values())):  # those forked from one came after it
        if session in live or session.children or session.paused or next(runs_of(cache, session), None) is not None:
            continue
        if session.parent is not None:
            del session.parent.children[session]
        del cache.known_sessions[session.tenant, session.name]
    cache.sessions_limit = max(FEW_SESSIONS, 2 * len(cache.known_sessions))


def known_session(cache: Cache, tenant: str, name: str) -> Session:
    """A session of which something was heard."""
    session = cache.known_sessions.get((tenant, name))
    if session is None:
        whose = f" of tenant {tenant!r}" if tenant else ""
        raise UnknownSessionError(
            f"no session {name!r}{whose} is known: it begins with its first request, and is forgotten some time after "
            "nothing of it is cached any more"
        )
    return session


def runs_of(cache: Cache, session: Session) -> Iterator[Node]:
    """The cached runs that its requests published."""
    for node in cache.sessions.get(session.name, ()):
        if node.session == session.name and node.root.scope.tenant == session.tenant:
            yield node


def fork_session(cache: Cache, tenant: str, name: str, child: str) -> None:
    """Begins a session of which it is known whom it comes from: what both use is their family's, not everybody's."""
    if name == child:
        raise InvalidArgumentError(f"session {name!r} cannot be forked from itself; give the new one another name")
    known, parent = cache.known_sessions.get((tenant, child)), cache.known_sessions.get((tenant, name))
    if known is not None:
        if parent is None or known.parent is not parent:
            raise InvalidArgumentError(f"session {child!r} has begun already; fork before its first request")
        return
    if parent is not None and parent.depth > MAX_DEPTH:
        raise InvalidArgumentError(
            f"session {name!r} is {MAX_DEPTH - 1} forks deep already; fork the one that it comes from"
        )
    _begin(cache, tenant, child, session_for(cache, tenant, name) if parent is None else parent)


def end_session(cache: Cache, session: Session) -> int:
    """Gives up what only it used; returns how many blocks (positions) that are."""
    session.paused, session.returns_at = False, None
    if session.num_open:
        cache.orders.let_leavers_go()
        _change(cache, session, -1)
    return sum(node.num_blocks for node in runs_of(cache, session) if node.owner is session)


def _change(cache: Cache, session: Session, change: int) -> None:
    """It ends, or comes back: runs of the groups that this closes or opens change their place in the order of eviction."""
    touched: set[Owner | None] = {*session.count(change)}
    top = session
    while top.parent is not None and top.parent.family in touched:
        top = top.parent
    for member in top.members() if top.family in touched else [session]:
        for node in runs_of(cache, member):
            if node.owner in touched and node.is_candidate():
                policy = node.root.policies[node.tier]
                policy.remove(node)
                policy.add(node)
