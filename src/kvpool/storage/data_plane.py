"""DataPlane: the bytes of a cache, as its engine uses them. Read this first.

A step, as an engine drives it:

    slots = manager.extend_batch(batch)              # which places
    step = plane.prepare(slots)                      # planned copies run; the places are checked and go to the device
    for layer in range(num_layers):
        plane.write(step, k, v, layer)
        ...                                          # attention reads plane.layer_cache(layer) through the batch's tables
    manager.commit_batch(batch, tokens)
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from kvpool.checks import as_count, show
from kvpool.config import GroupKind, KVCacheConfig, LayerGroup, Tier
from kvpool.core.handle import KVCacheHandle, SequenceBatch
from kvpool.core.kind import StatePlaces
from kvpool.errors import InvalidArgumentError, SequenceStateError, SharedBlockError, TransferError
from kvpool.kernels.write import read_slots, read_values, write_slots
from kvpool.kinds import kind_of
from kvpool.pools.arrays import BoolArray, Int32Array, as_array
from kvpool.pools.pool import CopyOp, ResizeResult
from kvpool.storage.disk import ByteRows, DiskStore
from kvpool.storage.layout import LayerCache, layout_of
from kvpool.storage.moving import TakenBlocks, Wait, check_rows, read_out, upload, write_in
from kvpool.storage.states import StateSlots
from kvpool.storage.store import BlockStore
from kvpool.storage.transfer import Transfer, TransferEngine
from kvpool.storage.transfer_steps import Store

T = TypeVar("T")
_NO_BLOCKS: Int32Array = np.empty(0, np.int32)


class Pools(Protocol):
    """What the data plane asks of a manager's `cache`."""

    def resize(self, num_blocks: int, *, pool: int = 0, tier: Tier = Tier.GPU) -> ResizeResult: ...


class Manager(Protocol):
    """What the data plane asks of a `KVCacheManager`."""

    config: KVCacheConfig

    @property
    def cache(self) -> Pools: ...
    @property
    def lock(self) -> AbstractContextManager[object]: ...
    def take_copies(self) -> list[CopyOp]: ...
    def writable_blocks(self, group: int = 0) -> BoolArray: ...


class StepSlots(NamedTuple):
    """Checked slots of one step on the device, int32 [layer group, token]. Made by `DataPlane.prepare`."""

    tensor: Tensor


