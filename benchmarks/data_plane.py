"""Speed of the data plane, each figure beside a plain copy of the same bytes in the same run.

    python benchmarks/data_plane.py [--json FILE] [--check] [--quick] [--only WORD]

Blocks are those of a model of 32 layers, 8 KV heads of 128, bfloat16, 16 tokens: 2 MiB each. GPU figures are wall-clock
times from the call to the end of the work, or CUDA events where it says so; CPU figures are CPU time of one thread. Cases
that need a GPU are absent where there is none.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

import harness
import kvpool
from data_plane_attention import attention_cases, attention_peers
from harness import Case, NoPartError, Peer, PeerAbsentError, PeerCase, Runner, Times
from kvpool import CopyKind, CopyOp, KVCacheConfig, KVCacheManager, LayerSpec, Tier
from kvpool.kernels.layout import LayerCache, StoredPart
from kvpool.kernels.write import read_slots, write_slots
from kvpool.storage import BlockStore, DataPlane, GroupLayout

LAYERS, HEADS, DIM, BLOCK_SIZE = 32, 8, 128, 16
LAYER = LayerSpec(kv_heads=HEADS, head_dim=DIM)
BLOCK_BYTES = LAYERS * LAYER.bytes_per_token * BLOCK_SIZE
GPU_BLOCKS, HOST_BLOCKS = 4096, 1024
CPU_LAYERS, CPU_BLOCKS = 8, 640  # on a CPU the model has fewer layers
NUM_SWAPPED, NUM_COPIED, CPU_COPIED, NUM_TOKENS = 512, 512, 160, 8192
TOKEN_BYTES = NUM_TOKENS * LAYER.bytes_per_token  # K and V of one layer
DECODES = {"sequences": 64, "tokens": 4096}

Ids = npt.NDArray[np.int32]


def gigabytes_per_second(num_bytes: int, run: Callable[[], Any]) -> list[float]:
    """Wall-clock, with the GPU idle before and after."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return [num_bytes / (time.perf_counter() - start) / 1e9]


def cpu_gigabytes_per_second(num_bytes: int, run: Callable[[], Any]) -> list[float]:
    start = time.thread_time_ns()
    run()
    return [num_bytes / (time.thread_time_ns() - start)]


