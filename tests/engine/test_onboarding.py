"""Prefixes that come back from the host while others decode: nobody else waits for them, and the answers stay the same."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from models import random_prompt, tiny_model  # noqa: E402

from kvpool import Tier  # noqa: E402
from kvpool.engine import Engine, SamplingParams  # noqa: E402
from kvpool.errors import TransferError  # noqa: E402
from kvpool.scheduling import SchedulerConfig  # noqa: E402
from kvpool.scheduling.running import Arrivals  # noqa: E402
from kvpool.storage.moving import move  # noqa: E402
from kvpool.storage.transfer_steps import StepInFlight, TransferStep  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_self_check")

LINK_STEPS = 3  # that a copy from the host takes
GREEDY = SamplingParams(max_new_tokens=12, ignore_eos=True)


class OnTheWay:
    """A copy whose bytes are there after some steps, or when somebody waits for them."""

    def __init__(self, link: SlowLink, step: TransferStep) -> None:
        self._link, self._step = link, step
        self._due = link.num_steps + LINK_STEPS
        self._moved = False

    def done(self) -> bool:
        if self._link.num_steps >= self._due:
            self._move()
        return self._moved

    def wait(self) -> None:
        if not self._moved:
            self._link.num_waits += 1
            self._move()

    order = wait

    def _move(self) -> None:
        if not self._moved:
            move(self._step)
        self._moved = True


class SlowLink:
    """Makes the copies of an engine on a CPU as slow as those over a link, and lets it tell what landed."""

    def __init__(self, engine: Engine) -> None:
        self.num_steps = self.num_waits = 0
        self.rows: list[list[Any]] = []  # the requests in each step
        loop, transfers = engine._loop, engine.plane.transfers
        loop.scheduler._queues.running.arrivals = Arrivals()
        start, step, run = transfers._start, loop.step, loop.runner.run

        def slow_start(copies: TransferStep) -> Any:
            if (copies.source.tier, copies.target.tier) != (Tier.HOST, Tier.GPU):
                return start(copies)
            for completion in transfers._in_flight.before(copies):
                completion.wait()
            return StepInFlight(copies, OnTheWay(self, copies))

        def counted_step() -> None:
            self.num_steps += 1
            step()

        def noted_run(plan: Any, *rest: Any, **options: Any) -> Any:
            self.rows.append([sequence.request.id for sequence in plan.sequences])
            return run(plan, *rest, **options)

        transfers._start = slow_start  # type: ignore[method-assign]
        loop.step = counted_step  # type: ignore[method-assign]
        loop.runner.run = noted_run  # type: ignore[method-assign]


def make_engine(host_write: Any = "back", **options: Any) -> Engine:
    limits = SchedulerConfig(max_tokens_per_step=64, max_sequences=8)
    cache = {"watermark": 0.0, "host_write": host_write}
    return Engine(tiny_model("llama"), block_size=4, host_bytes=2**20, scheduler=limits, cache=cache, **options)


@pytest.fixture
def engine() -> Iterator[Engine]:
    with make_engine(kv_blocks=64) as made:
        yield made


def prompt(length: int, seed: int) -> list[int]:
    tokens: list[int] = random_prompt(length, seed=seed).tolist()
    return tokens


def test_given_a_prefix_on_the_host_when_others_decode_then_they_go_on_while_it_comes(engine: Engine) -> None:
    text = prompt(40, 1)
    want = engine.generate([text], GREEDY)[0].token_ids
    engine.manager.cache.offload(64)
    link = SlowLink(engine)
    reader = engine.submit(
        prompt(6, 2), SamplingParams(max_new_tokens=60, ignore_eos=True), on_chunk=lambda chunk: ask()
    )
    asked: list[Any] = []

    def ask() -> None:  # in the engine's thread: the reader decodes
        if not asked:
            asked.append(engine.submit(text, GREEDY))

    reader.result(60)
    done = asked[0].result(60)

    assert done.token_ids == want
    assert done.num_cached_tokens == 39
    assert engine.stats().scheduler.arrival_waits == 1
    assert link.num_waits == 0
    first = next(number for number, ids in enumerate(link.rows) if len(ids) == 2)
    assert first > LINK_STEPS


@pytest.mark.quick("back")
@pytest.mark.parametrize("host_write", ["back", "through"])
def test_given_conversations_in_a_cache_that_is_too_small_then_they_are_those_of_a_large_one(host_write: Any) -> None:
    def talk(engine: Engine) -> list[list[int]]:
        texts = [prompt(20 + seed, seed) for seed in range(6)]
        for turn in range(3):
            outputs = engine.generate(texts, GREEDY)
            texts = [text + out.token_ids + prompt(5, 10 * turn + 7) for text, out in zip(texts, outputs, strict=True)]
        return texts

    with make_engine(kv_blocks=400) as large:
        want = talk(large)
    with make_engine(kv_blocks=40, host_write=host_write) as small:
        link = SlowLink(small)
        assert talk(small) == want
        stats = small.stats()
        assert stats.cache.onboarded_blocks > 0
        assert (stats.cache.blocks_copied_ahead > 0) == (host_write != "back")
        assert stats.scheduler.arrival_waits > 0
        assert link.rows
        small.manager.check()


def test_given_a_link_that_fails_once_then_the_prefix_comes_with_the_next_copies(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = prompt(40, 1)
    want = engine.generate([text], GREEDY)[0].token_ids
    engine.manager.cache.offload(64)
    SlowLink(engine)
    engine.generate([prompt(3, 9)], GREEDY)  # the offload is under way before the link fails
    reader = engine.submit(
        prompt(6, 2), SamplingParams(max_new_tokens=30, ignore_eos=True), on_chunk=lambda chunk: ask()
    )
    asked: list[Any] = []
    submit = engine.plane.transfers.submit

    def failing(ops: Any, **options: Any) -> Any:
        if ops:
            monkeypatch.setattr(engine.plane.transfers, "submit", submit)
            error = TransferError("the link is down")
            error.remaining = list(ops)
            raise error
        return submit(ops, **options)

    def ask() -> None:
        if not asked:
            monkeypatch.setattr(engine.plane.transfers, "submit", failing)
            asked.append(engine.submit(text, GREEDY))

    with pytest.raises(Exception, match="the link is down"):
        reader.result(60)  # it was part of the step that failed
    assert asked[0].result(60).token_ids == want
