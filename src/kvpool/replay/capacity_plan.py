"""Capacity planning: what fits on a GPU, what lower tiers add, and from which length on loading beats computing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from pathlib import Path
from typing import Any, NamedTuple

from kvpool.checks import check_number
from kvpool.config import KVCacheConfig
from kvpool.config.layers import ceil_div
from kvpool.config.model_config import layers_from_hf, max_positions
from kvpool.errors import InvalidArgumentError
from kvpool.replay.costs import (
    COMPUTE_EFFICIENCY,
    DISK_BYTES_PER_SECOND,
    LINK_EFFICIENCY,
    Weights,
    costs_for,
    count_weights,
    find_gpu,
)
from kvpool.replay.parallel import Interconnect, RankCosts
from kvpool.scheduling import LinearCostModel
from kvpool.scheduling.cost_model import Measurement

GPU_FRACTION = 0.9
LINK_LATENCY = 5e-5  # seconds before the first byte of a copy
DISK_LATENCY = 2e-4
GIB = 2**30


@dataclass(frozen=True)
class PlanRequest:
    """The question: a model, GPUs (or a measured machine), and how it will be used."""

    model: str | Path | Mapping[str, Any]
    gpu: str | None = None
    kv_dtype: str | None = None
    context: int = 8192
    concurrency: int = 1
    num_gpus: int = 1
    block_size: int = 16
    weight_bytes: float | None = None  # per parameter; None: as the config says
    gpu_fraction: float = GPU_FRACTION
    host_bytes: int = 0
    disk_bytes: int = 0
    measured: Measurement | None = None
    tensor_parallel: int = 1  # ranks of each engine
    data_parallel: int = 1  # engines
    link: Interconnect | None = None  # between ranks; None: as the data sheet of the GPU says

    def __post_init__(self) -> None:
        if (self.gpu is None) == (self.measured is None):
            raise InvalidArgumentError(
                "a plan needs either the name of a GPU or the costs that were measured on a machine"
            )
        for name in ("num_gpus", "tensor_parallel"):
            if self.measured is not None and getattr(self, name) > 1:
                raise InvalidArgumentError(
                    f"{name} is {getattr(self, name)}, but costs were measured on one; give a GPU's name"
                )
        if self.num_gpus > 1 and max(self.tensor_parallel, self.data_parallel) > 1:
            raise InvalidArgumentError(
                "num_gpus adds up GPUs as if they were one; drop it, tensor_parallel and data_parallel say what each does"
            )
        for name in ("context", "concurrency", "num_gpus", "block_size", "tensor_parallel", "data_parallel"):
            if type(getattr(self, name)) is not int or getattr(self, name) < 1:
                raise InvalidArgumentError(f"{name} is {getattr(self, name)!r}; it must be an integer of at least 1")
        if not 0 < self.gpu_fraction <= 1:
            raise InvalidArgumentError(f"gpu_fraction is {self.gpu_fraction}; it must lie above 0 and not above 1")
        if (
            self.weight_bytes is not None
            and not check_number(self.weight_bytes, "weight_bytes", "a number above 0") > 0
        ):
            raise InvalidArgumentError(f"weight_bytes is {self.weight_bytes}; it must be above 0")


@dataclass
class Plan:
    """The answer: numbers by name, each with a sentence that explains it."""

    numbers: dict[str, float] = field(default_factory=dict)
    why: dict[str, str] = field(default_factory=dict)
    verdict: str = ""

    def put(self, name: str, value: float, why: str) -> float:
        self.numbers[name] = value
        self.why[name] = why
        return value

    def to_dict(self) -> dict[str, Any]:
        """Plain data for `json.dumps`."""
        return {"numbers": self.numbers, "why": self.why, "verdict": self.verdict}


def make_plan(request: PlanRequest) -> Plan:
    """Works out a plan.

    >>> config = {"model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    ...           "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256}
    >>> plan = make_plan(PlanRequest(config, "h200", kv_dtype="fp8", context=32768, concurrency=200))
    >>> int(plan.numbers["kv_bytes_per_token"]), int(plan.numbers["sequences_that_fit"])
    (65536, 51)
    """
    weights = count_weights(request.model)
    layers = layers_from_hf(request.model, dtype=request.kv_dtype)
    plan = Plan()
    per_parameter = request.weight_bytes or weights.bytes_per_parameter
    ranks = _ranks(request)
    hardware = _hardware(request, weights, per_parameter, ranks)
    plan.put("parameters", weights.total, weights.why)
    weight_bytes = plan.put(
        "weights_bytes",
        weights.total * per_parameter,
        f"{weights.total / 1e9:.2f} B parameters x {per_parameter:g} bytes",
    )
    if ranks is not None:
        layers = ranks.shape.layers
        plan.put("ranks", request.tensor_parallel, f"a GPU each; {ranks.shape.words}")
        weight_bytes = plan.put(
            "rank_weights_bytes",
            weight_bytes / request.tensor_parallel,
            "of each rank; from here on, bytes are those of one",
        )
    budget = plan.put(
        "kv_budget_bytes",
        int(hardware.memory_bytes * request.gpu_fraction - weight_bytes),
        f"{request.gpu_fraction:.0%} of {hardware.memory} less the weights; the rest is for activations and the runtime",
    )
    if budget <= 0:
        plan.verdict = (
            f"The weights alone do not fit: {_gb(weight_bytes)} on {hardware.name}. Use more GPUs or smaller weights."
        )
        return plan
    longest = max_positions(request.model)  # as of an engine's cache, whose pools are divided by it
    limit = None if longest is None else max(longest, request.context)
    config = KVCacheConfig(layers, request.block_size, gpu_bytes=int(budget), max_seq_len=limit)
    _add_cache(plan, request, config)
    _add_costs(plan, request.context, hardware, request.tensor_parallel)
    if ranks is not None:
        _add_ranks(plan, request, ranks)
    return plan


def _ranks(request: PlanRequest) -> RankCosts | None:
    if request.tensor_parallel == 1:
        return None
    gpu = request.gpu or ""
    link = request.link or Interconnect.of(gpu)
    return RankCosts.of(request.model, gpu, request.tensor_parallel, link, request.kv_dtype, request.weight_bytes)


class _Hardware(NamedTuple):
    """Memory, costs, and the words that explain them."""

    name: str
    memory_bytes: int
    memory: str
    costs: LinearCostModel
    why_token: str
    why_pair: str
    link: str


def _hardware(request: PlanRequest, weights: Weights, per_parameter: float, ranks: RankCosts | None) -> _Hardware:
    if request.measured is not None:
        found = request.measured
        found.check_model(weights.total)
        return _Hardware(
            found.machine,
            found.memory_bytes,
            f"the {found.memory_bytes / 1e9:.0f} GB of {found.machine}",
            found.costs,
            f"measured on {found.machine} with {found.model} (median error {found.errors.get('prefill', 0):.0%})",
            "attention, for each token before it; measured in the same way",
            "measured",
        )
    gpu = find_gpu(request.gpu or "")
    name = f"{request.num_gpus} x {gpu.name}"
    costs, _ = costs_for(
        request.model, gpu.name, request.kv_dtype, num_gpus=request.num_gpus, weight_bytes=request.weight_bytes
    )
    peak = gpu.flops(per_parameter) / COMPUTE_EFFICIENCY / 1e12
    if ranks is not None:
        name, costs = f"{request.tensor_parallel} x {gpu.name}", ranks.divided
    return _Hardware(
        name,
        gpu.memory_bytes * request.num_gpus,
        f"{request.num_gpus} x {gpu.memory_bytes / 1e9:.0f} GB",
        costs,
        f"2 x {weights.active / 1e9:.2f} B active parameters at {COMPUTE_EFFICIENCY:.0%} of {peak:.0f} TFLOP/s "
        f"(data sheet) on {name}" + (", and its part of the all-reduces" if ranks is not None else ""),
        "attention: 4 x hidden size x layers that attend FLOPs for each token before it",
        f"{LINK_EFFICIENCY:.0%} of the data sheet",
    )


def _add_cache(plan: Plan, request: PlanRequest, config: KVCacheConfig) -> None:
    groups = "; ".join(
        f"{len(group.layers)} layers x {group.bytes_per_token // len(group.layers)} bytes"
        + (f" (window {group.window})" if group.window else "")
        for group in config.groups
        if group.bytes_per_token
    )
    if config.bytes_per_token:
        plan.put("kv_bytes_per_token", config.bytes_per_token, groups)
    _add_blocks(plan, request, config)
    live = "" if config.state_group is None else ", and two states: that where it stands, and that where its step goes"
    each = plan.put(
        "sequence_bytes",
        config.sequence_bytes(request.context),
        f"{request.context:,} tokens in whole blocks; windowed layers keep their window only{live}",
    )
    fit = plan.put("sequences_that_fit", config.max_sequences(request.context), _why_fit(request, config))
    if config.bytes_per_token:
        plan.put(
            "tokens_that_fit",
            plan.numbers["kv_budget_bytes"] // config.bytes_per_token,
            "if every layer that attends keeps all tokens",
        )
    for tier, size in (("host", request.host_bytes), ("disk", request.disk_bytes)):
        if size:
            plan.put(
                f"{tier}_sequences",
                size // request.tensor_parallel // _cached_bytes(plan),
                f"{_gb(size)} of {tier} memory keep so many further sequences of {request.context:,} tokens cached",
            )
    if request.data_parallel > 1:
        fit = plan.put("all_sequences_that_fit", fit * request.data_parallel, f"in {request.data_parallel} engines")
    short = request.concurrency - int(fit)
    if short <= 0:
        plan.verdict = (
            f"{request.concurrency} sequences of {request.context:,} tokens fit: there is room for {int(fit)}."
        )
    else:
        cache = plan.numbers["kv_budget_bytes"] * request.data_parallel
        each = max(each, cache / fit) if fit else each  # what pools divided for cached prefixes need for one more
        needed = max(2, ceil(request.concurrency * each / cache))
        plan.verdict = (
            f"{int(fit)} of {request.concurrency} sequences of {request.context:,} tokens fit. "
            f"The others need {_gb(short * each)} more: {needed}x the cache, shorter contexts, a smaller dtype, or a queue."
        )


def _why_fit(request: PlanRequest, config: KVCacheConfig) -> str:
    """What the number of sequences counts; with several pools, also what another division of the budget would give."""
    watermark = (
        f"in a manager with default settings, which keeps {config.watermark:.0%} of its blocks free at admission"
    )
    if len(config.pools) == 1:
        return watermark
    divided = replace(config, gpu_bytes=config.gpu_bytes, plan_tokens=request.context).max_sequences(request.context)
    return f"{watermark}, and divides the budget for cached prefixes; {divided:,} with plan_tokens={request.context}"


def _add_blocks(plan: Plan, request: PlanRequest, config: KVCacheConfig) -> None:
    """Blocks and checkpoints that the budget gives."""
    group = config.state_group
    counts = config.blocks_in(int(plan.numbers["kv_budget_bytes"]))
    if group is None:
        plan.put(
            "gpu_blocks",
            sum(counts),
            f"blocks of {request.block_size} tokens in {len(config.pools)} pool(s) of the budget",
        )
        return
    shared = len(config.pools[group.pool].groups)
    checkpoints = counts[group.pool] // shared
    plan.put(
        "checkpoint_bytes",
        group.block_bytes,
        f"the states of {len(group.layers)} layers behind one token, however long the sequence is",
    )
    of_states = checkpoints * group.block_bytes / plan.numbers["kv_budget_bytes"]
    plan.put(
        "gpu_checkpoints",
        checkpoints,
        f"{of_states:.0%} of the budget for states and {1 - of_states:.0%} for K and V, as cached prefixes need them",
    )
    plan.put(
        "gpu_blocks",
        sum(counts) - checkpoints,
        f"blocks of {request.block_size} tokens of the layers that attend",
    )


def _cached_bytes(plan: Plan) -> float:
    """Bytes of a sequence that is cached: it has one checkpoint, where a live one has two states."""
    return plan.numbers["sequence_bytes"] - plan.numbers.get("checkpoint_bytes", 0)


def _add_costs(plan: Plan, context: int, hardware: _Hardware, num_ranks: int) -> None:
    costs = hardware.costs
    token = plan.put("recompute_seconds_per_token", costs.prefill_seconds_per_token, hardware.why_token)
    pair = plan.put("recompute_seconds_per_token_pair", costs.seconds_per_token_pair, hardware.why_pair)
    computing = plan.put(
        "recompute_seconds", costs.prefill_seconds(context, 0), f"a prompt of {context:,} tokens, computed"
    )
    speeds = {
        "host": (costs.transfer_bytes_per_second, LINK_LATENCY, hardware.link),
        "disk": (
            DISK_BYTES_PER_SECOND / num_ranks,
            DISK_LATENCY,
            f"one good NVMe drive{' for all ranks' * (num_ranks > 1)}",
        ),
    }
    each = _cached_bytes(plan)
    for tier, (speed, latency, source) in speeds.items():
        loading = plan.put(
            f"{tier}_load_seconds",
            latency + each / speed,
            f"the same prompt, loaded at {speed / 1e9:.1f} GB/s ({source})",
        )
        plan.put(
            f"{tier}_break_even_tokens",
            _break_even(
                token,
                pair,
                latency + plan.numbers.get("checkpoint_bytes", 0) / speed,
                plan.numbers.get("kv_bytes_per_token", 0) / speed,
            ),
            f"prefixes from this length on are faster to load from {tier} than to compute (at {context:,} tokens: "
            f"{computing / loading:.1f}x); -1: never",
        )


def _add_ranks(plan: Plan, request: PlanRequest, ranks: RankCosts) -> None:
    """What ranks add up in a step, what that costs, and what other divisions would; all of one engine."""
    count, context = request.tensor_parallel, request.context
    most = max(1, int(plan.numbers["sequences_that_fit"]))
    running = min(most, ceil_div(request.concurrency, request.data_parallel))
    batch = f"{running:,} sequences that decode behind {context:,} tokens"
    plan.put("all_reduces_per_step", ranks.num_reduces, f"2 in each of {len(ranks.shape.layers)} layers")
    plan.put(
        "all_reduce_bytes", running * ranks.activation_bytes, f"of each: {running:,} x {ranks.activation_bytes:,} bytes"
    )
    reducing = plan.put(
        "all_reduce_seconds",
        ranks.all_reduce_seconds(running),
        f"all of a step: {ranks.link.latency * 1e6:.3g} µs each, and 2 x {count - 1}/{count} of the bytes at "
        f"{ranks.link.bytes_per_second / 1e9:.0f} GB/s ({ranks.link.source})",
    )
    alone = ranks.alone.decode_seconds(running, running * context)
    step = plan.put(
        "decode_step_seconds",
        ranks.divided.decode_seconds(running, running * context),
        f"{batch}; {alone:.4f} s on one GPU, if it had the memory",
    )
    plan.why["decode_step_seconds"] += f"; {reducing / step:.0%} of it are all-reduces"
    plan.put(
        "pipeline_step_seconds",
        ranks.pipeline_seconds(running, context),
        f"on paper: the same with {count} stages of layers, each at work on another {1 / count:.0%} of the sequences",
    )
    plan.put(
        "context_prefill_seconds",
        ranks.context_seconds(context),
        f"on paper: a prompt of {context:,} tokens divided between {count} GPUs with all weights each; divided by heads "
        f"it takes {plan.numbers['recompute_seconds']:.3f} s",
    )


def _break_even(token: float, pair: float, latency: float, load: float) -> float:
    """The shortest prefix for which latency + n * load <= n * token + n^2 / 2 * pair; -1 when there is none."""
    gain = token - load
    root = gain**2 + 2 * pair * latency
    if pair == 0:
        return float(-(-latency // gain)) if gain > 0 else -1.0
    return max(1.0, float(-(-(-gain + root**0.5) // pair)))


_BEND = 0.05  # of the rise: a curve that lies no higher above the line between its ends has no knee


def knee(capacities: Sequence[int], ratios: Sequence[float]) -> int | None:
    """The capacity after which more gains little: the point farthest above the line from the first to the last point.

    Capacities count by their logarithm. With a flat curve the smallest is the answer. None: the curve is straight or bends
    upwards, so that more still gains as much as before.

    >>> knee([1, 10, 100], [0.1, 0.4, 0.45]), knee([1, 10, 100], [0.1, 0.2, 0.5])
    (10, None)
    """
    from math import log

    if not capacities or len(capacities) != len(ratios):
        raise InvalidArgumentError("a knee needs as many hit ratios as capacities, and at least one")
    width, height = log(capacities[-1] / capacities[0]), ratios[-1] - ratios[0]
    if width <= 0 or height <= 0:
        return capacities[0]
    above = [
        (ratio - ratios[0]) / height - log(size / capacities[0]) / width
        for size, ratio in zip(capacities, ratios, strict=True)
    ]
    highest = max(range(len(above)), key=above.__getitem__)
    return capacities[highest] if above[highest] > _BEND else None


def knees(capacities: list[int], ratios: list[float], gpu_blocks: int) -> dict[str, int | None]:
    """The knee of the part of a hit curve that fits on the GPU, and of the rest, which lower tiers would hold.

    >>> knees([1, 2, 4, 8, 16, 32], [0.1, 0.3, 0.31, 0.32, 0.6, 0.61], gpu_blocks=8)
    {'on the GPU': 2, 'with lower tiers': 16}
    """
    found = dict(zip(capacities, ratios, strict=True))
    parts = curve_parts(capacities, gpu_blocks)
    return {where: knee(sizes, [found[size] for size in sizes]) for where, sizes in parts.items()}


def curve_parts(capacities: list[int], gpu_blocks: int) -> dict[str, list[int]]:
    """The sizes of a hit curve that fit on the GPU, and those from the largest of them on; without those of no use."""
    on_gpu = [size for size in capacities if size <= gpu_blocks]
    behind = [size for size in capacities if not on_gpu or size >= on_gpu[-1]]
    parts = {"on the GPU": on_gpu} if on_gpu else {}
    if len(behind) > 1 or (behind and not on_gpu):
        parts["with lower tiers"] = behind
    return parts


def curve_sentence(capacities: Sequence[int], ratios: Sequence[float]) -> str:
    """What a hit curve says, if that is not where its knee is: that nothing is shared, or that there is no knee yet."""
    if not any(ratios):
        return "No size finds anything: no prompt begins with blocks of one before it."
    if len(capacities) > 2 and knee(capacities, ratios) is None:
        return (
            f"There is no knee yet: from {capacities[0]:,} to {capacities[-1]:,} blocks, more memory finds more "
            f"({ratios[0]:.1%} to {ratios[-1]:.1%})."
        )
    return ""


def _gb(size: float) -> str:
    return f"{size / GIB:,.1f} GiB"
