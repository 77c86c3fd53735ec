"""Both sides of a connector under a toy engine whose layers keep a state: every hit ends with one, and it is right."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("xxhash")

import torch
from toy import BLOCK, LAYERS, PAGE_BYTES, PROMPT, ToyEngine, ToyRequest, content, give_way, introduction

from kvpool.errors import ConfigError
from kvpool.integrations.connector.pages import EnginePages
from kvpool.integrations.connector.scheduler_side import SchedulerSide
from kvpool.integrations.connector.settings import ConnectorSettings
from kvpool.integrations.connector.worker_side import WorkerSide


class StatefulToy(ToyEngine):
    """One layer keeps a state of two parts. As in vLLM, steps of a prompt end with a block, and only then is it kept."""

    def __init__(
        self,
        *,
        checkpoints: int = 8,
        num_workers: int = 1,
        host_blocks: int = 16,
        announces: bool = False,
        num_pages: int = 32,
        **extra: Any,
    ) -> None:
        settings = ConnectorSettings.of({"host_blocks": host_blocks, **extra})
        ranks = range(num_workers)
        self.layers = [
            {f"layer {n}": torch.zeros((num_pages, PAGE_BYTES), dtype=torch.uint8) for n in range(LAYERS)}
            for _ in ranks
        ]
        half = PAGE_BYTES // 2
        self.states = [[torch.zeros((num_pages, half), dtype=torch.uint8) for _ in range(2)] for _ in ranks]
        workers = [introduction(host_blocks, rank, num_workers, num_checkpoints=checkpoints) for rank in ranks]
        self.workers = [
            WorkerSide(
                settings,
                EnginePages(layers, num_pages),
                worker,
                states=EnginePages({"state": states}, num_pages, [["state"]]),
            )
            for layers, states, worker in zip(self.layers, self.states, workers, strict=True)
        ]
        self.scheduler = SchedulerSide(settings, BLOCK, workers, hash_size=BLOCK if announces else None)
        self.num_pages = num_pages
        self.computed = self._at = self._state_at = 0
        self._ended = {}

    def serve(self, request: ToyRequest, *, local_blocks: int = 0, chunk: int = 1000, stores: bool = True) -> int:
        """Prefills a request; returns the tokens that were loaded. Checks that it ends with the right state."""
        tokens, asked = request.all_token_ids, request.request_id
        count = self.look_up(request, local_blocks * BLOCK)
        pages = [(self._at + n) % self.num_pages for n in range(-(-len(tokens) // BLOCK))]
        self._at += len(pages)
        for page in pages:
            self._fill(page, *[b"\xee" * PAGE_BYTES] * LAYERS)
        for name in self.layers[0]:
            self._compute(request, pages, name, range(local_blocks))
        done = local_blocks * BLOCK + count
        live = self._new_state_page()
        for rank in range(len(self.workers)):
            self._put(rank, live, content(tokens[:done], rank, "state") if not count and done else b"\xee" * PAGE_BYTES)
        table = [0] * (done // BLOCK - 1) + [live]
        self.scheduler.order_load(request, [pages], count, [table])
        while count and asked not in self._step_loads(set()):
            give_way()
        if set().union(*(worker.take_failed_requests() for worker in self.workers)):
            done, self.failed = 0, True
        self._prefill_states(request, pages, done, live, chunk, stores)
        self.scheduler.finish(asked)
        self.idle()
        assert self.holds(request, pages, len(tokens) // BLOCK)
        return count

    failed = False

    def _prefill_states(
        self, request: ToyRequest, pages: list[int], done: int, live: int, chunk: int, stores: bool
    ) -> None:
        tokens = request.all_token_ids
        last = (len(tokens) - 1) // BLOCK * BLOCK
        while done < len(tokens):
            upto = min(last, (done + chunk) // BLOCK * BLOCK) if done < last else len(tokens)
            target = self._new_state_page()
            if upto % BLOCK == 0 and stores:
                self.scheduler.follow_checkpoint(request.request_id, [pages], upto, [target])
            orders = self.scheduler.orders(is_idle=False)
            for worker in self.workers:
                worker.begin_step(orders)
            for name in self.layers[0]:
                self._compute(request, pages, name, range(done // BLOCK, upto // BLOCK))
            for rank in range(len(self.workers)):
                right = not done or self._get(rank, live) == content(tokens[:done], rank, "state")
                assert right, f"the state behind {done} tokens is wrong"
                self._put(rank, target, content(tokens[:upto], rank, "state"))
            self.computed += upto - done
            for worker in self.workers:
                worker.load(orders)
                worker.store(orders)
                worker.poll(is_idle=False)
            self._report()
            done, live = upto, target

    def _new_state_page(self) -> int:
        self._state_at += 1
        return self._state_at % self.num_pages

    def _put(self, rank: int, page: int, value: bytes) -> None:
        for part, begin in zip(self.states[rank], (0, PAGE_BYTES // 2), strict=True):
            part[page] = torch.frombuffer(bytearray(value[begin : begin + PAGE_BYTES // 2]), dtype=torch.uint8)

    def _get(self, rank: int, page: int) -> bytes:
        return b"".join(part[page].numpy().tobytes() for part in self.states[rank])


@pytest.fixture
def engine() -> Iterator[Callable[..., StatefulToy]]:
    made: list[StatefulToy] = []

    def make(**options: Any) -> StatefulToy:
        made.append(StatefulToy(**options))
        return made[-1]

    yield make
    for toy in made:
        toy.close()


def test_given_a_prompt_that_was_computed_then_it_comes_back_with_its_state(engine: Any) -> None:
    toy = engine()
    assert toy.serve(ToyRequest("a", PROMPT)) == 0
    assert toy.serve(ToyRequest("b", PROMPT)) == 16
    assert toy.computed == 18 + 2


def test_given_a_prompt_that_parts_before_the_only_state_then_its_blocks_alone_are_no_hit(engine: Any) -> None:
    toy = engine()
    toy.serve(ToyRequest("a", PROMPT))
    assert toy.serve(ToyRequest("b", [*PROMPT[:13], 1, 2, 3])) == 0


def test_given_states_behind_every_chunk_then_the_longest_with_one_is_found(engine: Any) -> None:
    toy = engine()
    toy.serve(ToyRequest("a", PROMPT), chunk=8)
    assert toy.serve(ToyRequest("b", [*PROMPT[:13], 1, 2, 3])) == 8
    assert toy.serve(ToyRequest("c", PROMPT)) == 16
    assert toy.serve(ToyRequest("d", PROMPT[:16])) == 12, "the request before left a state there"


def test_given_blocks_in_the_engines_own_cache_then_those_behind_them_come_with_their_state(engine: Any) -> None:
    toy = engine()
    toy.serve(ToyRequest("a", PROMPT))
    assert toy.serve(ToyRequest("b", PROMPT), local_blocks=3) == 4
    assert toy.serve(ToyRequest("c", PROMPT), local_blocks=4) == 0


@pytest.mark.parametrize("num_workers", [1, 2])
def test_given_a_disk_when_the_engine_is_started_again_then_blocks_and_states_come_from_there(
    engine: Any, tmp_path: Path, num_workers: int
) -> None:
    first = engine(disk=str(tmp_path), num_workers=num_workers)
    first.serve(ToyRequest("a", PROMPT), chunk=8)
    first.close()
    toy = engine(disk=str(tmp_path), num_workers=num_workers)
    assert toy.serve(ToyRequest("b", PROMPT)) == 16
    assert toy.scheduler.stats()["from_tiers"] == 4
    assert toy.serve(ToyRequest("c", PROMPT[:15])) == 8
    assert toy.scheduler.stats()["from_tiers"] == 6, "the host has no state in the middle of what it loaded"
    assert toy.serve(ToyRequest("d", PROMPT)) == 16
    assert toy.scheduler.stats()["from_host"] == 4


def test_given_a_disk_that_lost_the_last_state_then_the_one_before_it_counts(engine: Any, tmp_path: Path) -> None:
    first = engine(disk=str(tmp_path))
    first.serve(ToyRequest("a", PROMPT), chunk=8)
    (worker,) = first.workers
    states = worker._space.keys(_names(PROMPT[:16]), 1)
    worker._storer.flush(10.0)
    worker._tiers.watched[0].tier.remove(states[3:])
    first.close()
    toy = engine(disk=str(tmp_path))
    assert toy.serve(ToyRequest("b", PROMPT)) == 8
    assert not toy.failed


def _names(tokens: list[int]) -> list[bytes]:
    from kvpool.integrations.connector.requests import TrackedRequest, scope_of

    tracked = TrackedRequest(request := ToyRequest("names", tokens), BLOCK, scope_of(request, "", ""), ())
    return tracked.tier_digests(0, len(tokens) // BLOCK)


@pytest.mark.parametrize("group", [0, 1])
def test_given_a_promised_block_or_state_that_does_not_come_then_the_request_is_computed_from_its_beginning(
    engine: Any, tmp_path: Path, group: int
) -> None:
    first = engine(disk=str(tmp_path))
    first.serve(ToyRequest("a", PROMPT))
    first.close()
    toy = engine(disk=str(tmp_path))
    tier = toy.workers[0]._tiers.watched[0].tier
    load, lost = tier._load, toy.workers[0]._space.keys(_names(PROMPT[:16]), group)

    def broken(keys: Any, *rest: Any) -> Any:
        outcomes = list(load(keys, *rest))
        return [type(one).MISS if key in lost else one for key, one in zip(keys, outcomes, strict=True)]

    tier._load = broken
    assert toy.serve(ToyRequest("b", PROMPT)) == 16
    assert toy.failed
    assert toy.scheduler.stats()["failed"] == 4
    assert toy.scheduler.stats()["hits"] == 0
    tier._load = load
    assert toy.serve(ToyRequest("c", PROMPT)) == 16, "what was computed instead is there"


def test_given_room_for_two_states_then_requests_are_served_and_the_host_never_has_more(engine: Any) -> None:
    toy = engine(checkpoints=2, host_blocks=64, num_pages=64)
    for number in range(6):
        prompt = [number, *PROMPT]
        toy.serve(ToyRequest(f"{number}", prompt), chunk=4)
        assert toy.serve(ToyRequest(f"{number} again", prompt)) == 16
    toy.scheduler.host.check()


def test_given_kv_events_then_blocks_are_announced_and_states_are_not(engine: Any) -> None:
    toy = engine(announces=True)
    request = ToyRequest("a", PROMPT)
    toy.serve(request, chunk=8)
    stored = [name for event in toy.scheduler.take_events() for name in event.names]
    assert stored == request.block_hashes


def test_given_a_request_that_is_not_to_be_stored_then_no_state_of_it_is_kept(engine: Any) -> None:
    toy = engine()
    toy.serve(ToyRequest("a", PROMPT, kv_transfer_params={"kvpool": {"no_store": True}}))
    assert toy.serve(ToyRequest("b", PROMPT)) == 0


@pytest.mark.quick("0")
@pytest.mark.parametrize("seed", range(4))
def test_given_random_prompts_with_common_beginnings_then_every_state_is_right(
    engine: Any, tmp_path: Path, seed: int
) -> None:
    rng = random.Random(seed)
    begins = [[rng.randrange(5) for _ in range(40)] for _ in range(4)]
    toy = engine(checkpoints=rng.choice([2, 5]), host_blocks=24, num_pages=64, disk=str(tmp_path))
    loaded = 0
    for number in range(60):
        prompt = rng.choice(begins)[: rng.randrange(5, 40)] + [rng.randrange(5) for _ in range(rng.randrange(1, 9))]
        loaded += toy.serve(ToyRequest(f"{number}", prompt), chunk=rng.choice([4, 8, 100]))
    assert loaded > 0
    assert not toy.failed


def test_given_the_memory_of_a_host_then_states_get_a_quarter_of_it() -> None:
    assert ConnectorSettings.of({"host_bytes": 1000}).num_checkpoints(10, 50) == (75, 5)
    assert ConnectorSettings.of({"host_blocks": 100}).num_checkpoints(10, 50) == (75, 5)
    with pytest.raises(ConfigError, match="needs 2000 or more"):
        ConnectorSettings.of({"host_bytes": 1000}).num_checkpoints(10, 500)
