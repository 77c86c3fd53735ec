"""What people do to a store: count what it holds, see whose it is, and check every value."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kvpool.errors import InvalidArgumentError
from kvpool.tiers.compressed_tier import CompressedTier
from kvpool.tiers.contract import KeyedTier, Outcome
from kvpool.tiers.disk.upkeep import Checked, Progress, Space
from kvpool.tiers.keys import SPACE_BYTES
from kvpool.tiers.opening import open_tier
from kvpool.tiers.remote.remote_tier import Listing, RemoteTier

STORE_SECONDS = 3600.0
BATCH_BYTES = 32 << 20
BATCH_KEYS = 256


@contextmanager
def opened_store(address: str) -> Iterator[RemoteTier[Any]]:
    """The store at an address, without the compression over it."""
    with open_tier(address) as tier:
        store = innermost(tier)
        assert isinstance(store, RemoteTier)
        yield store


def innermost(tier: KeyedTier) -> KeyedTier:
    """The tier that holds the bytes."""
    while isinstance(tier, CompressedTier):
        tier = tier.inner
    return tier


def listed(store: RemoteTier[Any]) -> Listing:
    """What a store holds; refused where it cannot say."""
    if not store.can_list:
        raise InvalidArgumentError(
            f"{store.name} cannot list what it holds; `kvpool tier stat` says whether it answers, `kvpool tier purge` takes "
            "values out, and the metrics of its master count them"
        )
    return store.listed(timeout=STORE_SECONDS)


def store_figures(store: RemoteTier[Any]) -> dict[str, Any]:
    """How full a store is. `problem` says why the figures may be too small; without an answer there are none."""
    if store.can_list:
        sizes, problem = listed(store)
    else:
        sizes, problem = {}, _answer(store)
    is_known = store.can_list and (bool(sizes) or not problem)
    return {
        "store": store.name,
        "values": len(sizes) if is_known else None,
        "value_bytes": sum(sizes.values()) if is_known else None,
        "spaces": len({key[:SPACE_BYTES] for key in sizes}) if is_known else None,
        "problem": problem,
        "notes": [] if store.can_list else ["it cannot list what it holds; the metrics of its master count it"],
    }


def _answer(store: RemoteTier[Any]) -> str:
    """Asks for a value that is not there; why there was no answer, or nothing."""
    end = time.monotonic() + 2 * store.timeout  # the first probe may still be under way
    while (problem := store.stats().problem) and time.monotonic() < end:
        time.sleep(0.01)
    if not problem:
        store.contains([bytes(32)])
    return store.stats().problem


def store_spaces(listing: Listing) -> list[Space]:
    """Whose values a store holds; those of most bytes first. A store keeps no description of models and no times of use."""
    found: dict[bytes, Space] = {}
    for key, size in listing.sizes.items():
        space = found.setdefault(key[:SPACE_BYTES], Space(key[:SPACE_BYTES], None))
        space.num_values += 1
        space.value_bytes += size
    return sorted(found.values(), key=lambda space: (-space.value_bytes, space.prefix))


def verify_store(store: RemoteTier[Any], listing: Listing, progress: Progress, *, repair: bool) -> tuple[Checked, str]:
    """Loads every value, which compares it with its seal; also why some could not be looked at, or nothing.

    A value that left meanwhile is not counted.
    """
    result, problem = Checked(), listing.problem
    for keys in _batches(listing.sizes):
        out = [bytearray(listing.sizes[key]) for key in keys]
        outcomes = store.load(keys, out, timeout=max(60.0, store.timeout))
        if lost := store.stats().problem:
            return result, problem or lost
        damaged = [key for key, outcome in zip(keys, outcomes, strict=True) if outcome == Outcome.FAILED]
        if Outcome.LATE in outcomes:
            return result, problem or "some values did not come within a minute"
        whole = outcomes.count(Outcome.OK)
        result.num_values += whole + len(damaged)
        result.num_bytes += sum(len(view) for view, outcome in zip(out, outcomes, strict=True) if outcome == Outcome.OK)
        result.damaged += [key.hex() for key in damaged]
        if repair:
            result.removed += store.remove(damaged, timeout=max(60.0, store.timeout)).count(Outcome.OK)
        progress(len(keys))
    return result, problem


def _batches(sizes: dict[bytes, int]) -> Iterator[list[bytes]]:
    """Keys whose values are loaded together."""
    batch: list[bytes] = []
    room = BATCH_BYTES
    for key, size in sizes.items():
        if batch and (size > room or len(batch) == BATCH_KEYS):
            yield batch
            batch, room = [], BATCH_BYTES
        batch.append(key)
        room -= size
    if batch:
        yield batch
