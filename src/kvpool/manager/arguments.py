"""What users give to the manager, checked: each mistake is named where it was made, with the value and the remedy."""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable, Mapping
from functools import partial
from typing import Any

import numpy as np

from kvpool.checks import as_count, as_duration, show
from kvpool.core.handle import KVCacheHandle
from kvpool.core.retention import Retention
from kvpool.errors import ConfigError, InvalidArgumentError
from kvpool.eviction import EvictionPolicy, make_policy
from kvpool.pools.arrays import Int64Array, as_array
from kvpool.scope import ReuseScope


def as_policy_factory(chosen: str | Callable[[], EvictionPolicy]) -> Callable[[], EvictionPolicy]:
    """What makes the eviction policies: a registered name, a class, or a function."""
    if isinstance(chosen, EvictionPolicy):
        raise ConfigError(
            "policy takes a name, a class or a factory: each tier and tenant needs an instance of its own"
        )
    new_policy = chosen if callable(chosen) else partial(make_policy, chosen)
    try:
        made = new_policy()  # an unknown name is refused here, before anything is built
    except TypeError as error:
        raise ConfigError(f"policy {show(chosen)} cannot be called without arguments: {error}") from None
    if not isinstance(made, EvictionPolicy):
        raise ConfigError(f"policy {show(chosen)} does not make an EvictionPolicy")
    return new_policy


def is_among(request_id: Hashable, request_ids: Container[Hashable]) -> bool:
    """Whether an id is there; handles, and ids that cannot be compared or do not equal themselves, are refused."""
    if isinstance(request_id, KVCacheHandle):
        raise InvalidArgumentError(
            f"a request id was asked for, got the handle of request {show(request_id.request_id)}; give an id"
        )
    try:
        if request_id == request_id:  # not-a-number does not: nobody could name that request again
            return request_id in request_ids
        error = "it does not equal itself"
    except Exception as raised:
        error = str(raised)
    raise InvalidArgumentError(f"a request id must be hashable and comparable, got {show(request_id)}: {error}")


def check_requests(requests: Any, names: frozenset[str]) -> list[dict[str, Any]]:
    """The requests of `allocate_batch`: their `names` are checked here, before any is admitted, values where each is."""
    try:
        given = list(requests)
    except Exception:
        raise InvalidArgumentError(f"allocate_batch takes a list of requests, got {show(requests)}") from None
    for request in given:
        if type(request) is not dict and not isinstance(request, Mapping):  # the second takes long to find out
            raise InvalidArgumentError(f"a request is a mapping of allocate's arguments, got {show(request)}")
        if "request_id" not in request or not names.issuperset(request):
            known = ", ".join(sorted(names))
            raise InvalidArgumentError(f"a request has a request_id and may have {known}; got {show(list(request))}")
    return [request if type(request) is dict else dict(request) for request in given]


def check_keeping(ttl: float | None, retention: Retention | None, session: str | None) -> None:
    """How long what a request computes should stay, and the name of its session."""
    as_duration(ttl, "ttl")
    if retention is not None and not isinstance(retention, Retention):
        raise InvalidArgumentError(f"retention must be a Retention, got {retention!r}")
    if session is not None and not isinstance(session, str):
        raise InvalidArgumentError(f"session must be a string, got {session!r}")


def as_counts(num_tokens: Any) -> int | Int64Array:
    """Token counts: one for all sequences, or an int64 array with one per sequence."""
    if type(num_tokens) is int or isinstance(num_tokens, (int, np.integer)):
        return as_count(num_tokens, "num_tokens")
    array = as_array(num_tokens, "num_tokens")
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise InvalidArgumentError(f"num_tokens must be an int or one int per sequence, got {num_tokens!r}")
    if array.size and (int(array.min()) < 0 or int(array.max()) > 2**40):
        raise InvalidArgumentError(f"num_tokens must not be negative or huge, got {array.tolist()[:8]}")
    return array.astype(np.int64)


def check_counts(counts: int | Int64Array, batch_size: int) -> None:
    """Refuses counts that are not one for each sequence."""
    if isinstance(counts, np.ndarray) and len(counts) != batch_size:
        raise InvalidArgumentError(f"got {len(counts)} counts for a batch of {batch_size} sequences")


def check_scope(scope: ReuseScope) -> ReuseScope:
    """Refuses what is no scope."""
    if not isinstance(scope, ReuseScope):
        raise InvalidArgumentError(f"scope must be a ReuseScope, got {scope!r}")
    return scope
