"""CopyOps checked and joined into the steps that the transfer engine carries out, and the steps that are in flight.

A long prefix comes in a hundred pieces. They are not compared with each other one by one: blocks count the pieces that
read and write them, so that a step which meets none of them, nearly every one, is let through by one look at its blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import cached_property
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from kvpool.config import LayerGroup, Tier
from kvpool.errors import InvalidArgumentError
from kvpool.pools.arrays import BoolArray, Int32Array
from kvpool.pools.pool import CopyOp
from kvpool.storage.disk import DiskStore
from kvpool.storage.store import BlockStore

Store: TypeAlias = "BlockStore | DiskStore"
Stores: TypeAlias = "Mapping[tuple[int, Tier], Store]"


PIECE_BYTES = 1 << 28  # over the link in one step, 5 ms: who needs its first blocks does not wait for many others


class _Copies(NamedTuple):
    """A checked operation: blocks of one store to blocks of another. The same store twice: no block is on both sides."""

    source: Store
    target: Store
    src: Int32Array
    dst: Int32Array


class TransferStep:
    """Independent copies between two stores: operations that follow each other and do not depend on each other."""

    def __init__(self, copies: _Copies, op: CopyOp, is_partial: bool) -> None:
        self.source, self.target = copies.source, copies.target
        self.group = op.group  # whose layout tells where tokens are, in partial copies
        self.ops = [op]
        self.is_partial = is_partial
        self._src, self._dst = [copies.src], [copies.dst]

    @cached_property
    def _read(self) -> BoolArray:
        return _mask(self.source, np.concatenate(self._src))

    @cached_property
    def _written(self) -> BoolArray:
        return _mask(self.target, np.concatenate(self._dst))

    @cached_property
    def src(self) -> Int32Array:
        return np.concatenate(self._src)

    @cached_property
    def dst(self) -> Int32Array:
        return np.concatenate(self._dst)

    @cached_property
    def num_tokens(self) -> Int32Array | None:
        """How many tokens of each block are copied; None: whole blocks."""
        if not self.is_partial:
            return None
        return np.repeat([op.num_tokens or 0 for op in self.ops], [len(op.src) for op in self.ops]).astype(np.int32)

    @property
    def is_on_link(self) -> bool:
        """Whether it goes from the GPU tier to the host's, or back."""
        return _is_on_link(self.source, self.target)

    def join(self, copies: _Copies, op: CopyOp, is_partial: bool) -> bool:
        """Takes in the copies of the operation that follows, if they may run together with these."""
        source, target, src, dst = copies
        if source is not self.source or target is not self.target or is_partial != self.is_partial:
            return False
        if sum(map(len, self._src)) + len(src) > _piece_blocks(source, target):
            return False
        if is_partial and op.group != self.group:
            return False
        if self._written[dst].any() or (source is target and (self._written[src].any() or self._read[dst].any())):
            return False
        self._read[src] = True
        self._written[dst] = True
        self._src.append(src)
        self._dst.append(dst)
        self.ops.append(op)
        return True

    def conflicts(self, later: TransferStep) -> bool:
        """Whether `later` must wait for this: it reads what this writes, or writes what this reads or writes."""
        return (
            self.writes(later.source, later.src)
            or self.writes(later.target, later.dst)
            or self.reads(later.target, later.dst)
        )

    def writes(self, store: Store, blocks: Int32Array | None) -> bool:
        """Whether some of these blocks (None: any) are written."""
        return self.target is store and (blocks is None or bool(self._written[blocks].any()))

    def reads(self, store: Store, blocks: Int32Array | None) -> bool:
        """Whether some of these blocks (None: any) are read."""
        return self.source is store and (blocks is None or bool(self._read[blocks].any()))


