"""Ranks: processes that compute one model together. Read this first.

The process of the `Engine` is rank 0. It has the only control plane: it plans steps, sends each to the other ranks as one
message (`step_message`), and samples. The others (`rank_process`) have a part of the weights and the same part of every
block. Inside a step, ranks add up their results through torch.distributed: NCCL between GPUs, gloo on CPUs, and gloo
through host memory where ranks share a GPU (`rank_group`).

`Ranks` starts processes on this machine. Processes that torchrun or Ray has started, on one machine or on several, come to
rank 0 by themselves (`rank_meeting`). From then on nothing differs but how the messages of steps travel (`rank_channel`).

Every rank has two sockets to rank 0: for steps, and for questions about tiers (`rank_tiers`). A rank that dies closes them,
one that fails says why on the first, and one that hangs lets a collective or a message run out of time, as does a machine
that is gone. Each of these ends the engine, because no rank can compute alone.
"""

from __future__ import annotations

import itertools
import json
import os
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import torch

from kvpool.checks import check_int, check_number
from kvpool.engine.rank_channel import END, ERROR, OK, Channel, StepMemory
from kvpool.engine.rank_group import HOST_BACKEND, Hello, join_ranks, leave_ranks
from kvpool.errors import ConfigError, InvalidArgumentError, KVPoolError, RankError, SequenceStateError
from kvpool.model.loading import torch_device
from kvpool.pools.arrays import Int32Array

RANK_SECONDS = 60.0  # a collective or a message that takes longer ends the engine
START_SECONDS = 1800.0  # the same for loading weights
_END_SECONDS = 5.0
_REPORT_SECONDS = 1.0
_MOST_RANKS = 64


