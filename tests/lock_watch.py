"""Locks of kvpool that notice what is done while somebody holds them: files, sockets, log lines, copies, callbacks.

`install` puts them in place of `threading`'s for all that kvpool makes from then on; locks of others stay as they are. What
is found is kept in `findings`, as (lock, what was done, where). A lock is named by the file that makes it and its attribute.
Which locks may be held over what is said in docs/threads.md, and nowhere else.
"""

from __future__ import annotations

import linecache
import logging
import os
import re
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from functools import cache, wraps
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

Lock, RLock, Condition = threading.Lock, threading.RLock, threading.Condition

DOCS = Path(__file__).resolve().parent.parent / "docs" / "threads.md"
EVENTS = {  # of the interpreter's audit: whatever opens, looks for or removes files, reaches out, or sleeps
    *("open", "os.listdir", "os.scandir", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.truncate"),
    *("fcntl.flock", "mmap.__new__", "subprocess.Popen", "tempfile.mkdtemp", "tempfile.mkstemp", "time.sleep"),
    *("socket.bind", "socket.connect", "socket.getaddrinfo", "socket.sendmsg", "socket.sendto"),
}
CALLS = ("close", "fdatasync", "fsync", "posix_fallocate", "pread", "preadv", "pwrite", "pwritev", "read", "write")
SOCKET_CALLS = ("accept", "recv", "recv_into", "send", "sendall")


class Finding(NamedTuple):
    """Something was done under a lock."""

    lock: str
    deed: str
    where: str


findings: list[Finding] = []


class Held(threading.local):
    """The names of the locks that a thread holds."""

    def __init__(self) -> None:
        self.names: list[str] = []


_held = Held()


class WatchedLock:
    """A lock that is known to be held."""

    def __init__(self, name: str, lock: Any) -> None:
        self.name, self._lock = name, lock

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        got: bool = self._lock.acquire(blocking, timeout)
        if got:
            _held.names.append(self.name)
        return got

    def release(self) -> None:
        names = _held.names
        if self.name in names:  # a plain lock may be given back by another thread
            names.remove(self.name)
        self._lock.release()

    def locked(self) -> bool:
        return bool(self._lock.locked())

    __enter__ = acquire

    def __exit__(self, *exc_info: object) -> None:
        self.release()


class WatchedRLock(WatchedLock):
    """One that a thread may take again; a condition gives it back as a whole while it waits."""

    def _is_owned(self) -> bool:
        return bool(self._lock._is_owned())

    def _release_save(self) -> Any:
        depth = _held.names.count(self.name)
        _held.names = [name for name in _held.names if name != self.name]
        return depth, self._lock._release_save()

    def _acquire_restore(self, saved: Any) -> None:
        depth, state = saved
        self._lock._acquire_restore(state)
        _held.names.extend([self.name] * depth)


def _name(frame: Any) -> str | None:
    """The name of the lock that is made in this frame; None if it is not kvpool's."""
    module: str = frame.f_globals.get("__name__", "")
    if not module.startswith("kvpool."):
        return None
    held, _held.names = _held.names, []  # reading the source is no deed
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
    _held.names = held
    attribute = re.search(r"(\w+)(?:: [^=]+)? = threading\.", line)
    path = module.removeprefix("kvpool.").replace(".", "/") + ".py"
    return f"{path} {attribute[1] if attribute else line.strip()}"


def _make_lock() -> Any:
    name = _name(sys._getframe(1))
    return Lock() if name is None else WatchedLock(name, Lock())


def _make_rlock() -> Any:
    name = _name(sys._getframe(1))
    return RLock() if name is None else WatchedRLock(name, RLock())


def _make_condition(lock: Any = None) -> Any:
    name = _name(sys._getframe(1))
    return Condition(lock) if name is None or lock is not None else Condition(WatchedRLock(name, RLock()))  # type: ignore[arg-type]


def note(deed: str) -> None:
    """Something is done that no lock may be held over, but those that the documentation names."""
    frames = list(islice(traceback.walk_stack(sys._getframe(1)), 10))
    if any(frame.f_code.co_filename.startswith("<frozen importlib") for frame, _ in frames):
        return  # what a library imports on first use: which test comes first decides where that is
    where = " < ".join(f"{frame.f_code.co_filename.rpartition('/')[2]}:{line}" for frame, line in frames)
    findings.extend(Finding(name, deed, where) for name in dict.fromkeys(_held.names))


def watched(call: Callable[..., Any], deed: str) -> Callable[..., Any]:
    """A function that is not to be called under a lock."""

    @wraps(call)
    def noted(*arguments: Any, **options: Any) -> Any:
        if getattr(_held, "names", None):
            note(deed)
        return call(*arguments, **options)

    return noted


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if getattr(_held, "names", None) and event in EVENTS:
        note(f"{event} {arguments[0]!r}")


def install() -> None:
    """From now on kvpool's locks are watched, in this process."""
    threading.Lock, threading.RLock, threading.Condition = _make_lock, _make_rlock, _make_condition  # type: ignore[misc, assignment]
    sys.addaudithook(_audit)
    for name in CALLS:
        setattr(os, name, watched(getattr(os, name), f"os.{name}"))
    for name in SOCKET_CALLS:
        setattr(socket.socket, name, watched(getattr(socket.socket, name), f"socket.{name}"))
    logging.Logger.handle = watched(logging.Logger.handle, "a log line")  # type: ignore[method-assign]


@cache
def exceptions() -> dict[str, str]:
    """Locks that may be held over I/O or a callback, and why, as the table in the documentation says it."""
    table = DOCS.read_text().partition("## Locks that are held over I/O")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `([\w/.]+)` `(\w+)` \| (.+) \|$", table, re.MULTILINE)
    return {f"{path} {attribute}": reason for path, attribute, reason in rows}
