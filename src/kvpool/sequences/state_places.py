"""Where a step of a batch reads and leaves the states of its layers."""

from __future__ import annotations

from typing import Any

from kvpool.core.batch import SequenceBatch
from kvpool.core.cache import Cache
from kvpool.errors import InvalidArgumentError
from kvpool.kinds.state import StateGroup, StatePlaces
from kvpool.sequences.step import asked_positions, prepare_write


def state_places(cache: Cache, batch: SequenceBatch, start: Any, stop: Any) -> StatePlaces:
    """Where a step reads and writes states that writes the positions start..stop of every sequence."""
    batch.refresh()
    group = next((group for group in cache.groups if isinstance(group, StateGroup)), None)
    if group is None:
        raise InvalidArgumentError("no layer of this model keeps a state")
    first, last = asked_positions(cache, batch, start, stop)
    places = group.places(batch, first, last)
    if not cache.rows.num_shared:
        return places
    prepare_write(cache, batch)
    return group.places(batch, first, last)
