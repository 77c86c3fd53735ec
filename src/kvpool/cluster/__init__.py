"""More than one machine: cache events on the wire, an index of what every node holds, and routing by it."""

from kvpool.cluster.index.cluster_index import ClusterIndex, Hit, IndexStats, NodeBlocks
from kvpool.cluster.index.subscriber import NodeSubscriber
from kvpool.cluster.routing.router import Decision, NodeLoad, Route, Router, RouterStats
from kvpool.cluster.routing.routing_config import RoutingConfig
from kvpool.cluster.wire.publisher import EventPublisher, PublisherStats

__all__ = [
    "ClusterIndex", "Decision", "EventPublisher", "Hit", "IndexStats", "NodeBlocks", "NodeLoad", "NodeSubscriber",
    "PublisherStats", "Route", "Router", "RouterStats", "RoutingConfig",
]  # fmt: skip
