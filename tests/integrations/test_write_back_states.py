"""Write-back under random steps of many requests, with copies that come late: every row holds the block of its name.

The engine plans steps as vLLM does, ahead of what the workers do. It preempts, aborts and resets, and copies of it fail.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest

pytest.importorskip("torch")

from test_write_back import OwnCache
from toy import BLOCK, LAYERS, PAGE_BYTES, ToyEngine, ToyRequest, _salt, content

from kvpool.errors import TransferError
from kvpool.integrations.connector.orders import Orders
from kvpool.integrations.connector.pages import EnginePages, HostRows, Move

GARBAGE = b"\xee" * PAGE_BYTES


class SlowPages(EnginePages):
    """A link that copies when it likes, and at the latest when the engine waits for it. Some copies fail."""

    copies_later = True

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.rng = random.Random(0)
        self.reads: list[Callable[[], None]] = []

    def read(self, moves: Sequence[Move], host: HostRows) -> Callable[[], bool]:
        if self.rng.random() < 0.05:
            raise TransferError("a copy failed")
        copy, given = partial(self._copy, to_host=True), list(moves)

        def run() -> None:
            if given:
                copy(given, host)
                given.clear()

        self.reads.append(run)
        return lambda: self._maybe(given)

    def write(self, moves: Sequence[Move], host: HostRows) -> Callable[[], bool]:
        if self.rng.random() < 0.05:
            raise TransferError("a copy failed")
        copy, given = self._copy_in_turns, list(moves)

        def is_over() -> bool:
            if given and self.rng.random() < 0.5:
                copy(given, host)
                given.clear()
            return not given

        return is_over

    def _maybe(self, given: list[Move]) -> bool:
        if given and self.rng.random() < 0.3:  # streams go in order
            self.fence()
        return not given

    def fence(self) -> None:
        for run in self.reads:
            run()
        self.reads.clear()

    def begin_step(self, *, fences_loads: bool) -> None:
        if fences_loads:
            self.fence()


@dataclass
class Running:
    request: ToyRequest
    pages: list[int] = field(default_factory=list)
    computed: int = 0  # tokens that planned steps compute
    is_loading: bool = False
    is_new: bool = True
    is_over: bool = False


class StepEngine(ToyEngine):
    """Plans a step while the one before it runs."""

    def __init__(self, *, num_pages: int, step_pages: int, seed: int, **options: Any) -> None:
        self.own = OwnCache(num_pages)
        self.step_tokens = step_pages * BLOCK
        super().__init__(num_pages=num_pages, cache=self.own, step_pages=step_pages, pages=SlowPages, **options)
        self.rng = random.Random(seed)
        for worker in self.workers:
            worker._pages.rng = self.rng
        self.active: list[Running] = []
        self.waiting: list[Running] = []
        self.planned: list[tuple[Orders, list[tuple[Running, list[int], int, int]], bool]] = []
        self.named: dict[Any, tuple[list[int], str]] = {}  # tokens and salt of each name

    def plan(self) -> None:
        budget, steps, going_on = self.step_tokens, [], []
        for each in list(self.active):
            if each not in self.active:
                break  # it was preempted, and all behind it
            total = len(each.request.all_token_ids)
            upto = min(total, each.computed + budget)
            lacking = max(0, -(-upto // BLOCK) - len(each.pages))
            while lacking > len(self.own.free) and self.active[-1] is not each:
                self.preempt(self.active[-1])
            if upto == each.computed:
                continue
            if lacking > len(self.own.free):
                self.preempt(each)
                continue
            new = self.own.take([], lacking)
            each.pages += new
            going_on.append((each.request.request_id, [new] if new else None, upto))
            steps.append((each, list(each.pages), each.computed, upto))
            self._plan(each, upto)
            budget -= upto - each.computed
            each.computed = upto
        followed = []
        for each in list(self.waiting):
            if not budget or each.is_loading:
                continue
            if not each.pages:
                names = each.request.block_hashes
                found = self.own.found(names[: (len(each.request.all_token_ids) - 1) // BLOCK])
                count = self.scheduler.look_up(each.request, len(found) * BLOCK)
                if count is None or self.rng.random() < 0.1 or self._lacks(found, count // BLOCK):
                    continue
                each.computed = len(found) * BLOCK
                each.pages = self.own.take(found, count // BLOCK)
                self.scheduler.order_load(each.request, [list(each.pages)], count)
                if count:
                    each.computed += count
                    each.is_loading = True
                    continue
            upto = min(len(each.request.all_token_ids), each.computed + budget)
            lacking = max(0, -(-upto // BLOCK) - len(each.pages))
            if lacking > len(self.own.free):
                self.own.give_back(each.pages)
                each.pages, each.computed = [], 0
                continue
            each.pages += self.own.take([], lacking)
            self.waiting.remove(each)
            self.active.append(each)
            followed.append((each.request.request_id, [list(each.pages)], upto, each.computed))
            steps.append((each, list(each.pages), each.computed, upto))
            self._plan(each, upto)
            budget -= upto - each.computed
            each.computed = upto
        for name, pages, upto, computed in followed:
            self.scheduler.follow(name, pages, upto, num_computed=computed)
        self.scheduler.follow_on(going_on)
        self.planned.append((self.scheduler.orders(is_idle=not steps), steps, not steps))

    def _lacks(self, found: list[int], number: int) -> bool:
        return number + sum(page in self.own.free for page in found) > len(self.own.free)

    def _plan(self, each: Running, upto: int) -> None:
        """vLLM names blocks when it plans the step that fills them."""
        for page, name in list(zip(each.pages, each.request.block_hashes, strict=False))[: upto // BLOCK]:
            self.own.give_name(page, name)
        for number, name in enumerate(each.request.block_hashes, 1):
            self.named[name] = each.request.all_token_ids[: number * BLOCK], _salt(each.request)

    def preempt(self, each: Running) -> None:
        self.active.remove(each)
        self.own.give_back(each.pages)
        each.pages, each.computed = [], 0
        self.waiting.insert(0, each)

    def run(self) -> None:
        orders, steps, is_idle = self.planned.pop(0)
        for worker in self.workers:
            worker.begin_step(orders)
        for each, pages, first, upto in steps:
            for block in range(first // BLOCK, -(-upto // BLOCK)):
                self._write(each.request, pages, block, upto)
        failed: set[int] = set()
        loaded: list[str] = []
        for worker in self.workers:
            worker.load(orders)
            worker.store(orders)
            worker.poll(is_idle=is_idle)
            failed |= worker.take_failed_pages()
            for name in worker.take_loaded():
                self._ended[name] = self._ended.get(name, 0) + 1
                if self._ended[name] == len(self.workers):
                    del self._ended[name]
                    loaded.append(name)
        for each in self.waiting:
            if each.is_loading:
                each.computed = self._first_failed(each.pages, failed, each.computed)
        self._report()
        for each in [each for each in self.waiting if each.request.request_id in loaded]:
            each.is_loading = False
            if each.is_over:
                self.waiting.remove(each)
                self.own.give_back(each.pages)
                continue
            assert self.holds(each.request, each.pages, each.computed // BLOCK)
            self._plan(each, each.computed)
            if not each.computed:
                self.own.give_back(each.pages)
                each.pages = []

    def _write(self, request: ToyRequest, pages: list[int], block: int, upto: int) -> None:
        end = (block + 1) * BLOCK
        for rank, layers in enumerate(self.layers):
            for layer in layers.values():
                value = content(request.all_token_ids[:end], rank, _salt(request)) if end <= upto else GARBAGE
                layer[pages[block]] = layer.new_tensor(bytearray(value))

    def end(self, each: Running) -> None:
        self.scheduler.finish(each.request.request_id)
        if each.is_loading:
            each.is_over = True
            return
        (self.active if each in self.active else self.waiting).remove(each)
        self.own.give_back(each.pages)

    def reset(self) -> None:
        """With `reset_running_requests`, if no load is in flight; else vLLM keeps its own cache."""
        if not any(each.is_loading for each in self.waiting):
            for each in reversed(list(self.active)):
                self.preempt(each)
            self.own.forget()
        self.scheduler.reset()

    def check_rows(self) -> None:
        host = self.scheduler.host
        for name, row in host._rows.items():
            tokens, salt = self.named[name]
            for rank, worker in enumerate(self.workers):
                assert worker._host.array[row].tobytes() == content(tokens, rank, salt) * LAYERS
        host.check()


@pytest.mark.quick("0")
@pytest.mark.parametrize("seed", range(12))
def test_given_random_steps_then_every_row_holds_the_block_of_its_name(engine: Any, seed: int) -> None:
    rng = random.Random(seed)
    toy = engine(
        kind=StepEngine,
        num_pages=rng.choice([16, 24, 40]),
        step_pages=rng.choice([2, 5, 12]),
        host_blocks=rng.choice([3, 12, 30, 60]),
        num_workers=rng.choice([1, 2]),
        seed=seed,
    )
    begins = [[rng.randrange(9) for _ in range(40)] for _ in range(4)]
    for number in range(250):
        if rng.random() < 0.3 and len(toy.active) + len(toy.waiting) < 6:
            tokens = rng.choice(begins)[: rng.randrange(4, 41)] + [rng.randrange(9) for _ in range(rng.randrange(1, 9))]
            salt, params = rng.choice([None, "ada"]), rng.choice([None, None, {"kvpool": {"no_store": True}}])
            toy.waiting.append(Running(ToyRequest(str(number), tokens, cache_salt=salt, kv_transfer_params=params)))
        for each in toy.active:
            if each.computed == len(each.request.all_token_ids) and rng.random() < 0.7:
                each.request.all_token_ids.append(rng.randrange(9))
        everybody = [each for each in toy.active + toy.waiting if not each.is_over]
        if everybody and rng.random() < 0.2:
            toy.end(rng.choice(everybody))
        if rng.random() < 0.01:
            toy.reset()
        toy.plan()
        while len(toy.planned) > rng.randrange(2):
            toy.run()
        toy.check_rows()
    assert toy.scheduler.stats()["stored"]