class Ranks:
    """The processes of ranks 1 to `size - 1`, for one engine after another: `Engine(model, tensor_parallel=Ranks(2))`.

    `Engine(model, tensor_parallel=2)` makes ranks of its own. On GPUs each rank has one, unless `device` names a GPU by its
    number: then all share it. A rank that does not answer for `seconds` ends the engine. Close them, or use `with`.
    """

    outlive_engines = False  # even if an engine made them

    def __init__(self, size: int, *, device: Any = None, seconds: float = RANK_SECONDS) -> None:
        self.size = check_int(size, "size", 2, _MOST_RANKS)
        self.seconds = check_number(seconds, "seconds", "a number of seconds")
        self.devices = rank_devices(device, size, self._num_here())
        self.backend = rank_backend(self.devices)
        if torch.distributed.is_initialized():
            raise ConfigError(
                f"tensor_parallel={size}: this process is in a process group of torch.distributed already (of torchrun, or "
                "of another engine); use a process of its own"
            )
        self.mesh: Any = None
        self.failure: KVPoolError | None = None
        self.in_use = False
        self._lock = threading.Lock()
        self._ending = False
        self._ended = threading.Event()
        self._directory = tempfile.mkdtemp(prefix="kvpool-ranks-")
        self.processes: list[Any] = []  # of the other ranks, if they can be waited for and killed from here
        self.channels: list[Channel] = []
        self.tier_channels: list[Channel] = []
        self.machines: list[str] = []  # of ranks 0 to `size - 1`, if they are on several
        self._address, self._port = "", 0  # by which ranks of other machines find rank 0
        self._store: Any = None  # which listens there
        self._memory = StepMemory(size)
        self.numbers = itertools.count()  # of questions, new ones for each engine
        try:
            self._start_all()
        except BaseException:
            self.close()
            raise

    def _num_here(self) -> int:
        """How many of the ranks take GPUs of this machine."""
        return self.size

    def _start_all(self) -> None:
        """Starts the other ranks, and adds each."""
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        for rank in range(1, self.size):
            (ours, theirs), (our_tiers, their_tiers) = socket.socketpair(), socket.socketpair()
            with theirs, their_tiers:
                numbers = theirs.fileno(), their_tiers.fileno()
                self.processes.append(
                    subprocess.Popen(
                        [sys.executable, "-m", "kvpool.engine.rank_process", *map(str, numbers)],
                        pass_fds=numbers,
                        env=environment,
                        stdin=subprocess.DEVNULL,
                        stdout=subprocess.DEVNULL,
                    )
                )
            self._add(rank, Channel(ours, START_SECONDS), Channel(our_tiers, self.seconds))

    def _add(self, rank: int, channel: Channel, tier_channel: Channel) -> None:
        """A rank has been started; tells it who it is."""
        self.channels.append(channel)
        self.tier_channels.append(tier_channel)
        channel.send(OK, json.dumps(self._hello(rank)).encode())
        channel.give_memory(self._memory, rank)

    def _hello(self, rank: int) -> Hello:
        return Hello(
            rank,
            self.size,
            str(self.devices[rank]),
            self.backend,
            self._directory,
            self._address,
            self._port,
            self.seconds,
            torch.get_num_threads(),
        )

    def name(self, rank: int) -> str:
        """A rank for people, with its machine if there are several."""
        return f"rank {rank} on {self.machines[rank]}" if self.machines else f"rank {rank}"

    def connect(self) -> None:
        """Waits until all ranks are there, and joins them."""
        if self.mesh is None:
            self.each_answers()
            self.mesh = join_ranks(self._hello(0), self._address)

    def each_answers(self) -> list[bytearray]:
        """Waits for one answer of every rank."""
        answers = []
        for rank, channel in enumerate(self.channels, 1):
            try:
                kind, content = channel.receive()
            except TimeoutError:
                raise self.fail(f"{self.name(rank)} did not answer within {channel.socket.gettimeout():g} s") from None
            except (EOFError, OSError):
                raise self.fail() from None
            if kind == ERROR:
                raise self.fail(self._said(rank, content))
            answers.append(content)
        return answers

    def tell_all(self, kind: bytes, content: bytes = b"") -> None:
        """Sends a message to every rank."""
        self._to_each(lambda channel: channel.send(kind, content))

    def _to_each(self, send: Callable[[Channel], None]) -> None:
        for rank, channel in enumerate(self.channels, 1):
            try:
                send(channel)
            except TimeoutError:
                raise self.fail(f"{self.name(rank)} took no message for {channel.socket.gettimeout():g} s") from None
            except OSError:
                raise self.fail() from None

    def tell_step(self, write: Callable[[Callable[[int], Int32Array]], Int32Array]) -> None:
        """Sends a step to every rank: `write` gets memory for so many integers by calling its argument, and writes it."""
        numbers: list[int] = []

        def place(count: int) -> Int32Array:
            if (taken := self._memory.take(count)) is None:
                return np.empty(count, np.int32)
            numbers.append(taken[0])
            return taken[1]

        message = write(place)
        number = numbers[0] if numbers else None
        self._to_each(lambda channel: channel.send_step(message, number))

    def end_engine(self) -> None:
        """Has every rank close its part of an engine, whatever it does now, and waits for that."""
        self.tell_all(END)
        for rank, channel in enumerate(self.channels, 1):
            try:
                while (message := channel.receive())[0] != END:
                    if message[0] == ERROR:
                        raise self.fail(self._said(rank, message[1]))
            except TimeoutError:
                raise self.fail(f"{self.name(rank)} did not end within {channel.socket.gettimeout():g} s") from None
            except (EOFError, OSError):
                raise self.fail() from None

    def set_seconds(self, seconds: float) -> None:
        """How long `tell_all` and `each_answers` wait for one rank."""
        for channel in self.channels:
            channel.socket.settimeout(seconds)

    def fail(self, reason: str = "", error: BaseException | None = None) -> KVPoolError:
        """Ends all ranks and returns why: the first reason that was found counts."""
        if self._may_end():
            found = reason or self._reason(error)
            self._end(RankError(f"{found}; no rank can go on without the others"), 0.0)
        self._ended.wait()
        assert self.failure is not None
        return self.failure

    def _may_end(self) -> bool:
        """Whether the caller is the first who ends the ranks: the only one who may."""
        with self._lock:
            first, self._ending = not self._ending, True
        return first

    def _reason(self, error: BaseException | None) -> str:
        """What the ranks say and how they ended; otherwise the error of rank 0."""
        late = error is not None and "peer" not in str(error) and _is_late(str(error))
        due = time.monotonic() + _REPORT_SECONDS  # a rank may be about to say why
        said: list[str] = []
        lost: list[str] = []
        ended: list[str] = []
        silent: list[str] = []
        for rank, channel in enumerate(self.channels, 1):
            try:
                channel.socket.settimeout(max(0.001, due - time.monotonic()))
                kind, content = channel.receive()
                if kind == ERROR:
                    said.append(self._said(rank, content))
            except (EOFError, ConnectionError):
                lost.append(self.name(rank))
            except OSError as problem:
                if problem.errno is None:  # it waited long enough
                    silent.append(self.name(rank))
                else:
                    ended.append(f"{self.name(rank)} cannot be reached ({os.strerror(problem.errno)})")
        for rank, process in enumerate(self.processes, 1):
            with suppress(subprocess.TimeoutExpired, TimeoutError):
                code = process.wait(max(0.001, due - time.monotonic()))
                if code < 0:
                    ended.append(f"{self.name(rank)} was killed by signal {-code}")
        # Other ranks say only that they have lost the one with the error.
        causes = [what for what in ended if "signal" in what] + [what for what in said if not _is_late(what)]
        if late and not causes and silent:
            return f"{' and '.join(silent)} did not answer within {self.seconds:g} s"
        if lost:  # all of them: whoever has started the ranks may end the others of one that was killed
            ended.append(f"{' and '.join(lost)} {'has' if len(lost) == 1 else 'have'} ended")
        causes += ended + said
        if causes:
            return causes[0]
        return "ranks cannot be reached" if error is None else f"rank 0 failed: {type(error).__name__}: {error}"

    def _said(self, rank: int, content: bytearray) -> str:
        return f"{self.name(rank)} failed: {content.decode(errors='replace')}"

    def close(self) -> None:
        """Ends the processes. May be called twice."""
        if self._may_end():
            self._end(SequenceStateError("these ranks are closed"), _END_SECONDS)
        self._ended.wait()
        mesh, self.mesh = self.mesh, None
        if mesh is not None:
            leave_ranks()

    def _end(self, failure: KVPoolError, seconds: float) -> None:
        self.failure = failure
        for channel in (*self.channels, *self.tier_channels):
            with suppress(OSError):
                channel.socket.shutdown(socket.SHUT_RDWR)  # wakes who waits for it, too
            channel.socket.close()
        for process in self.processes:
            try:
                process.wait(seconds)
            except (subprocess.TimeoutExpired, TimeoutError):
                process.kill()
                process.wait()
        self._memory.close()
        self._store = None
        shutil.rmtree(self._directory, ignore_errors=True)
        self._ended.set()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def _is_late(message: str) -> bool:
    """Whether a message of torch.distributed is about another rank."""
    return any(words in message.lower() for words in ("timed out", "timeout", "peer"))


