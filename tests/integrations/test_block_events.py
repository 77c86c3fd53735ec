"""What is announced of the host and the tiers: under the engine's own names, everything once, nothing that is not there."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("xxhash")

from toy import BLOCK, PROMPT, ToyEngine, ToyRequest, lora

from kvpool.integrations.connector.reports import HOST, STORAGE, BlocksRemoved, BlocksStored


@pytest.fixture
def engine(engine: Callable[..., ToyEngine]) -> Callable[..., ToyEngine]:
    """Toy engines that announce their blocks."""
    return partial(engine, announces=True)


class Mirror:
    """What a router would believe."""

    def __init__(self) -> None:
        self.media: dict[str, set[Any]] = {HOST: set(), STORAGE: set()}

    def read(self, toy: ToyEngine) -> Mirror:
        for event in toy.scheduler.take_events():
            held = self.media[event.medium]
            if isinstance(event, BlocksRemoved):
                assert held >= {*event.names}
                held -= {*event.names}
            else:
                assert held.isdisjoint(event.names)
                assert event.parent is None or event.parent in held
                assert len(event.tokens) == BLOCK * len(event.names)
                held |= {*event.names}
        return self


def test_given_nobody_who_listens_then_there_are_no_events() -> None:
    toy = ToyEngine()
    toy.serve(ToyRequest("a", PROMPT))
    assert list(toy.scheduler.take_events()) == []
    toy.close()


def test_given_a_prompt_that_was_stored_then_it_is_told_with_its_tokens_and_parent(engine: Any) -> None:
    toy = engine()
    first, longer = ToyRequest("a", PROMPT), ToyRequest("b", PROMPT[:16] + list(range(5)), lora_request=None)
    toy.serve(first)
    toy.serve(longer)
    stored, more = toy.scheduler.take_events()
    assert stored == BlocksStored(first.block_hashes, None, PROMPT[:16], HOST, None, 0)
    assert more == BlocksStored(longer.block_hashes[4:], first.block_hashes[3], [0, 1, 2, 3], HOST, None, 0)


def test_given_an_adapter_then_its_name_is_told_and_not_its_digest(engine: Any, tmp_path: Path) -> None:
    (tmp_path / "adapter_model.safetensors").write_bytes(b"weights")
    toy = engine()
    toy.serve(ToyRequest("a", PROMPT, lora_request=lora("sql", str(tmp_path))))
    assert [event.adapter for event in toy.scheduler.take_events()] == ["sql"]


def test_given_a_small_host_then_what_leaves_it_is_told_once(engine: Any) -> None:
    toy, mirror = engine(host_blocks=6), Mirror()
    last = None
    for number in range(8):
        last = ToyRequest(str(number), [number] * 17)
        toy.serve(last)
        mirror.read(toy)
    assert len(mirror.media[HOST]) <= 6
    assert mirror.media[HOST] >= {*last.block_hashes}


def test_given_a_disk_then_its_blocks_are_told_and_another_process_tells_what_it_finds(
    engine: Any, tmp_path: Path
) -> None:
    toy, request = engine(disk=str(tmp_path)), ToyRequest("a", PROMPT)
    toy.serve(request)
    assert Mirror().read(toy).media == {HOST: {*request.block_hashes}, STORAGE: {*request.block_hashes}}
    toy.close()
    second = engine(disk=str(tmp_path))
    second.serve(ToyRequest("b", PROMPT))
    assert Mirror().read(second).media == {HOST: {*request.block_hashes}, STORAGE: {*request.block_hashes}}


def test_given_blocks_that_a_tier_lost_then_they_are_told_when_somebody_looks(engine: Any, tmp_path: Path) -> None:
    toy, mirror = engine(disk=str(tmp_path), host_blocks=4, policy="lru"), Mirror()
    toy.serve(ToyRequest("a", PROMPT))
    mirror.read(toy)
    digests = toy.scheduler._tracked(ToyRequest("x", PROMPT)).tier_digests(0, 4)
    for worker in toy.workers:
        worker._storer.flush(5)
        worker._tiers.watched[0].tier.remove(worker._space.keys(digests), timeout=5)
    toy.serve(ToyRequest("b", [7] * 17))  # takes the room on the host
    assert toy.look_up(ToyRequest("c", PROMPT)) == 0
    assert mirror.read(toy).media[STORAGE] == {*ToyRequest("b", [7] * 17).block_hashes}


def test_given_a_reset_then_nothing_is_left(engine: Any, tmp_path: Path) -> None:
    toy, mirror = engine(disk=str(tmp_path)), Mirror()
    toy.serve(ToyRequest("a", PROMPT))
    mirror.read(toy)
    toy.scheduler.reset()
    assert mirror.read(toy).media == {HOST: set(), STORAGE: set()}
    toy.serve(ToyRequest("b", PROMPT))
    assert len(mirror.read(toy).media[HOST]) == 4


def test_given_events_that_nobody_took_for_long_then_what_is_there_is_told_anew(engine: Any) -> None:
    toy, mirror = engine(host_blocks=12), Mirror()
    for number in range(40):
        toy.serve(ToyRequest(str(number), [number] * 17))
        if number == 2:
            mirror.read(toy)
    log = toy.scheduler.host.manager.events
    log._buffer.discard_before(log._buffer.next_id)  # as a full buffer does with what is oldest
    mirror.read(toy)
    assert len(mirror.media[HOST]) == toy.scheduler.host.manager.stats().pools[0].cached
    assert mirror.media[HOST] >= {*ToyRequest("last", [39] * 17).block_hashes}


def test_given_names_of_blocks_that_never_come_then_the_oldest_are_forgotten(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvpool.integrations.connector.reports._MAX_NAMED", 6)
    toy = engine()
    events = toy.scheduler.host._events
    for number in range(5):
        events.name(toy.scheduler._tracked(ToyRequest(str(number), [number] * 17)), 0, 4)
    assert len(events._named) == 6


def test_given_random_prompts_then_what_was_told_of_the_host_is_what_is_there(engine: Any, tmp_path: Path) -> None:
    rng = random.Random(3)
    toy, mirror = engine(disk=str(tmp_path), host_blocks=12), Mirror()
    begins = [[rng.randrange(9) for _ in range(20)] for _ in range(4)]
    for number in range(60):
        tokens = rng.choice(begins)[: rng.randrange(8, 20)] + [rng.randrange(9) for _ in range(rng.randrange(1, 20))]
        toy.serve(ToyRequest(str(number), tokens), chunk=rng.choice([5, 1000]))
        mirror.read(toy)
        assert len(mirror.media[HOST]) == toy.scheduler.host.manager.stats().pools[0].cached
