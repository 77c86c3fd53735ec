"""Random arrivals, cancellations and deadlines against a tiny pool: all that is not cut off ends with the right tokens.

The toy engine derives each token from what the blocks hold of the whole history, so a sequence that was preempted, swapped,
resumed or forked must end exactly as it would alone. The manager proves its invariants after every step, the number of steps
is bounded (no livelock), and at the end nobody holds a block (no leak).
"""

from __future__ import annotations

import sys
from pathlib import Path
from random import Random
from typing import Any

import hypothesis.strategies as st
from hypothesis import event, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from wild_configs import TENANTS, draw_layer

from managers import FULL

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scheduling"))
from toy_engine import ToyEngine, expected_output

from kvpool import KVCacheConfig, KVCacheManager, ReuseScope, Tier
from kvpool.errors import InvalidArgumentError, NeverFitsError
from kvpool.eviction import policy_names
from kvpool.scheduling import (
    POLICIES,
    CapacityMode,
    Finished,
    FinishReason,
    LinearCostModel,
    PreemptionMode,
    Request,
    Scheduler,
    SchedulerConfig,
)

CUT_OFF = {FinishReason.CANCELLED, FinishReason.DEADLINE, FinishReason.FAILED, FinishReason.REFUSED}
QUOTAS = [(0, None), (0, 0), (0, 0.5), (0.2, None), (0.3, 0.5), (0.5, None)]  # guaranteed and maximum

# Few different tokens and beginnings, so that prompts share prefixes, also while they are being computed.
prompts = st.tuples(
    st.sampled_from([(), (1,) * 4, (1,) * 9, (2,) * 6]), st.lists(st.integers(0, 2), min_size=1, max_size=8)
)


