"""What a tier has is loaded where that is faster than computing it, and no step waits for what goes to a tier."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from toy import BLOCK, PROMPT, ToyEngine, ToyRequest

from kvpool.integrations.connector.reports import REPEATS
from kvpool.tiers.transport.deciding import PROBE_SECONDS, Decider

LONG = list(range(200, 200 + 41 * BLOCK + 1))


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def restarted(
    engine: Any, tmp_path: Path, clock: Clock, tokens: list[int], **changed: Any
) -> tuple[ToyEngine, Decider]:
    """An engine whose disk has a prompt and whose host has not; it decides by what it measures."""
    options = dict(host_blocks=64, num_pages=128, disk=str(tmp_path / "disk"), disk_bytes="16MB", clock=clock)
    first = engine(**options)
    first.serve(ToyRequest("before", tokens))
    first.close()
    second = engine(**{**options, **changed})
    decider = second.scheduler.host._loader.decider = Decider(1, clock)
    return second, decider


def test_given_a_tier_that_is_slower_than_computing_then_its_blocks_are_computed(
    engine: Any, tmp_path: Path, clock: Clock
) -> None:
    toy, decider = restarted(engine, tmp_path, clock, PROMPT)
    decider.observe_prompt(16, 0.1)
    decider.observe_load(0, 4, 0.2)
    assert toy.serve(ToyRequest("a", PROMPT)) == 0
    assert toy.scheduler.stats()["slower"] == 1
    assert missed(toy) == {"slower": 4}


def missed(toy: ToyEngine) -> dict[str, int]:
    """Blocks that were not brought, by cause."""
    return {name[7:]: count for name, count in toy.scheduler.stats().items() if name.startswith("missed_") and count}


def test_given_a_longer_prompt_then_what_nobody_has_is_absent(engine: Any, tmp_path: Path, clock: Clock) -> None:
    toy, decider = restarted(engine, tmp_path, clock, PROMPT)
    decider.observe_prompt(16, 10.0)
    decider.observe_load(0, 4, 0.1)
    longer = [*PROMPT[: 4 * BLOCK], *range(5000, 5000 + 3 * BLOCK)]
    assert toy.serve(ToyRequest("a", longer)) == 4 * BLOCK
    assert missed(toy) == {"absent": 2}


def test_given_a_host_that_is_too_small_then_what_a_tier_has_and_it_cannot_hold_is_crowded(
    engine: Any, tmp_path: Path, clock: Clock
) -> None:
    toy, decider = restarted(engine, tmp_path, clock, LONG, host_blocks=10)
    decider.observe_prompt(16, 10.0)
    decider.observe_load(0, 4, 0.001)
    num_found = toy.serve(ToyRequest("a", LONG)) // BLOCK
    assert 0 < num_found < 41
    assert missed(toy) == {"crowded": 41 - num_found}


def test_given_a_tier_that_does_not_answer_then_its_blocks_are_late(
    engine: Any, tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    toy, _ = restarted(engine, tmp_path, clock, PROMPT)
    monkeypatch.setattr(toy.scheduler.host._loader._lookups._threads, "submit", lambda *job: False)
    assert toy.serve(ToyRequest("a", PROMPT)) == 0
    assert missed(toy) == {"late": 4}


def test_given_prompts_that_are_never_found_because_of_a_slow_tier_then_the_warning_says_so(
    engine: Any, tmp_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    toy, decider = restarted(engine, tmp_path, clock, PROMPT, host_blocks=2)
    decider.observe_prompt(16, 0.1)
    decider.observe_load(0, 4, 0.2)
    for number in range(REPEATS + 1):
        toy.serve(ToyRequest(str(number), PROMPT))
    (line,) = [record.getMessage() for record in caplog.records if record.name == "kvpool"]
    assert "prompts computed what a tier had, because it was slower than computing" in line


def test_given_a_tier_that_is_faster_than_computing_then_its_blocks_are_loaded(
    engine: Any, tmp_path: Path, clock: Clock
) -> None:
    toy, decider = restarted(engine, tmp_path, clock, PROMPT)
    decider.observe_prompt(16, 0.3)
    decider.observe_load(0, 4, 0.2)
    assert toy.serve(ToyRequest("a", PROMPT)) == 16


def test_given_a_tier_that_was_never_measured_then_its_blocks_are_loaded_and_measured(
    engine: Any, tmp_path: Path, clock: Clock
) -> None:
    toy, decider = restarted(engine, tmp_path, clock, PROMPT)
    decider.observe_prompt(16, 0.001)
    assert toy.serve(ToyRequest("a", PROMPT)) == 16
    assert decider.speeds[0].count == 1


def test_given_a_slow_tier_then_a_few_blocks_measure_it_again_after_a_while(
    engine: Any, tmp_path: Path, clock: Clock
) -> None:
    toy, decider = restarted(engine, tmp_path, clock, LONG)
    decider.observe_prompt(len(LONG), 0.1)
    decider.observe_load(0, 41, 0.2)
    assert toy.look_up(ToyRequest("a", LONG)) == 0
    clock.now += PROBE_SECONDS
    assert toy.serve(ToyRequest("b", LONG)) == 16 * BLOCK
    assert decider.speeds[0].count == 2


def test_given_a_request_that_asks_again_then_the_answer_is_the_same(engine: Any, tmp_path: Path, clock: Clock) -> None:
    toy, decider = restarted(engine, tmp_path, clock, PROMPT)
    decider.observe_prompt(16, 0.3)
    decider.observe_load(0, 4, 0.2)
    request = ToyRequest("a", PROMPT)
    assert toy.look_up(request) == 16
    decider.observe_load(0, 4, 20.0)  # another request's load was slow meanwhile
    assert toy.look_up(request) == 16


def test_given_a_first_token_then_the_time_of_its_prompt_is_known(engine: Any, tmp_path: Path, clock: Clock) -> None:
    toy, decider = restarted(engine, tmp_path, clock, PROMPT)
    request = ToyRequest("a", list(range(500, 518)))
    assert toy.look_up(request) == 0
    toy.scheduler.follow("a", [[1, 2, 3, 4, 5]], 18, num_computed=0)
    toy.scheduler.orders(is_idle=False)
    assert decider.compute_seconds(18) is None
    clock.now += 0.5
    request.all_token_ids.append(7)
    toy.scheduler.orders(is_idle=False)
    assert decider.compute_seconds(18) == pytest.approx(0.5)


def test_given_a_request_with_one_token_then_its_prompt_is_measured_when_it_ends(
    engine: Any, tmp_path: Path, clock: Clock
) -> None:
    toy, decider = restarted(engine, tmp_path, clock, PROMPT)
    request = ToyRequest("a", list(range(500, 518)))
    toy.look_up(request)
    toy.scheduler.follow("a", [[1, 2, 3, 4, 5]], 18, num_computed=8)
    clock.now += 0.5
    request.all_token_ids.append(7)
    toy.scheduler.finish("a")
    assert decider.compute_seconds(10) == pytest.approx(0.5)


def test_given_rows_for_a_tier_then_no_step_waits_until_they_are_copied(engine: Any, tmp_path: Path) -> None:
    toy = engine(disk=str(tmp_path / "disk"), disk_bytes="16MB")
    host, may_copy = toy.workers[0]._host, threading.Event()
    gather = host.gather

    def slow(*arguments: Any) -> None:
        assert may_copy.wait(20)
        gather(*arguments)

    host.gather = slow
    idle, toy.idle = toy.idle, lambda: None
    toy.serve(ToyRequest("a", PROMPT))
    for _ in range(5):
        toy._step_loads(set())
    assert toy.scheduler.has_waiting  # the rows are held
    assert toy.look_up(ToyRequest("b", PROMPT)) == 16
    may_copy.set()
    idle()
    assert not toy.scheduler.has_waiting
    again = engine(disk=str(tmp_path / "other"), disk_bytes="16MB")
    assert again.serve(ToyRequest("c", PROMPT)) == 0
    toy.close()
    assert engine(disk=str(tmp_path / "disk"), disk_bytes="16MB").serve(ToyRequest("d", PROMPT)) == 16
