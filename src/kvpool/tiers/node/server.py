"""NodeServer: the process that owns a region. One thread serves all connections; who misbehaves is cut off alone."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import queue
import select
import socket
import stat
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvpool.checks import check_int
from kvpool.config.layers import MAX_BYTES
from kvpool.errors import ConfigError, StorageError
from kvpool.files import NotPlainError, open_plain
from kvpool.quiet import QuietLog
from kvpool.tiers.contract import KeyedTier
from kvpool.tiers.node import wire
from kvpool.tiers.node.behind import Behind
from kvpool.tiers.node.index import NodeIndex
from kvpool.tiers.node.region import MIN_BYTES, Region, check_room
from kvpool.tiers.node.service import LATER, Client, NodeService, stats_answer
from kvpool.tiers.node.values import Process, Quotas
from kvpool.tiers.node.wire import Verb, WireError

SILENCE_SECONDS = 30.0
"""That a client may say nothing while it holds leases or reservations; a call of a tier takes seconds at most."""
HELD_SECONDS = 60.0
"""That a client may hold leases or reservations without a break; others can neither evict nor write to what it holds."""
TICK_SECONDS = 1.0
MAX_CLIENTS = 512  # a process may usually have 1,024 files open
MAX_OF_PROCESS = 128

_log = logging.getLogger("kvpool")


class _Peer(Client):
    """A client and its socket."""

    def __init__(
        self, connection: socket.socket, pid: int, process: Process, answer: Callable[[_Peer, bytes], None]
    ) -> None:
        super().__init__(pid, lambda packet: answer(self, packet), process)
        self.socket = connection
        self.heard = time.monotonic()
        self.is_busy = False  # tiers behind the node are being asked for it


class NodeServer:
    """Owns the files in `directory`, which no other node may use, and answers engines until it is stopped.

    What an earlier node left there is found again, if it was of the same size. `tiers` lie behind the memory: what it lacks
    is looked for there, and what is stored goes there, too. The server closes them.
    """

    def __init__(
        self,
        directory: Path,
        num_bytes: int,
        *,
        policy: str = "lru",
        quotas: Quotas | None = None,
        tiers: Sequence[KeyedTier] = (),
        silence_seconds: float = SILENCE_SECONDS,
        held_seconds: float = HELD_SECONDS,
    ) -> None:
        check_int(num_bytes, "bytes", MIN_BYTES, MAX_BYTES, ConfigError)
        self.directory = directory
        self._silence, self._held = silence_seconds, held_seconds
        with contextlib.ExitStack() as after_errors:
            self._lock = _locked(directory)
            after_errors.callback(os.close, self._lock)
            check_room(directory, num_bytes)
            region = Region(directory, num_bytes)
            after_errors.callback(region.close)
            self.is_warm = region.is_warm
            self.index = NodeIndex(region, policy, quotas)
            self._listener = _listening(directory / wire.SOCKET)
            after_errors.pop_all()
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK)
        self.service = NodeService(self.index, Behind(tiers, self._post))
        self._peers: dict[int, _Peer] = {}
        self._processes: dict[int, Process] = {}
        self._buffer = memoryview(bytearray(wire.MAX_MESSAGE + 1))
        self._quiet = QuietLog(_log, lines=4)
        self._is_stopping = False
        self._epoll = select.epoll()
        for fd in (self._listener.fileno(), self._wake):
            self._epoll.register(fd, select.EPOLLIN)

    # --- the loop ----------------------------------------------------------------------------------------------------

    def serve(self) -> None:
        """Answers until `stop` is called."""
        next_tick = time.monotonic() + TICK_SECONDS
        while not self._is_stopping:
            for fd, _ in self._epoll.poll(TICK_SECONDS):
                if fd == self._listener.fileno():
                    self._accept()
                elif fd == self._wake:
                    self._run_jobs()
                elif fd in self._peers:  # another one's message may have ended it
                    self._read(self._peers[fd])
            if time.monotonic() >= next_tick:
                next_tick = time.monotonic() + TICK_SECONDS
                self._tick()

    def stop(self) -> None:
        """Ends `serve`; from any thread, or a signal."""
        self._is_stopping = True
        os.eventfd_write(self._wake, 1)

    def stats(self) -> dict[str, Any]:
        """One look at the node. In the thread of `serve`; `call` brings it there."""
        return self.service.stats(list(self._peers.values()))

    def call(self, job: Callable[[], Any], timeout: float) -> Any:
        """What a function returns that runs in the thread of `serve`; raises queue.Empty if that is late."""
        answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._post(lambda: answers.put(job()))
        return answers.get(timeout=timeout)

    def close(self) -> None:
        """Ends all connections. The memory stays: the next node finds it."""
        for peer in list(self._peers.values()):
            self._end(peer)
        self.service.behind.close()
        self._run_jobs()
        self.index.count_uses()
        self._epoll.close()
        with contextlib.suppress(OSError):
            os.unlink(self.directory / wire.SOCKET)
        self._listener.close()
        os.close(self._wake)
        self.index.region.close()
        os.close(self._lock)

    def _post(self, job: Callable[[], None]) -> None:
        self._jobs.put(job)
        with contextlib.suppress(OSError):  # closed: a call of a tier came back too late
            os.eventfd_write(self._wake, 1)

    def _run_jobs(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        while not self._jobs.empty():
            try:
                self._jobs.get()()
            except Exception:
                _log.exception("node: what tiers behind it brought was not used")

    def _tick(self) -> None:
        """Once a second: who holds something and is silent or holds it too long goes, and records learn of uses.

        If the region was cut off, the node ends.
        """
        if not self.index.region.is_whole:
            path = self.directory / wire.REGION
            raise StorageError(f"another process has cut off {path}, the memory of this node: it ends; start it again")
        now = time.monotonic()
        for peer in list(self._peers.values()):
            if peer.heard < now - self._silence and not peer.is_busy and (peer.holder or not peer.name):
                self._cut_off(peer, f"it was silent for {self._silence:g} s while it held leases or reservations")
            elif peer.holder and peer.holder.since < now - self._held:
                self._cut_off(peer, f"it held leases or reservations for {self._held:g} s without a break")
        self.index.count_uses()

    # --- connections -------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # it left again, or no file descriptor is free
            return
        connection.setblocking(False)
        pid, uid = wire.peer_of(connection)
        process = self._processes.get(pid) or Process()
        reason = ""
        if uid != os.getuid():
            reason = f"this node belongs to user {os.getuid()}, and process {pid} to user {uid}"
        elif len(self._peers) >= MAX_CLIENTS or process.num_connections >= MAX_OF_PROCESS:
            reason = f"process {pid} has {process.num_connections} connections, and all processes {len(self._peers)}"
        if reason:
            self._refuse(connection, reason)
            connection.close()
            return
        fd = connection.fileno()
        self._peers[fd] = _Peer(connection, pid, process, self._answer_late)
        process.num_connections += 1
        if pid:  # else it is in another namespace, as in a container, and cannot be told from others there
            self._processes[pid] = process
        self._epoll.register(fd, select.EPOLLIN)

    def _read(self, peer: _Peer) -> None:
        """Serves one message of a client, so that one that sends many waits for the others in between."""
        try:
            count = peer.socket.recv_into(self._buffer)
        except BlockingIOError:
            return
        except OSError:
            count = 0
        if not count:
            self._end(peer)
            return
        peer.heard = time.monotonic()
        try:
            if count > wire.MAX_MESSAGE:
                raise WireError(f"a message has at most {wire.MAX_MESSAGE} bytes")
            found = wire.parse(self._buffer[:count])
            if not peer.name:
                self._greet(peer, self.service.hello(peer, found))
                return
            answer = stats_answer(self.stats()) if found.verb == Verb.STATS else self.service.handle(peer, found)
        except WireError as error:
            self._cut_off(peer, str(error))
            return
        except Exception as error:  # a mistake of ours: it must cost one client and not all
            _log.exception("node: a message of engine %r failed", peer.name)
            self._cut_off(peer, f"{type(error).__name__}: {error}")
            return
        if answer == LATER:
            peer.is_busy = True
            self._epoll.modify(peer.socket.fileno(), 0)  # its next message waits; that it has left is told anyway
        elif answer is not None:
            self._send(peer, answer)

    def _greet(self, peer: _Peer, answer: bytes) -> None:
        try:
            socket.send_fds(peer.socket, [answer], [self.index.region.fd])
        except OSError:
            self._end(peer)

    def _answer_late(self, peer: _Peer, packet: bytes) -> None:
        if not peer.is_gone:
            peer.is_busy = False
            peer.heard = time.monotonic()
            self._epoll.modify(peer.socket.fileno(), select.EPOLLIN)
            self._send(peer, packet)

    def _send(self, peer: _Peer, packet: bytes) -> None:
        try:
            peer.socket.send(packet)
        except BlockingIOError:
            self._cut_off(peer, "it asks and does not read the answers")
        except OSError:
            self._end(peer)

    def _cut_off(self, peer: _Peer, reason: str) -> None:
        self.service.counts["cut_off"] += 1
        self._quiet.warning("node: cut off engine %r, process %d: %s", peer.name, peer.pid, reason)
        self._refuse(peer.socket, reason)
        self._end(peer)

    @staticmethod
    def _refuse(connection: socket.socket, reason: str) -> None:
        with contextlib.suppress(OSError):
            connection.send(wire.message(Verb.REFUSED, 0, 0, reason.encode()[:1024]))

    def _end(self, peer: _Peer) -> None:
        del self._peers[peer.socket.fileno()]
        peer.process.num_connections -= 1
        if not peer.process.num_connections:
            self._processes.pop(peer.pid, None)
        self._epoll.unregister(peer.socket.fileno())
        peer.socket.close()
        self.service.leave(peer)


def _locked(directory: Path) -> int:
    """Makes the directory for this user alone, and this process its node."""
    try:
        if directory.parent.name == f"kvpool-{os.getuid()}":
            directory.parent.mkdir(0o700, exist_ok=True)
            _check_private(directory.parent)
        directory.mkdir(0o700, parents=True, exist_ok=True)
        _check_private(directory)
        fd = open_plain(directory / wire.LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    except NotPlainError as error:
        raise ConfigError(
            f"{directory / wire.LOCK} is {error.strerror}; remove it, and the node makes its own"
        ) from None
    except OSError as error:
        raise ConfigError(f"cannot use the directory {directory} ({error.strerror}); name one that is yours") from None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        owner = os.pread(fd, 32, 0).decode(errors="replace").strip() or "unknown"
        os.close(fd)
        raise ConfigError(f"process {owner} is the node of {directory} already; give this one another --name") from None
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    return fd


def _check_private(directory: Path) -> None:
    found = os.stat(directory, follow_symlinks=False)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise ConfigError(
            f"{directory} must be a directory of this user that nobody else can enter (mode 700): what engines were "
            f"asked lies in it; remove it, or chmod 700 {directory}"
        )


def _listening(path: Path) -> socket.socket:
    """A socket that only this user may connect to."""
    path.unlink(missing_ok=True)  # of a node that was killed: this one has the lock
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        listener.bind(str(path))  # in a directory that nobody else can enter
        os.chmod(path, 0o600)
        listener.listen(128)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return listener