def plan_steps(ops: Sequence[CopyOp], stores: Stores, groups: Sequence[LayerGroup]) -> list[TransferStep]:
    """The operations as steps, in order. Every one is checked before any is carried out."""
    steps: list[TransferStep] = []
    for op in ops:
        if not len(op.src) and not len(op.dst):
            continue
        copies = _checked(op, stores, groups)
        is_partial = op.num_tokens is not None and op.num_tokens < groups[op.group].block_size
        size = _piece_blocks(copies.source, copies.target)
        for start in range(0, len(copies.src), size):
            src, dst = copies.src[start : start + size], copies.dst[start : start + size]
            piece, part = copies._replace(src=src, dst=dst), op._replace(src=src, dst=dst)
            if not steps or not steps[-1].join(piece, part, is_partial):
                steps.append(TransferStep(piece, part, is_partial))
    return steps


def _piece_blocks(source: Store, target: Store) -> int:
    """The most blocks of a step: all that can be joined, but over the link between GPU and host no more than a piece."""
    return max(1, PIECE_BYTES // source.block_bytes if _is_on_link(source, target) else target.num_blocks)


def _is_on_link(source: Store, target: Store) -> bool:
    return {source.tier, target.tier} == {Tier.GPU, Tier.HOST}


def _checked(op: CopyOp, stores: Stores, groups: Sequence[LayerGroup]) -> _Copies:
    if not 0 <= op.group < len(groups):
        raise InvalidArgumentError(f"{op.kind.value} names layer group {op.group}; there are {len(groups)}")
    group = groups[op.group]
    for tier in (op.src_tier, op.dst_tier):
        if (group.pool, tier) not in stores:
            raise InvalidArgumentError(f"{op.kind.value} needs a store of pool {group.pool} on {tier!r}: there is none")
    if op.num_tokens is not None and not 0 < op.num_tokens <= group.block_size:
        raise InvalidArgumentError(f"{op.kind.value} of {op.num_tokens} tokens: a block has {group.block_size}")
    source, target = stores[group.pool, op.src_tier], stores[group.pool, op.dst_tier]
    src, dst = _ids(op.src, source, op), _ids(op.dst, target, op)
    targets = _mask(target, dst) if len(dst) > 1 else None
    if len(src) != len(dst) or (targets is not None and int(np.count_nonzero(targets)) != len(dst)):
        raise InvalidArgumentError(f"{op.kind.value} must name as many distinct targets as sources: {src} to {dst}")
    if source is target and (targets[src].any() if targets is not None else src[0] == dst[0]):
        raise InvalidArgumentError(f"{op.kind.value} reads and writes the same blocks: {src} to {dst}")
    return _Copies(source, target, src, dst)


def _ids(ids: Int32Array, store: Store, op: CopyOp) -> Int32Array:
    if len(ids) and not (int(ids.min()) >= 0 and int(ids.max()) < store.num_blocks):
        raise InvalidArgumentError(
            f"{op.kind.value} names blocks {int(ids.min())}..{int(ids.max())} of pool {store.pool} on {store.tier.name}, "
            f"whose store has {store.num_blocks}; change pools with DataPlane.resize"
        )
    return np.ascontiguousarray(ids, np.int32)


def _mask(store: Store, blocks: Int32Array) -> BoolArray:
    mask = np.zeros(store.num_blocks, np.bool_)
    mask[blocks] = True
    return mask


# --- steps in flight -------------------------------------------------------------------------------------------------


class StepEnd(Protocol):
    """The end of a step."""

    def done(self) -> bool: ...
    def wait(self) -> None: ...
    def order(self) -> None:
        """Makes what follows on the current stream come after it."""


class EventEnd:
    """A step on a CUDA stream: over when the event is reached."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.event = stream.record_event()
        self.device = stream.device

    def done(self) -> bool:
        return bool(self.event.query())

    def wait(self) -> None:
        self.event.synchronize()

    def order(self) -> None:
        torch.cuda.current_stream(self.device).wait_event(self.event)


class LinkEnd:
    """A step over the link, which a thread hands to the driver: over when that is done and its event is reached."""

    def __init__(self, event: Future[Any], device: torch.device) -> None:
        self.future = event
        self.device = device

    def done(self) -> bool:
        return self.future.done() and (self.future.exception() is not None or bool(self.future.result().query()))

    def wait(self) -> None:
        self.future.result().synchronize()

    def order(self) -> None:
        torch.cuda.current_stream(self.device).wait_event(self.future.result())


class DiskEnd:
    """A step of the disk worker: over when its future is."""

    def __init__(self, future: Future[None]) -> None:
        self.future = future

    def done(self) -> bool:
        return self.future.done()

    def wait(self) -> None:
        self.future.result()

    order = wait


class StepInFlight(NamedTuple):
    """A step that was started."""

    step: TransferStep
    completion: StepEnd

    def failed(self) -> bool:
        """Whether it ended with an error; it is kept, to be tried again."""
        if not isinstance(self.completion, (DiskEnd, LinkEnd)) or not self.completion.future.done():
            return False
        return self.completion.future.exception() is not None


class StepsInFlight:
    """The steps that were started and are not over, in order."""

    def __init__(self) -> None:
        self._items: list[StepInFlight] = []
        self._num_reading: dict[tuple[int, Tier], npt.NDArray[np.int32]] = {}  # steps by store and block
        self._num_writing: dict[tuple[int, Tier], npt.NDArray[np.int32]] = {}

    def __iter__(self) -> Iterator[StepInFlight]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def add(self, item: StepInFlight) -> None:
        """A step was started."""
        self._items.append(item)
        self._count(item.step, 1)

    def forget_done(self) -> None:
        """Drops the steps that are over, but for those that failed."""
        self._keep([not item.completion.done() or item.failed() for item in self._items])

    def take_failed(self) -> list[TransferStep]:
        """Drops the steps that failed, and returns them."""
        failed = [item.failed() for item in self._items]
        steps = [item.step for item, has_failed in zip(self._items, failed, strict=True) if has_failed]
        self._keep([not has_failed for has_failed in failed])
        return steps

    def before(self, step: TransferStep) -> list[StepEnd]:
        """The ends that a new step must wait for: it reads what they write, or writes what they read or write."""
        writes_target, reads_target = self._meet(step.target, step.dst)
        if not (writes_target or reads_target or self._meet(step.source, step.src)[0]):
            return []
        return [item.completion for item in self._items if item.step.conflicts(step)]

    def before_work(self, store: Store, written: Int32Array | None, read: Int32Array | None) -> list[StepEnd]:
        """The same for work that writes and reads these blocks of a store; None stands for every block."""
        if not any(self._meet(store, written)) and not self._meet(store, read)[0]:
            return []
        return [
            completion
            for step, completion in self._items
            if step.writes(store, written) or step.reads(store, written) or step.writes(store, read)
        ]

    def touching(self, store: Store) -> list[StepEnd]:
        """The ends of steps that read or write anything of a store."""
        return self.before_work(store, None, None)

    def _meet(self, store: Store, blocks: Int32Array | None) -> tuple[bool, bool]:
        """Whether some step writes, and whether some step reads one of these blocks."""
        place = slice(None) if blocks is None else blocks
        writing, reading = (_counts(tables, store) for tables in (self._num_writing, self._num_reading))
        return bool(writing[place].any()), bool(reading[place].any())

    def _keep(self, kept: list[bool]) -> None:
        if all(kept):
            return
        for item, is_kept in zip(self._items, kept, strict=True):
            if not is_kept:
                self._count(item.step, -1)
        self._items = [item for item, is_kept in zip(self._items, kept, strict=True) if is_kept]

    def _count(self, step: TransferStep, change: int) -> None:
        _counts(self._num_reading, step.source)[step.src] += change
        _counts(self._num_writing, step.target)[step.dst] += change


def _counts(tables: dict[tuple[int, Tier], npt.NDArray[np.int32]], store: Store) -> npt.NDArray[np.int32]:
    """The table of a store, as long as the store is now."""
    table = tables.get((store.pool, store.tier))
    if table is None or len(table) < store.num_blocks:
        longer = np.zeros(store.num_blocks, np.int32)
        if table is not None:
            longer[: len(table)] = table
        table = tables[store.pool, store.tier] = longer
    return table