def draw_config(
    rng: Random,
    num_windows: int,
    block_size: int,
    gpu_tokens: int,
    host_blocks: int | None,
    disk_blocks: int | None,
    caching: bool,
    watermark: float,
    **_: Any,
) -> KVCacheConfig:
    """One full group, whose blocks tell the history, and windows of any kind; pools of different sizes on every tier."""
    layers = [FULL, *(draw_layer(rng, block_size) for _ in range(num_windows))]
    groups = [len(pool.groups) for pool in KVCacheConfig(layers, block_size, gpu_blocks=len(layers)).pools]
    offload = rng.random() < 0.8
    return KVCacheConfig(
        layers,
        block_size,
        gpu_blocks=[n * max(3, gpu_tokens // block_size) + rng.randrange(4) for n in groups],
        host_blocks=None if host_blocks is None else [n + rng.randrange(host_blocks + 1) for n in groups],
        disk_blocks=None if disk_blocks is None else [n + rng.randrange(disk_blocks + 1) for n in groups],
        enable_prefix_caching=caching,
        partial_match=rng.random() < 0.8,
        offload_on_evict=offload,
        host_write=rng.choice(("back", "through")) if offload else "back",
        eviction_policy=rng.choice(policy_names()),
        watermark=watermark,
    )


class SchedulerMachine(RuleBasedStateMachine):
    """A scheduler, the engine that runs its plans, and the requests that were added."""

    @initialize(
        rng=st.randoms(use_true_random=False),
        num_windows=st.sampled_from([0, 0, 1, 1, 2, 3]),
        block_size=st.sampled_from([1, 3, 4]),
        gpu_tokens=st.integers(16, 40),
        host_blocks=st.sampled_from([None, 0, 4, 40]),
        disk_blocks=st.sampled_from([None, None, 0, 5]),
        caching=st.sampled_from([True, True, False]),
        watermark=st.sampled_from([0.0, 0.01, 0.2]),
        policy=st.sampled_from(sorted(POLICIES)),
        capacity=st.sampled_from(CapacityMode),
        preemption=st.sampled_from(PreemptionMode),
        max_sequences=st.integers(2, 6),
        spare_tokens=st.sampled_from([0, 1, 5, 100]),
        chunk=st.sampled_from([None, 1, 3]),
        goal=st.sampled_from([None, None, 1e-6, 5.2e-3]),  # decoding alone takes longer; a few tokens fit beside it
        depth=st.integers(1, 3),
        drafts=st.sampled_from([(), (), (0, 2, 1)]),
        slow_link=st.booleans(),
        quotas=st.tuples(*[st.sampled_from(QUOTAS)] * len(TENANTS)),
        link_steps=st.sampled_from([0, 1, 4]),
    )
    def start(self, **chosen: Any) -> None:
        self.now = 0.0
        self.manager = KVCacheManager(draw_config(**chosen), clock=lambda: self.now)
        config = SchedulerConfig(
            max_tokens_per_step=chosen["max_sequences"] + chosen["spare_tokens"],
            max_sequences=chosen["max_sequences"],
            max_chunk_tokens=chosen["chunk"],
            max_step_seconds=chosen["goal"],
            policy=chosen["policy"],
            capacity=chosen["capacity"],
            preemption=chosen["preemption"],
            max_draft_tokens=3 if chosen["drafts"] else 0,
        )
        costs = LinearCostModel(transfer_bytes_per_second=1e3 if chosen["slow_link"] else 1e12, transfer_latency=0.0)
        reports = chosen["link_steps"] > 0
        self.scheduler = Scheduler(self.manager, config, costs, clock=lambda: self.now, reports_landings=reports)
        self.engine = ToyEngine(self.scheduler, chosen["depth"], chosen["drafts"], chosen["link_steps"])
        self.requests: dict[int, Request] = {}
        self.cancelled: dict[int, Finished] = {}
        self.number = 0
        self.guarantees_changed = False  # after requests were accepted: it may take from them what they were promised
        for tenant, quota in zip(TENANTS, chosen["quotas"], strict=True):
            self.set_quota(tenant, quota)

    @rule(
        prompt=prompts,
        max_new_tokens=st.integers(1, 16),
        n=st.sampled_from([1, 1, 1, 2, 3]),
        priority=st.integers(0, 2),
        tenant=st.sampled_from(TENANTS),
        stops=st.sampled_from([(), (), (3,), (5, 6, 7)]),
        patience=st.sampled_from([None, None, None, 3.0]),
    )
    def add(
        self,
        prompt: tuple[tuple[int, ...], list[int]],
        patience: float | None,
        tenant: str,
        stops: tuple[int, ...],
        **options: Any,
    ) -> None:
        self.number += 1
        request = Request(
            self.number,
            [*prompt[0], *prompt[1]],
            options.pop("max_new_tokens"),
            scope=ReuseScope(tenant=tenant),
            stop_token_ids=stops,
            deadline=None if patience is None else self.now + patience,
            **options,
        )
        try:
            self.scheduler.add(request)
        except NeverFitsError:
            event("refused")
        else:
            self.requests[request.id] = request

    @rule(steps=st.integers(1, 5))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.now += 0.1
            plan = self.engine.step()
            config = self.scheduler.config
            assert plan.num_tokens <= config.max_tokens_per_step
            assert self.scheduler.num_running <= config.max_sequences
            self.manager.check()

    @precondition(lambda self: self.engine.launched)
    @rule()
    def complete(self) -> None:
        self.engine.complete()

    @precondition(lambda self: self.engine.launched)
    @rule()
    def abandon(self) -> None:
        self.engine.abandon()

    @precondition(lambda self: self.live())
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        chosen = data.draw(st.sampled_from(self.live()))
        self.cancelled[chosen] = self.scheduler.cancel(chosen)

    @rule()
    def let_time_pass(self) -> None:
        self.now += 2.0

    @rule(num_blocks=st.integers(1, 8))
    def evict(self, num_blocks: int) -> None:
        self.manager.cache.evict(num_blocks)

    @rule(num_blocks=st.integers(1, 8), tier=st.sampled_from([Tier.GPU, Tier.HOST]))
    def offload(self, num_blocks: int, tier: Tier) -> None:
        if self.manager.config.num_blocks(Tier(tier + 1)):
            self.manager.cache.offload(num_blocks, tier=tier)

    @rule(tenant=st.sampled_from(TENANTS), quota=st.sampled_from(QUOTAS))
    def set_quota(self, tenant: str, quota: tuple[float, float | None]) -> None:
        guaranteed, maximum = quota
        try:
            self.manager.cache.set_quota(tenant, guaranteed=guaranteed, maximum=maximum)
        except InvalidArgumentError:
            event("more was guaranteed than there is")
        else:
            self.guarantees_changed |= guaranteed > 0 and bool(self.live())

    def live(self) -> list[int]:
        return [i for i in self.requests if i not in self.engine.finished and i not in self.cancelled]

    @invariant()
    def the_manager_is_consistent(self) -> None:
        if hasattr(self, "manager"):
            self.manager.check()

    @invariant()
    def places_are_what_the_manager_reserved(self) -> None:
        if hasattr(self, "scheduler"):
            running = self.scheduler._queues.running
            for sequence in running.members:
                ahead = sequence.live_handle().num_reserved - running.lanes.places[sequence.lane]
                # One that waits for its blocks, or did until now, keeps the place of its only token.
                assert ahead == 0 or (ahead == 1 and sequence not in running.decoding)

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        work = sum(len(r.prompt) + r.max_new_tokens * r.n for r in self.requests.values())
        self.engine.drain(max_steps=100 + 20 * work)
        self.assert_outputs_are_right()
        assert self.scheduler.num_running == self.scheduler.num_waiting == self.scheduler.num_swapped == 0
        assert all(pool.referenced == 0 for pool in self.manager.stats().pools)
        assert self.manager.stats().num_sequences == 0
        stats = self.scheduler.stats
        if self.scheduler.config.capacity is CapacityMode.GUARANTEED and not self.guarantees_changed:
            assert (stats.preemptions, stats.stalls) == (0, 0)
        for name in ("preemptions", "swapped_out", "stalls", "prefix_waits", "accepted_draft_tokens", "cached_tokens"):
            event(f"{name}: {getattr(stats, name) > 0}")

    def assert_outputs_are_right(self) -> None:
        for number, request in self.requests.items():
            done = self.cancelled.get(number) or self.engine.finished[number]
            assert done.reason is not FinishReason.REFUSED or self.guarantees_changed
            outputs = {output.sample: output for output in done.outputs}
            if done.reason not in CUT_OFF:
                assert sorted(outputs) == list(range(request.n))
            for sample, output in outputs.items():
                expected = expected_output(request, sample)
                if output.reason in CUT_OFF:
                    expected = expected[: len(output.token_ids)]
                assert output.token_ids.tolist() == expected
                assert output.reason in CUT_OFF or (output.reason is FinishReason.STOP) == (
                    expected[-1] in request.stop_ids
                )


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(stateful_step_count=40)
