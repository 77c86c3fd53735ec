"""The same requests are planned as ever: who runs when, with which blocks, who is preempted, what is copied and counted.

`same_plans.txt` has a line for each run and a letter for each step of it. A change that is meant to plan otherwise writes it
again, and says in its commit what is else: `python tests/scheduling/test_same_plans.py`.
"""

from __future__ import annotations

import hashlib
from dataclasses import astuple
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from toy_engine import ToyEngine

import kvpool.replay.policies  # noqa: F401  # known by name, also where this file is run
from kvpool import KVCacheConfig, KVCacheManager, LayerSpec, ReuseScope, Tier
from kvpool.errors import NeverFitsError
from kvpool.scheduling import (
    POLICIES,
    BatchPlan,
    CapacityMode,
    Finished,
    LinearCostModel,
    PreemptionMode,
    Request,
    Scheduler,
    SchedulerConfig,
)

PLANS = Path(__file__).with_name("same_plans.txt")
NUM_STEPS, SEEDS, MOST_STEPS = 30, range(36), 2_000
EVICTION = ("2q", "adaptive", "arc", "clock", "cost", "fifo", "lfu", "lru", "priority", "s3fifo", "sieve")
BEGINNINGS = ((), (1,) * 4, (1,) * 9, (2,) * 6)


