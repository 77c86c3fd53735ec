"""Bad moments: aborts, preemption and resets while bytes are on their way, tiers that hang, an end in a hurry."""

from __future__ import annotations

import itertools
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("xxhash")

from toy import PROMPT, ToyEngine, ToyRequest, give_way

from kvpool.integrations.connector.reports import BlocksStored
from kvpool.tiers import Outcome

PAGES = [0, 1, 2, 3, 4]
PATIENCE = 30.0  # seconds after which something waits for ever


def filled(engine: Callable[..., ToyEngine], disk: Path, **options: Any) -> ToyEngine:
    """An engine that finds the prompt on its disk only."""
    first = engine(disk=str(disk))
    first.serve(ToyRequest("a", PROMPT))
    first.close()
    return engine(disk=str(disk), **options)


def until(is_so: Callable[[], bool]) -> None:
    due = time.monotonic() + PATIENCE
    while not is_so():
        assert time.monotonic() < due, "this waits for ever"
        give_way()


class Gate:
    """A method of a tier that waits until it may go on."""

    def __init__(self, tier: Any, method: str) -> None:
        self.opens, self.num_waiting = threading.Event(), 0
        self._method = getattr(tier, method)
        setattr(tier, method, self)

    def __call__(self, *arguments: Any) -> Any:
        self.num_waiting += 1
        self.opens.wait(PATIENCE)
        return self._method(*arguments)


def begin_load(toy: ToyEngine, request: ToyRequest) -> Gate:
    """A load that a tier is in the middle of."""
    gate = Gate(toy.workers[0]._tiers.watched[0].tier, "_load")
    assert toy.look_up(request) == 16
    toy.scheduler.order_load(request, [PAGES], 16)
    toy._step_loads(set())
    until(lambda: gate.num_waiting >= 1)
    return gate


def end_load(toy: ToyEngine, name: str, gate: Gate) -> None:
    over: set[str] = set()
    gate.opens.set()
    until(lambda: bool(over.update(toy._step_loads(set())) or name in over))


# --- aborts and preemption -----------------------------------------------------------------------------------------------


def test_given_a_request_that_is_aborted_in_the_middle_of_a_load_then_it_is_reported_and_its_rows_are_let_go(
    engine: Any, tmp_path: Path
) -> None:
    toy = filled(engine, tmp_path, timeout=PATIENCE)
    gate = begin_load(toy, ToyRequest("b", PROMPT))
    toy.scheduler.finish("b")
    end_load(toy, "b", gate)
    pool = toy.scheduler.host.manager.stats().pools[0]
    assert (pool.cached, pool.referenced) == (4, 0)
    assert toy.serve(ToyRequest("c", PROMPT)) == 16
    assert toy.scheduler.stats()["from_host"] == 4


def test_given_a_request_that_is_aborted_before_tiers_have_answered_then_nothing_is_left_of_it(
    engine: Any, tmp_path: Path
) -> None:
    toy = filled(engine, tmp_path, timeout=PATIENCE)
    gate = Gate(toy.scheduler.host._lookups.tiers()[0], "_contains")
    assert toy.scheduler.look_up(ToyRequest("b", PROMPT), 0) is None
    toy.scheduler.finish("b")
    gate.opens.set()
    assert toy.scheduler._requests == {}
    assert toy.serve(ToyRequest("c", PROMPT)) == 16


def test_given_a_preemption_while_a_store_is_not_confirmed_then_it_is_stored_once_and_right(engine: Any) -> None:
    toy, request = engine(), ToyRequest("a", PROMPT)
    (worker,) = toy.workers
    toy.look_up(request)
    toy.scheduler.order_load(request, [PAGES], 0)
    toy.scheduler.follow("a", [PAGES], 18)
    orders = toy.scheduler.orders(is_idle=False)
    for name in toy.layers[0]:
        toy._compute(request, PAGES, name, range(4))
    worker.store(orders)  # and its report is on its way when the engine takes the pages for another request
    assert toy.look_up(request) == 0
    others = [9, 8, 7, 6, 5]
    toy.scheduler.order_load(request, [others], 0)
    toy.scheduler.follow("a", [others], 18)
    assert toy.scheduler.orders(is_idle=False).stores == []
    toy._report()
    toy.scheduler.finish("a")
    toy.idle()
    assert toy.scheduler.stats()["stored"] == 4
    again = ToyRequest("b", PROMPT)
    assert toy.serve(again) == 16
    assert toy.holds(again, toy.last_pages(again), 4)


