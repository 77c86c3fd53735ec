"""Three servers behind the proxy, asked in every form: a turn goes where the last one was, and hits as on one server."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("zmq", reason="pip install 'kvpool[cluster]'")
pytest.importorskip("fastapi")
pytest.importorskip("tokenizers")
httpx = pytest.importorskip("httpx")
sys.path[:0] = [str(Path(__file__).parents[1] / folder) for folder in ("cluster", "server", "engine")]

from agent_model import agent_model, agent_tokenizer  # noqa: E402
from talks import FORMS, PROGRAMS, Talks  # noqa: E402

from kvpool.cluster.proxy.app import Proxy, create_proxy_app  # noqa: E402
from kvpool.cluster.proxy.backends import Backend  # noqa: E402
from kvpool.cluster.publisher import EventPublisher  # noqa: E402
from kvpool.cluster.router import RoutingConfig  # noqa: E402
from kvpool.engine import Engine  # noqa: E402
from kvpool.server import ServedModel, create_app  # noqa: E402
from live_app import PATIENCE, Live  # noqa: E402


class _Node:
    """A server of a tiny model that can use tools, and what it publishes."""

    def __init__(self, model: Any) -> None:
        self.engine = Engine(model, tokenizer=agent_tokenizer(), device="cpu", kv_blocks=2048, block_size=16)
        self.live = Live(create_app([ServedModel("tiny", self.engine)]))
        self.publisher = EventPublisher(self.engine.manager, "tcp://127.0.0.1:0", heartbeat=0.05)

    @property
    def backend(self) -> Backend:
        return Backend.parse(f"{self.live.url}={self.publisher.endpoint},{self.publisher.replay_endpoint}")

    def close(self) -> None:
        self.live.stop(waits=False)
        self.publisher.close()
        self.engine.close()


@pytest.fixture(scope="module")
def nodes() -> Iterator[list[_Node]]:
    """Three behind the proxy, and one alone."""
    model = agent_model()
    made = [_Node(model) for _ in range(4)]
    yield made
    for node in made:
        node.close()


@pytest.fixture
def proxy(nodes: list[_Node]) -> Iterator[tuple[Proxy, str]]:
    """A proxy that assumes nothing: it knows of the last turn only by events, as after a long pause."""
    proxy = Proxy([node.backend for node in nodes[:3]], health_seconds=0.02, routing=RoutingConfig(assumed_seconds=0))
    live = Live(create_proxy_app(proxy), "critical")
    _until(lambda: all(load.is_ready for load in proxy.router.nodes.values()))
    yield proxy, live.url
    live.stop(waits=False)


def _until(is_so: Any) -> None:
    end = time.monotonic() + PATIENCE
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.005)


@pytest.mark.parametrize("form", [*FORMS, *PROGRAMS])
def test_given_pauses_in_a_conversation_of_any_form_or_program_then_it_stays_on_its_node_and_hits_as_on_one(
    nodes: list[_Node], proxy: tuple[Proxy, str], form: str
) -> None:
    routed, alone = Talks(form, talks=4), Talks(form, talks=4)

    def is_told() -> bool:
        known = proxy[0].index.node_blocks()
        return all(
            known[node.live.url].gpu == node.engine.manager.inspect.stats().pools[0].cached for node in nodes[:3]
        )

    with httpx.Client(trust_env=False, timeout=PATIENCE) as client:
        for _ in range(3):
            routed.turn(lambda path, body: client.post(proxy[1] + path, json=body))
            alone.turn(lambda path, body: client.post(nodes[3].live.url + path, json=body))
            _until(is_told)
    assert routed.num_changes == 0
    assert routed.missed == alone.missed == []
    assert alone.share > 0.6
    assert routed.share >= alone.share - 0.03
    for node in nodes:
        node.engine.reset_prefix_cache()
