"""Transfers that are not over, and which of them others must wait for.

A long prefix comes in a hundred pieces. They are not compared with each other one by one: blocks count the pieces that
read and write them, so that a step which meets none of them, nearly every one, is let through by one look at its blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from kvpool.config import Tier
from kvpool.pools.arrays import Int32Array
from kvpool.storage.transfer_steps import Store, TransferStep


class Ending(Protocol):
    """The end of a step."""

    def done(self) -> bool: ...
    def wait(self) -> None: ...
    def order(self) -> None:
        """Makes what follows on the current stream come after it."""


class Recorded:
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


class Sent:
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


class Promised:
    """A step of the disk worker: over when its future is."""

    def __init__(self, future: Future[None]) -> None:
        self.future = future

    def done(self) -> bool:
        return self.future.done()

    def wait(self) -> None:
        self.future.result()

    order = wait


class UnderWay(NamedTuple):
    """A step that was started."""

    step: TransferStep
    completion: Ending

    def failed(self) -> bool:
        """Whether it ended with an error; it is kept, to be tried again."""
        if not isinstance(self.completion, (Promised, Sent)) or not self.completion.future.done():
            return False
        return self.completion.future.exception() is not None


class StepsUnderWay:
    """The steps that were started and are not over, in order."""

    def __init__(self) -> None:
        self._items: list[UnderWay] = []
        self._num_reading: dict[tuple[int, Tier], npt.NDArray[np.int32]] = {}  # steps by store and block
        self._num_writing: dict[tuple[int, Tier], npt.NDArray[np.int32]] = {}

    def __iter__(self) -> Iterator[UnderWay]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def add(self, item: UnderWay) -> None:
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

    def before(self, step: TransferStep) -> list[Ending]:
        """The ends that a new step must wait for: it reads what they write, or writes what they read or write."""
        writes_target, reads_target = self._meet(step.target, step.dst)
        if not (writes_target or reads_target or self._meet(step.source, step.src)[0]):
            return []
        return [item.completion for item in self._items if item.step.conflicts(step)]

    def before_work(self, store: Store, written: Int32Array | None, read: Int32Array | None) -> list[Ending]:
        """The same for work that writes and reads these blocks of a store; None stands for every block."""
        if not any(self._meet(store, written)) and not self._meet(store, read)[0]:
            return []
        return [
            completion
            for step, completion in self._items
            if step.writes(store, written) or step.reads(store, written) or step.writes(store, read)
        ]

    def touching(self, store: Store) -> list[Ending]:
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