class DataPlane:
    """Stores for every pool and tier of a manager, writing and reading, and the engine that runs planned copies.

    `device` holds the GPU tier: "cuda", or "cpu" where there is none. `check_writes` refuses slots of blocks that are
    published, shared or free (default: on a CPU only; it costs about one operation on the tables per step). `factors` are
    the scale factors of fp8 layers, one for each part: (K, V). `disk_directory` is where the file of the DISK tier goes.

    Any thread may call it, each with requests of its own. Copies run one batch after the other, in the order in which the
    manager planned them, and `prepare` returns after all that were planned before: so nobody writes into a block that
    somebody else gave up before its bytes were copied. Views (`layer_cache`) are stale after `resize`.

    >>> from kvpool import KVCacheConfig, KVCacheManager, LayerSpec
    >>> manager = KVCacheManager(KVCacheConfig([LayerSpec(kv_heads=2, head_dim=4)], block_size=4, gpu_blocks=8))
    >>> plane = DataPlane(manager, "cpu")
    >>> handle = manager.allocate("a", [1, 2, 3, 4, 5])
    >>> slots = manager.slot_mapping([handle], 0, 5)
    >>> k, v = torch.randn(5, 2, 4).bfloat16(), torch.randn(5, 2, 4).bfloat16()
    >>> plane.write(slots, k, v, layer=0)
    >>> manager.commit(handle)
    >>> torch.equal(plane.read(handle, layer=0)[0], k)
    True
    """

    def __init__(
        self,
        manager: Manager,
        device: torch.device | str = "cuda",
        *,
        check_writes: bool | None = None,
        checksums: bool = False,
        factors: Mapping[int, tuple[float, ...]] | None = None,
        disk_directory: Path | str | None = None,
    ) -> None:
        self.manager = manager
        self.config = config = manager.config
        self.device = checked_device(device)
        self.check_writes = self.device.type == "cpu" if check_writes is None else check_writes
        self._turn = threading.RLock()  # who holds it takes copies and runs them; the manager's lock is taken after it
        self._pending: list[CopyOp] = []
        self._index_in_group = {layer: (g.index, i) for g in config.groups for i, layer in enumerate(g.layers)}
        layouts = {group.index: layout_of(group, config.layers, factors) for group in config.groups}
        gpu = self.device if self.device.type == "cuda" else None
        self.stores: dict[tuple[int, Tier], Store] = {}
        for pool in config.pools:
            spare = int(config.state_group is not None and config.state_group.index in pool.groups)
            self.stores[pool.index, Tier.GPU] = BlockStore(pool, Tier.GPU, layouts, device=self.device, spare=spare)
            self.stores[pool.index, Tier.HOST] = BlockStore(pool, Tier.HOST, layouts, gpu=gpu)
            self.stores[pool.index, Tier.DISK] = DiskStore(pool, directory=disk_directory)
        self.transfers = TransferEngine(self.stores, config.groups, self.device, checksums=checksums)
        self._link: torch.cuda.Stream | None = None  # on which whole blocks leave the GPU

    # --- steps -------------------------------------------------------------------------------------------------------

    def layer_cache(self, layer: int) -> LayerCache:
        """What one layer stores on the GPU tier, such as K and V, for attention kernels."""
        group, index = self._index_in_group[self._layer(layer)]
        return self._gpu_store(self.config.groups[group].pool).layer_cache(group, index)

    def run_copies(self, copies: Sequence[CopyOp] = (), *, overlap: bool = False) -> Transfer:
        """Carries out what the manager planned, in order. Required before bytes are touched: `prepare` and `read` do it too.

        `copies` were taken from the manager before, by a scheduler: they come first. With `overlap`, work on the current
        stream does not wait for the transfers; announce each step by `prepare`. If it fails, nothing is forgotten: the
        operations that were not carried out come first in the next call. What `copies` names wrongly is refused, and none of
        them is kept.
        """
        self.transfers.check(copies)
        with self._turn:
            self._take(copies)
            return self._run(overlap)

    def _take(self, copies: Sequence[CopyOp] = ()) -> None:
        """Puts what was planned behind what is still to run."""
        self._pending += [*copies, *self.manager.take_copies()]

    def _run(self, overlap: bool = False) -> Transfer:
        """Carries out what was taken."""
        ops, self._pending = self._pending, []
        try:
            return self.transfers.submit(ops, overlap=overlap)
        except TransferError as error:
            self._pending = error.remaining
            raise
        except Exception:
            self._pending = ops
            raise

    @contextmanager
    def _reaching(self, find: Callable[[], T]) -> Iterator[T]:
        """What `find` says of the places of tokens holds inside, whatever other threads ask the manager for.

        `find` runs under the manager's lock. Copies that were planned before are done inside, and later ones wait.
        """
        with self._turn:
            with self.manager.lock:
                found = find()
                self._take()
            self._run()
            yield found

    def state_slots(self, numbers: Mapping[int, int] | None = None) -> StateSlots | None:
        """The states of the layers that keep one; None if there are none. `numbers`: what the model calls these layers."""
        group = self.config.state_group
        return None if group is None else StateSlots(self._gpu_store(group.pool), group.index, numbers)

    def prepare(self, slots: Any, batch: SequenceBatch | None = None, states: StatePlaces | None = None) -> StepSlots:
        """Makes a step's slots ready for `write`: runs planned copies, checks the slots, puts them on the device.

        `slots` is what `extend_batch` or `slot_mapping` returned, [layer group, token]. The step waits for transfers under
        way that touch the blocks it writes and those that `batch` reads (None: any block). `states` says where it leaves
        states.
        """
        array = self._checked_slots(slots, len(self.config.groups))
        with self._turn:
            self.run_copies(overlap=True)
            for group in self.config.groups:
                self._check_group(array[group.index], group)
            if self.transfers.has_link:
                self._order(array, batch, states)
        return StepSlots(upload(array, self.device))

    @contextmanager
    def step(self, find: Callable[[], Int32Array | None]) -> Iterator[StepSlots | None]:
        """`prepare` for threads that share requests: a write inside reaches the slots that `find` returns, or none (None).

        `find` runs under the manager's lock. No copy that is planned later runs before the end.
        """

        def checked() -> Int32Array | None:
            slots = find()
            if slots is None:
                return None
            array = self._checked_slots(slots, len(self.config.groups))
            for group in self.config.groups:
                self._check_group(array[group.index], group)
            return array

        with self._reaching(checked) as array:
            yield None if array is None else StepSlots(upload(array, self.device))

    def _order(self, slots: Int32Array, batch: SequenceBatch | None, states: StatePlaces | None) -> None:
        """Puts a step behind the transfers that touch its blocks; transfers of other blocks need not wait for it."""
        touched: dict[int, list[Int32Array]] = {}
        needs: list[tuple[int, Int32Array, Int32Array | None]] = []
        for group in self.config.groups:
            written = _blocks(slots[group.index], self.config.block_size)
            if states is not None and group.kind is GroupKind.STATE:
                written = states.targets
            read = None if batch is None else _table_blocks(batch, group.index)
            needs.append((group.pool, written, read))
            touched.setdefault(group.pool, []).extend(blocks for blocks in (written, read) if blocks is not None)
        self.transfers.announce(None if batch is None else touched)
        for need in needs:
            self.transfers.before_compute(*need)

    def write(self, slots: Any, k: Tensor, v: Tensor | None, layer: int) -> None:
        """Stores K and V of many tokens in one layer: k is [token, head, head_dim], v None in a layer that has none."""
        self.write_parts(slots, {"k": k} if v is None else {"k": k, "v": v}, layer, whole=True)

    def write_parts(self, slots: Any, values: Mapping[str, Tensor], layer: int, *, whole: bool = False) -> None:
        """Stores parts of many tokens in one layer, [token, head, element] by name; if `whole`, all that the layer has.

        `slots`: what `prepare` returned (best: checked once for all layers); or an int32 tensor [token] on the GPU, which is
        trusted, so that the call can be captured in a CUDA graph; or one row of slots, or all of them, as the manager
        returned them, which are prepared first. -1 is skipped.
        """
        group, index = self._index_in_group[self._layer(layer)]
        if isinstance(slots, StepSlots):
            tensor = slots.tensor[group]
        elif isinstance(slots, Tensor) and slots.is_cuda:
            tensor = slots
        else:
            tensor = self._prepare_one(slots, group)
        num_tokens = tensor.shape[0]  # len() of a tensor is slow
        cache = self._gpu_store(self.config.groups[group].pool).layer_cache(group, index)
        if not values.keys() <= cache.keys() or (whole and len(values) < len(cache)):
            raise InvalidArgumentError(f"layer {layer} stores {_listed(cache)}, got {_listed(values)}")
        for name, given in values.items():
            _check_values(given, name, (num_tokens, cache[name].data.shape[2], cache[name].width), self.device)
        write_slots(cache, tensor, values)

    def read(
        self, handle: KVCacheHandle, layer: int, start: int = 0, num_tokens: int | None = None, *, raw: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """`read_parts` of K and V; None in the place of a V that the layer does not have."""
        parts = self.read_parts(handle, layer, start, num_tokens, raw=raw)
        return parts["k"], parts.get("v")

    def read_parts(
        self, handle: KVCacheHandle, layer: int, start: int = 0, num_tokens: int | None = None, *, raw: bool = False
    ) -> dict[str, Tensor]:
        """What a layer stores of written tokens `start..start + num_tokens`, [token, head, element] by name, dequantised.

        `raw` returns the elements as they are stored, without scales. A swapped-out sequence is read from the host.
        """
        group, index = self._index_in_group[self._layer(layer)]
        spec = self.config.groups[group]

        def find() -> tuple[Tier, Int32Array]:
            length = kind_of(spec).pick(handle.num_written, handle.num_fixed_tokens)
            first = as_count(start, "start", maximum=length)
            rest = length - first
            count = rest if num_tokens is None else as_count(num_tokens, "num_tokens", maximum=rest)
            tier = Tier.GPU if handle.swapped is None else Tier.HOST
            ids = handle.block_ids(group) if handle.swapped is None else handle.swapped[group]
            return tier, self.slots_of(handle, ids, group, first, count)

        with self._reaching(find) as (tier, slots):
            store = self.stores[spec.pool, tier]
            assert isinstance(store, BlockStore)
            if tier == Tier.HOST:
                self.transfers.wait_for(store)
            cache, places = store.layer_cache(group, index), upload(slots, store.device)
            if raw:
                return {name: read_slots(part, places).data for name, part in cache.items()}
            return {name: read_values(part, places) for name, part in cache.items()}

    def cross_slots(self, handle: KVCacheHandle, group: int) -> Int32Array:
        """Slots of the encoder's tokens of a request in a cross-attention group."""
        return self.slots_of(handle, handle.block_ids(group), group, 0, handle.num_fixed_tokens)

    def slots_of(self, handle: KVCacheHandle, ids: Int32Array, group: int, start: int, count: int) -> Int32Array:
        """Slots of the tokens `start..start + count` of a sequence whose blocks in a layer group are `ids`."""
        size = self.config.block_size
        positions = np.arange(start, start + count)
        blocks = ids[positions // size]
        if (blocks < 0).any():
            position = int(positions[(blocks < 0).argmax()])
            raise SequenceStateError(
                f"request {handle.request_id!r}: position {position} left the window of layer group {group}; "
                f"its keys and values are gone"
            )
        return np.asarray(blocks * size + positions % size, np.int32)

    # --- whole blocks ------------------------------------------------------------------------------------------------

    def read_blocks(self, blocks: Int32Array, group: int, out: Tensor) -> Wait:
        """Copies blocks of a layer group on the GPU tier into `out`, uint8 [block, byte] on the host (pinned for a GPU).

        The bytes are those that the work given to the device so far leaves. Returns a function that waits until they are
        in `out`; the blocks may change at once.
        """
        with self._turn:
            store = self._prepare_blocks(blocks, group, out)
            self.transfers.before_compute(store.pool, _NO_BLOCKS, blocks)
            return read_out(store, blocks, out, self._link_stream())

    def take_blocks(self, blocks: Int32Array, group: int, data: Tensor) -> TakenBlocks:
        """Copies blocks of a layer group into `data`, uint8 [block, byte] on their device; the blocks may change at once."""
        with self._turn:
            store = self._prepare_blocks(blocks, group, None)
            if tuple(data.shape) != (len(blocks), store.block_bytes) or data.device != store.device:
                raise InvalidArgumentError(
                    f"{len(blocks)} blocks of {store.block_bytes} bytes on {store.device} do not fit into "
                    f"{tuple(data.shape)} bytes on {data.device}"
                )
            self.transfers.before_compute(store.pool, _NO_BLOCKS, blocks)
            return TakenBlocks(store, blocks, data, self._link_stream())

    def _link_stream(self) -> torch.cuda.Stream | None:
        """For copies between a GPU and the host that nothing on the current stream waits for."""
        if self.device.type == "cuda" and self._link is None:
            self._link = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        return self._link

    def write_blocks(self, blocks: Int32Array, group: int, rows: Tensor | Sequence[ByteRows]) -> Wait:
        """Writes whole blocks of a layer group: `rows` as `read_blocks` gave them, or one array for each block (page-locked
        for a GPU). Returns a function that waits until `rows` may change.
        """
        with self._turn:
            store = self._prepare_blocks(blocks, group, rows)
            if self.check_writes:
                self._check_group(blocks * self.config.block_size, self.config.groups[group])
            self.transfers.before_compute(store.pool, blocks, _NO_BLOCKS)
            return write_in(store, blocks, rows, self._link_stream())

    def _prepare_blocks(self, blocks: Int32Array, group: int, rows: Tensor | Sequence[ByteRows] | None) -> BlockStore:
        store = self._gpu_store(self.config.groups[as_count(group, "group", maximum=len(self.config.groups) - 1)].pool)
        if rows is not None:
            check_rows(rows, len(blocks), store)
        if len(blocks) and not 0 <= int(blocks.min()) <= int(blocks.max()) < store.num_blocks:
            raise InvalidArgumentError(
                f"blocks {blocks.tolist()[:8]} are not all among the {store.num_blocks} of the store"
            )
        self.run_copies(overlap=True)
        # What follows is no step that was announced: transfers of these blocks come behind it
        self.transfers.announce(None)
        return store

    # --- shape -------------------------------------------------------------------------------------------------------

    def resize(self, num_blocks: int, *, pool: int = 0, tier: Tier = Tier.GPU) -> ResizeResult:
        """`manager.cache.resize`, with the bytes: moves what stands in the way, then changes the store."""
        store = self.stores.get((pool, tier))
        if store is None:
            raise InvalidArgumentError(f"there is no pool {pool!r} on {tier!r}")
        num_blocks = as_count(num_blocks, "num_blocks")
        before = store.num_blocks
        if num_blocks > before:
            self._resize(store, num_blocks)  # may find no memory: then nothing has changed
        try:
            result = self.manager.cache.resize(num_blocks, pool=pool, tier=tier)
        except Exception:
            self._resize(store, before)
            raise
        if num_blocks < before:
            self._resize(store, num_blocks)
        return result

    def _resize(self, store: Store, num_blocks: int) -> None:
        """Gives a store another size, when nothing is copied from or to it any more."""
        with self._turn:
            self.run_copies()
            self.transfers.wait_for(store)
            store.resize(num_blocks)

    @property
    def num_bytes(self) -> dict[Tier, int]:
        """Bytes allocated per tier: exactly what the configuration says."""
        return {
            tier: sum(store.num_bytes for (_, at), store in self.stores.items() if at == tier)
            for tier in (Tier.GPU, Tier.HOST, Tier.DISK)
        }

    def close(self) -> None:
        """Waits for transfers and gives all memory back."""
        self.transfers.close()
        for store in self.stores.values():
            store.close()

    # --- checks ------------------------------------------------------------------------------------------------------

    def _layer(self, layer: int) -> int:
        return as_count(layer, "layer", maximum=len(self.config.layers) - 1)

    def _gpu_store(self, pool: int) -> BlockStore:
        store = self.stores[pool, Tier.GPU]
        assert isinstance(store, BlockStore)
        return store

    def _prepare_one(self, slots: Any, group: int) -> Tensor:
        """Slots for one layer group, given as they are or as a row of all."""
        array = slots.numpy() if isinstance(slots, Tensor) else as_array(slots, "slots")
        if array.ndim == 2 and len(array) == len(self.config.groups):
            array = array[group]
        array = self._checked_slots(array[None], 1)[0]
        spec = self.config.groups[group]
        with self._turn:
            self.run_copies(overlap=True)
            self._check_group(array, spec)
            self.transfers.announce(None)
            self.transfers.before_compute(spec.pool, _blocks(array, self.config.block_size), None)
        return upload(array, self.device)

    def _checked_slots(self, slots: Any, num_groups: int) -> Int32Array:
        array = slots.numpy() if isinstance(slots, Tensor) and not slots.is_cuda else as_array(slots, "slots")
        if array.ndim != 2 or len(array) != num_groups or (array.size and array.dtype.kind not in "iu"):
            raise InvalidArgumentError(
                f"slots must be integers [layer group ({len(self.config.groups)}), token], got {array.dtype} {array.shape}"
            )
        if array.size and int(array.min()) < -1:
            raise InvalidArgumentError(f"slots hold {int(array.min())}; -1 is the only negative one (no write)")
        return np.ascontiguousarray(array, np.int32)

    def _check_group(self, slots: Int32Array, group: LayerGroup) -> None:
        """Slots lie inside the store, and with `check_writes` only in blocks that may be written."""
        size = self.config.block_size
        limit = self._gpu_store(group.pool).num_blocks * size
        if not len(slots):
            return
        if int(slots.max()) >= limit:
            raise InvalidArgumentError(
                f"slot {int(slots.max())} of layer group {group.index} is outside its store, which has {limit} slots"
            )
        if self.check_writes:
            blocks = _blocks(slots, size)
            refused = blocks[~self.manager.writable_blocks(group.index)[blocks]]
            if len(refused):
                raise SharedBlockError(
                    f"blocks {np.unique(refused)[:8].tolist()} of layer group {group.index} are published, shared or free: "
                    f"only slots that the manager handed out for uncommitted tokens can be written"
                )


def checked_device(device: torch.device | str) -> torch.device:
    chosen = torch.device(device)
    if chosen.type == "cuda":
        if not torch.cuda.is_available():
            raise InvalidArgumentError(f"device={str(device)!r}, but torch finds no GPU; use device='cpu'")
        return torch.device("cuda", torch.cuda.current_device() if chosen.index is None else chosen.index)
    if chosen.type != "cpu":
        raise InvalidArgumentError(f"device={str(device)!r}: stores live on 'cuda' or 'cpu'")
    return chosen


def _listed(parts: Iterable[str]) -> str:
    return " and ".join(map(show, parts)) or "nothing"


def _check_values(values: Tensor, name: str, shape: tuple[int, ...], device: torch.device) -> None:
    if not isinstance(values, Tensor) or values.shape != shape or not values.is_floating_point():
        given = f"{values.dtype} {tuple(values.shape)}" if isinstance(values, Tensor) else type(values).__name__
        raise InvalidArgumentError(
            f"{name} must be a floating-point tensor [token, head, element] = {shape}, got {given}"
        )
    if values.device != device:
        raise InvalidArgumentError(f"{name} is on {values.device}, the store on {device}; move it with .to()")


def _blocks(slots: Int32Array, block_size: int) -> Int32Array:
    return np.asarray(slots[slots >= 0] // block_size, np.int32)


def _table_blocks(batch: SequenceBatch, group: int) -> Int32Array:
    table = batch.padded_table(group)
    return table[table >= 0]
