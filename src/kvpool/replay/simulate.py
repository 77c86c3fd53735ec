"""Replays a workload through the real manager, one request after the other, to see what a cache of this size reuses.

In this sequential model, the blocks of a request are matched, held, computed, published and released before the next request
comes. The manager does all of it: an id of the trace is a token for it. Where layers keep a state, prompts are computed in
the steps that the manager asks for, so hits end at checkpoints.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from kvpool.config import DType, KVCacheConfig, LayerSpec, StatePart, StateSpec, Tier
from kvpool.config.cache_config import check_host_write, check_objective
from kvpool.config.layers import ceil_div
from kvpool.core.handle import KVCacheHandle
from kvpool.errors import InvalidArgumentError, TraceError
from kvpool.manager import KVCacheManager
from kvpool.pools.arrays import Int32Array, Int64Array
from kvpool.replay.costs import DISK_BYTES_PER_SECOND
from kvpool.replay.misses import Missed, Misses
from kvpool.replay.trace import Trace
from kvpool.scheduling.cost_model import LinearCostModel
from kvpool.scope import Retention, TokenRange

_USUAL = LinearCostModel()
USUAL_TOKEN_BYTES = 131_072  # of K and V, in the 8-billion-parameter model of the default costs
TIERS = (Tier.GPU, Tier.HOST, Tier.DISK)
PROGRESS_STEP = 256  # requests between two reports
LEAST_CHECKPOINTS = 2  # of a live request: the state that a step reads, and the one that it leaves
READS_PRIORITIES = frozenset({"adaptive", "priority"})  # policies that are told about partial last blocks

Progress = Callable[[int], None]
Observer = Callable[[int, KVCacheManager], None]  # after each request: its index, the manager


@dataclass(frozen=True)
class PrefillTime:
    """Seconds of computing and loading prefixes; by default of an 8-billion-parameter model on one large GPU.

    >>> PrefillTime(seconds_per_token=1.0, seconds_per_pair=0.5).computing(np.array([0, 2])).tolist()
    [0.0, 3.5]
    """

    seconds_per_token: float = _USUAL.prefill_seconds_per_token
    seconds_per_pair: float = _USUAL.seconds_per_token_pair  # for each pair of tokens of which one attends to the other
    host_seconds_per_token: float = USUAL_TOKEN_BYTES / _USUAL.transfer_bytes_per_second
    disk_seconds_per_token: float = USUAL_TOKEN_BYTES / DISK_BYTES_PER_SECOND

    @classmethod
    def of(cls, costs: LinearCostModel, token_bytes: int) -> PrefillTime:
        """From the costs of a machine, and the bytes that its model keeps of a token."""
        return cls(
            costs.prefill_seconds_per_token,
            costs.seconds_per_token_pair,
            token_bytes / costs.transfer_bytes_per_second,
            token_bytes / DISK_BYTES_PER_SECOND,
        )

    @property
    def depth_cost(self) -> float:
        """How much more a token costs for each token before it, relative to a first token."""
        return self.seconds_per_pair / self.seconds_per_token if self.seconds_per_token else 0.0

    def computing(self, num_tokens: Int64Array) -> npt.NDArray[np.float64]:
        """Seconds to compute the first so many tokens of each prompt."""
        tokens = num_tokens.astype(np.float64)
        seconds: npt.NDArray[np.float64] = tokens * (self.seconds_per_token + (tokens + 1) / 2 * self.seconds_per_pair)
        return seconds

    def seconds(self, num_tokens: int) -> float:
        """The same of one prompt."""
        return num_tokens * (self.seconds_per_token + (num_tokens + 1) / 2 * self.seconds_per_pair)

    def loading(self, blocks_by_tier: Mapping[str, int], block_size: int) -> float:
        """Seconds to load blocks from lower tiers."""
        of_host = blocks_by_tier.get("HOST", 0) * self.host_seconds_per_token
        return block_size * (of_host + blocks_by_tier.get("DISK", 0) * self.disk_seconds_per_token)


@dataclass(frozen=True)
class ReplayConfig:
    """What to replay with. `capacity`, `host` and `disk` count blocks; `None` is as large as the workload.

    `block_size` counts tokens. For a trace of block ids it must be a multiple of the trace's own block size (the default).
    If some of the `layers` keep a state, a capacity is the memory of so many blocks of K and V, and `KVCacheConfig` divides
    it between blocks and checkpoints.
    """

    policy: str = "lru"
    capacity: int | None = None
    host: int = 0
    disk: int = 0
    host_write: str = "back"  # when runs are copied to the host: see `KVCacheConfig`
    block_size: int | None = None
    layers: tuple[LayerSpec | StateSpec, ...] = ()  # of the model; none: bytes are not reported
    checkpoint_every: int | None = None  # tokens, where layers keep a state: see `KVCacheConfig`
    objective: str = "blocks"  # what eviction saves: see `KVCacheConfig`
    time: PrefillTime = PrefillTime()  # what found blocks are worth in seconds
    why: bool = False  # whether to say why tokens missed; it takes time and memory

    def __post_init__(self) -> None:
        for name in ("capacity", "host", "disk", "block_size", "checkpoint_every"):
            value = getattr(self, name)
            least = 0 if name in ("host", "disk") else 1
            if value is not None and (type(value) is not int or value < least):
                raise InvalidArgumentError(f"{name} is {value!r}; it must be an integer of at least {least}")
        check_host_write(self.host_write, InvalidArgumentError)
        check_objective(self.objective, InvalidArgumentError)
        if self.keeps_states and not self.token_bytes:
            raise InvalidArgumentError(
                "no layer of this model attends: it has checkpoints and no blocks, which is what capacities count"
            )
        if self.checkpoint_every is not None and not self.keeps_states:
            raise InvalidArgumentError(
                f"checkpoint_every is {self.checkpoint_every}, but no layer keeps a state (StateSpec)"
            )

    @property
    def keeps_states(self) -> bool:
        """Whether some layers keep a state."""
        return any(isinstance(layer, StateSpec) for layer in self.layers)

    @property
    def token_bytes(self) -> int:
        """Bytes of K and V that all layers keep of a token."""
        return sum(layer.bytes_per_token for layer in self.layers if isinstance(layer, LayerSpec))


def least_capacity(layers: tuple[LayerSpec | StateSpec, ...], block_size: int) -> int:
    """The smallest capacity that can serve a request: one block, and the checkpoints of a live request."""
    state_bytes = sum(layer.bytes for layer in layers if isinstance(layer, StateSpec))
    token_bytes = ReplayConfig(layers=layers).token_bytes
    return 1 + ceil_div(LEAST_CHECKPOINTS * state_bytes, token_bytes * block_size) if state_bytes else 1


@dataclass
class ReplayResult:
    """Totals of one run and, in `hits`, the blocks that each request reused."""

    trace: str
    policy: str
    capacity: int | None
    block_size: int
    requests: int
    requested_blocks: int
    hit_blocks: int
    hit_ratio: float
    requested_tokens: int
    hit_tokens: int  # tokens that need not be computed: full blocks, less the last token of a fully cached prompt
    token_hit_ratio: float
    saved_seconds: float  # time of computing what was found, less the time of loading it
    saved_ratio: float  # saved_seconds over the time of computing all prompts
    objective: str = "blocks"
    checkpoints: int | None = None  # how many the GPU has room for; None: no layer keeps a state
    checkpoint_every: int | None = None
    hit_blocks_by_tier: dict[str, int] = field(default_factory=dict)
    evicted_blocks: int = 0  # blocks that left the index, or the tier
    offloaded_blocks: int = 0
    onboarded_blocks: int = 0
    copied_down_blocks: int = 0  # from the GPU
    awaited_blocks: int = 0  # of these, blocks that were copied only when they were evicted, while a request waited
    offloaded_bytes: int | None = None
    onboarded_bytes: int | None = None
    oversized: int = 0  # requests larger than the cache, for which it was enlarged
    bound: str = ""  # for offline bounds: what kind
    hits: Int32Array | None = None
    missed: dict[str, Missed] = field(default_factory=dict)  # by cause, if `why` was asked

    @property
    def label(self) -> str:
        """The policy, its objective if that is not blocks, and where states are kept."""
        label = self.policy if self.objective == "blocks" else f"{self.policy}, {self.objective}"
        if self.checkpoints is None:
            return label
        every = "" if self.checkpoint_every is None else f" every {self.checkpoint_every:,}"
        return f"{label}, checkpoints{every}"

    def row(self) -> dict[str, Any]:
        """Plain data for JSON and CSV, without the hits per request."""
        data = asdict(self)
        del data["hits"], data["missed"]
        for tier, blocks in data.pop("hit_blocks_by_tier").items():
            data[f"hit_blocks_{tier.lower()}"] = blocks
        for cause, missed in self.missed.items():
            data |= {f"missed_tokens_{cause}": missed.tokens, f"missed_seconds_{cause}": missed.seconds}
        return data


def replay(
    trace: Trace, config: ReplayConfig, *, progress: Progress | None = None, observe: Observer | None = None
) -> ReplayResult:
    """Runs a trace through a manager with this policy and these sizes.

    >>> from kvpool.replay.trace import TraceBuilder
    >>> trace = TraceBuilder("tiny", unit=16).add(0, [1, 2], 32, 0).add(1, [1, 3], 32, 0).build()
    >>> replay(trace, ReplayConfig("lru", capacity=2)).hit_blocks
    1
    """
    if not trace.reuse_known:
        raise TraceError(
            f"{trace.name} has lengths only: what its prompts share is not known, so nothing can be replayed"
        )
    with _rare_collections():
        return _Replay(trace, config).run(progress, observe)


@lru_cache(maxsize=4096)
def _last_id_first(num_ids: int) -> Retention:
    """A priority of 0 for the last of so many ids."""
    return Retention([TokenRange(num_ids - 1, num_ids, priority=0)])


@contextmanager
def _rare_collections() -> Iterator[None]:
    """Makes garbage collection rare: the tree has no cycles, but hundreds of thousands of objects to traverse."""
    before = gc.get_threshold()
    gc.set_threshold(100_000, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


class _Replay:
    def __init__(self, trace: Trace, config: ReplayConfig) -> None:
        self.trace, self.config = trace, config
        block_size = config.block_size or trace.block_size
        self.ids_per_block = trace.ids_per_block(block_size)
        if config.checkpoint_every is not None and config.checkpoint_every % block_size:
            raise InvalidArgumentError(
                f"checkpoint_every={config.checkpoint_every} is no multiple of the blocks of {block_size} tokens"
            )
        sizes = self._sizes(block_size)
        self.capacity, self.checkpoints = sizes[Tier.GPU]
        self.now = 0.0
        self.manager = self._manager(sizes)
        self.num_blocks = self.capacity
        self.oversized = self.copied_down = 0
        ends = np.diff(trace.offsets) * trace.unit > trace.input_lengths
        self.ends_partially: list[bool] = ends.tolist()
        # The last block of such a prompt is hardly ever reused; the policy is told so.
        self.tells_ends = config.policy in READS_PRIORITIES and self.ids_per_block == 1 < trace.unit
        # A full cache without a tier below is not given it at all.
        self.leaves_ends = not (self.checkpoints or config.host or config.disk)
        self.hints = trace.hints()
        self.misses = Misses(trace.unit, trace.input_lengths.tolist(), config.time.seconds) if config.why else None

    def _sizes(self, block_size: int) -> dict[Tier, tuple[int, int]]:
        """Blocks and checkpoints of each tier."""
        config = self.config
        blocks = {Tier.GPU: config.capacity or self._everything(), Tier.HOST: config.host, Tier.DISK: config.disk}
        if not config.keeps_states:
            return {tier: (num_blocks, 0) for tier, num_blocks in blocks.items()}
        block_bytes, least = config.token_bytes * block_size, least_capacity(config.layers, block_size)
        if config.capacity is not None and config.capacity < least:
            raise InvalidArgumentError(
                f"capacity is {config.capacity} blocks; one block and {LEAST_CHECKPOINTS} checkpoints take {least}"
            )
        divided = KVCacheConfig(
            config.layers,
            block_size,
            gpu_bytes=blocks[Tier.GPU] * block_bytes,
            host_bytes=config.host * block_bytes,
            disk_bytes=config.disk * block_bytes,
        )
        group = divided.state_group
        assert group is not None
        pool = divided.pools[group.pool]
        sizes = {}
        for tier, num_blocks in blocks.items():
            kept = pool.num_blocks[tier] // len(pool.groups)
            kept = max(kept, LEAST_CHECKPOINTS if tier is Tier.GPU else 0)
            sizes[tier] = (num_blocks - ceil_div(kept * group.block_bytes, block_bytes), kept)
        if config.capacity is None:
            sizes[Tier.GPU] = (blocks[Tier.GPU], max(blocks[Tier.GPU], LEAST_CHECKPOINTS))
        return sizes

    def _everything(self) -> int:
        lengths = ceil_div(np.diff(self.trace.offsets), self.ids_per_block)
        if self.ids_per_block == 1 and self.trace.is_tree:
            return max(self.trace.num_unique, int(lengths.max(initial=1)), 1)
        return max(int(lengths.sum()), 1)

    def _manager(self, sizes: Mapping[Tier, tuple[int, int]]) -> KVCacheManager:
        layers: list[LayerSpec | StateSpec] = [LayerSpec(kv_heads=1, head_dim=1)]
        if self.checkpoints:  # of another size than blocks, so that each has a pool of its own
            layers.append(StateSpec((StatePart("state", (self.ids_per_block, 16), DType.FLOAT32),)))
        num_pools = len(layers)
        every = self.config.checkpoint_every
        config = KVCacheConfig(
            layers,
            self.ids_per_block,
            gpu_blocks=sizes[Tier.GPU][:num_pools],
            host_blocks=sizes[Tier.HOST][:num_pools],
            disk_blocks=sizes[Tier.DISK][:num_pools],
            checkpoint_every=None if every is None else every // self.trace.unit,
            host_write=self.config.host_write,
            watermark=0.0,
            partial_match=False,
            event_buffer_size=0,
            remembered_blocks=len(self.trace.ids) + 1 if self.config.why else 0,  # all that ever was
            **self._objective(),
        )
        return KVCacheManager(config, policy=self.config.policy, clock=lambda: self.now)

    def _objective(self) -> dict[str, Any]:
        """The objective of the manager. Its tokens are ids of the trace, so depth counts in units of ids."""
        if self.config.objective == "blocks":
            return {}
        return {"objective": self.config.objective, "depth_cost": self.config.time.depth_cost * self.trace.unit}

    def run(self, progress: Progress | None, observe: Observer | None) -> ReplayResult:
        trace, manager = self.trace, self.manager
        offsets = trace.offsets.tolist()
        seconds = (np.maximum.accumulate(trace.timestamps) / 1000).tolist()
        hits = np.zeros(len(trace), np.int32)
        has_tiers = bool(self.config.host or self.config.disk)
        for index in range(len(trace)):
            start, end = offsets[index], offsets[index + 1]
            self.now = seconds[index]
            if start < end:
                hits[index] = self._serve(index, trace.ids[start:end], end - start)
                if has_tiers:
                    self._take_copies()
            if observe is not None:
                observe(index, manager)
            if progress is not None and index % PROGRESS_STEP == PROGRESS_STEP - 1:
                progress(PROGRESS_STEP)
        if progress is not None:
            progress(len(trace) % PROGRESS_STEP)
        return self._result(hits)

    def _serve(self, index: int, ids: Int32Array, num_ids: int) -> int:
        """One request; returns the whole blocks that were cached."""
        manager = self.manager
        room = self.capacity
        if num_ids > room * self.ids_per_block:
            room = ceil_div(num_ids, self.ids_per_block)
            self.oversized += 1
            if room > self.num_blocks:
                self._resize(room)
        retention, reserve = None, 0 if self.checkpoints else None
        if self.tells_ends and self.ends_partially[index]:
            if self.leaves_ends and manager.inspect.num_free_blocks() < num_ids:
                reserve = num_ids - 1  # the next prompt would have it evicted before anything else
            else:
                retention = _last_id_first(num_ids)
        handle = manager.allocate(index, ids, retention=retention, reserve=reserve)
        if self.misses is not None:
            hit_ids = handle.num_cached_blocks * self.ids_per_block
            self.misses.note(index, num_ids, hit_ids, manager.inspect.explain(handle))
        if self.checkpoints:
            self._compute(handle, num_ids - self.ends_partially[index])
        else:
            manager.commit(handle)
        if self.num_blocks > room:
            self._resize(room)  # while the request is live, so that only other blocks are evicted
        manager.free(handle, hint=None if self.hints is None else self.hints[index])
        return handle.num_cached_blocks

    def _compute(self, handle: KVCacheHandle, stop: int) -> None:
        """Computes a prompt in the steps that leave checkpoints. A partial last block is left out: it never has one."""
        manager = self.manager
        while (start := handle.num_committed) < stop:
            end = manager.step_end(handle, start, stop)
            manager.extend(handle, max(0, end - handle.num_reserved))
            manager.commit(handle, end - start)

    def _resize(self, num_blocks: int) -> None:
        self.manager.cache.resize(num_blocks)
        self._take_copies()
        self.num_blocks = num_blocks

    def _take_copies(self) -> None:
        ops = self.manager.take_copies()
        self.copied_down += sum(op.num_blocks for op in ops if op.src_tier == Tier.GPU != op.dst_tier)

    def _result(self, hits: Int32Array) -> ReplayResult:
        stats = self.manager.stats()
        by_tier = {tier.name: stats.hit_blocks[tier.name] for tier in TIERS}
        block_size = self.ids_per_block * self.trace.unit
        block_bytes = self.config.token_bytes * block_size if self.config.layers else None
        return ReplayResult(
            **totals(self.trace, hits, block_size, self.config.time, by_tier),
            policy=self.config.policy,
            capacity=self.config.capacity,
            objective=self.config.objective,
            checkpoints=self.checkpoints or None,
            checkpoint_every=self.config.checkpoint_every,
            hit_blocks_by_tier=by_tier,
            evicted_blocks=sum(stats.evictions.values()),
            offloaded_blocks=stats.offloaded_blocks,
            onboarded_blocks=stats.onboarded_blocks,
            copied_down_blocks=self.copied_down,
            awaited_blocks=self.copied_down - stats.blocks_copied_ahead,
            offloaded_bytes=None if block_bytes is None else stats.offloaded_blocks * block_bytes,
            onboarded_bytes=None if block_bytes is None else stats.onboarded_blocks * block_bytes,
            oversized=self.oversized,
            missed={} if self.misses is None else self.misses.by_cause,
        )


def totals(
    trace: Trace, hits: Int32Array, block_size: int, time: PrefillTime, hit_blocks_by_tier: Mapping[str, int]
) -> Mapping[str, Any]:
    """The fields of a `ReplayResult` that follow from the hits of each request."""
    ids_per_block = block_size // trace.unit
    lengths: Int64Array = ceil_div(np.diff(trace.offsets), ids_per_block)
    requested, hit = int(lengths.sum()), int(hits.sum())
    prompt_tokens = int(trace.input_lengths.sum())
    saved = np.minimum(hits.astype(np.int64) * block_size, np.maximum(trace.input_lengths - 1, 0))
    seconds, of_all = float(time.computing(saved).sum()), float(time.computing(trace.input_lengths).sum())
    seconds -= time.loading(hit_blocks_by_tier, block_size)
    return {
        "trace": trace.name,
        "block_size": block_size,
        "requests": len(trace),
        "requested_blocks": requested,
        "hit_blocks": hit,
        "hit_ratio": hit / requested if requested else 0.0,
        "requested_tokens": prompt_tokens,
        "hit_tokens": int(saved.sum()),
        "token_hit_ratio": int(saved.sum()) / prompt_tokens if prompt_tokens else 0.0,
        "saved_seconds": seconds,
        "saved_ratio": seconds / of_all if of_all else 0.0,
        "hits": hits,
    }


def best_run(results: Sequence[ReplayResult]) -> ReplayResult | None:
    """The run of a policy that found most; of equals, that with the least memory. None if only bounds were run."""
    real = [result for result in results if not result.bound and result.capacity is not None]
    return max(real, key=lambda result: (result.hit_ratio, -(result.capacity or 0)), default=None)


def hit_curve(results: Sequence[ReplayResult], label: str) -> list[tuple[int, float]]:
    """The capacities of all runs of a label, the smallest first, and the hit ratios there."""
    return sorted((r.capacity, r.hit_ratio) for r in results if r.label == label and r.capacity is not None)
