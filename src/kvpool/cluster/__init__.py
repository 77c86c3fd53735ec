"""More than one machine: cache events on the wire, an index of what every node has cached, and a router that uses it."""

from kvpool.cluster.index import ClusterIndex, Hit, IndexStats, NodeBlocks
from kvpool.cluster.publisher import EventPublisher, PublisherStats
from kvpool.cluster.router import Decision, NodeLoad, Route, Router, RouterStats, RoutingConfig
from kvpool.cluster.subscriber import FeedStats, NodeSubscriber

__all__ = [
    "ClusterIndex",
    "Decision",
    "EventPublisher",
    "FeedStats",
    "Hit",
    "IndexStats",
    "NodeBlocks",
    "NodeLoad",
    "NodeSubscriber",
    "PublisherStats",
    "Route",
    "Router",
    "RouterStats",
    "RoutingConfig",
]
