"""KVCacheConfig: the model's layers, the memory for them, and what fits. Everything is checked on construction."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from fractions import Fraction

from kvpool.checks import check_bool, check_int, check_number, show
from kvpool.config.layers import (
    MAX_BLOCK_SIZE,
    MAX_BLOCKS,
    MAX_BYTES,
    MAX_TOKENS,
    PREFIX_TOKENS,
    GroupKind,
    LayerGroup,
    LayerSpec,
    PoolSpec,
    StateSpec,
    Tier,
    build_groups,
    build_pools,
    ceil_div,
    divide_budget,
    divide_by_shares,
    divide_for_prefixes,
    prefix_needs,
)
from kvpool.errors import ConfigError, InvalidArgumentError, KVPoolError, NeverFitsError

LOCAL_TIERS = (Tier.GPU, Tier.HOST, Tier.DISK)
HOST_WRITES = ("back", "through")
OBJECTIVES = ("blocks", "seconds")
REMEMBERED = 32  # times the blocks of the largest pool
USUAL_DEPTH_COST = 2.5e-5  # per token, of an 8B model: as `LinearCostModel` has it
DEFAULT_PLAN_TOKENS = 4096
_UNLIMITED = 2**62  # above every reachable length: MAX_BLOCKS blocks of MAX_BLOCK_SIZE tokens are 2**51


@dataclass(frozen=True)
class KVCacheConfig:
    """Layers, block size and memory of one KV cache, plus the switches of its manager.

    Each tier's memory is a number of blocks (one for every pool, or one per pool) or a number of bytes. The GPU's may also
    be `gpu_fraction` of `free_gpu_bytes`; several ranks must then all pass the smallest of their free bytes. Bytes are
    divided between pools by what cached prefixes need of each (docs/decisions/0007). `plan_tokens` divides them for
    running sequences of that length instead, and `pool_shares` by fractions.

    >>> config = KVCacheConfig([LayerSpec(kv_heads=8, head_dim=128)] * 32, gpu_bytes=2**30)
    >>> config.bytes_per_token, config.num_blocks(Tier.GPU), config.longest_sequence()
    (131072, 512, 8112)
    """

    layers: Sequence[LayerSpec | StateSpec]
    block_size: int = 16
    _: KW_ONLY
    gpu_blocks: int | Sequence[int] | None = None
    gpu_bytes: int | None = None
    gpu_fraction: float | None = None
    free_gpu_bytes: int | None = None
    max_gpu_tokens: int | None = None  # use at most the bytes that so many tokens need in all layers
    host_blocks: int | Sequence[int] | None = None
    host_bytes: int | None = None
    disk_blocks: int | Sequence[int] | None = None
    disk_bytes: int | None = None
    plan_tokens: int | None = None  # divide bytes for running sequences of this length; None = for cached prefixes
    pool_shares: Sequence[float] | None = None  # or by these fractions of the bytes, one per pool
    plan_cross_tokens: int | None = None  # encoder tokens of such a sequence; None = plan_tokens
    max_seq_len: int | None = None  # longest sequence accepted; None = unlimited
    enable_prefix_caching: bool = True
    partial_match: bool = True  # reuse the matching part of a block by copying it
    copy_on_partial_reuse: bool = True  # False: reuse a part of a block only by taking the block over from the cache
    cache_unfilled_blocks: bool = False  # keep the last block of freed sequences for partial reuse: docs/decisions/0008
    offload_on_evict: bool = True  # evicted GPU cache goes to HOST, HOST to DISK, where these tiers exist
    offload_min_priority: int = 0  # evicted runs of a lower retention priority are dropped, not offloaded
    # When cached GPU blocks are copied to HOST: "back" on eviction, "through" when their last reader leaves:
    # docs/decisions/0013
    host_write: str = "back"
    watermark: float = 0.01  # fraction of each GPU pool kept free at admission
    eviction_policy: str = "adaptive"  # learns what is reused; its comparison with "lru": docs/decisions/0005
    objective: str = "blocks"  # what eviction saves: the number of "blocks", or the "seconds" to compute them
    # For "seconds": the added cost of a token for each token before it; None: that of an 8B model
    depth_cost: float | None = None
    # Of layers that keep a state: also keep one every so many tokens of a prompt, a multiple of block_size
    checkpoint_every: int | None = None
    default_ttl: float | None = None  # seconds
    max_pinned_tokens: int | None = None  # None = half of the smallest GPU pool's tokens
    # Pressure is MEDIUM, HIGH, CRITICAL from these used fractions on
    pressure_levels: Sequence[float] = (0.6, 0.8, 0.95)
    event_buffer_size: int = 65536  # 0 = events off
    # Blocks that left whose tokens are remembered, to say why a prompt missed: docs/why.md. None: 32 times the largest
    # pool of the GPU; 0: nothing is remembered
    remembered_blocks: int | None = 0

    groups: tuple[LayerGroup, ...] = field(init=False, repr=False, compare=False)
    pools: tuple[PoolSpec, ...] = field(init=False, repr=False, compare=False)
    group_of_layer: tuple[int, ...] = field(init=False, repr=False, compare=False)
    bytes_per_token: int = field(init=False, repr=False, compare=False)  # over all groups
    block_bytes: int = field(init=False, repr=False, compare=False)  # one block of every group
    state_group: LayerGroup | None = field(init=False, repr=False, compare=False)  # of all layers that keep a state

    def __post_init__(self) -> None:
        self._check_model()
        self._check_limits()
        self._check_features()
        self._check_states()
        groups = build_groups(self.layers, self.block_size)
        self._put("groups", groups)
        self._put("state_group", next((group for group in groups if group.kind is GroupKind.STATE), None))
        group_of = {layer: group.index for group in groups for layer in group.layers}
        self._put("group_of_layer", tuple(group_of[layer] for layer in range(len(self.layers))))
        self._put("bytes_per_token", sum(group.bytes_per_token for group in groups))
        self._put("block_bytes", sum(group.block_bytes for group in groups))
        if self.plan_cross_tokens is not None and not self._has_cross:
            raise ConfigError(f"plan_cross_tokens={self.plan_cross_tokens} but no layer has cross_attention=True")
        pools = build_pools(groups)
        counts = {tier: self._tier_counts(tier, pools) for tier in LOCAL_TIERS}
        self._put("pools", tuple(replace(p, num_blocks={t: counts[t][p.index] for t in LOCAL_TIERS}) for p in pools))

    # ---- sizes -------------------------------------------------------------------------------------------------------

    def num_blocks(self, tier: Tier) -> int:
        """Blocks of all pools on `tier`."""
        return sum(self._counts(tier))

    def pool_bytes(self, tier: Tier) -> int:
        """Bytes that all pools allocate on `tier`."""
        return sum(count * pool.block_bytes for count, pool in zip(self._counts(tier), self.pools, strict=True))

    def watermark_blocks(self, pool: int, num_blocks: int | None = None) -> int:
        """GPU blocks of a pool that admission leaves free; `num_blocks` when the pool was resized.

        At least 1 if `watermark` > 0, but never so many that less than one block for each group of the pool is left.
        """
        check_int(pool, "pool", 0, len(self.pools) - 1, InvalidArgumentError)
        if self.watermark == 0:
            return 0
        if num_blocks is None:
            num_blocks = self.pools[pool].num_blocks[Tier.GPU]
        wanted = max(1, int(_exact(self.watermark) * num_blocks))
        return max(0, min(wanted, num_blocks - len(self.pools[pool].groups)))

    @property
    def planned_tokens(self) -> int:
        """`plan_tokens`, or its default."""
        if self.plan_tokens is not None:
            return self.plan_tokens
        return DEFAULT_PLAN_TOKENS if self.max_seq_len is None else self.max_seq_len

    @property
    def planned_cross_tokens(self) -> int:
        """`plan_cross_tokens`, or its default; 0 without cross-attention layers."""
        if not self._has_cross:
            return 0
        return self.planned_tokens if self.plan_cross_tokens is None else self.plan_cross_tokens

    def attention_layer(self, layer: int) -> LayerSpec:
        """What a layer keeps of each token; refused if it keeps a state instead."""
        return self.groups[self.group_of_layer[layer]].attention

    @property
    def pinned_tokens_limit(self) -> int:
        """`max_pinned_tokens`, or its default: half of what the smallest GPU pool can hold, but for checkpoints."""
        if self.max_pinned_tokens is not None:
            return self.max_pinned_tokens
        of_tokens = {group.pool for group in self.groups if group.kind is not GroupKind.STATE}
        pools = [pool for pool in self.pools if pool.index in of_tokens] or self.pools
        return min(p.num_blocks[Tier.GPU] * self.block_size // len(p.groups) for p in pools) // 2

    # ---- what fits ---------------------------------------------------------------------------------------------------

    def blocks_for(self, num_tokens: int, *, cross_tokens: int = 0) -> tuple[int, ...]:
        """Blocks per group that one sequence of `num_tokens` needs at its peak (see `LayerGroup.max_live_blocks`).

        CROSS groups hold `cross_tokens`, the encoder's. A prompt written in one piece needs all its blocks meanwhile.
        """
        check_int(num_tokens, "num_tokens", 0, _UNLIMITED, InvalidArgumentError)
        check_int(cross_tokens, "cross_tokens", 0, MAX_TOKENS, InvalidArgumentError)
        if cross_tokens and not self._has_cross:
            raise InvalidArgumentError(f"cross_tokens={cross_tokens} but no layer has cross_attention=True")
        return tuple(g.max_live_blocks(cross_tokens if g.kind is GroupKind.CROSS else num_tokens) for g in self.groups)

    def pool_blocks_for(self, num_tokens: int, *, cross_tokens: int = 0) -> tuple[int, ...]:
        """Blocks per pool that one sequence needs: `blocks_for`, added up over the groups of each pool."""
        needs = [0] * (1 + max(group.pool for group in self.groups))
        group_needs = self.blocks_for(num_tokens, cross_tokens=cross_tokens)
        for group, need in zip(self.groups, group_needs, strict=True):
            needs[group.pool] += need
        return tuple(needs)

    def sequence_bytes(self, num_tokens: int, *, cross_tokens: int = 0) -> int:
        """Bytes of the blocks that one sequence needs."""
        needs = self.pool_blocks_for(num_tokens, cross_tokens=cross_tokens)
        return sum(need * pool.block_bytes for need, pool in zip(needs, self.pools, strict=True))

    def blocks_in(self, num_bytes: int) -> tuple[int, ...]:
        """How many blocks of each pool fit into `num_bytes`, divided as a byte budget of the GPU is."""
        num_bytes = check_int(num_bytes, "num_bytes", 0, MAX_BYTES, InvalidArgumentError)
        return self._divide("num_bytes", num_bytes, self.pools, on_gpu=True)

    def longest_sequence(self, *, cross_tokens: int = 0, keep_watermark: bool = True) -> int | None:
        """Tokens of the longest sequence that an empty GPU tier admits; None: no limit (no layer reads all tokens).

        With `keep_watermark=False`, the length that an admitted sequence can grow to. 0: not even one token fits.
        """
        usable = self._usable_blocks(keep_watermark)
        longest = _UNLIMITED if self.max_seq_len is None else self.max_seq_len

        def overflows(num_tokens: int) -> bool:
            needs = self.pool_blocks_for(num_tokens, cross_tokens=cross_tokens)
            return any(need > limit for need, limit in zip(needs, usable, strict=True))

        if overflows(longest):
            return max(0, bisect_right(range(longest), False, key=overflows) - 1)
        return self.max_seq_len

    def max_sequences(self, num_tokens: int, *, cross_tokens: int = 0) -> int:
        """How many sequences of `num_tokens` that share nothing fit at once; 0 if none does."""
        check_int(num_tokens, "num_tokens", 1, MAX_TOKENS, InvalidArgumentError)
        if self.max_seq_len is not None and num_tokens > self.max_seq_len:
            return 0
        needs = self.pool_blocks_for(num_tokens, cross_tokens=cross_tokens)
        return min(usable // need for usable, need in zip(self._usable_blocks(True), needs, strict=True) if need)

    def require_fit(self, num_tokens: int, *, cross_tokens: int = 0) -> None:
        """NeverFitsError, saying what would fit, if even an empty GPU tier cannot admit a sequence of `num_tokens`."""
        needs = self.pool_blocks_for(num_tokens, cross_tokens=cross_tokens)
        usable = self._usable_blocks(True)
        short = next((p for p in self.pools if needs[p.index] > usable[p.index]), None)
        too_long = self.max_seq_len is not None and num_tokens > self.max_seq_len
        if short is None and not too_long:
            return
        reasons = [f"max_seq_len={self.max_seq_len} is less"] if too_long else []
        if short is not None:
            reasons.append(
                f"it needs {needs[short.index]} blocks of pool {short.index}, which has {short.num_blocks[Tier.GPU]} "
                f"and keeps {self.watermark_blocks(short.index)} free; {self._remedy(needs)} would hold it"
            )
        longest = self.longest_sequence(cross_tokens=cross_tokens)
        reasons.append(f"the longest that fits has {longest} tokens")
        raise NeverFitsError(f"a sequence of {num_tokens} tokens never fits: {'; '.join(reasons)}")

    def explain(self) -> str:
        """The whole arithmetic, for people."""
        lines = [
            f"{len(self.layers)} layers, {self.bytes_per_token} bytes per token, "
            f"blocks of {self.block_size} tokens and {self.block_bytes} bytes"
        ]
        lines += map(str, self.groups)
        for pool in self.pools:
            counts = ", ".join(f"{tier.name} {pool.num_blocks[tier]}" for tier in LOCAL_TIERS if pool.num_blocks[tier])
            lines.append(
                f"pool {pool.index}: {pool.block_bytes} bytes per block, blocks: {counts}, "
                f"{self.watermark_blocks(pool.index)} kept free at admission"
            )
        tiers = ", ".join(f"{tier.name} {self.pool_bytes(tier)}" for tier in LOCAL_TIERS if self.pool_bytes(tier))
        longest = self.longest_sequence(cross_tokens=self.planned_cross_tokens)
        lines.append(f"bytes: {tiers}")
        lines.append(f"longest sequence: {'unlimited' if longest is None else f'{longest} tokens'}")
        fitting = self.max_sequences(self.planned_tokens, cross_tokens=self.planned_cross_tokens)
        lines.append(f"sequences of {self.planned_tokens} tokens at once: {fitting}")
        return "\n".join(lines)

    # ---- checks and derivation ---------------------------------------------------------------------------------------

    def _put(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    @property
    def _has_cross(self) -> bool:
        return any(group.kind is GroupKind.CROSS for group in self.groups)

    def _check_model(self) -> None:
        given: object = self.layers
        if not isinstance(given, (tuple, list)):
            raise ConfigError(f"layers={show(given)} must be a list of LayerSpec; for n equal layers: [spec] * n")
        for index, layer in enumerate(given):
            if not isinstance(layer, (LayerSpec, StateSpec)):
                raise ConfigError(f"layers[{index}]={show(layer)} must be a LayerSpec or a StateSpec")
        if all(layer.kind is GroupKind.CROSS for layer in given):
            raise ConfigError(f"layers={show(given)} must hold at least one LayerSpec without cross_attention")
        self._put("layers", tuple(given))
        self._put("block_size", check_int(self.block_size, "block_size", 1, MAX_BLOCK_SIZE))

    def _check_limits(self) -> None:
        for name, high in (
            ("plan_tokens", MAX_TOKENS),
            ("plan_cross_tokens", MAX_TOKENS),
            ("max_seq_len", MAX_TOKENS),
            ("gpu_bytes", MAX_BYTES),
            ("free_gpu_bytes", MAX_BYTES),
            ("max_gpu_tokens", MAX_TOKENS),
        ):
            if getattr(self, name) is not None:
                self._put(name, check_int(getattr(self, name), name, 1, high))
        for name, high in (
            ("host_bytes", MAX_BYTES),
            ("disk_bytes", MAX_BYTES),
            ("max_pinned_tokens", MAX_TOKENS),
            ("remembered_blocks", MAX_BLOCKS),
        ):
            if getattr(self, name) is not None:
                self._put(name, check_int(getattr(self, name), name, 0, high))
        if self.plan_tokens is not None and self.max_seq_len is not None and self.plan_tokens > self.max_seq_len:
            raise ConfigError(f"plan_tokens={self.plan_tokens} exceeds max_seq_len={self.max_seq_len}; lower it")
        budgets = (self.gpu_bytes, self.gpu_fraction, self.host_bytes, self.disk_bytes)
        if self.pool_shares is not None and (self.plan_tokens is not None or not any(budgets)):
            raise ConfigError(
                f"pool_shares={show(self.pool_shares)} divides byte budgets: give one of these, and no plan_tokens"
            )
        given = [n for n in ("gpu_blocks", "gpu_bytes", "gpu_fraction") if getattr(self, n) is not None]
        if len(given) != 1:
            found = " and ".join(given) if given else "none"
            raise ConfigError(f"give exactly one of gpu_blocks, gpu_bytes, gpu_fraction; found {found}")
        if self.max_gpu_tokens is not None and self.gpu_blocks is not None:
            raise ConfigError(
                f"max_gpu_tokens={self.max_gpu_tokens} caps gpu_bytes or gpu_fraction; gpu_blocks is exact"
            )
        for tier in ("host", "disk"):
            if getattr(self, f"{tier}_blocks") is not None and getattr(self, f"{tier}_bytes") is not None:
                raise ConfigError(f"{tier}_blocks and {tier}_bytes both size the {tier.upper()} tier; give one of them")
        if (self.gpu_fraction is None) != (self.free_gpu_bytes is None):
            raise ConfigError(
                f"gpu_fraction={show(self.gpu_fraction)} and free_gpu_bytes={show(self.free_gpu_bytes)} go together: "
                "the first is the part of the second that the cache may use"
            )
        if self.gpu_fraction is not None:
            self._put("gpu_fraction", check_number(self.gpu_fraction, "gpu_fraction", "in (0, 1]"))
            if not 0 < self.gpu_fraction <= 1:
                raise ConfigError(f"gpu_fraction={self.gpu_fraction} must be in (0, 1]")

    def _check_features(self) -> None:
        for name in (
            *("enable_prefix_caching", "partial_match", "copy_on_partial_reuse"),
            *("cache_unfilled_blocks", "offload_on_evict"),
        ):
            check_bool(getattr(self, name), name)
        if self.cache_unfilled_blocks and not (self.enable_prefix_caching and self.partial_match):
            raise ConfigError("cache_unfilled_blocks=True needs enable_prefix_caching=True and partial_match=True")
        if not (self.copy_on_partial_reuse or self.partial_match):
            raise ConfigError("copy_on_partial_reuse=False does nothing with partial_match=False")
        low = check_int(self.offload_min_priority, "offload_min_priority", 0, 100)
        if low and not self.offload_on_evict:
            raise ConfigError(f"offload_min_priority={low} does nothing with offload_on_evict=False")
        self._put("offload_min_priority", low)
        self._put("host_write", check_host_write(self.host_write))
        if self.host_write != "back" and not self.offload_on_evict:
            raise ConfigError(f"host_write={show(self.host_write)} does nothing with offload_on_evict=False")
        self._put("watermark", check_number(self.watermark, "watermark", "in [0, 1)"))
        if not 0 <= self.watermark < 1:
            raise ConfigError(f"watermark={self.watermark} must be in [0, 1)")
        policy: object = self.eviction_policy
        if not isinstance(policy, str) or not policy:
            raise ConfigError(f"eviction_policy={show(policy)} must be the name of a policy, such as 'lru'")
        self._check_objective()
        if self.remembered_blocks != 0 and not self.enable_prefix_caching:
            raise ConfigError(
                f"remembered_blocks={self.remembered_blocks} does nothing with enable_prefix_caching=False"
            )
        if self.default_ttl is not None:
            self._put("default_ttl", check_number(self.default_ttl, "default_ttl", "seconds above 0, or None"))
            if self.default_ttl <= 0:
                raise ConfigError(f"default_ttl={self.default_ttl} must be seconds above 0, or None for no limit")
            if not self.enable_prefix_caching:
                raise ConfigError(f"default_ttl={self.default_ttl} does nothing with enable_prefix_caching=False")
        expected = "three rising fractions in (0, 1]; equal ones leave a level out"
        if not isinstance(self.pressure_levels, (tuple, list)) or len(self.pressure_levels) != 3:
            raise ConfigError(f"pressure_levels={show(self.pressure_levels)} must be {expected}")
        levels = tuple(check_number(level, "pressure_levels", expected) for level in self.pressure_levels)
        if not 0 < levels[0] <= levels[1] <= levels[2] <= 1:
            raise ConfigError(f"pressure_levels={levels} must be {expected}")
        self._put("pressure_levels", levels)
        self._put("event_buffer_size", check_int(self.event_buffer_size, "event_buffer_size", 0, MAX_BLOCKS))

    def _check_states(self) -> None:
        has_states = any(isinstance(layer, StateSpec) for layer in self.layers)
        if has_states and self.cache_unfilled_blocks:
            raise ConfigError("cache_unfilled_blocks=True: layers that keep a state are reused where a block ends only")
        if self.checkpoint_every is not None:
            every = check_int(self.checkpoint_every, "checkpoint_every", self.block_size, MAX_TOKENS)
            if not has_states:
                raise ConfigError(f"checkpoint_every={every}, but no layer keeps a state (StateSpec): leave it out")
            if every % self.block_size:
                raise ConfigError(f"checkpoint_every={every} must be a multiple of block_size={self.block_size}")
            self._put("checkpoint_every", every)

    def _check_objective(self) -> None:
        check_objective(self.objective)
        if self.depth_cost is not None:
            if self.objective != "seconds":
                raise ConfigError(f"depth_cost={show(self.depth_cost)} does nothing with objective={self.objective!r}")
            expected = "a number, 0 or more"
            self._put("depth_cost", check_number(self.depth_cost, "depth_cost", expected))
            if self.depth_cost < 0:
                raise ConfigError(f"depth_cost={self.depth_cost} must be {expected}")

    @property
    def remembered_blocks_limit(self) -> int:
        """`remembered_blocks`, or what None stands for."""
        if self.remembered_blocks is not None:
            return self.remembered_blocks
        return REMEMBERED * max(pool.num_blocks[Tier.GPU] for pool in self.pools)

    @property
    def block_depth_cost(self) -> float | None:
        """What a block costs more for each one before it, in units of a first one; None if eviction counts blocks."""
        if self.objective == "blocks":
            return None
        return self.block_size * (USUAL_DEPTH_COST if self.depth_cost is None else self.depth_cost)

    def _tier_counts(self, tier: Tier, pools: Sequence[PoolSpec]) -> tuple[int, ...]:
        prefix = tier.name.lower()
        blocks, num_bytes = getattr(self, f"{prefix}_blocks"), getattr(self, f"{prefix}_bytes")
        if tier is Tier.GPU and self.gpu_fraction is not None and self.free_gpu_bytes is not None:
            budget = int(_exact(self.gpu_fraction) * self.free_gpu_bytes)
            return self._divide("gpu_fraction * free_gpu_bytes", budget, pools, on_gpu=True)
        if blocks is None:
            if not num_bytes:
                return (0,) * len(pools)
            return self._divide(f"{prefix}_bytes", num_bytes, pools, on_gpu=tier is Tier.GPU)
        return self._check_counts(f"{prefix}_blocks", blocks, pools, optional=tier is not Tier.GPU)

    def _check_counts(self, name: str, blocks: object, pools: Sequence[PoolSpec], *, optional: bool) -> tuple[int, ...]:
        if isinstance(blocks, (tuple, list)):
            counts = tuple(check_int(count, f"{name}[{i}]", 0, MAX_BLOCKS) for i, count in enumerate(blocks))
            self._put(name, counts)
        else:
            self._put(name, check_int(blocks, name, 0, MAX_BLOCKS))
            counts = (getattr(self, name),) * len(pools)
        if len(counts) != len(pools):
            raise ConfigError(f"{name}={show(counts)} has {len(counts)} counts; these layers form {len(pools)} pools")
        for count, pool in zip(counts, pools, strict=True):
            if count < len(pool.groups) and not (optional and not any(counts)):
                raise ConfigError(
                    f"{name}={show(blocks)} leaves pool {pool.index} with {count} blocks; its groups need at least "
                    f"{len(pool.groups)}, one each, of {pool.block_bytes} bytes"
                )
        if (num_bytes := sum(n * pool.block_bytes for n, pool in zip(counts, pools, strict=True))) > MAX_BYTES:
            raise ConfigError(f"{name}={show(blocks)} would take {num_bytes} bytes; no machine has that many")
        return counts

    def _divide(self, name: str, num_bytes: int, pools: Sequence[PoolSpec], *, on_gpu: bool) -> tuple[int, ...]:
        if num_bytes < self.block_bytes:
            raise ConfigError(
                f"{name}={num_bytes} bytes is too little: one block of {self.block_size} tokens needs "
                f"{self.block_bytes} bytes over all groups"
            )
        counts = self._divide_bytes(num_bytes, pools, on_gpu)
        if on_gpu and self.max_gpu_tokens is not None:
            most = ceil_div(self.max_gpu_tokens, self.block_size)
            counts = tuple(min(n, most * len(pool.groups)) for n, pool in zip(counts, pools, strict=True))
        if max(counts) > MAX_BLOCKS:
            raise ConfigError(f"{name}={num_bytes} bytes gives {max(counts)} blocks; ids are int32: raise block_size")
        return counts

    def _divide_bytes(self, num_bytes: int, pools: Sequence[PoolSpec], on_gpu: bool) -> tuple[int, ...]:
        sizes, minimums = [pool.block_bytes for pool in pools], [len(pool.groups) for pool in pools]
        if self.pool_shares is not None:
            return divide_by_shares(num_bytes, sizes, self._checked_shares(pools), minimums)
        cross = self.planned_cross_tokens
        if self.plan_tokens is not None or not self.enable_prefix_caching:
            return divide_budget(
                num_bytes, sizes, self.pool_blocks_for(self.planned_tokens, cross_tokens=cross), minimums
            )
        prefix = prefix_needs(self.groups, min(self.planned_tokens, PREFIX_TOKENS), cross, is_written=on_gpu)
        longest = None
        if on_gpu and self.max_seq_len is not None:
            longest = self.pool_blocks_for(self.max_seq_len, cross_tokens=cross)
        return divide_for_prefixes(num_bytes, sizes, prefix, longest, minimums)

    def _checked_shares(self, pools: Sequence[PoolSpec]) -> tuple[float, ...]:
        given: object = self.pool_shares
        expected = f"{len(pools)} positive fractions, one per pool, that add up to 1"
        if not isinstance(given, (tuple, list)) or len(given) != len(pools):
            raise ConfigError(f"pool_shares={show(given)} must be {expected}")
        shares = tuple(check_number(share, "pool_shares", expected) for share in given)
        if min(shares) <= 0 or abs(sum(shares) - 1) > 1e-6:
            raise ConfigError(f"pool_shares={shares} must be {expected}")
        self._put("pool_shares", shares)
        return shares

    def _counts(self, tier: Tier) -> tuple[int, ...]:
        if tier not in LOCAL_TIERS:
            raise InvalidArgumentError(f"tier={show(tier)} has no size here; ask for Tier.GPU, Tier.HOST or Tier.DISK")
        return tuple(pool.num_blocks[tier] for pool in self.pools)

    def _usable_blocks(self, keep_watermark: bool) -> tuple[int, ...]:
        counts = self._counts(Tier.GPU)
        return tuple(n - self.watermark_blocks(p) for p, n in enumerate(counts)) if keep_watermark else counts

    def _remedy(self, needs: Sequence[int]) -> str:
        """The smallest block counts whose part below the watermark covers `needs`, as a suggestion."""
        counts = []
        for need, pool in zip(needs, self.pools, strict=True):
            total = max(need, len(pool.groups))
            if self.watermark and need > len(pool.groups):
                total = max(need + 1, int((need - 1) / (1 - _exact(self.watermark))) + 1)
            counts.append(max(total, pool.num_blocks[Tier.GPU]))
        num_bytes = sum(count * pool.block_bytes for count, pool in zip(counts, self.pools, strict=True))
        shown = counts[0] if len(counts) == 1 else tuple(counts)
        return f"gpu_blocks={shown} ({num_bytes} bytes)"


def check_host_write(given: object, error: type[KVPoolError] = ConfigError) -> str:
    """`host_write` as it is, if it says when runs are copied to the host."""
    if isinstance(given, str) and given in HOST_WRITES:
        return given
    expected = " or ".join(f"'{name}'" for name in HOST_WRITES)
    instead = "; a number of uses left in 0.3" * (type(given) is int)
    raise error(f"host_write={show(given)} must be {expected}{instead}")


def _exact(fraction: float) -> Fraction:
    """The decimal that was written: 0.29 of 100 is 29, though 0.29 * 100 in floats is less."""
    return Fraction(str(fraction))


def check_objective(objective: object, error: type[KVPoolError] = ConfigError) -> str:
    """What eviction is to save."""
    if not isinstance(objective, str) or objective not in OBJECTIVES:
        raise error(f"objective={show(objective)} is unknown; known: {', '.join(OBJECTIVES)}")
    return objective
