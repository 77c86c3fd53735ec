"""Where requests go, by what nodes hold and what they have to do."""

from __future__ import annotations

import random
from typing import Any

import pytest

import managers
from kvpool.cluster.index import ClusterIndex, Hit
from kvpool.cluster.router import Router, RoutingConfig
from kvpool.cluster.wire_events import BlockStored
from kvpool.errors import ConfigError, InvalidArgumentError, NoNodeError

SIZE = 4


class Cluster:
    """A router whose nodes cache what a test says, and time that passes when it says so."""

    def __init__(self, num_nodes: int = 3, **settings: Any) -> None:
        self.index = ClusterIndex(SIZE)
        self.clock = managers.Clock()
        self.router = Router(self.index, RoutingConfig(**settings), clock=self.clock)
        self.names: dict[tuple[int, ...], int] = {}
        for node in range(num_nodes):
            self.router.add_node(node)

    def cache(self, node: int, prompt: list[int], medium: str = "GPU") -> None:
        prompt = prompt[: len(prompt) // SIZE * SIZE]
        prefixes = [tuple(prompt[:end]) for end in range(SIZE, len(prompt) + 1, SIZE)]
        hashes = [self.names.setdefault(prefix, len(self.names) + 1) for prefix in prefixes]
        self.index.apply(node, [BlockStored(hashes, None, prompt, SIZE, medium)])

    def routed(self, prompt: list[int], **options: Any) -> Any:
        route = self.router.route(prompt, **options)
        route.end()
        return route.node


def prompt_of(first: int, num_tokens: int = 400) -> list[int]:
    return list(range(first, first + num_tokens))


def test_given_a_cached_prefix_when_routed_then_the_node_with_the_longest_takes_it() -> None:
    cluster = Cluster()
    cluster.cache(1, prompt_of(0, 200))
    cluster.cache(2, prompt_of(0, 300))
    route = cluster.router.route(prompt_of(0))
    assert (route.node, route.hit, route.reason) == (2, Hit(300, 300, 300), "cheapest")


def test_given_equal_prefixes_on_different_tiers_when_routed_then_the_faster_tier_wins() -> None:
    cluster = Cluster()
    for node, medium in enumerate(("STORAGE", "CPU", "GPU")):
        cluster.cache(node, prompt_of(0), medium)
    assert cluster.routed(prompt_of(0)) == 2
    cluster.router.set_ready(2, False)
    assert cluster.routed(prompt_of(0)) == 1
    cluster.router.set_ready(1, False)
    assert cluster.routed(prompt_of(0)) == 0


def test_given_nothing_cached_when_routed_then_all_nodes_get_their_share() -> None:
    cluster = Cluster(4)
    assert sorted(cluster.routed(prompt_of(1000 * at)) for at in range(8)) == [0, 0, 1, 1, 2, 2, 3, 3]


def test_given_a_prompt_that_was_sent_a_moment_ago_when_it_comes_again_then_it_follows_until_events_should_be_there() -> (
    None
):
    cluster = Cluster(assumed_seconds=5)
    first = cluster.routed(prompt_of(0))
    assert [cluster.routed(prompt_of(0)) for _ in range(4)] == [first] * 4
    cluster.clock.now += 6
    assert cluster.routed(prompt_of(0)) != first  # nobody said that it is cached


def test_given_a_session_when_its_prefix_is_on_no_node_then_it_stays_where_it_was() -> None:
    cluster = Cluster(session_seconds=100, assumed_seconds=0)
    home = cluster.routed(prompt_of(0), session="alice")
    cluster.routed(prompt_of(5000))
    for turn in range(1, 4):
        cluster.clock.now += 50
        route = cluster.router.route(prompt_of(1000 * turn), session="alice")
        route.end()
        assert (route.node, route.reason) == (home, "session")
    cluster.clock.now += 101
    assert cluster.router.route(prompt_of(9000), session="alice").reason == "cheapest"


@pytest.mark.parametrize("late", [0.0, 0.001])
def test_given_a_time_that_a_router_remembers_then_it_remembers_at_its_end_and_not_after_it(late: float) -> None:
    is_late, tenth = late > 0, 0.1
    talking = Cluster(session_seconds=100, assumed_seconds=0)
    talking.routed(prompt_of(0), session="alice")
    talking.clock.now += 100 + late
    route = talking.router.route(prompt_of(1000), session="alice")
    assert route.reason == ("cheapest" if is_late else "session")
    sending = Cluster(assumed_seconds=5)
    sending.routed(prompt_of(0))
    sending.clock.now += 5 + late
    assert sending.router.route(prompt_of(0)).hit == (Hit(0, 0, 0) if is_late else Hit(400, 400, 400))
    hot = Cluster(2, hot_requests=1, hot_seconds=10)
    hot.cache(0, prompt_of(0))
    assert hot.router.route(prompt_of(0)).reason == "cheapest"
    hot.clock.now += 10 - tenth + late * 100  # at the end of ten seconds a request does not count any more
    assert hot.router.route(prompt_of(0)).reason == ("cheapest" if is_late else "replicated")


def test_given_a_node_then_its_cost_adds_up_what_a_request_has_to_wait_for_there() -> None:
    weights = dict(cpu_cost=0.5, storage_cost=2.0, decode_cost=1000.0, context_cost=10.0, placed_cost=100.0)
    router = Cluster(1, **weights, session_tokens=7).router
    books = router._nodes[0]
    books.waiting_tokens, books.requests, books.context_tokens, books.placed_tokens = 3, 2, 4, 5.0
    at_home, elsewhere = (router._cost(400, Hit(100, 200, 230), books, is_home=home) for home in (True, False))
    assert elsewhere == 170 + 0.5 * 100 + 2.0 * 30 + 3 + 1000.0 * 2 + 10.0 * 4 + 100.0 * 5
    assert at_home == elsewhere - 7


def test_given_nodes_that_cost_the_same_then_they_take_turns() -> None:
    cluster = Cluster(3, placed_cost=0.0, assumed_seconds=0)
    assert [cluster.routed(prompt_of(1000 * at)) for at in range(6)] == [0, 1, 2] * 2
    cluster.router.set_ready(1, False)
    assert [cluster.routed(prompt_of(1000 * at)) for at in range(6, 9)] == [0, 2, 0]
    cluster.router.set_ready(1, True)
    assert cluster.routed(prompt_of(9000)) == 1


def test_given_tokens_that_a_node_computed_then_half_of_them_are_forgotten_after_each_half_life() -> None:
    cluster = Cluster(1, placed_seconds=100)
    cluster.routed(prompt_of(0))
    for left in (200.0, 100.0):
        cluster.clock.now += 100
        books = cluster.router._nodes[0]
        books.fade(cluster.clock.now, 100)
        assert books.placed_tokens == left


def test_given_as_many_tokens_as_a_node_may_have_then_another_one_gets_the_next() -> None:
    for num_tokens, node in ((399, 0), (400, 1)):
        cluster = Cluster(2, max_node_tokens=400, hot_requests=1000)
        cluster.cache(0, prompt_of(0, 4_000))
        cluster.router.route(prompt_of(0, 4_000 + num_tokens))
        assert cluster.router.route(prompt_of(0, 4_000)).node == node


def test_given_a_busy_holder_when_computing_elsewhere_is_cheaper_then_the_request_goes_elsewhere() -> None:
    cluster = Cluster(2)
    cluster.cache(0, prompt_of(0))
    open_routes = [cluster.router.route([*prompt_of(0), 7_000 + at]) for at in range(3)]
    assert {route.node for route in open_routes} == {0}
    busy = [cluster.router.route(prompt_of(10_000 * at, 2000)) for at in range(1, 4)]
    loads = cluster.router.nodes
    cheap = min(loads, key=lambda node: loads[node].num_waiting_tokens)
    assert cluster.router.route(prompt_of(0, 40)).node == cheap
    for route in (*open_routes, *busy):
        route.end()


def test_given_a_full_node_when_another_has_room_then_it_gets_nothing_more() -> None:
    cluster = Cluster(2, max_node_requests=2, hot_requests=1000)
    cluster.cache(0, prompt_of(0, 4_000))
    routes = [cluster.router.route(prompt_of(0, 4_000)) for _ in range(3)]
    assert [route.node for route in routes] == [0, 0, 1]
    assert routes[-1].reason == "spilled"
    fourth, fifth = (cluster.router.route(prompt_of(0, 4_000)) for _ in range(2))
    assert {fourth.node, fifth.node} <= {0, 1}  # all are full: the cheapest takes it nevertheless
    assert cluster.router.stats().num_spilled >= 1


def test_given_a_hot_prefix_when_requests_go_on_then_one_more_node_gets_it_at_a_time() -> None:
    cluster = Cluster(4, hot_requests=10, hot_seconds=10)
    cluster.cache(0, prompt_of(0))
    holders = {0}
    reached = []
    for at in range(60):
        cluster.clock.now += 0.1
        route = cluster.router.route([*prompt_of(0), at])
        route.end()
        if route.reason == "replicated":
            cluster.cache(route.node, prompt_of(0))
            assert route.node not in holders
            holders.add(route.node)
            reached.append(at)
    assert reached == [10, 20, 30]
    cluster.clock.now += 100
    assert cluster.router.route(prompt_of(0)).reason == "cheapest"


def test_given_first_token_and_end_then_the_load_of_a_node_goes_up_and_down_to_nothing() -> None:
    cluster = Cluster(1)
    cluster.cache(0, prompt_of(0, 200))
    route = cluster.router.route(prompt_of(0))
    assert cluster.router.nodes[0][:3] == (1, 200, 400)
    route.first_token()
    assert cluster.router.nodes[0][:3] == (1, 0, 400)
    route.first_token()
    route.end()
    route.end()
    assert cluster.router.nodes[0][:3] == (0, 0, 0)
    whole = cluster.router.route(prompt_of(0, 200))
    assert cluster.router.nodes[0].num_waiting_tokens == 1  # the last token of a prompt is always computed
    assert whole.hit.gpu == 200


def test_given_a_node_that_died_when_routed_then_nothing_goes_there_and_nothing_is_remembered_of_it() -> None:
    cluster = Cluster(2)
    cluster.cache(0, prompt_of(0))
    assert cluster.routed(prompt_of(0), session="alice") == 0
    cluster.router.set_ready(0, False)
    assert cluster.routed(prompt_of(0), session="alice") == 1
    assert cluster.index.match(prompt_of(0)) == {}
    cluster.router.set_ready(0, True)
    assert cluster.routed(prompt_of(0), session="alice") == 1
    cluster.router.remove_node(1)
    assert cluster.routed(prompt_of(0), session="alice") == 0
    with pytest.raises(NoNodeError, match="1 were tried"):
        cluster.router.route(prompt_of(0), exclude=[0])
    with pytest.raises(InvalidArgumentError, match="no node"):
        cluster.router.set_ready(1, True)


@pytest.mark.parametrize(
    "settings", [{"cpu_cost": -1}, {"decode_cost": "x"}, {"hot_requests": 0}, {"session_tokens": -1}]
)
def test_given_a_wrong_weight_then_it_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(settings))):
        RoutingConfig(**settings)


