"""Calls that must be refused, and change nothing. Each function is one operation."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np
from item_codes import raw
from wild_machine import WildMachine

from kvpool import Tier
from kvpool.errors import (
    DuplicateRequestError,
    InvalidArgumentError,
    KVPoolError,
    OutOfBlocksError,
    SequenceStateError,
    UnknownRequestError,
)

Mistake = tuple[type[KVPoolError], Callable[[], Any]]


def make_one(m: WildMachine, rng: Random, mistakes: list[Mistake]) -> None:
    for error, call in rng.sample(mistakes, min(2, len(mistakes))):
        m.refused(error, call)


def wrong_call(m: WildMachine, rng: Random) -> None:
    manager, far = m.manager, 10_000 * m.size
    no_tier_below = Tier.DISK
    mistakes: list[Mistake] = [
        (UnknownRequestError, lambda: manager.get("nobody")),
        (InvalidArgumentError, lambda: manager.allocate("x", [])),
        (InvalidArgumentError, lambda: manager.allocate("x", [1], num_tokens=1)),
        (InvalidArgumentError, lambda: manager.allocate("x", [1, 2], reserve=3)),
        (InvalidArgumentError, lambda: manager.allocate("x", num_tokens=-1)),
        (InvalidArgumentError, lambda: manager.allocate("x", [-1])),
        (InvalidArgumentError, lambda: manager.allocate(["x"], [1])),
        (InvalidArgumentError, lambda: manager.allocate("x", [1], ttl=-1.0)),
        (InvalidArgumentError, lambda: manager.cache.evict(-1)),
        (InvalidArgumentError, lambda: manager.cache.evict(1, pool=99)),
        (InvalidArgumentError, lambda: manager.cache.offload(1, tier=no_tier_below)),
        (InvalidArgumentError, lambda: manager.cache.resize(0)),
        (InvalidArgumentError, lambda: manager.cache.invalidate()),
        (InvalidArgumentError, lambda: manager.cache.invalidate(tenant="a", session="s")),
        (InvalidArgumentError, lambda: manager.cache.invalidate(tenant=7)),
        (InvalidArgumentError, lambda: manager.cache.set_quota("a", guaranteed=4, maximum=1)),
        (InvalidArgumentError, lambda: manager.cache.pin([7, 7, 7])),
        (InvalidArgumentError, lambda: manager.allocate("x", [1, 2], multimodal=[(0, 2, "cat"), (1, 1, "dog")])),
        (InvalidArgumentError, lambda: manager.allocate("x", [1, 2], multimodal=[(1, 2, "cat")])),
        (InvalidArgumentError, lambda: manager.allocate("x", num_tokens=2, multimodal=[(0, 1, "cat")])),
        (InvalidArgumentError, lambda: manager.match_prefix([1, 2], multimodal=[(0, 1, None)])),
        *([] if m.states else [(InvalidArgumentError, lambda: manager.state_places([], 0, 1))]),
    ]
    if m.config.max_seq_len is None and m.growing:  # a state takes the same place behind any number of tokens
        mistakes.append((OutOfBlocksError, lambda: manager.allocate("x", num_tokens=far)))
    make_one(m, rng, mistakes)


def use_freed_handle(m: WildMachine, rng: Random) -> None:
    if not m.freed:
        return
    manager, handle = m.manager, rng.choice(m.freed)
    verbs = (manager.free, manager.extend, manager.swap_out, manager.swap_in, manager.cache.pin, manager.commit)
    mistakes: list[Mistake] = [(UnknownRequestError, lambda verb=verb: verb(handle)) for verb in verbs]
    mistakes += [
        (UnknownRequestError, lambda: manager.fork(handle, "x")),
        (UnknownRequestError, lambda: manager.rewind(handle, 0)),
        (UnknownRequestError, lambda: handle.num_reserved),
    ]
    make_one(m, rng, mistakes)


def wrong_step(m: WildMachine, rng: Random) -> None:
    manager, groups = m.manager, len(m.config.groups)
    request, other = m.pick(rng), m.pick(rng, swapped=None)
    if request is None or other is None:
        return
    handle, taken = request.handle, other.handle.request_id
    spare = request.reserved - request.written
    mistakes: list[Mistake] = [
        (DuplicateRequestError, lambda: manager.allocate(taken, [1])),
        (DuplicateRequestError, lambda: manager.fork(handle, "x", taken)),
        (DuplicateRequestError, lambda: manager.fork(handle, "x", "x")),
        (InvalidArgumentError, lambda: manager.fork(handle)),
        (InvalidArgumentError, lambda: manager.extend(handle, -1)),
        (InvalidArgumentError, lambda: manager.extend(handle, 1, lookahead=-1)),
        (InvalidArgumentError, lambda: manager.extend_batch([handle], [1, 1])),
        (InvalidArgumentError, lambda: manager.extend_batch([handle, handle])),
        (KVPoolError, lambda: manager.extend_batch([handle], 2, out=np.zeros((groups, 5), np.int32))),
        (KVPoolError, lambda: manager.slot_mapping([handle], 0, 10_000)),
        (
            KVPoolError,
            lambda: manager.slot_mapping(
                [handle], request.written, request.reserved, out=np.zeros((groups, spare), np.int64)
            ),
        ),
        (SequenceStateError, lambda: manager.mark_written(handle, spare + 1)),
        (SequenceStateError, lambda: manager.commit(handle, request.reserved - request.committed + 1)),
        (InvalidArgumentError, lambda: manager.commit(handle, -1)),
        (KVPoolError, lambda: manager.commit_batch([handle], [1, 1], [1])),
        (InvalidArgumentError, lambda: manager.rewind(handle, request.reserved + 1)),
        (InvalidArgumentError, lambda: manager.rewind(handle, -1)),
        (SequenceStateError, lambda: manager.swap_in(handle)),
        (KVPoolError, lambda: manager.free_batch([handle, handle])),
        (KVPoolError, lambda: manager.swap_out(handle, handle)),
    ]
    if request.committed < min(len(request.known), request.reserved):
        right = raw(request.known[request.committed])
        mistakes.append((InvalidArgumentError, lambda: manager.commit(handle, [right + 1])))
        mistakes.append((InvalidArgumentError, lambda: manager.commit(handle, [right], multimodal=[(0, 1, "bird")])))
    make_one(m, rng, mistakes)


def use_swapped_request(m: WildMachine, rng: Random) -> None:
    away, here = m.pick(rng, swapped=True), m.pick(rng)
    if away is None:
        return
    manager, handle = m.manager, away.handle
    verbs = (manager.extend, manager.swap_out, manager.mark_written, manager.commit)
    mistakes: list[Mistake] = [(SequenceStateError, lambda verb=verb: verb(handle)) for verb in verbs]
    mistakes += [
        (SequenceStateError, lambda: manager.fork(handle, "x")),
        (SequenceStateError, lambda: manager.rewind(handle, 0)),
    ]
    if here is not None:
        mistakes.append((SequenceStateError, lambda: manager.extend_batch([here.handle, handle])))
        mistakes.append((SequenceStateError, lambda: manager.swap_out(here.handle, handle)))
    make_one(m, rng, mistakes)


OPERATIONS = {wrong_call: 1, use_freed_handle: 1, wrong_step: 2, use_swapped_request: 1}