# --- resets --------------------------------------------------------------------------------------------------------------


def test_given_a_reset_in_the_middle_of_a_load_then_nothing_of_it_is_found_or_told(engine: Any, tmp_path: Path) -> None:
    toy = filled(engine, tmp_path, timeout=PATIENCE, announces=True)
    gate = begin_load(toy, ToyRequest("b", PROMPT))
    toy.scheduler.reset()
    list(toy.scheduler.take_events())
    end_load(toy, "b", gate)
    assert not [event for event in toy.scheduler.take_events() if isinstance(event, BlocksStored)]
    assert toy.scheduler.host.manager.inspect.num_free_blocks() == 16
    assert toy.look_up(ToyRequest("c", PROMPT)) == 0


def test_given_a_reset_in_the_middle_of_the_load_of_an_aborted_request_then_nothing_of_it_is_found_or_told(
    engine: Any, tmp_path: Path
) -> None:
    toy = filled(engine, tmp_path, timeout=PATIENCE, announces=True)
    gate = begin_load(toy, ToyRequest("b", PROMPT))
    toy.scheduler.finish("b")
    toy.scheduler.reset()
    list(toy.scheduler.take_events())
    end_load(toy, "b", gate)
    assert not [event for event in toy.scheduler.take_events() if isinstance(event, BlocksStored)]
    assert toy.scheduler.host.manager.inspect.num_free_blocks() == 16


@pytest.mark.parametrize("num_steps", [0, 1])
def test_given_a_reset_while_blocks_are_on_their_way_to_tiers_then_they_are_not_told(
    engine: Any, tmp_path: Path, num_steps: int
) -> None:
    toy, request = engine(disk=str(tmp_path), announces=True), ToyRequest("a", PROMPT)
    (worker,) = toy.workers
    toy.look_up(request)
    toy.scheduler.order_load(request, [PAGES], 0)
    toy._prefill(request, PAGES, 0, 1000)
    toy.scheduler.finish("a")  # what was confirmed is published, and ordered to the tiers with the next step
    if num_steps:
        worker.store(toy.scheduler.orders(is_idle=True))
    toy.scheduler.reset()
    list(toy.scheduler.take_events())
    toy.idle()
    assert not [event for event in toy.scheduler.take_events() if isinstance(event, BlocksStored)]
    assert toy.scheduler.host.manager.inspect.num_free_blocks() == 16


# --- tiers that hang -----------------------------------------------------------------------------------------------------


def test_given_a_tier_that_does_not_answer_look_ups_then_requests_are_computed(engine: Any, tmp_path: Path) -> None:
    toy = filled(engine, tmp_path, timeout=0.3)
    gate = Gate(toy.scheduler.host._lookups.tiers()[0], "_contains")
    for number in range(5):  # more than threads that ask
        request = ToyRequest(f"b{number}", [*PROMPT, number])
        until(lambda request=request: toy.scheduler.look_up(request, 0) == 0)  # type: ignore[misc]
        toy.scheduler.finish(request.request_id)
    assert gate.num_waiting <= 2
    gate.opens.set()
    until(lambda: not toy.scheduler.host._lookups._chains[0].watched[0].num_hung)
    toy.scheduler.host._lookups._timeout = toy.scheduler.host._lookups.patience = (
        PATIENCE  # a busy machine must not look like a tier that hangs
    )
    assert toy.look_up(ToyRequest("c", PROMPT)) == 16


def test_given_as_many_loads_that_hang_as_there_are_threads_then_the_next_one_fails_at_once(
    engine: Any, tmp_path: Path
) -> None:
    toy = filled(engine, tmp_path, timeout=0.5, host_blocks=32)
    gate, over = Gate(toy.workers[0]._tiers.watched[0].tier, "_load"), set()
    requests = [ToyRequest(f"b{number}", PROMPT) for number in range(3)]
    for number, request in enumerate(requests[:2]):
        assert toy.look_up(request) == 16
        toy.scheduler.order_load(request, [[5 * number + page for page in PAGES]], 16)
    until(lambda: bool(over.update(toy._step_loads(set())) or len(over) == 2))
    assert gate.num_waiting == 4, "each load comes in two parts"
    assert toy.look_up(requests[2]) == 16
    toy.scheduler.order_load(requests[2], [[20, 21, 22, 23, 24]], 16)
    failed: set[int] = set()
    assert toy._step_loads(failed) == {"b2"}
    assert failed == {20, 21, 22, 23}
    gate.opens.set()


# --- many who want the same ----------------------------------------------------------------------------------------------


