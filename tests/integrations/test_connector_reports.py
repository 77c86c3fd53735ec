"""What a connector tells of itself: counters that an engine collects, and one line when it is of no use."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("xxhash")

from toy import BLOCK, PROMPT, ToyEngine, ToyRequest

from kvpool.integrations.connector.reports import COUNTS, REPEATS, SHORT_PROMPTS, Increments
from kvpool.tiers import MemoryTier, opening


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    caplog.set_level(logging.WARNING, "kvpool")
    return lambda: [record.getMessage() for record in caplog.records if record.name == "kvpool"]


def test_given_totals_then_only_what_grew_is_handed_over() -> None:
    increments = Increments()
    assert increments.since({"stored": 2, "failed": 0}) == {"stored": 2}
    assert increments.since({"stored": 2, "failed": 0}) == {}
    assert increments.since({"stored": 5, "failed": 1}) == {"stored": 3, "failed": 1}


def test_given_requests_then_every_counter_is_known_and_counts(engine: Any) -> None:
    toy = engine()
    toy.serve(ToyRequest("a", PROMPT))
    toy.serve(ToyRequest("b", PROMPT))
    assert toy.scheduler.take_counts() == {"requests": 2, "hits": 1, "stored": 4, "from_host": 4, "missed_absent": 4}
    assert toy.scheduler.take_counts() == {}
    assert {*toy.scheduler.stats()} <= {*COUNTS}


@pytest.mark.slow
def test_given_damage_on_the_disk_then_the_worker_counts_it(engine: Any, tmp_path: Path) -> None:
    first = engine(disk=str(tmp_path))
    first.serve(ToyRequest("a", PROMPT))
    first.close()
    from toy import content

    (slab,) = tmp_path.glob("*.kvslab")
    data = bytearray(slab.read_bytes())
    data[data.index(content(PROMPT[:12], 0, "//[]"))] ^= 1
    slab.write_bytes(data)
    second = engine(disk=str(tmp_path))
    second.serve(ToyRequest("b", PROMPT))
    assert second.workers[0].take_counts() == {"tier_load_failures": 1}
    assert second.scheduler.take_counts()["failed"] == 2


def test_given_prompts_that_repeat_and_a_host_without_room_then_one_line_says_why(engine: Any, said: Any) -> None:
    toy = engine(host_blocks=2)
    for number in range(REPEATS + 3):
        toy.serve(ToyRequest(str(number), PROMPT))
    (line,) = said()
    assert (
        f"{REPEATS} prompts began like earlier ones, and nothing was ever found for them: 0 blocks were stored" in line
    )
    assert "had no room on a host of 2 blocks; a larger host_bytes would help" in line


def test_given_prompts_that_are_found_or_differ_then_nothing_is_said(engine: Any, said: Any) -> None:
    toy = engine()
    for number in range(2 * REPEATS):
        toy.serve(ToyRequest(str(number), PROMPT))
    other = engine(host_blocks=2)
    for number in range(2 * REPEATS):
        other.serve(ToyRequest(str(number), [number, *PROMPT]))
    assert said() == []


def test_given_prompts_that_the_engine_finds_itself_then_nothing_is_said(engine: Any, said: Any) -> None:
    toy = engine(host_blocks=2)
    for number in range(2 * REPEATS):
        toy.serve(ToyRequest(str(number), PROMPT), local_blocks=4 if number else 0)
    assert said() == []


def test_given_resets_then_what_was_forgotten_is_not_missed(engine: Any, said: Any) -> None:
    toy = engine(host_blocks=2)
    for number in range(2 * REPEATS):
        toy.serve(ToyRequest(str(number), PROMPT))
        toy.scheduler.reset()
    assert said() == []


def test_given_only_prompts_without_a_whole_block_then_one_line_says_so(engine: Any, said: Any) -> None:
    toy = engine()
    for number in range(2 * SHORT_PROMPTS):
        toy.serve(ToyRequest(str(number), PROMPT[:BLOCK]))
    (line,) = said()
    assert f"longer than a block of {BLOCK} tokens" in line


class SharedTier(MemoryTier):
    """A store that goes on when an engine lets go of it."""

    def close(self) -> None:
        pass


@pytest.fixture
def remote(monkeypatch: pytest.MonkeyPatch) -> str:
    shared, open_tier = SharedTier(2**20), opening.open_tier
    monkeypatch.setattr(opening, "open_tier", lambda url: shared if url.startswith("redis:") else open_tier(url))
    return "redis://shared"


def hits(toy: ToyEngine, name: str) -> tuple[int, int, int]:
    """Where the blocks of a prompt would come from: host, disk, remote store."""
    request = ToyRequest(name, PROMPT)
    number = toy.look_up(request)
    toy.scheduler.order_load(request, [[0, 1, 2, 3, 4]], number)
    return toy.scheduler.hit_blocks(request)


def test_given_blocks_in_several_places_then_each_is_counted_where_it_comes_from(
    engine: Any, tmp_path: Path, remote: str
) -> None:
    places: list[tuple[dict[str, str], list[int]]] = [
        ({"remote": remote}, PROMPT),
        ({"disk": str(tmp_path)}, PROMPT[:13]),
    ]
    for tiers, tokens in places:
        first = engine(**tiers)
        first.serve(ToyRequest("a", tokens))
        first.close()
    assert hits(engine(remote=remote), "b") == (0, 0, 4)
    both = engine(disk=str(tmp_path), remote=remote)
    assert hits(both, "c") == (0, 3, 1)
    both.close()
    warm = engine(disk=str(tmp_path), remote=remote)
    warm.serve(ToyRequest("d", PROMPT[:9]))
    assert hits(warm, "e") == (2, 1, 1)


def test_given_two_workers_of_which_one_has_a_block_elsewhere_then_the_slower_place_counts(
    engine: Any, tmp_path: Path, remote: str
) -> None:
    first = engine(disk=str(tmp_path), remote=remote, num_workers=2)
    first.serve(ToyRequest("a", PROMPT))
    first.close()
    shutil.rmtree(tmp_path / "rank-1-of-2")
    assert hits(engine(disk=str(tmp_path), remote=remote, num_workers=2), "b") == (0, 0, 4)
