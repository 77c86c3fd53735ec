"""Messages of the live view: first a snapshot of a `Look`, then only what has changed since the last one.

A message is a server-sent event named `frame` with one JSON object. The page holds a copy of everything and replaces what a
frame brings: words of blocks by spans, tables of the named sequences, and whole lists for the rest. A missing field has not
changed. No frame holds tokens or text: blocks are named by digest.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple

import numpy as np

from kvpool.events import Created, Event, Removed, Stored, Updated
from kvpool.manager.snapshots import RunsSnapshot, SequenceSnapshot
from kvpool.view.sampling import Look, PoolLook, changed_spans, id_spans, packed

MAX_SEQUENCES = 256  # shown one by one, with their tables
MAX_RUNS = 2000  # of the tree that are shown, those nearest to the root
MAX_NAME = 80


def view_event(name: str, data: Mapping[str, Any]) -> bytes:
    """A server-sent event."""
    return f"event: {name}\ndata: {json.dumps(data, separators=(',', ':'))}\n\n".encode()


def request_name(request_id: Hashable) -> str:
    """The name of a sequence: that of its request, and its number if it is not the first sample.

    >>> request_name(("r1", 0)), request_name(("r1", 2)), request_name("r1")
    ('r1', 'r1 #2', 'r1')
    """
    if isinstance(request_id, tuple) and len(request_id) == 2 and isinstance(request_id[1], int):
        name, sample = request_id
        return f"{name} #{sample}" if sample else str(name)
    return str(request_id)


class Names(NamedTuple):
    """What is known of requests besides what the manager keeps: their names for people, and what their prompts missed."""

    name_of: Callable[[Hashable], str] = request_name
    missed_of: Callable[[Hashable], Mapping[str, int]] = lambda request_id: {}  # tokens by cause


PLAIN = Names()


def frame(old: Look | None, new: Look, names: Names = PLAIN) -> dict[str, Any]:
    """What has changed between two looks; everything, if `old` is None."""
    before = {} if old is None else {(pool.pool, pool.tier): pool for pool in old.pools}
    content: dict[str, Any] = {
        "number": new.number,
        "after": None if old is None else old.number,
        "now": new.now,
        "look_us": round(new.seconds * 1e6),
        "pools": [_pool(before.get((pool.pool, pool.tier)), pool) for pool in new.pools],
    }
    if old is None or old.tenants != new.tenants:
        content["tenants"] = [tenant[:MAX_NAME] for tenant in new.tenants]
    if old is None or old.counts != new.counts:
        content["counts"] = new.counts
    if old is None or old.tick != new.tick:
        content |= _sequences(() if old is None else old.sequences, new.sequences, new.tenants, names)
    if new.runs is not None and (old is None or old.runs_number != new.runs_number):
        content["tree"] = _tree(new.runs, new.tenants)
    if new.events:
        content["events"] = [_event(event) for event in new.events]
        content["num_events"] = new.num_events
    if old is None or old.more != new.more:
        content["more"] = new.more
    return content


def _pool(old: PoolLook | None, new: PoolLook) -> dict[str, Any]:
    spans = changed_spans(None if old is None else old.words, new.words)
    described: dict[str, Any] = {
        "pool": new.pool,
        "tier": new.tier.name,
        "blocks": len(new.words),
        "referenced": new.num_referenced,
        "cached": new.num_cached,
        "pinned": new.num_pinned,
    }
    return described | {"spans": spans.to_json()} if len(spans.start) else described


def _sequences(
    old: tuple[SequenceSnapshot, ...],
    new: tuple[SequenceSnapshot, ...],
    tenants: tuple[str, ...],
    names: Names,
) -> dict[str, Any]:
    known = {sequence.serial: sequence for sequence in old[:MAX_SEQUENCES]}
    number = {tenant: place for place, tenant in enumerate(tenants)}
    rows, changed = [], []
    for one in new[:MAX_SEQUENCES]:
        rows.append(
            [
                one.serial,
                names.name_of(one.request_id)[:MAX_NAME],
                number.get(one.scope.tenant, 0),
                int(one.is_swapped),
                one.num_prompt_tokens,
                one.num_cached_tokens,
                one.num_written,
                one.num_reserved,
                names.missed_of(one.request_id),
            ]
        )
        before = known.get(one.serial)
        if before is None or not _same_tables(before, one):
            changed.append(one)
    return {"sequences": rows, "num_sequences": len(new), "tables": _tables(changed)}


def _tables(sequences: list[SequenceSnapshot]) -> dict[int, list[str]]:
    """The block tables of sequences, one for each layer group, as spans."""
    tables: dict[int, list[str]] = {one.serial: [] for one in sequences}
    for of_group in zip(*(one.tables for one in sequences), strict=True):
        spans = id_spans(np.concatenate(of_group), np.array([len(ids) for ids in of_group], np.int64))
        ends = (2 * spans.at).tolist()
        for place, one in enumerate(sequences):
            tables[one.serial].append(packed(spans.pairs[ends[place] : ends[place + 1]], "<i4"))
    return tables


def _same_tables(one: SequenceSnapshot, other: SequenceSnapshot) -> bool:
    return one.is_swapped == other.is_swapped and all(map(np.array_equal, one.tables, other.tables))


def _tree(runs: RunsSnapshot, tenants: tuple[str, ...]) -> dict[str, Any]:
    """The runs nearest to the root. The parent of each run comes before it."""
    level = np.zeros(len(runs.number), np.int64)
    for _ in range(len(level)):  # a step for each level of the tree
        deeper = np.where(runs.parent >= 0, level[runs.parent] + 1, 0)
        if np.array_equal(deeper, level):
            break
        level = deeper
    chosen = np.sort(np.argsort(level, kind="stable")[:MAX_RUNS])
    place = np.full(len(level) + 1, -1, np.int64)  # the last one stands for no parent
    place[chosen] = np.arange(len(chosen))
    number = {tenant: index for index, tenant in enumerate(tenants)}
    scopes = np.array([number.get(scope.tenant, 0) for scope in runs.scopes], np.int64)
    flags = runs.tier + 4 * runs.is_pinned + 8 * runs.is_read
    is_chosen = place[:-1] >= 0
    spans = id_spans(runs.block_ids[0][np.repeat(is_chosen, runs.num_blocks)], runs.num_blocks[chosen])
    return {
        "num_runs": len(level),
        "number": packed(runs.number[chosen], "<u4"),
        "start": packed(runs.start[chosen], "<u4"),
        "blocks": packed(runs.num_blocks[chosen], "<u4"),
        "parent": packed(place[runs.parent[chosen]], "<i4"),
        "scope": packed(runs.scope[chosen], "<u4"),
        "tenant": packed(scopes[runs.scope[chosen]], "<u2"),
        "priority": packed(runs.priority[chosen], "u1"),
        "flags": packed(flags[chosen], "u1"),
        "hits": packed(runs.num_hits[chosen], "<u4"),
        "ids": packed(spans.pairs, "<i4"),
        "ids_at": packed(spans.at, "<u4"),
    }


def _event(event: Event) -> dict[str, Any]:
    """One line of the list of events: what happened to how many blocks, and the digest of the first."""
    line: dict[str, Any] = {"id": event.event_id, "kind": type(event).__name__.lower()}
    if isinstance(event, Created):
        return line
    line |= {"blocks": len(event.digests), "digest": event.digests[0].hex()[:12], "group": event.group}
    if isinstance(event, Stored):
        line |= {"tier": event.tier.name, "tenant": event.scope.tenant[:MAX_NAME], "priority": event.priority}
    elif isinstance(event, Removed):
        line |= {"tier": event.tier.name, "reason": str(getattr(event.reason, "value", event.reason))}
    elif isinstance(event, Updated):
        if event.old_tier is not None and event.new_tier is not None:
            line["tiers"] = [event.old_tier.name, event.new_tier.name]
        if event.old_priority is not None:
            line["priorities"] = [event.old_priority, event.new_priority]
    return line
