"""TransferEngine: carries out the manager's CopyOps, in order, on streams of their own where there are any.

Who waits for whom, with a GPU (no wait is device-wide, none blocks the CPU unless a disk is involved):

    compute stream   writes, attention, copies inside the GPU
    out, in          one stream per direction; each transfer first waits for what the compute stream was given so far, but
                     not for a step that was announced and touches none of its blocks: it runs beside that one
    link worker      one thread; hands transfers over the link to the driver, in order
    disk worker      one thread; waits for the transfers that it depends on

A transfer waits for every earlier one that is not done and touches the same blocks in a conflicting way. The compute
stream waits for all transfers at once, or with `overlap=True` only in `before_compute` and only for those that touch
the blocks in question.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from kvpool.config import LayerGroup, Tier
from kvpool.errors import ChecksumError, TransferError
from kvpool.kernels.copy import note_transfers, upload_by_kernel
from kvpool.kernels.layout import widest_view
from kvpool.pools.arrays import BoolArray, Int32Array
from kvpool.pools.pool import CopyOp
from kvpool.storage.disk import DiskStore
from kvpool.storage.moving import move
from kvpool.storage.store import BlockStore
from kvpool.storage.transfer_steps import (
    DiskEnd,
    EventEnd,
    LinkEnd,
    StepEnd,
    StepInFlight,
    StepsInFlight,
    Store,
    Stores,
    TransferStep,
    plan_steps,
)

_log = logging.getLogger(__name__)


_Check: TypeAlias = tuple[TransferStep, Tensor]
"""A step and, per block, whether its checksum differs."""


class Transfer:
    """Copies in flight. `wait` returns when all of them are done, or raises what went wrong."""

    def __init__(self, completions: list[StepEnd], verify: Callable[[], None], watcher: ThreadPoolExecutor) -> None:
        self._completions = completions
        self._verify = verify
        self._watcher = watcher

    def done(self) -> bool:
        """Whether everything has ended, well or not."""
        return all(completion.done() for completion in self._completions)

    def wait(self) -> None:
        """Blocks the CPU until the bytes are there. Raises `TransferError`, or `ChecksumError` if they are wrong."""
        for completion in self._completions:
            completion.wait()
        self._verify()

    def add_callback(self, callback: Callable[[Transfer], None]) -> None:
        """Calls `callback(transfer)` once it is done, from a thread of the engine; at once if it is done already."""
        if self.done():
            self._call(callback)
        else:
            self._watcher.submit(self._watch, callback)

    def _watch(self, callback: Callable[[Transfer], None]) -> None:
        for completion in self._completions:
            with contextlib.suppress(Exception):  # the callback finds out by `wait`
                completion.wait()
        self._call(callback)

    def _call(self, callback: Callable[[Transfer], None]) -> None:
        try:
            callback(self)
        except Exception:
            _log.exception("a transfer's callback raised")


class _Announced(NamedTuple):
    """The newest step on the compute stream."""

    stream: torch.cuda.Stream
    before: torch.cuda.Event  # all that came earlier
    blocks: Mapping[int, BoolArray]  # whether it touches each block of the GPU tier, by pool

    def touches(self, step: TransferStep) -> bool:
        return any(
            store.tier == Tier.GPU and store.pool in self.blocks and bool(self.blocks[store.pool][ids].any())
            for store, ids in ((step.source, step.src), (step.target, step.dst))
        )


class TransferEngine:
    """Moves blocks between the stores of one cache. One thread uses it at a time.

    `stores` maps (pool, tier) to stores; `device` is where those of the GPU tier are. With `checksums`, whole blocks that
    leave the GPU tier are summed up, and checked when they come back to it.
    """

    def __init__(
        self, stores: Stores, groups: Sequence[LayerGroup], device: torch.device, *, checksums: bool = False
    ) -> None:
        self.stores = stores
        self.device = device
        self._groups = groups
        self._checksums = TravellingChecksums(device) if checksums else None
        self._to_verify: list[_Check] = []
        self._to_send: list[tuple[Future[Any], Callable[[], Any]]] = []
        self._in_flight = StepsInFlight()
        self._announced: _Announced | None = None  # None: the compute stream may touch any block
        self._disk_worker = ThreadPoolExecutor(1, thread_name_prefix="kvpool-disk-transfers")
        self._watcher = ThreadPoolExecutor(1, thread_name_prefix="kvpool-transfer-callbacks")
        if device.type == "cuda":
            self._out, self._in, self._disk = (_new_stream(device) for _ in range(3))
            # The driver takes 5 ms for 1 GiB of scattered blocks, which nobody else should wait for.
            self._link_worker = ThreadPoolExecutor(1, thread_name_prefix="kvpool-link-transfers")
            if self.has_link:  # compiled now: when it is needed, somebody waits
                word = torch.zeros(1, dtype=torch.int32)
                upload_by_kernel(word.pin_memory(), word.to(device))

    def check(self, ops: Sequence[CopyOp]) -> None:
        """Raises `InvalidArgumentError` for operations that `submit` would refuse."""
        if ops:
            plan_steps(ops, self.stores, self._groups)

    def submit(self, ops: Sequence[CopyOp], *, overlap: bool = False) -> Transfer:
        """Starts the operations in order and returns at once where a GPU or a disk does the work.

        Everything is checked before the first byte moves. What follows on the current stream finds these copies, and all
        earlier ones, done; with `overlap` it does not wait, and whoever launches work calls `before_compute`. An operation
        that cannot be started raises `TransferError`; it and those behind it are in `remaining`.
        """
        return self._run(plan_steps(ops, self.stores, self._groups), overlap)

    def retry_failed(self) -> Transfer:
        """Runs again what failed after it was started (a disk that was full, for instance), in the same order."""
        return self._run(self._in_flight.take_failed(), overlap=False)

    def before_compute(self, pool: int, written: Int32Array | None = None, read: Int32Array | None = None) -> None:
        """Makes work that follows on the current stream wait for transfers of the GPU blocks that it writes and reads.

        None stands for every block. Costs nothing while no transfer is in flight.
        """
        if not self._in_flight:
            return
        self._forget_done()
        for completion in self._in_flight.before_work(self.stores[pool, Tier.GPU], written, read):
            completion.order()

    @property
    def has_link(self) -> bool:
        """Whether there is a lower tier, so that transfers may run beside a step."""
        return any(store.num_blocks for (_, tier), store in self.stores.items() if tier != Tier.GPU)

    def announce(self, blocks: Mapping[int, Sequence[Int32Array]] | None) -> None:
        """What follows on the current stream touches these GPU blocks only, by pool (None: any), until the next call.

        Transfers of other blocks that are submitted later run beside it.
        """
        self._announced = None
        if blocks is not None and self.device.type == "cuda":
            stream = torch.cuda.current_stream(self.device)
            touched = {pool: np.zeros(self.stores[pool, Tier.GPU].num_blocks, np.bool_) for pool in blocks}
            for pool, parts in blocks.items():
                for part in parts:
                    touched[pool][part] = True
            self._announced = _Announced(stream, stream.record_event(), touched)

    def wait_for(self, store: Store) -> None:
        """Blocks the CPU until no transfer touches this store any more."""
        for completion in self._in_flight.touching(store):
            completion.wait()

    def close(self) -> None:
        """Waits for transfers in flight and ends the threads."""
        if self.device.type == "cuda":
            self._link_worker.shutdown()
            note_transfers(self.device, id(self), False)
        self._disk_worker.shutdown()
        for item in self._in_flight:
            if not item.failed():
                item.completion.wait()
        self._watcher.shutdown()

    # --- one step ----------------------------------------------------------------------------------------------------

    def _run(self, steps: list[TransferStep], overlap: bool) -> Transfer:
        self._forget_done()
        started: list[StepEnd] = []
        self._to_verify = []
        left = deque(steps)
        try:
            while left:
                item = self._start(left[0])
                left.popleft()
                if item is not None:
                    self._in_flight.add(item)
                    started.append(item.completion)
        except TransferError as error:
            error.remaining = [op for step in left for op in step.ops]
            raise
        finally:
            self._hand_over()
        if not overlap:
            self.announce(None)  # work that follows need not be announced
            for item in self._in_flight:
                if Tier.GPU in (item.step.source.tier, item.step.target.tier) and not item.failed():
                    item.completion.order()
        return Transfer(started, partial(_verify, self._to_verify), self._watcher)

    def _forget_done(self) -> None:
        self._in_flight.forget_done()
        if self.device.type == "cuda":
            on_link = any(isinstance(item.completion, LinkEnd) and not item.failed() for item in self._in_flight)
            note_transfers(self.device, id(self), on_link)

    def _start(self, step: TransferStep) -> StepInFlight | None:
        """Begins a step behind everything it depends on; None if it is over already."""
        before = self._in_flight.before(step)
        if not step.is_on_link:
            self._hand_over()  # what it depends on
        if isinstance(step.source, DiskStore) or isinstance(step.target, DiskStore):
            return self._start_on_disk(step, before)
        if self.device.type == "cpu" or Tier.GPU not in (step.source.tier, step.target.tier):
            for completion in before:  # the CPU itself copies
                completion.wait()
            self._to_verify.extend(self._move(step))
            return None
        if step.is_on_link:
            return self._start_on_link(step, before)
        for completion in before:
            completion.order()
        self._to_verify.extend(self._move(step))
        return StepInFlight(step, EventEnd(torch.cuda.current_stream(self.device)))

    def _start_on_link(self, step: TransferStep, before: list[StepEnd]) -> StepInFlight:
        """Between GPU and host: beside the newest step if that touches none of the blocks, else behind it."""
        compute, newest, checks = torch.cuda.current_stream(self.device), self._announced, self._to_verify
        stream = self._out if step.source.tier == Tier.GPU else self._in
        beside = newest is not None and newest.stream == compute and not newest.touches(step)
        ready = newest.before if newest is not None and beside else compute.record_event()

        def run() -> Any:
            with torch.cuda.stream(stream):
                stream.wait_event(ready)
                for completion in before:
                    completion.order()
                checks.extend(self._move(step))
                return stream.record_event()

        sent: Future[Any] = Future()
        self._to_send.append((sent, run))
        return StepInFlight(step, LinkEnd(sent, self.device))

    def _hand_over(self) -> None:
        """Gives the steps over the link that were begun to the thread that sends them, all at once."""
        if self._to_send:
            note_transfers(self.device, id(self), True)
            self._link_worker.submit(_send, self._to_send)
            self._to_send = []

    def _start_on_disk(self, step: TransferStep, before: list[StepEnd]) -> StepInFlight:
        for completion in before:
            if isinstance(completion, DiskEnd) and completion.done():
                completion.wait()  # raises what went wrong there
        cuda = self.device.type == "cuda"
        written = torch.cuda.current_stream(self.device).record_event() if cuda else None

        def run() -> None:
            for completion in before:
                completion.wait()
            if written is None:
                _verify(self._move(step))
                return
            with torch.cuda.stream(self._disk):
                self._disk.wait_event(written)
                _verify(self._move(step))
                self._disk.synchronize()

        return StepInFlight(step, DiskEnd(self._disk_worker.submit(run)))

    def _move(self, step: TransferStep) -> list[_Check]:
        """Moves the bytes; returns what is to be verified once they are there."""
        if self._checksums is None:
            move(step)
            return []
        self._checksums.before(step)
        move(step)
        differ = self._checksums.after(step)
        return [] if differ is None else [(step, differ)]


def _send(steps: list[tuple[Future[Any], Callable[[], Any]]]) -> None:
    for sent, run in steps:
        try:
            sent.set_result(run())
        except Exception as error:  # whoever waits for it is told
            sent.set_exception(error)


def _new_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _verify(checks: list[_Check]) -> None:
    """Raises for the blocks whose checksums differ."""
    for step, differ in checks:
        if bool(differ.any()):
            blocks = step.src[differ.cpu().numpy()].tolist()
            raise ChecksumError(
                f"blocks {blocks[:8]} of pool {step.source.pool} came back from {step.source.tier.name} with other bytes "
                f"than they left with; drop what was cached there (reset_prefix_cache) and check the memory"
            )


# --- checksums -------------------------------------------------------------------------------------------------------


_CHUNK_BYTES = 1 << 26  # of temporary memory
_ODD = -7046029254386353131  # 2**64 over the golden ratio, as a signed number


def block_checksums(data: Tensor, blocks: Int32Array) -> Tensor:
    """int64 [block]: the words of each block, each times an odd number that depends on its place, added up modulo 2**64.

    Any single changed word changes the sum, and so do two words that changed places (unless they differ by a multiple of
    a high power of two). It is meant to find faults, not forgeries.
    """
    rows = widest_view(data)
    weights = (torch.arange(rows.shape[1], dtype=torch.int64, device=data.device) * 2 + 1) * _ODD
    step = max(1, _CHUNK_BYTES // (8 * rows.shape[1]))
    ids = torch.from_numpy(blocks).long().to(data.device)
    sums = [(rows.index_select(0, ids[i : i + step]).long() * weights).sum(1) for i in range(0, len(ids), step)]
    return torch.cat(sums) if sums else torch.empty(0, dtype=torch.int64, device=data.device)


class TravellingChecksums:
    """The sums of blocks that left the GPU tier, kept beside their ids on the lower tiers."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lock = threading.Lock()  # the disk worker takes part
        self._sums: dict[tuple[int, Tier], Tensor] = {}
        self._known: dict[tuple[int, Tier], BoolArray] = {}

    def before(self, step: TransferStep) -> None:
        """Notes the sums that the blocks of a step go with. Runs where their bytes are final."""
        if step.target.tier == Tier.GPU:
            return
        if step.source.tier == Tier.GPU:
            assert isinstance(step.source, BlockStore)
            values, are_known = block_checksums(step.source.data, step.src), np.ones(len(step.src), np.bool_)
        with self._lock:
            if step.source.tier != Tier.GPU:
                sums, known = self._of(step.source)
                values, are_known = sums[self._ids(step.src)], known[step.src]
            sums, known = self._of(step.target)
            sums[self._ids(step.dst)] = values
            known[step.dst] = are_known

    def after(self, step: TransferStep) -> Tensor | None:
        """Which blocks of a step came back to the GPU tier with other bytes than they left with; None: no such step."""
        if step.target.tier != Tier.GPU or step.source.tier == Tier.GPU or step.num_tokens is not None:
            return None
        assert isinstance(step.target, BlockStore)
        with self._lock:
            sums, known = self._of(step.source)
        differ = sums[self._ids(step.src)] != block_checksums(step.target.data, step.dst)
        return differ & torch.from_numpy(known[step.src]).to(self._device)

    def _of(self, store: Store) -> tuple[Tensor, BoolArray]:
        key = store.pool, store.tier
        missing = store.num_blocks - (len(self._known[key]) if key in self._known else 0)
        if key not in self._known:
            self._sums[key] = torch.zeros(0, dtype=torch.int64, device=self._device)
            self._known[key] = np.zeros(0, np.bool_)
        if missing > 0:
            self._sums[key] = torch.cat([self._sums[key], self._sums[key].new_zeros(missing)])
            self._known[key] = np.concatenate([self._known[key], np.zeros(missing, np.bool_)])
            if self._device.type == "cuda":
                torch.cuda.current_stream(self._device).synchronize()  # other streams use it too; happens once per size
        return self._sums[key], self._known[key]

    def _ids(self, blocks: Int32Array) -> Tensor:
        return torch.from_numpy(blocks).long().to(self._device)
