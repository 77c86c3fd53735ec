"""Serves a trace in simulated time: the real scheduler and manager, with a cost model instead of a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvpool.config import KVCacheConfig, LayerSpec, StateSpec
from kvpool.errors import InvalidArgumentError, NeverFitsError, TraceError
from kvpool.manager import KVCacheManager
from kvpool.replay.simulate import ReplayConfig
from kvpool.replay.trace import Trace
from kvpool.scheduling import BatchPlan, CostModel, Request, ScheduledSequence, Scheduler, SchedulerConfig

SAMPLED = 2**31 - 3  # the token that every step samples: never part of a prompt
MAX_AHEAD = 64  # decode steps that are planned as one


@dataclass(frozen=True)
class ServingConfig:
    """A replay configuration, the model's layers, what steps cost, and what counts as served well.

    `speed` divides the time between arrivals. `slo_ttft` and `slo_tpot` are seconds to the first and per further token.
    """

    cache: ReplayConfig
    layers: Sequence[LayerSpec | StateSpec]
    costs: CostModel
    speed: float = 1.0
    slo_ttft: float = 2.0
    slo_tpot: float = 0.1
    max_tokens_per_step: int = 8192
    max_sequences: int = 256

    def __post_init__(self) -> None:
        if not self.speed > 0 or not self.slo_ttft > 0 or not self.slo_tpot > 0:
            raise InvalidArgumentError("speed, slo_ttft and slo_tpot must be above 0")
        if self.cache.capacity is None:
            raise InvalidArgumentError("serving needs a capacity: a GPU is finite")


@dataclass
class ServingResult:
    """Times in seconds of simulated time."""

    served: int
    refused: int  # larger than the whole cache
    ttft_p50: float
    ttft_p90: float
    ttft_p99: float
    tpot_p50: float
    output_tokens_per_second: float
    served_requests_per_second: float
    goodput: float  # fraction of all requests within both limits
    serving_token_hit_ratio: float
    simulated_seconds: float

    def row(self) -> dict[str, Any]:
        """Columns for the table of replays."""
        return dict(self.__dict__)


def simulate_serving(trace: Trace, config: ServingConfig) -> ServingResult:
    """Serves every request of a trace at its time of arrival, as an engine would."""
    if not trace.reuse_known:
        raise TraceError(f"{trace.name} has lengths only: what its prompts share is not known")
    return _Serving(trace, config).run()


class _Serving:
    def __init__(self, trace: Trace, config: ServingConfig) -> None:
        self.trace, self.config = trace, config
        block_size = config.cache.block_size or trace.block_size
        cache = KVCacheConfig(
            config.layers,
            block_size,
            **_sizes(config.cache, block_size),
            checkpoint_every=config.cache.checkpoint_every,
            host_write=config.cache.host_write,
            event_buffer_size=0,
            objective=config.cache.objective,
            depth_cost=config.cache.time.depth_cost if config.cache.objective == "seconds" else None,
        )
        self.drafts = cache.state_group is None  # others compute accepted drafts again
        self.now = 0.0
        self.manager = KVCacheManager(cache, policy=config.cache.policy, clock=lambda: self.now)
        limits = SchedulerConfig(
            max_tokens_per_step=config.max_tokens_per_step,
            max_sequences=config.max_sequences,
            max_draft_tokens=MAX_AHEAD - 1,
        )
        self.scheduler = Scheduler(self.manager, limits, config.costs, clock=lambda: self.now)
        self.first_token = np.full(len(trace), np.nan)
        self.finished = np.full(len(trace), np.nan)
        self.left = np.maximum(trace.output_lengths, 1)  # tokens that each request has yet to generate
        self.decoded: BatchPlan | None = None  # the last step, if the next one is the same unless a request arrives
        self.refused = 0

    def run(self) -> ServingResult:
        arrivals = np.sort(self.trace.timestamps - self.trace.timestamps.min(initial=0.0)) / 1000 / self.config.speed
        order = np.argsort(self.trace.timestamps, kind="stable")
        at = 0
        while at < len(order) or self.scheduler.has_work:
            while at < len(order) and arrivals[at] <= self.now:
                self._add(int(order[at]), float(arrivals[at]))
                at += 1
            if not self.scheduler.has_work:
                if at < len(order):
                    self.now = float(arrivals[at])
                continue
            self._step(float(arrivals[at]) if at < len(order) else float("inf"))
        by_arrival = np.empty(len(order))
        by_arrival[order] = arrivals
        return self._result(by_arrival)

    def _add(self, index: int, arrival: float) -> None:
        outputs = max(1, int(self.trace.output_lengths[index]))
        try:
            self.scheduler.add(Request(index, self._prompt(index), outputs, arrival=arrival))
        except NeverFitsError:
            self.refused += 1

    def _prompt(self, index: int) -> Any:
        """Tokens for the ids of a request: each id becomes `unit` equal tokens, so equal ids give equal tokens."""
        tokens = np.repeat(self.trace.ids_of(index), self.trace.unit)[: max(1, int(self.trace.input_lengths[index]))]
        return tokens if len(tokens) else [SAMPLED]

    def _step(self, next_arrival: float) -> None:
        ahead = self._uninterrupted(next_arrival)
        if ahead > 1 and self.decoded is not None:
            drafts = np.full(ahead - 1, SAMPLED, np.int32)
            for sequence in self.decoded.sequences:
                self.scheduler.propose(sequence, drafts)
        plan = self.scheduler.step()
        self.now += max(self._seconds(plan), 1e-6)
        rows = plan.sampling_rows
        counts = plan.num_samples[rows] + plan.num_drafts[rows]
        for row, count in zip(rows.tolist(), counts.tolist(), strict=True):
            index: Any = plan.sequences[row].request.id
            self.left[index] -= count
            if np.isnan(self.first_token[index]):
                self.first_token[index] = self.now
        result = self.scheduler.complete(plan, [SAMPLED] * int(counts.sum()), counts)
        for done in result.finished:
            finished: Any = done.request.id
            self.finished[finished] = self.now
        settled = (
            plan.num_decode == len(plan.sequences) == self.scheduler.num_running and not self.scheduler.num_swapped
        )
        self.decoded = plan if settled and not result.finished else None

    def _uninterrupted(self, next_arrival: float) -> int:
        """How many decode steps come now in which no request arrives or finishes. They are planned as one, with drafts.

        What is computed, when, and what the cache holds afterwards are the same. It only takes fewer plans.
        """
        plan = self.decoded
        if plan is None or self.scheduler.num_waiting or not self.drafts:
            return 1
        num = len(plan.sequences)
        most = min(MAX_AHEAD, self.config.max_tokens_per_step // num)
        most = min(most, *(int(self.left[_index(sequence)]) for sequence in plan.sequences))
        if 8 * most < num:  # verifying drafts row by row would cost more than it saves
            return 1
        context, now, steps = int(plan.kv_lengths.sum()), self.now, 0
        while steps < most and now < next_arrival:
            steps += 1
            now += max(self.config.costs.decode_seconds(num, context + steps * num), 1e-6)
        return max(steps, 1)

    def _seconds(self, plan: BatchPlan) -> float:
        """Seconds that a plan takes. Each draft stands for one step before the last one."""
        seconds = plan.seconds(self.config.costs, self.manager.config)
        num, drafts = plan.num_decode, int(plan.num_drafts.max(initial=0))
        context = int(plan.kv_lengths[:num].sum())
        return seconds + sum(
            max(self.config.costs.decode_seconds(num, context - before * num), 1e-6) for before in range(1, drafts + 1)
        )

    def _result(self, arrivals: Any) -> ServingResult:
        served = ~np.isnan(self.finished)
        ttft = (self.first_token - arrivals)[served]
        outputs = np.maximum(self.trace.output_lengths, 1)[served]
        tpot = (self.finished - self.first_token)[served] / np.maximum(outputs - 1, 1)
        good = (ttft <= self.config.slo_ttft) & (tpot <= self.config.slo_tpot)
        percentiles = np.percentile(ttft, [50, 90, 99]).tolist() if len(ttft) else [0.0] * 3
        return ServingResult(
            served=int(served.sum()),
            refused=self.refused,
            ttft_p50=percentiles[0],
            ttft_p90=percentiles[1],
            ttft_p99=percentiles[2],
            tpot_p50=float(np.median(tpot)) if len(tpot) else 0.0,
            output_tokens_per_second=float(outputs.sum()) / self.now if self.now else 0.0,
            served_requests_per_second=float(served.sum()) / self.now if self.now else 0.0,
            goodput=float(good.sum()) / len(self.trace) if len(self.trace) else 0.0,
            serving_token_hit_ratio=self.manager.stats().token_hit_rate,
            simulated_seconds=self.now,
        )


def _sizes(cache: ReplayConfig, block_size: int) -> dict[str, Any]:
    """The memory of each tier: blocks, or the bytes of so many blocks of K and V if layers keep a state."""
    blocks = {"gpu": cache.capacity, "host": cache.host or None, "disk": cache.disk or None}
    if not cache.keeps_states:
        return {f"{tier}_blocks": count for tier, count in blocks.items()}
    block_bytes = cache.token_bytes * block_size
    return {f"{tier}_bytes": count and count * block_bytes for tier, count in blocks.items()}


def _index(sequence: ScheduledSequence) -> int:
    found: Any = sequence.request.id
    return int(found)