def gpu_seconds(run: Callable[[], Any]) -> float:
    """Between two CUDA events on the current stream."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def require_gpu() -> None:
    if not torch.cuda.is_available():
        raise PeerAbsentError("needs a CUDA device: torch finds none")


@cache
def gpu_plane() -> DataPlane:
    require_gpu()
    config = KVCacheConfig([LAYER] * LAYERS, BLOCK_SIZE, gpu_blocks=GPU_BLOCKS, host_blocks=HOST_BLOCKS)
    plane = DataPlane(KVCacheManager(config), "cuda")
    assert plane.stores[0, Tier.HOST].num_bytes == HOST_BLOCKS * BLOCK_BYTES
    return plane


@cache
def cpu_plane() -> DataPlane:
    config = KVCacheConfig([LAYER] * CPU_LAYERS, BLOCK_SIZE, gpu_blocks=CPU_BLOCKS, host_blocks=CPU_BLOCKS)
    plane = DataPlane(KVCacheManager(config), "cpu")
    for tier in (Tier.GPU, Tier.HOST):
        plane.stores[0, tier].data.fill_(1)  # type: ignore[union-attr]
    return plane


def scattered(seed: int, limit: int, count: int) -> Ids:
    return np.random.default_rng(seed).permutation(limit)[:count].astype(np.int32)


def copy_op(source: Tier, target: Tier, src: Ids, dst: Ids) -> CopyOp:
    return CopyOp(CopyKind.OFFLOAD, 0, source, target, src, dst)


# --- between GPU and host ------------------------------------------------------------------------------------------------


def swap(out: bool, back: bool, num_blocks: int, latency: bool = False) -> Runner:
    """Scattered blocks on both sides; both directions move disjoint blocks at the same time."""
    plane = gpu_plane()
    gpu, host = scattered(1, GPU_BLOCKS, 2 * num_blocks), scattered(2, HOST_BLOCKS, 2 * num_blocks)
    ops = []
    if out:
        ops.append(copy_op(Tier.GPU, Tier.HOST, gpu[:num_blocks], host[:num_blocks]))
    if back:
        ops.append(copy_op(Tier.HOST, Tier.GPU, host[num_blocks:], gpu[num_blocks:]))
    num_bytes = len(ops) * num_blocks * BLOCK_BYTES
    run = partial(gigabytes_per_second, num_bytes, lambda: plane.transfers.submit(ops, overlap=True).wait())
    return run if not latency else lambda: [num_bytes / speed / 1e3 for speed in run()]


def plain_swap(out: bool, back: bool, num_blocks: int, latency: bool = False) -> Runner:
    """The ceiling: one memcpy per direction between pinned and device memory."""
    device = gpu_plane().stores[0, Tier.GPU].data  # type: ignore[union-attr]
    host = torch.empty((2 * num_blocks, BLOCK_BYTES), dtype=torch.uint8, pin_memory=True)
    streams = [torch.cuda.Stream() for _ in range(2)]  # type: ignore[no-untyped-call]

    def run() -> None:
        if out:
            with torch.cuda.stream(streams[0]):
                host[:num_blocks].copy_(device[:num_blocks], non_blocking=True)
        if back:
            with torch.cuda.stream(streams[1]):
                device[num_blocks : 2 * num_blocks].copy_(host[num_blocks : 2 * num_blocks], non_blocking=True)

    num_bytes = (out + back) * num_blocks * BLOCK_BYTES
    measure = partial(gigabytes_per_second, num_bytes, run)
    return measure if not latency else lambda: [num_bytes / speed / 1e3 for speed in measure()]


def layer_first_swap(num_blocks: int) -> Runner:
    """What a swap costs where each layer has its own K and V tensors: 64 times as many copies, each a 64th."""
    from kvpool.storage.dma import HostSide, copy_over_link

    plane = gpu_plane()
    device, host = (plane.stores[0, tier].data for tier in (Tier.GPU, Tier.HOST))  # type: ignore[union-attr]
    store, pieces = plane.stores[0, Tier.HOST], 2 * LAYERS
    assert isinstance(store, BlockStore)
    side = HostSide(store.part_blocks * pieces, store.lock(np.arange(HOST_BLOCKS, dtype=np.int32)))

    def piecewise(blocks: Ids, limit: int) -> Ids:
        return (np.arange(pieces)[:, None] * limit + blocks).ravel().astype(np.int32)

    src = piecewise(scattered(1, GPU_BLOCKS, num_blocks), GPU_BLOCKS)
    dst = piecewise(scattered(2, HOST_BLOCKS, num_blocks), HOST_BLOCKS)
    source, target = (data.view(-1, BLOCK_BYTES // pieces) for data in (device, host))
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def run() -> None:
        with torch.cuda.stream(stream):
            copy_over_link(source, target, src, dst, side)

    return partial(gigabytes_per_second, num_blocks * BLOCK_BYTES, run)


# --- inside the GPU ------------------------------------------------------------------------------------------------------


def copy_on_gpu() -> Runner:
    """Copy-on-write and defragmentation: scattered blocks to scattered places. Bytes are read and written.

    Batches follow each other, as an engine submits them: the next is planned while the GPU copies (CUDA events).
    """
    plane = gpu_plane()
    ids = scattered(3, GPU_BLOCKS, 2 * NUM_COPIED)
    ops = [copy_op(Tier.GPU, Tier.GPU, ids[:NUM_COPIED], ids[NUM_COPIED:])]
    return in_a_row(lambda: plane.transfers.submit(ops))


def plain_copy_on_gpu() -> Runner:
    data = gpu_plane().stores[0, Tier.GPU].data  # type: ignore[union-attr]
    return in_a_row(lambda: data[:NUM_COPIED].copy_(data[NUM_COPIED : 2 * NUM_COPIED]))


def in_a_row(copy: Callable[[], Any], count: int = 16) -> Runner:
    num_bytes = count * 2 * NUM_COPIED * BLOCK_BYTES
    return lambda: [num_bytes / gpu_seconds(lambda: [copy() for _ in range(count)]) / 1e9]


def random_slots(num_blocks: int) -> Ids:
    """New tokens of many sequences: whole blocks in any order."""
    blocks = scattered(4, num_blocks, NUM_TOKENS // BLOCK_SIZE)
    return np.asarray(blocks[:, None] * BLOCK_SIZE + np.arange(BLOCK_SIZE), np.int32).ravel()


def captured(run: Callable[[int], Any]) -> Runner:
    """GB/s (read and written) of 32 writes in one CUDA graph, so that launching them costs nothing."""
    run(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for number in range(LAYERS):
            run(number)
    return lambda: [2 * LAYERS * TOKEN_BYTES / gpu_seconds(graph.replay) / 1e9]


def new_tokens(count: int) -> list[Tensor]:
    """K or V of 8,192 tokens, several times over: more than the caches of the GPU hold."""
    return [torch.randn(NUM_TOKENS, HEADS, DIM, device="cuda", dtype=torch.bfloat16) for _ in range(count)]


def scatter_on_gpu() -> Runner:
    plane = gpu_plane()
    slots = torch.from_numpy(random_slots(GPU_BLOCKS)).cuda()
    k, v = new_tokens(8), new_tokens(8)
    return captured(lambda layer: plane.write(slots, k[layer % 8], v[layer % 8], layer))


def scatter_heads_first() -> Runner:
    """The same where the heads of a block, not its tokens, stand side by side: eight times as many, shorter rows."""
    data: Tensor = gpu_plane().stores[0, Tier.GPU].data  # type: ignore[union-attr]
    rows = data.view(torch.bfloat16).view(-1, BLOCK_SIZE, 1, DIM)  # every head of every layer as a block of its own
    heads = np.arange(HEADS, dtype=np.int64)
    slots = random_slots(GPU_BLOCKS // 8).astype(np.int64)
    places = (slots // BLOCK_SIZE * (2 * LAYERS * HEADS))[:, None] + heads
    flat = torch.from_numpy((places * BLOCK_SIZE + slots[:, None] % BLOCK_SIZE).ravel().astype(np.int32)).cuda()
    k, v = ([x.view(-1, 1, DIM) for x in new_tokens(8)] for _ in range(2))

    def write(layer: int) -> None:
        first = 2 * layer * HEADS
        limit = len(rows) - 2 * LAYERS * HEADS
        write_slots(
            LayerCache(
                k=StoredPart(LAYER.dtype, rows[first : first + limit], DIM),
                v=StoredPart(LAYER.dtype, rows[first + HEADS : first + HEADS + limit], DIM),
            ),
            flat,
            {"k": k[layer % 8], "v": v[layer % 8]},
        )

    return captured(write)


# --- attention beside transfers ------------------------------------------------------------------------------------------


def decode(heads_first: bool = False) -> Callable[[], Any]:
    """Decode attention of 64 sequences of 4,096 tokens over one layer of scattered blocks."""
    require_gpu()
    from kvpool.attention import AttentionSpec, PagedBatch, create_backend

    sequences, tokens = DECODES["sequences"], DECODES["tokens"]
    num_blocks = sequences * tokens // BLOCK_SIZE
    config = KVCacheConfig([LAYER], BLOCK_SIZE, gpu_blocks=num_blocks)
    data = torch.randn(num_blocks, config.block_bytes // 2, device="cuda", dtype=torch.bfloat16).view(torch.uint8)
    cache = GroupLayout(config.groups[0]).layer_cache(data, 0)
    if heads_first:
        strides = (cache["k"].data.stride(0), DIM, BLOCK_SIZE * DIM, 1)
        for name, part in cache.items():
            turned = part.data.as_strided(part.data.shape, strides, part.data.storage_offset())
            cache[name] = part._replace(data=turned)
    indptr = np.arange(sequences + 1, dtype=np.int32) * (tokens // BLOCK_SIZE)
    indices = scattered(5, num_blocks, num_blocks)
    batch = PagedBatch.build(indptr, indices, [1] * sequences, [tokens] * sequences, block_size=BLOCK_SIZE)
    backend = create_backend("triton", device="cuda")
    plan = backend.plan(AttentionSpec(q_heads=4 * HEADS, kv_heads=HEADS, head_dim=DIM), batch)
    q = torch.randn(sequences, 4 * HEADS, DIM, device="cuda", dtype=torch.bfloat16)
    return lambda: backend.run(q, cache, plan)


def decode_speed(heads_first: bool) -> Runner:
    run = decode(heads_first)
    num_bytes = DECODES["sequences"] * DECODES["tokens"] * LAYER.bytes_per_token
    return lambda: [50 * num_bytes / gpu_seconds(lambda: [run() for _ in range(50)]) / 1e9]


def decode_while_offloading() -> Runner:
    """How much longer decode attention takes while blocks leave the GPU at full speed (CUDA events)."""
    run, plane = decode(), gpu_plane()
    gpu, host = scattered(1, GPU_BLOCKS, NUM_SWAPPED), scattered(2, HOST_BLOCKS, NUM_SWAPPED)
    ops = [copy_op(Tier.GPU, Tier.HOST, gpu, host)]

    def steps() -> float:
        return gpu_seconds(lambda: [run() for _ in range(150)])

    def slowdown() -> list[float]:
        steps()
        alone = steps()
        transfers = [plane.transfers.submit(ops, overlap=True) for _ in range(6)]
        together = steps()
        if transfers[-1].done():
            raise RuntimeError("the transfers ended before the decoding did: nothing was measured")
        transfers[-1].wait()
        return [together / alone]

    return slowdown


# --- on a CPU ------------------------------------------------------------------------------------------------------------


def cpu_tokens() -> tuple[LayerCache, Tensor, Tensor, Tensor]:
    slots = torch.from_numpy(random_slots(CPU_BLOCKS))
    k, v = (torch.randn(len(slots), HEADS, DIM).bfloat16() for _ in range(2))
    return cpu_plane().layer_cache(3), slots, k, v


def cpu_scatter() -> Runner:
    layer, slots, k, v = cpu_tokens()
    return partial(cpu_gigabytes_per_second, TOKEN_BYTES, lambda: write_slots(layer, slots, {"k": k, "v": v}))


def cpu_gather() -> Runner:
    layer, slots, _, _ = cpu_tokens()
    return partial(cpu_gigabytes_per_second, TOKEN_BYTES, lambda: [read_slots(part, slots) for part in layer.values()])


def cpu_plain_tokens(fresh: bool) -> Runner:
    _, _, k, v = cpu_tokens()
    targets = torch.empty_like(k), torch.empty_like(v)

    def run() -> None:
        for source, target in zip((k, v), targets, strict=True):
            (torch.empty_like(target) if fresh else target).copy_(source)

    return partial(cpu_gigabytes_per_second, TOKEN_BYTES, run)


def cpu_copy(source: Tier, target: Tier) -> Runner:
    plane = cpu_plane()
    ids = scattered(6, CPU_BLOCKS, 2 * CPU_COPIED)
    ops = [copy_op(source, target, ids[:CPU_COPIED], ids[CPU_COPIED:])]
    num_bytes = CPU_COPIED * plane.config.block_bytes
    return partial(cpu_gigabytes_per_second, num_bytes, lambda: plane.transfers.submit(ops).wait())


def cpu_plain_copy(source: Tier, target: Tier) -> Runner:
    plane = cpu_plane()
    a, b = (plane.stores[0, tier].data for tier in (source, target))  # type: ignore[union-attr]
    num_bytes = CPU_COPIED * plane.config.block_bytes
    return partial(cpu_gigabytes_per_second, num_bytes, lambda: b[CPU_COPIED : 2 * CPU_COPIED].copy_(a[:CPU_COPIED]))


# --- the table -----------------------------------------------------------------------------------------------------------


_CEILINGS: dict[str, Callable[..., Runner]] = {
    run.__name__: run for run in (plain_swap, plain_copy_on_gpu, cpu_plain_tokens, cpu_plain_copy)
}


class PlainCopy:
    """The ceiling of every case: torch's copy of as many bytes, measured between kvpool's repeats."""

    name = "copy_"

    def start(self) -> str:
        return str(torch.__version__)

    def setup(self, case: str, params: Mapping[str, Any]) -> None:
        if case not in _CEILINGS:
            raise NoPartError(f"{case} is no copy")
        self._run = _CEILINGS[case](**params)

    def repeat(self) -> Sequence[float]:
        return self._run()

    def close(self) -> None:
        return None


def beside(name: str, run: Callable[..., Runner], plain: Callable[..., Runner], share: float, **params: Any) -> Case:
    """A case in GB/s with its ceiling: the share of it that must be reached."""
    peer = PeerCase(plain.__name__, params)
    return Case(name, "GB/s", "higher", partial(run, **params), (Times(share, PlainCopy.name),), peer, warmups=2)


def gpu_cases() -> list[Case]:
    few: dict[str, Any] = {"out": True, "back": False, "num_blocks": 8, "latency": True}
    few_in = {**few, "out": False, "back": True}
    latency_bar = (Times(0.5, PlainCopy.name),)
    named = "GPU, swap of 8 blocks, "
    return [
        beside("GPU, swap out, 512 blocks", swap, plain_swap, 0.95, out=True, back=False, num_blocks=NUM_SWAPPED),
        beside("GPU, swap in, 512 blocks", swap, plain_swap, 0.95, out=False, back=True, num_blocks=NUM_SWAPPED),
        beside("GPU, both directions", swap, plain_swap, 0.90, out=True, back=True, num_blocks=NUM_SWAPPED),
        Case(named + "out", "us", "lower", partial(swap, **few), latency_bar, PeerCase("plain_swap", few), repeats=50),
        Case(
            named + "in",
            "us",
            "lower",
            partial(swap, **few_in),
            latency_bar,
            PeerCase("plain_swap", few_in),
            repeats=50,
        ),
        beside("GPU, copy 1 GiB of scattered blocks", copy_on_gpu, plain_copy_on_gpu, 0.85),
        beside("GPU, scatter 8,192 tokens, one layer", scatter_on_gpu, plain_copy_on_gpu, 0.70),
        Case("GPU, decode while offloading, slowdown", "x", "lower", decode_while_offloading, (1.05,), repeats=10),
    ]


def layout_cases() -> list[Case]:
    """The alternatives that docs/decisions/0004-block-layout.md weighs."""
    swaps = PeerCase("plain_swap", {"out": True, "back": False, "num_blocks": NUM_SWAPPED})
    return [
        Case("layout, swap out, layer first", "GB/s", "higher", partial(layer_first_swap, NUM_SWAPPED), (), swaps),
        Case("layout, scatter, heads first", "GB/s", "higher", scatter_heads_first, (), PeerCase("plain_copy_on_gpu")),
        Case("layout, decode, tokens first", "GB/s", "higher", partial(decode_speed, False)),
        Case("layout, decode, heads first", "GB/s", "higher", partial(decode_speed, True)),
    ]


def cpu_cases() -> list[Case]:
    down = {"source": Tier.GPU, "target": Tier.HOST}
    same = {"source": Tier.GPU, "target": Tier.GPU}
    tokens = dict(repeats=40, warmups=3)
    bar = (Times(0.8, PlainCopy.name),)

    def case(name: str, run: Callable[[], Runner], fresh: bool) -> Case:
        peer = PeerCase("cpu_plain_tokens", {"fresh": fresh})
        return Case(name, "GB/s", "higher", run, bar, peer, **tokens)  # type: ignore[arg-type]

    return [
        case("CPU, scatter 8,192 tokens, one layer", cpu_scatter, fresh=False),
        case("CPU, gather 8,192 tokens, one layer", cpu_gather, fresh=True),
        beside("CPU, swap out, 160 blocks", cpu_copy, cpu_plain_copy, 0.8, **down),
        beside("CPU, copy 160 scattered blocks", cpu_copy, cpu_plain_copy, 0.8, **same),
    ]


if __name__ == "__main__":
    options = harness.argument_parser(__doc__.splitlines()[0]).parse_args()
    torch.set_num_threads(1)
    versions = {"kvpool": getattr(kvpool, "__version__", "from source"), "torch": str(torch.__version__)}
    if torch.cuda.is_available():
        versions["GPU"] = torch.cuda.get_device_name()
    chosen = [*cpu_cases(), *gpu_cases(), *layout_cases(), *attention_cases()]
    peers: list[Peer] = [PlainCopy(), *attention_peers()]
    sys.exit(harness.main(chosen, peers, options, versions, clock="as benchmarks/data_plane.py says at its head"))
