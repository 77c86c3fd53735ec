"""Three servers behind the proxy, asked in every form: a turn goes where the last one was, and hits as on one server."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import cycle
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
    """A server of a tiny model that can use tools."""

    def __init__(self, model: Any) -> None:
        self.engine = Engine(model, tokenizer=agent_tokenizer(), device="cpu", kv_blocks=2048, block_size=16)
        self.live = Live(create_app([ServedModel("tiny", self.engine)]))

    def close(self) -> None:
        self.live.stop(waits=False)
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
    """A proxy that assumes nothing, before empty servers: it knows of the last turn only by events, as after a long pause."""
    with ExitStack() as stack:
        backends = []
        for node in nodes[:3]:
            node.engine.reset_prefix_cache()
            publisher = stack.enter_context(EventPublisher(node.engine.manager, "tcp://127.0.0.1:0", heartbeat=0.05))
            backends.append(Backend.parse(f"{node.live.url}={publisher.endpoint},{publisher.replay_endpoint}"))
        nodes[3].engine.reset_prefix_cache()
        proxy = Proxy(backends, health_seconds=0.02, routing=RoutingConfig(assumed_seconds=0))
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

    def is_settled() -> bool:
        """Every request is over at the proxy and in its engine, and the proxy knows all that the engines cached."""
        known = proxy[0].index.node_blocks()
        return not any(load.num_requests for load in proxy[0].router.nodes.values()) and all(
            not node.engine.stats().num_running
            and known[node.live.url].gpu == node.engine.manager.inspect.stats().pools[0].cached
            for node in nodes[:3]
        )

    with httpx.Client(trust_env=False, timeout=PATIENCE) as client:
        in_turn = cycle(nodes[:3])

        def begin(path: str, body: dict[str, Any]) -> Any:
            """The first turns are spread over the nodes before the proxy has a say."""
            node = nodes[0] if path == "/tokenize" else next(in_turn)
            answer = client.post(node.live.url + path, json=body)
            answer.headers["x-kvpool-node"] = node.live.url
            return answer

        def go_on(path: str, body: dict[str, Any]) -> Any:
            answer = client.post(proxy[1] + path, json=body)
            _until(is_settled)
            return answer

        for turn in (begin, go_on, go_on):
            routed.turn(turn)
            alone.turn(lambda path, body: client.post(nodes[3].live.url + path, json=body))
            _until(is_settled)
            if turn is begin:
                routed.forget_counts()
                alone.forget_counts()
    assert routed.num_changes == 0
    assert routed.missed == alone.missed == []
    assert alone.share > 0.7
    assert routed.share >= alone.share - 0.03