def test_given_a_prefix_that_is_on_its_way_from_a_tier_then_others_wait_for_it_and_take_it_from_the_host(
    engine: Any, tmp_path: Path
) -> None:
    toy = filled(engine, tmp_path, timeout=PATIENCE)
    gate = begin_load(toy, ToyRequest("b", PROMPT))
    longer, salted = ToyRequest("c", [*PROMPT, *PROMPT]), ToyRequest("d", PROMPT, cache_salt="ada")
    until(lambda: toy.scheduler.look_up(longer, 0) is None and not toy.scheduler._tracked(longer).is_asking)
    assert toy.scheduler.look_up(longer, 0) is None
    assert toy.look_up(salted) == 0
    end_load(toy, "b", gate)
    assert toy.scheduler.look_up(longer, 0) == 16
    assert gate.num_waiting == 2, "the two parts of one load"


def test_given_a_prefix_that_never_comes_from_a_tier_then_others_do_not_wait_for_it_for_ever(
    engine: Any, tmp_path: Path
) -> None:
    toy = filled(engine, tmp_path, timeout=0.3)
    gate = begin_load(toy, ToyRequest("b", PROMPT))
    until(lambda: toy.scheduler.look_up(ToyRequest("c", PROMPT), 0) is not None)
    gate.opens.set()


def test_given_a_prefix_that_could_not_be_loaded_then_those_who_waited_go_on(engine: Any, tmp_path: Path) -> None:
    toy = filled(engine, tmp_path, timeout=PATIENCE)
    gate = begin_load(toy, ToyRequest("b", PROMPT))
    waiting = ToyRequest("c", PROMPT)
    gate._method = lambda keys, *rest: [Outcome.FAILED] * len(keys)
    end_load(toy, "b", gate)
    assert toy.look_up(waiting) == 16, "it tries for itself"


# --- servers that come later ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_given_a_redis_that_is_started_after_the_engine_then_it_gets_blocks_from_then_on_and_others_find_them(
    engine: Any, tmp_path: Path
) -> None:
    pytest.importorskip("glide_sync")
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tiers"))
    from servers import RedisServer

    server, numbers = RedisServer(tmp_path), itertools.count()
    toy = engine(remote=server.url, timeout=5)
    (watched,) = toy.workers[0]._tiers.watched

    def serve_another() -> ToyRequest:
        request = ToyRequest("b", [next(numbers)] * 17)
        toy.serve(request)
        toy.workers[0]._storer.flush(PATIENCE)
        return request

    serve_another()
    server.start()
    try:
        until(lambda: bool(serve_another() and watched.tier.stats().bytes_stored))
        last, other = serve_another(), engine(remote=server.url, timeout=5)

        def finds() -> bool:
            request = ToyRequest(f"c{next(numbers)}", last.all_token_ids)
            answer = other.look_up(request)
            other.scheduler.finish(request.request_id)
            return answer == 16

        until(finds)
    finally:
        server.kill()


@pytest.mark.skipif(not hasattr(socket, "SO_PEERCRED"), reason="a node needs Linux")
def test_given_a_node_then_all_ranks_of_several_engines_share_it_and_find_their_own_parts(engine: Any) -> None:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tiers"))
    from nodes import node_folder, node_thread

    with node_folder() as folder, node_thread(folder) as server:
        address = f"node:{folder}?timeout=30"
        first = engine(remote=address, timeout=30, num_workers=2)
        first.serve(ToyRequest("a", PROMPT))
        first.close()
        assert server.call(server.stats, PATIENCE)["num_values"] == 2 * 4
        second = engine(remote=address, timeout=30, num_workers=2)
        until(lambda: second.look_up(ToyRequest("b", PROMPT)) == 16)
        second.serve(ToyRequest("c", PROMPT))
        assert server.call(server.stats, PATIENCE)["num_values"] == 2 * 4, "each block once, whoever stores it"


# --- ends ----------------------------------------------------------------------------------------------------------------


def test_given_an_engine_that_ends_while_a_tier_still_stores_then_everything_is_there_afterwards(
    engine: Any, tmp_path: Path
) -> None:
    toy = engine(disk=str(tmp_path))
    gate = Gate(toy.workers[0]._tiers.watched[0].tier, "_store")
    toy.serve(ToyRequest("a", PROMPT))
    until(lambda: gate.num_waiting >= 1)
    threading.Timer(0.05, gate.opens.set).start()
    toy.close()
    assert engine(disk=str(tmp_path)).serve(ToyRequest("b", PROMPT)) == 16