class Run:
    """A scheduler in a drawn setting, and requests that come and go."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = Random(f"plans {seed}")
        self.now, self.number, self.letters = 0.0, 0, ""
        self.digest = hashlib.sha256()
        size = rng.choice((1, 3, 4))
        layers = [
            LayerSpec(1, 4),
            *(LayerSpec(1, 4 * (1 + n % 2), window=rng.randrange(1, 9)) for n in range(rng.randrange(3))),
        ]
        drafts = rng.choice(((), (), (0, 2, 1)))
        cache = KVCacheConfig(
            layers,
            size,
            gpu_blocks=len(layers) * rng.randrange(20, 60) // size,
            host_blocks=rng.choice((None, 4 * len(layers), 60)),
            disk_blocks=rng.choice((None, None, 9 * len(layers))),
            enable_prefix_caching=rng.random() < 0.8,
            eviction_policy=rng.choice(EVICTION),
            watermark=rng.choice((0.0, 0.01, 0.2)),
        )
        lanes = rng.randrange(2, 7)
        config = SchedulerConfig(
            max_tokens_per_step=lanes + rng.choice((0, 1, 5, 100)),
            max_sequences=lanes,
            max_chunk_tokens=rng.choice((None, None, 1, 3)),
            max_step_seconds=rng.choice((None, None, 1e-6, 5.2e-3)),
            policy=sorted(POLICIES)[seed % len(POLICIES)],
            capacity=rng.choice(list(CapacityMode)),
            preemption=rng.choice(list(PreemptionMode)),
            max_draft_tokens=3 if drafts else 0,
            wait_for_prefix=rng.random() < 0.7,
            prefetch_requests=rng.choice((0, 1, 2)),
        )
        self.manager = KVCacheManager(cache, clock=lambda: self.now)
        costs = LinearCostModel(transfer_bytes_per_second=rng.choice((1e3, 1e12)), transfer_latency=0.0)
        link = rng.choice((0, 0, 1, 4))
        self.scheduler = Scheduler(self.manager, config, costs, clock=lambda: self.now, reports_landings=link > 0)
        self.engine = ToyEngine(self.scheduler, rng.randrange(1, 4), drafts, link)
        if rng.random() < 0.3:
            self.manager.cache.set_quota("a", guaranteed=rng.choice((0.0, 0.2)), maximum=rng.choice((None, 0.5)))

    def add(self) -> None:
        rng = self.rng
        self.number += 1
        patience = rng.choice((None, None, None, 3.0))
        request = Request(
            self.number,
            [*rng.choice(BEGINNINGS), *(rng.randrange(3) for _ in range(rng.randrange(1, 9)))],
            rng.randrange(1, 17),
            n=rng.choice((1, 1, 1, 2, 3)),
            priority=rng.randrange(3),
            scope=ReuseScope(tenant=rng.choice(("a", "a", "b"))),
            stop_token_ids=rng.choice(((), (), (3,), (5, 6, 7))),
            deadline=None if patience is None else self.now + patience,
        )
        try:
            self.scheduler.add(request)
        except NeverFitsError:
            self.note("refused")

    def live(self) -> list[Any]:
        return list(self.scheduler._groups)

    def step(self) -> None:
        """What comes in, what goes, a plan, and what it brought."""
        rng, engine = self.rng, self.engine
        for _ in range(rng.choice((0, 0, 1, 1, 2))):
            self.add()
        if engine.launched and rng.random() < 0.1:
            engine.abandon()
        if rng.random() < 0.08 and (live := self.live()):
            self.note(told(self.scheduler.cancel(rng.choice(live))))
        if rng.random() < 0.05:
            self.manager.cache.evict(rng.randrange(1, 9))
        if rng.random() < 0.05 and self.manager.config.num_blocks(Tier.HOST):
            self.manager.cache.offload(rng.randrange(1, 9))
        self.now += rng.choice((0.1, 0.1, 2.0))
        plan = engine.step()
        if rng.random() < 0.3 and not plan.is_empty:
            self.scheduler.observe(plan, rng.choice((1e-3, 1e-2)))
        self.note(planned(plan), self.state())
        self.letters += self.digest.hexdigest()[0]

    def state(self) -> list[Any]:
        scheduler, costs = self.scheduler, self.scheduler._queues.costs
        numbers = scheduler.num_waiting, scheduler.num_swapped, scheduler.num_in_flight, scheduler.num_arriving
        waiting = [(each.request.id, each.index) for each in scheduler.waiting(99)]
        pools = [(pool.free, pool.cached) for pool in self.manager.stats().pools]
        return [numbers, waiting, astuple(scheduler.stats), pools, f"{costs.decode_seconds(3, 100):.9g}"]

    def note(self, *values: Any) -> None:
        self.digest.update(repr(values).encode())

    def run(self) -> str:
        for _ in range(NUM_STEPS):
            self.step()
        for _ in range(MOST_STEPS):
            if self.scheduler.has_work:
                self.engine.step()
        self.note(self.state(), [told(self.engine.finished[number]) for number in sorted(self.engine.finished)])
        return self.letters + self.digest.hexdigest()[0]


def told(finished: Finished) -> list[Any]:
    outputs = [(output.sample, output.token_ids.tolist(), output.reason.value) for output in finished.outputs]
    return [finished.request.id, finished.reason.value, outputs]


def planned(plan: BatchPlan) -> list[Any]:
    arrays = ("token_ids", "positions", "slots", "query_start", "kv_lengths", "lanes", "num_samples", "num_drafts")
    more = ("sampling_rows", "logits_indices", "first_samples", "decodes_several")
    lists = ("sequences", "admitted", "resumed", "preempted")
    return [
        [np.asarray(getattr(plan, name)).tolist() for name in (*arrays, *more)],
        [[(each.request.id, each.index) for each in getattr(plan, name)] for name in lists],
        [(op.kind.value, op.group, op.src.tolist(), op.dst.tolist(), op.num_tokens) for op in plan.copies],
        [told(done) for done in plan.finished],
        (plan.num_decode, plan.num_prefill_tokens, plan.is_uniform, plan.has_unknown_tokens),
    ]


@pytest.mark.quick("0", "12", "30")
@pytest.mark.parametrize("first", range(0, len(SEEDS), 6))
def test_given_the_same_requests_then_their_plans_are_those_of_before(first: int) -> None:
    lines = PLANS.read_text().splitlines()
    for seed, before in list(zip(SEEDS, lines, strict=True))[first : first + 6]:
        now = Run(seed).run()
        changed = next((step for step, letter in enumerate(now) if letter != before[step]), None)
        assert now == before, f"run {seed} differs from step {changed} on; is that meant?"


if __name__ == "__main__":
    PLANS.write_text("".join(f"{Run(seed).run()}\n" for seed in SEEDS))
