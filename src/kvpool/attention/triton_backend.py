"""The Triton backend: kvpool's own kernels, for every kind of attention and every stored type on NVIDIA GPUs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvpool.attention.attention_batch import Int32Array, Int64Array, PagedBatch
from kvpool.attention.backend import AttentionBackend, AttentionPlan, PlanBuffers
from kvpool.attention.triton_sparse import SparseBuffers, SparsePlan, Tokens, listed_batch, token_arrays
from kvpool.attention.work import MANY_WAVES, Work, divide_work, max_items, max_partials
from kvpool.config.layers import DType, ceil_div
from kvpool.errors import UnsupportedAttentionError
from kvpool.kernels.attention import (
    FEW_MERGES,
    ITEM_FIELDS,
    TILE_FIELDS,
    Partials,
    TileShape,
    attend_items,
    merge_partials,
    use_interpreter,
)
from kvpool.kernels.attention_spec import AttentionSpec
from kvpool.kernels.copy import upload
from kvpool.kernels.latents import LATENT_TILE, attends_latents, latent_items
from kvpool.kernels.layout import LayerCache, current
from kvpool.kernels.prefill import PREFILL_TILE, prefill_items, prefills, prefills_on, reads
from kvpool.kernels.quantization import TORCH_DTYPES
from kvpool.kernels.sparse import Choice

_DECODE_ROWS = 16  # the smallest tile that tensor cores take
_DECODE_BYTES = 2**14  # of keys in one iteration of decoding
_WIDE_BYTES = 256  # with more bytes per head, tiles are smaller, to fit shared memory
_LONG_TILE = TileShape(128, 64, warps=8, stages=3, programs=1)


class _Launch(NamedTuple):
    """One kernel launch over work items of one tile shape, and the merge after it."""

    shape: TileShape
    tile_tokens: int
    items: Tensor
    tiles: Tensor
    partials: Partials | None


class _LaunchSize(NamedTuple):
    """The size of one launch in a CUDA graph."""

    shape: TileShape
    tile_tokens: int
    items: int
    tiles: int  # whose keys are divided
    partials: int


class _TritonPlan(AttentionPlan):
    def __init__(
        self, backend: AttentionBackend, spec: AttentionSpec, num_query_tokens: int, block_size: int, indices: Tensor
    ) -> None:
        super().__init__(backend, spec, num_query_tokens, block_size)
        self.indices = indices
        self.launches: list[_Launch] = []

    def over(self, indices: Tensor) -> _TritonPlan:
        """The same work over other lists."""
        plan = _TritonPlan(self.backend, self.spec, self.num_query_tokens, self.block_size, indices)
        plan.launches = self.launches
        return plan


class _Decoded(NamedTuple):
    """How the keys of single queries were divided, for a step soon after, in which each sequence has a few tokens more."""

    lengths: Int64Array  # keys that each query sees
    units: Int64Array
    work: Work

    def longer(self, batch: PagedBatch, units: Int64Array) -> Work | None:
        """The same division for longer sequences; None if it would be another one."""
        if not np.array_equal(self.units, units):
            return None
        items = self.work.items.copy()
        real = np.flatnonzero(items[:, 0] < len(units))  # the others fill the buffers up
        row = items[real, 0]
        items[real, 2] = batch.kv_lens[row] - 1
        items[real, 3] = batch.indptr[row]
        for bound in (5, 6):  # what began or ended behind the last key still does: some items are empty
            at_end = items[real, bound] == self.lengths[row]
            items[real[at_end], bound] = batch.kv_lens[row[at_end]]
        return self.work._replace(items=items)


class _TritonBuffers(PlanBuffers):
    """Launches of fixed size. Every query is its own tile; if sequences may have many, there are larger tiles, too."""

    def __init__(
        self,
        backend: TritonBackend,
        spec: AttentionSpec,
        max_sequences: int,
        max_query_tokens: int,
        max_blocks: int,
        beside: PlanBuffers | None,
    ) -> None:
        super().__init__(spec, max_sequences, max_query_tokens, max_blocks)
        rooms = [backend.room(spec, max_query_tokens, max_sequences, short=True)]
        if max_query_tokens > max_sequences:
            rooms.append(backend.room(spec, max_query_tokens, max_sequences, short=False))
        sizes = [size for room in rooms for size in (room.items * ITEM_FIELDS, room.tiles * TILE_FIELDS)]
        self.memory = torch.zeros(sum(sizes) + max_blocks, dtype=torch.int32, device=backend.device)
        *parts, self.indices = torch.split(self.memory, [*sizes, max_blocks])
        self.rooms = rooms
        self.decoded: _Decoded | None = None  # the last plan, if it had one query for each sequence
        self.launches: list[_Launch] = []
        for number, room in enumerate(rooms):
            items, tiles = parts[2 * number].view(-1, ITEM_FIELDS), parts[2 * number + 1].view(-1, TILE_FIELDS)
            partials = self._partials_of(beside, number, room) or backend.partials(
                spec, room.partials, room.tile_tokens
            )
            self.launches.append(_Launch(room.shape, room.tile_tokens, items, tiles, partials))

    def _partials_of(self, other: PlanBuffers | None, number: int, room: _LaunchSize) -> Partials | None:
        """Memory of other buffers for the partial results of a launch, if they have enough."""
        if not isinstance(other, _TritonBuffers) or other.spec != self.spec or number >= len(other.rooms):
            return None
        there, partials = other.rooms[number], other.launches[number].partials
        if partials is None or there.tile_tokens != room.tile_tokens or there.partials < room.partials:
            return None
        return Partials(*(tensor[: room.partials] for tensor in partials))


class TritonBackend(AttentionBackend):
    """Plans work items on the host, copies them to the device at once, and runs one kernel for each tile shape (1 or 2)."""

    name = "triton"
    graphs = True

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.specialised = prefills_on(device)
        self._beside: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self.num_sms = torch.cuda.get_device_properties(device).multi_processor_count
            self._beside = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        elif use_interpreter():
            self.num_sms = 4
        else:
            raise UnsupportedAttentionError(f"the triton backend needs a CUDA device, not {device}; use torch")

    def missing(self, spec: AttentionSpec) -> str | None:
        """It supports everything but heads that are too wide for a tile in shared memory."""
        if max(spec.head_dim, spec.v_dim) > 1024:
            return f"heads of {max(spec.head_dim, spec.v_dim)} elements (at most 1024)"
        return None

    def tile_shape(self, spec: AttentionSpec, *, short: bool) -> TileShape:
        """The tile for sequences with few queries (`short`) or many."""
        if self.specialised and attends_latents(spec):
            return LATENT_TILE
        return self._general_shape(spec, short=short)

    def _general_shape(self, spec: AttentionSpec, *, short: bool) -> TileShape:
        if not short and self.specialised and prefills(spec):
            return PREFILL_TILE
        # Of one part, kernels load what is key and value, and the rest of the key behind it
        widest = max(spec.v_dim, spec.head_dim - spec.v_dim if spec.shares_part else spec.head_dim)
        elements = 1 << (widest - 1).bit_length()  # as kernels pad them
        row_bytes = elements * (4 if spec.dtype is DType.FLOAT32 else 2)
        wide = max(1, row_bytes // _WIDE_BYTES)
        if short and wide == 1 and spec.kv_dtype is DType.INT4:
            return TileShape(_DECODE_ROWS, 64, warps=1, stages=2, programs=8)
        if short and wide == 1 and spec.kv_dtype.bits <= 8:
            return TileShape(_DECODE_ROWS, 64, warps=2, stages=3, programs=4)
        if short:
            keys = min(128, max(16, _DECODE_BYTES // row_bytes))
            return TileShape(_DECODE_ROWS, keys, warps=4, stages=2, programs=4)
        stages = 3 if wide <= 4 else 2
        if row_bytes == _WIDE_BYTES and spec.kv_dtype is spec.dtype:
            return _LONG_TILE
        return TileShape(max(16, 128 // wide), max(16, 32 // wide), warps=4, stages=stages, programs=2)

    def tile_tokens(self, spec: AttentionSpec, shape: TileShape) -> int:
        """Queries of one sequence in a tile: their heads fill its rows."""
        return max(1, shape.rows // spec.group_size)

    def target_items(self, spec: AttentionSpec, shape: TileShape, tile_tokens: int) -> int:
        """How many work items fill the GPU. Each runs once for every KV head (and part of its query heads)."""
        heads = min(spec.group_size, shape.rows // tile_tokens)
        return max(1, self.num_sms * shape.programs // (spec.kv_heads * ceil_div(spec.group_size, heads)))

    def partials(self, spec: AttentionSpec, count: int, tile_tokens: int) -> Partials:
        """Uninitialised memory for partial results."""
        rows = (count, spec.q_heads, tile_tokens)
        options = {"dtype": torch.float32, "device": self.device}
        return Partials(torch.empty(*rows, spec.v_dim, **options), torch.empty(rows, **options))  # type: ignore[call-overload]

    def reserve(
        self,
        spec: AttentionSpec,
        *,
        max_sequences: int,
        max_blocks: int,
        max_query_tokens: int | None = None,
        max_keys: int | None = None,
        beside: PlanBuffers | None = None,
    ) -> PlanBuffers:
        """Fixed buffers, by default for one query per sequence; `max_query_tokens` makes room for more."""
        self.require(spec)
        if spec.chosen:
            most = max_query_tokens or max_sequences
            near = beside.listed if isinstance(beside, SparseBuffers) else None
            assert near is None or isinstance(near, _TritonBuffers)
            listed = _TritonBuffers(self, spec, most, most, most * spec.chosen, near)
            longest = max(spec.chosen, max_keys or 0)
            return SparseBuffers(spec, listed, max_sequences, most, max_blocks, longest, self.device)
        return _TritonBuffers(self, spec, max_sequences, max_query_tokens or max_sequences, max_blocks, beside)

    def room(self, spec: AttentionSpec, max_query_tokens: int, max_sequences: int, *, short: bool) -> _LaunchSize:
        """The size of a launch for any batch up to these limits: of single queries (`short`), or of longer chunks."""
        shape = self.tile_shape(spec, short=short)
        if short:  # all queries, or one per sequence and one for the padding
            tiles, tile_tokens = min(max_query_tokens, max_sequences + 1), 1
            count = max_items(tiles, self.target_items(spec, shape, tile_tokens))
            return _LaunchSize(shape, tile_tokens, count, tiles, count)
        tile_tokens = self.tile_tokens(spec, shape)
        tiles = min(max_sequences, max_query_tokens // 2) + 1 + max_query_tokens // tile_tokens
        partials = max_partials(spec, tiles, self.target_items(spec, shape, tile_tokens), _waves(shape))
        return _LaunchSize(shape, tile_tokens, tiles + partials, min(tiles, partials // 2), partials)

    def plan(self, spec: AttentionSpec, batch: PagedBatch, buffers: PlanBuffers | None = None) -> AttentionPlan:
        """Divides the work and copies it to the device asynchronously, without waiting for the GPU."""
        self.require(spec)
        batch.check_for(spec)
        if spec.chosen:
            assert buffers is None or isinstance(buffers, SparseBuffers)
            return self._plan_sparse(spec, batch, buffers)
        if buffers is not None:
            assert isinstance(buffers, _TritonBuffers)
            return self._plan_into(buffers, batch)
        return self._plan_work(spec, batch)

    def _plan_sparse(self, spec: AttentionSpec, batch: PagedBatch, buffers: SparseBuffers | None) -> SparsePlan:
        """A plan over slots that are chosen on the device; short sequences need no choice, but a graph makes it."""
        longest = int(batch.kv_lens.max(initial=0))
        if buffers is not None:
            buffers.check(spec, batch)
            assert isinstance(buffers.listed, _TritonBuffers) and buffers.max_keys is not None
            arrays, num_keys = token_arrays(batch), buffers.max_keys
            host = self._host(len(buffers.memory) - len(buffers.tokens.indices) + len(arrays[2]))
            buffers.fill(host, arrays)
            self._upload(host, buffers.memory[: len(host)])
            listed = self._plan_into(buffers.listed, listed_batch(arrays[1], spec.chosen))
            sizes = buffers.max_query_tokens, batch.block_size
            return SparsePlan(self, spec, *sizes, listed=listed, tokens=buffers.tokens, num_keys=num_keys)
        sizes = batch.num_query_tokens, batch.block_size
        if longest <= spec.chosen:
            return SparsePlan(self, spec, *sizes, dense=self.plan(replace(spec, chosen=0), batch))
        arrays = token_arrays(batch)
        tokens = Tokens(*self._send(list(arrays)))
        listed = self._plan_work(spec, listed_batch(arrays[1], spec.chosen))
        return SparsePlan(self, spec, *sizes, listed=listed, tokens=tokens, num_keys=longest)

    def attend_chosen(
        self,
        q: Tensor,
        cache: LayerCache,
        plan: AttentionPlan,
        choice: Choice,
        sink_logits: Tensor | None,
        out: Tensor,
    ) -> None:
        """Chooses if need be, lists the slots of the chosen, and launches the planned kernels on the current stream."""
        assert isinstance(plan, SparsePlan)
        if plan.dense is not None:
            self.attend(q, cache, plan.dense, sink_logits, out)
            return
        assert isinstance(plan.listed, _TritonPlan)
        if choice.chosen is None:
            choice.chosen = plan.choose(choice, cache)
        slots = plan.slots(choice.chosen)
        if len(plan.listed.indices):  # the memory of a graph
            plan.listed.indices[: len(slots)] = slots
            self.attend(q, cache, plan.listed, sink_logits, out)
        else:
            self.attend(q, cache, plan.listed.over(slots), sink_logits, out)

    def _plan_work(self, spec: AttentionSpec, batch: PagedBatch) -> _TritonPlan:
        shapes = (self.tile_shape(spec, short=True), self.tile_shape(spec, short=False))
        few = max(1, shapes[0].rows // spec.group_size)
        short = batch.query_lens <= few
        parts: list[tuple[TileShape, int, Work]] = []
        for shape, rows in zip(shapes, (np.flatnonzero(short), np.flatnonzero(~short)), strict=True):
            if batch.query_lens[rows].any():
                tokens = 1 if batch.query_lens[rows].max() == 1 else self.tile_tokens(spec, shape)
                parts.append((shape, tokens, self._divide(spec, batch, rows, shape, tokens)))
        arrays = [array for _, _, work in parts for array in (work.items, work.tiles)]
        *sent, indices = self._send([*arrays, batch.indices[: int(batch.indptr[-1])]])
        plan = _TritonPlan(self, spec, batch.num_query_tokens, batch.block_size, indices)
        for number, (shape, tokens, work) in enumerate(parts):
            partials = self.partials(spec, work.num_partials, tokens) if work.num_partials else None
            items, tiles = sent[2 * number].view(-1, ITEM_FIELDS), sent[2 * number + 1].view(-1, TILE_FIELDS)
            plan.launches.append(_Launch(shape, tokens, items, tiles, partials))
        return plan

    def attend(
        self, q: Tensor, cache: LayerCache, plan: AttentionPlan, sink_logits: Tensor | None, out: Tensor
    ) -> None:
        """Launches the planned kernels on the current stream."""
        assert isinstance(plan, _TritonPlan)
        if q.stride(2) != 1:
            q = q.contiguous()
        with current(q.device):
            if len(plan.launches) > 1 and self._beside is not None and torch.cuda.is_current_stream_capturing():
                self._launch_side_by_side(plan, q, cache, sink_logits, out)
            else:
                for launch in plan.launches:
                    self._launch(launch, q, cache, plan, sink_logits, out)

    def _launch_side_by_side(
        self, plan: _TritonPlan, q: Tensor, cache: LayerCache, sink_logits: Tensor | None, out: Tensor
    ) -> None:
        """Runs prompts and decoding at the same time, because a few tiles of a prompt leave most of the GPU idle.

        Only in graphs: otherwise the additional launches cost the host more than the device gains.
        """
        assert self._beside is not None
        few, *many = plan.launches
        stream = torch.cuda.current_stream(q.device)
        self._beside.wait_stream(stream)
        with torch.cuda.stream(self._beside):
            for launch in many:
                self._launch(launch, q, cache, plan, sink_logits, out)
        self._launch(few, q, cache, plan, sink_logits, out)
        stream.wait_stream(self._beside)

    def _launch(
        self, launch: _Launch, q: Tensor, cache: LayerCache, plan: _TritonPlan, sink_logits: Tensor | None, out: Tensor
    ) -> None:
        """Launches the kernel of one tile shape on the current stream, and the merge after it."""
        shape, tile_tokens, items, tiles, partials = launch
        spec = plan.spec
        if shape == PREFILL_TILE and reads(q, cache[spec.keys], cache[spec.values]):
            prefill_items(q, cache, spec, plan.indices, items, shape, out, partials, self.num_sms)
        elif shape == LATENT_TILE and reads(q, cache[spec.keys], cache[spec.values]):
            latent_items(q, cache, spec, plan.indices, items, tile_tokens, shape, out, partials)
        else:
            if shape == LATENT_TILE:
                shape = self._general_shape(spec, short=True)
            shape = _LONG_TILE if shape == PREFILL_TILE else shape
            attend_items(q, cache, spec, plan.indices, items, tile_tokens, shape, out, partials, sink_logits)
        if partials is not None:
            merge_partials(spec, tiles, tile_tokens, out, partials, sink_logits)

    def compilations(self, spec: AttentionSpec, cache: LayerCache) -> Sequence[Callable[[], None]]:
        """Calls that compile the kernels of graphs, by launching each of them without work."""
        self.require(spec)
        options: Any = {"dtype": TORCH_DTYPES[spec.dtype], "device": self.device}
        q = torch.zeros(256, spec.q_heads, spec.head_dim, **options)
        out = torch.zeros(256, spec.q_heads, spec.v_dim, **options)
        sinks = torch.zeros(spec.q_heads, **options) if spec.sink_logits else None
        nothing = torch.zeros(FEW_MERGES + 1, ITEM_FIELDS, dtype=torch.int32, device=self.device)
        plan = _TritonPlan(self, spec, len(q), cache.block_size, nothing[0])
        jobs = list(self.compilations(replace(spec, chosen=0), cache)) if spec.chosen else []
        for short in (True,) if spec.chosen else (False, True):
            shape = self.tile_shape(spec, short=short)
            tokens = 1 if short else self.tile_tokens(spec, shape)
            partials = self.partials(spec, 1, tokens)
            launch = _Launch(shape, tokens, nothing[:1], nothing[:0], partials)
            jobs.append(partial(self._launch, launch, q, cache, plan, sinks, out))
            tiles = nothing.view(-1, TILE_FIELDS)
            jobs += (
                partial(merge_partials, spec, tiles[:count], tokens, out, partials, sinks)
                for count in (1, FEW_MERGES // (tokens * spec.q_heads) + 1)
            )
        return jobs

    def _divide(
        self,
        spec: AttentionSpec,
        batch: PagedBatch,
        rows: Int64Array,
        shape: TileShape,
        tile_tokens: int,
        most_partials: int | None = None,
    ) -> Work:
        target = self.target_items(spec, shape, tile_tokens)
        return divide_work(
            spec,
            batch,
            rows,
            tile_tokens=tile_tokens,
            tile_keys=shape.keys,
            target_items=target,
            waves=_waves(shape),
            most_partials=most_partials,
        )

    def _plan_into(self, buffers: _TritonBuffers, batch: PagedBatch) -> _TritonPlan:
        buffers.check(buffers.spec, batch)
        works = self._works(buffers, batch)
        num_blocks = min(int(batch.indptr[-1]), len(batch.indices))  # slots are listed later, on the device
        fixed = len(buffers.memory) - len(buffers.indices)
        host = self._host(fixed + num_blocks)
        target = host.numpy()
        target[:fixed] = 0  # items and tiles that are not used have no queries
        target[fixed:] = batch.indices[:num_blocks]
        at = 0
        for room, work in zip(buffers.rooms, works, strict=True):
            for array, size in ((work.items, room.items * ITEM_FIELDS), (work.tiles, room.tiles * TILE_FIELDS)):
                target[at : at + array.size] = array.ravel()
                at += size
        self._upload(host, buffers.memory[: len(host)])
        plan = _TritonPlan(self, buffers.spec, buffers.max_query_tokens, batch.block_size, buffers.indices)
        plan.launches.extend(buffers.launches)
        return plan

    def _works(self, buffers: _TritonBuffers, batch: PagedBatch) -> list[Work]:
        """The work of each launch of the buffers."""
        spec, whole = buffers.spec, batch.padded(buffers.max_query_tokens)
        if len(buffers.rooms) > 1:
            single = whole.query_lens == 1
            chosen = [np.flatnonzero(single), np.flatnonzero(~single)]
            return [
                self._divide(spec, whole, rows, room.shape, room.tile_tokens, room.partials)
                for room, rows in zip(buffers.rooms, chosen, strict=True)
            ]
        (room,) = buffers.rooms
        reads_all = spec.causal and spec.window is None and spec.chunk is None and not batch.gaps.any()
        decodes = reads_all and bool((batch.query_lens == 1).all())
        units = ceil_div(batch.kv_lens, room.shape.keys)
        work = buffers.decoded.longer(batch, units) if decodes and buffers.decoded is not None else None
        if work is None:
            work = self._divide(spec, whole, np.arange(len(whole)), room.shape, room.tile_tokens, room.partials)
        buffers.decoded = _Decoded(batch.kv_lens.copy(), units, work) if decodes else None
        return [work]

    def _send(self, arrays: list[Int32Array]) -> list[Tensor]:
        """Copies arrays to the device, through one pinned buffer and with one copy."""
        sizes = [array.size for array in arrays]
        host = self._host(sum(sizes))
        np.concatenate([array.ravel() for array in arrays], out=host.numpy())
        sent = torch.empty_like(host, device=self.device)
        self._upload(host, sent)
        return list(torch.split(sent, sizes))

    def _upload(self, host: Tensor, target: Tensor) -> None:
        if self.device.type == "cuda":
            upload(host, target)
        else:
            target.copy_(host)

    def _host(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.int32, pin_memory=self.device.type == "cuda")


def _waves(shape: TileShape) -> int:
    """The most waves for dividing tiles evenly. With large tiles, merging would take longer than an uneven last wave."""
    return MANY_WAVES if shape.rows == _DECODE_ROWS or shape == LATENT_TILE else 1
