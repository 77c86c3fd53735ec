"""A cluster: two nodes announce what they cache, and a router sends each prompt to the right one. Needs kvpool[cluster]."""

import time

from kvpool import KVCacheConfig, KVCacheManager, LayerSpec
from kvpool.cluster import ClusterIndex, EventPublisher, NodeSubscriber, Router

config = KVCacheConfig(
    [LayerSpec(kv_heads=8, head_dim=128)] * 32, block_size=16, gpu_blocks=256, event_buffer_size=1000
)
index = ClusterIndex(block_size=16)
router = Router(index)
nodes, sockets = {}, []
for name in ("a", "b"):
    nodes[name] = KVCacheManager(config)
    # With servers: kvpool serve --publish tcp://HOST:PORT for each node, and kvpool route in front of them.
    publisher = EventPublisher(nodes[name], "tcp://127.0.0.1:0")  # port 0: a free one
    router.add_node(name)
    subscriber = NodeSubscriber(index, name, publisher.endpoint, replay=publisher.replay_endpoint)
    sockets += [subscriber, publisher]

manuals = {"a": list(range(1000)), "b": list(range(5000, 6000))}
for name, manual in manuals.items():  # each node computes one long prompt
    handle = nodes[name].allocate("manual", manual)
    nodes[name].commit(handle)
    nodes[name].free(handle)
while not all(name in index.match(manual) for name, manual in manuals.items()):
    time.sleep(0.01)  # until their events are here

for name, manual in manuals.items():
    question = [*manual, 7, 8, 9]
    route = router.route(question)
    print(
        f"a question about the manual of {name} goes to {route.node}: {index.match(question)[route.node].gpu} tokens cached"
    )
    route.first_token()
    route.end()
for each in sockets:
    each.close()
