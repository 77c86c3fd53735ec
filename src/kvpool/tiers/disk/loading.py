"""Loading: finds values, has the threads read them, compares key and checksum, and copies correct ones to the caller."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from kvpool.tiers.contract import Keeper, Outcome
from kvpool.tiers.disk.buffers import PAGE, Buffer, Call, Workers, pages
from kvpool.tiers.disk.catalog import State
from kvpool.tiers.disk.slab import Slab
from kvpool.tiers.envelope import HEADER_BYTES, is_whole


class _Read(NamedTuple):
    """One value that is being read."""

    number: int
    key: bytes
    place: int
    slab: Slab
    slot: int
    out: memoryview
    keeper: Keeper | None = None  # given: it is read straight into `out`
    is_second: bool = False  # the first found unexpected bytes


class Loading:
    """The loads of a tier; any number of threads may call at a time."""

    def __init__(self, state: State, workers: Workers, left_unfilled: Callable[[int], None]) -> None:
        self._state = state
        self._workers = workers
        self._left_unfilled = left_unfilled

    def load(
        self, keys: Sequence[bytes], out: Sequence[memoryview], deadline: float, keeper: Keeper | None = None
    ) -> list[Outcome]:
        """One outcome per key, at the deadline at the latest. With a `keeper`, values are read straight into `out`."""
        outcomes = [Outcome.MISS] * len(keys)
        waiting = self._find(keys, out, outcomes, keeper)
        in_flight: dict[int, _Read] = {}
        call = Call(self._workers, deadline)
        while waiting or call.num_pending:
            if waiting and (buffer := call.take_buffer()) is not None:
                read = waiting.popleft()
                if self._begin(call, read, buffer):
                    in_flight[read.number] = read
                else:
                    outcomes[read.number] = Outcome.MISS
                continue
            finished = call.next() if call.num_pending else None
            if finished is None:  # the deadline
                break
            read, outcome = in_flight.pop(finished.number), finished.outcome
            assert finished.buffer is not None
            if outcome == Outcome.OK and not _taken(read, finished.buffer):
                outcome = self._doubted(read)
                if outcome == Outcome.LATE:
                    waiting.appendleft(read._replace(is_second=True))
            self._workers.give_buffer(finished.buffer)
            outcomes[read.number] = outcome
            if outcome == Outcome.OK:
                self._left_unfilled(out[read.number].nbytes - read.out.nbytes)
        call.leave()
        return outcomes

    def _find(
        self, keys: Sequence[bytes], out: Sequence[memoryview], outcomes: list[Outcome], keeper: Keeper | None
    ) -> deque[_Read]:
        """The values that are there, and the outcomes: final for values that are not read, LATE for the others."""
        catalog, reads = self._state.catalog, deque[_Read]()
        with self._state.lock:
            for index, (key, view) in enumerate(zip(keys, out, strict=True)):
                if (place := catalog.find(key)) is None:
                    continue
                slab, slot = catalog.at(place)
                length = int(slab.records["length"][slot])
                outcomes[index] = Outcome.LATE if length <= view.nbytes else Outcome.FAILED
                if length <= view.nbytes:
                    direct = keeper if keeper is not None and _is_aligned(view[:length]) else None
                    reads.append(_Read(index, key, place, slab, slot, view[:length], direct))
            catalog.touch([read.place for read in reads])
        return reads

    def _begin(self, call: Call, read: _Read, buffer: Buffer) -> bool:
        if not self._state.begin_job(read.slab):
            self._workers.give_buffer(buffer)
            return False
        call.expect()
        if read.keeper is not None:
            read.keeper.share()
        self._workers.submit(partial(self._read, call, read, buffer))
        return True

    def _read(self, call: Call, read: _Read, buffer: Buffer) -> None:
        """In a thread of ours."""
        outcome = Outcome.FAILED
        try:
            size = PAGE + pages(read.out.nbytes)
            memory = [buffer.view(size)] if read.keeper is None else [buffer.view(PAGE), read.out]
            got = os.preadv(read.slab.data_fd, memory, read.slab.offset(read.slot))
            if got < size:
                buffer.view(HEADER_BYTES)[:] = bytes(
                    HEADER_BYTES
                )  # a read past the end of the file then finds no header
            outcome = Outcome.OK
        except Exception as error:
            self._state.report(f"{read.slab.path.name}: {error}")
        finally:
            self._state.end_job(read.slab)
            if read.keeper is not None:
                read.keeper.release()
            call.finish(read.number, outcome, buffer)

    def _doubted(self, read: _Read) -> Outcome:
        """The outcome for a slot with unexpected bytes; `LATE` means to read it again.

        This process or the writer may have evicted the value and reused its slot: a miss. The value may have been evicted and
        stored again in the same slot: a second read finds it. Otherwise it is damaged, and is forgotten.
        """
        state, slab = self._state, read.slab
        is_replaced = not state.is_writable and slab.is_replaced(read.slot)
        with state.lock:
            if slab.retired or state.catalog.find(read.key) != read.place:
                return Outcome.MISS
            if not read.is_second and not is_replaced:
                return Outcome.LATE
            if not state.is_writable:
                state.catalog.forget(read.key)
            else:
                state.catalog.withdraw(read.key)
                slab.num_jobs += 1
        if is_replaced:
            return Outcome.MISS
        if state.is_writable:
            self._wipe_record(read)
        state.report(f"slot {read.slot} of {slab.path.name} is damaged: its value is forgotten")
        return Outcome.FAILED

    def _wipe_record(self, read: _Read) -> None:
        """Frees the slot of a damaged value."""
        state, slab = self._state, read.slab
        try:
            slab.write_record(read.slot)
        except OSError:
            pass  # the next start finds the wrong header, too
        finally:
            with state.lock:
                state.catalog.give_back(read.place)
            state.end_job(slab)


def _taken(read: _Read, buffer: Buffer) -> bool:
    """Checks a value, and copies it to the caller unless it was read straight into its memory; False if it is damaged."""
    if read.keeper is not None:
        return is_whole(buffer.view(HEADER_BYTES), read.key, read.out)
    memory = buffer.view(PAGE + pages(read.out.nbytes))
    data = memory[PAGE : PAGE + read.out.nbytes]
    if not is_whole(memory[:HEADER_BYTES], read.key, data):
        return False
    np.copyto(np.frombuffer(read.out, np.uint8), np.frombuffer(data, np.uint8))  # lets other threads run
    return True


def _is_aligned(view: memoryview) -> bool:
    """Whether a file that is open for direct I/O can be read into this memory."""
    return view.nbytes % PAGE == 0 and np.frombuffer(view, np.uint8).ctypes.data % PAGE == 0
