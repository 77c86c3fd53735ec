"""The log of what is cached, its kinds of events, and a mirror rebuilt from them."""

from kvpool.events.kinds import Created, Event, PoolSize, Removed, Stored, Updated, to_dict
from kvpool.events.log import EventBatch, EventLog, SnapshotSource, Subscription

__all__ = [
    "Created",
    "Event",
    "EventBatch",
    "EventLog",
    "PoolSize",
    "Removed",
    "SnapshotSource",
    "Stored",
    "Subscription",
    "Updated",
    "to_dict",
]