def rank_devices(device: Any, size: int, num_here: int) -> list[torch.device]:
    """The device of each rank, of which `num_here` are on this machine. Raises if there are fewer GPUs than those."""
    first = torch_device(device)
    if first.type == "cpu" or first.index is not None:
        return [first] * size
    count = torch.cuda.device_count()
    if count < num_here:
        raise InvalidArgumentError(
            f"tensor_parallel={size} needs {num_here} GPUs of this machine, but torch finds {count}; use fewer ranks, or "
            "device='cpu'"
        )
    return [torch.device("cuda", rank) for rank in range(size)]


def rank_backend(devices: list[torch.device]) -> str:
    """How ranks on these devices add up their results."""
    if len(set(devices)) > 1:
        return "nccl"
    return "gloo" if devices[0].type == "cpu" else HOST_BACKEND


class Watch:
    """A thread that waits for a rank to end or to fail between two steps, and for answers about tiers, and tells of both."""

    def __init__(self, ranks: Ranks, tell: Callable[[KVPoolError], None], heard: Callable[[bytearray], None]) -> None:
        self._ranks = ranks
        self._tell = tell
        self._heard = heard
        self._wake, self._woken = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="kvpool-ranks", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        sockets = [channel.socket for channel in self._ranks.channels]
        asked = {channel.socket: channel for channel in self._ranks.tier_channels}
        while True:
            try:
                ready, _, _ = select.select([self._woken, *sockets, *asked], [], [])
                if self._woken in ready:
                    return
                if not asked.keys() >= set(ready):
                    break
                for each in ready:
                    self._heard(asked[each].receive()[1])
            except ValueError:  # they are closed: the engine has failed, and knows
                return
            except (EOFError, OSError):
                break
        self._tell(self._ranks.fail())

    def close(self) -> None:
        """Stops to watch."""
        self._wake.close()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        self._woken.close()
