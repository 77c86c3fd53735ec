"""Three real servers of a tiny model behind `kvpool route`, each a process; one is killed while all of them answer.

`make test-cluster` runs it; it takes a minute or two.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif("KVPOOL_CLUSTER" not in os.environ, reason="make test-cluster runs it"),
]
httpx = pytest.importorskip("httpx")
sys.path[:0] = [
    str(Path(__file__).parent),
    *(str(Path(__file__).parents[1] / folder) for folder in ("engine", "server")),
]
from real_cluster import RealCluster  # noqa: E402
from talks import FORMS, Talks  # noqa: E402

from kvpool.cluster.router import RoutingConfig  # noqa: E402
from traffic import PATIENCE, Traffic, post, until  # noqa: E402

SERVERS = 3  # that a cluster has


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealCluster]:
    from agent_model import save_agent

    directory = tmp_path_factory.mktemp("model")
    save_agent(directory)
    made = RealCluster(str(directory))
    yield made
    made.close()


def test_given_conversations_when_routed_by_prefix_then_hits_are_near_one_infinite_cache_and_far_above_round_robin(
    cluster: RealCluster,
) -> None:
    routed, rotated = Traffic(1), Traffic(2)
    counter = iter(range(10**6))
    for _ in range(6):
        routed.turn(lambda at, talk: post(cluster.proxy_url, talk, session_id=f"talk {at}"))
        rotated.turn(lambda at, talk: post(cluster.urls[next(counter) % SERVERS], talk))
    print(json.dumps({"routed": routed.share, "round robin": rotated.share}))
    assert routed.share >= 0.95
    assert rotated.share < 0.9


def test_given_pauses_longer_than_anything_is_assumed_then_every_form_stays_on_its_node_and_hits_as_on_one_server(
    cluster: RealCluster,
) -> None:
    routed = {form: Talks(form, salt=f"{form} routed") for form in FORMS}
    alone = {form: Talks(form, salt=f"{form} alone") for form in FORMS}
    with httpx.Client(trust_env=False, timeout=PATIENCE) as client:
        for _ in range(4):
            for form in FORMS:
                routed[form].turn(lambda path, body: client.post(f"{cluster.proxy_url}{path}", json=body))
                alone[form].turn(lambda path, body: client.post(f"{cluster.urls[0]}{path}", json=body))
            time.sleep(RoutingConfig().assumed_seconds + 1.5)
    shares = {form: (routed[form].share, alone[form].share, routed[form].num_changes) for form in FORMS}
    print(json.dumps(shares))
    for ours, ideal, num_changes in shares.values():
        assert num_changes <= 1
        assert ours >= ideal - 0.03


def test_given_traffic_when_a_server_is_killed_then_no_answer_is_wrong_none_hangs_and_hits_recover(
    cluster: RealCluster,
) -> None:
    traffic = Traffic(3)
    stream_errors = 0

    def ask(at: int, talk: list[int]) -> Any:
        return post(cluster.proxy_url, talk, session_id=f"killed {at}")

    for _ in range(3):
        traffic.turn(ask)
    with ThreadPoolExecutor(2) as threads:
        streams = [
            threads.submit(post, cluster.proxy_url, talk, stream=True, max_tokens=100) for talk in traffic.talks[:6]
        ]
        turning = threads.submit(traffic.turn, ask)
        cluster.processes[0].send_signal(signal.SIGKILL)
        turning.result(PATIENCE)
        for stream in streams:
            text = stream.result(PATIENCE).text
            is_whole, is_told = "[DONE]" in text, "node_lost" in text
            assert is_whole != is_told, text[-300:]
            stream_errors += is_told
    cluster.processes[0].wait()
    until(lambda: not cluster.stats()["nodes"][cluster.urls[0]]["is_ready"], "the death is noticed")
    traffic.turn(ask)  # whoever was there starts anew elsewhere
    traffic.got = traffic.ideal = 0
    for _ in range(3):
        traffic.turn(ask)
    print(json.dumps({"after the death": traffic.share, "streams that were told": stream_errors}))
    assert traffic.share >= 0.95
    for talk, text in traffic.said.items():  # greedy answers are those of a server that never failed
        assert post(cluster.urls[1], list(talk)).json()["choices"][0]["text"] == text
    for node in cluster.stats()["nodes"].values():
        assert node["num_requests"] == 0