def test_given_conversations_over_real_caches_when_routed_by_prefix_then_hits_are_near_those_of_one_infinite_cache() -> (
    None
):
    rng = random.Random(2)
    hits = {}
    for kind in ("prefix", "round robin"):
        rng.seed(2)
        cluster = Cluster(4)
        caches: list[set[tuple[int, ...]]] = [set() for _ in range(4)]
        everywhere: set[tuple[int, ...]] = set()
        talks = [prompt_of(100_000 * (talk % 3), 80) + prompt_of(1000 * talk, 20) for talk in range(12)]
        got = ideal = turn = 0
        for _ in range(8):
            rng.shuffle(talks)
            for at, talk in enumerate(talks):
                prompt = talk + [rng.randrange(10**6) for _ in range(rng.randrange(20, 60))]
                talks[at] = prompt
                turn += 1
                prefixes = [tuple(prompt[:end]) for end in range(SIZE, len(prompt), SIZE)]
                if kind == "prefix":
                    route = cluster.router.route(prompt, session=talk[81])
                    node = route.node
                    route.end()
                    cluster.clock.now += 0.5
                else:
                    node = turn % 4
                got += sum(prefix in caches[node] for prefix in prefixes)
                ideal += sum(prefix in everywhere for prefix in prefixes)
                caches[node].update(prefixes)
                everywhere.update(prefixes)
                cluster.cache(node, prompt)
        hits[kind] = got / ideal
    assert hits["prefix"] >= 0.95
    assert hits["round robin"] <= 0.8


def test_given_decisions_when_looked_at_then_the_last_are_told_newest_first_and_counted_for_their_nodes() -> None:
    cluster = Cluster()
    cluster.cache(1, prompt_of(0, 200))
    for number in range(150):
        cluster.clock.now = float(number)
        cluster.routed(prompt_of(0), session="alice" if number == 149 else None)
    last = cluster.router.decisions
    assert [decision.number for decision in last] == list(range(150, 50, -1))
    assert (last[0].at, last[0].num_tokens) == (149.0, 400)
    assert last[0].hit.gpu >= 200  # what was sent lately counts
    loads, stats = cluster.router.nodes, cluster.router.stats()
    assert sum(load.num_routes for load in loads.values()) == stats.num_routes == 150
    assert sum(load.num_hit_tokens for load in loads.values()) == stats.num_hit_tokens
    assert sum(load.num_prompt_tokens for load in loads.values()) == stats.num_prompt_tokens
    assert loads[last[0].node].num_routes > 0
