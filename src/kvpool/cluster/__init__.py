"""More than one machine: cache events on the wire, an index of what every node holds, and routing by it."""

from kvpool.cluster.wire.publisher import EventPublisher, PublisherStats

__all__ = ["EventPublisher", "PublisherStats"]
