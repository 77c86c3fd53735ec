"""No lock is held over a callback or I/O, but for those that docs/threads.md names with their reason.

conftest.py watches kvpool's locks in every test; these say that the watch sees what it should, and let all callbacks that
users hand in be called.
"""

from __future__ import annotations

import ast
import linecache
import logging
import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import lock_watch
from kvpool import KVCacheManager
from kvpool.eviction import LRUPolicy
from kvpool.view.hub import Hub
from managers import cached, make_manager, running

SOURCES = Path(__file__).resolve().parent.parent / "src" / "kvpool"


def made_by(module: str, call: str) -> Any:
    """What a line `self._lock = threading…` in a module of kvpool makes."""
    space: dict[str, Any] = {"threading": threading, "__name__": module}
    source, name = f"_lock = threading.{call}", f"<{call}>"
    linecache.cache[name] = (len(source), None, [source], name)
    exec(compile(source, name, "exec"), space)
    return space["_lock"]


def found() -> list[tuple[str, str]]:
    """What the watch has found since, which is forgotten."""
    seen = [(finding.lock, finding.deed) for finding in lock_watch.findings]
    lock_watch.findings.clear()
    return seen


@pytest.mark.parametrize("call", ["Lock()", "RLock()", "Condition()"])
def test_given_a_lock_of_kvpool_then_files_sockets_and_log_lines_under_it_are_found(call: str, tmp_path: Path) -> None:
    lock = made_by("kvpool.some.room", call)
    one, other = socket.socketpair()
    with lock:
        (tmp_path / "file").write_bytes(b"1")
        os.listdir(str(tmp_path))
        one.sendall(b"1")
        logging.getLogger("kvpool").error("said")
    seen = found()
    assert {name for name, _ in seen} == {"some/room.py _lock"}
    assert [deed for _, deed in seen] == [
        f"open {str(tmp_path / 'file')!r}",
        f"os.listdir {str(tmp_path)!r}",
        "socket.sendall",
        "a log line",
    ]
    with one, other:
        assert other.recv(1) == b"1"
    assert found() == []


def test_given_a_lock_of_another_library_then_nothing_is_found(tmp_path: Path) -> None:
    with made_by("another.library", "Lock()"):
        os.listdir(str(tmp_path))
    assert found() == []


def test_given_a_condition_that_waits_then_its_lock_is_held_again_behind_it_and_not_meanwhile() -> None:
    condition, name = made_by("kvpool.some.room", "Condition()"), "some/room.py _lock"
    with condition, condition:
        saved = condition._release_save()
        assert lock_watch._held.names == []
        condition._acquire_restore(saved)
        condition.wait(timeout=0.001)
        assert lock_watch._held.names == [name, name]
    assert lock_watch._held.names == []


def test_given_a_lock_that_is_taken_again_then_it_is_held_until_the_last_release() -> None:
    lock = made_by("kvpool.some.room", "RLock()")
    with lock:
        with lock:
            pass
        lock_watch.note("a callback")
    assert found() == [("some/room.py _lock", "a callback")]


# --- callbacks that users hand in -------------------------------------------------------------------------------------


def callback(*_: Any) -> None:
    lock_watch.note("a callback")


@pytest.mark.parametrize("subscribe", [KVCacheManager.on_memory_pressure, KVCacheManager.on_operation])
def test_given_callbacks_of_a_manager_then_it_does_not_hold_its_lock_over_them(
    subscribe: Callable[[KVCacheManager, Any], Any],
) -> None:
    manager, calls = make_manager(), []

    def call(*told: Any) -> None:
        callback()
        calls.append(told)

    subscribe(manager, call)
    manager.free(running(manager, "a", 64))
    assert calls
    assert {lock for lock, _ in found()} <= {"manager/guard.py _delivery"}  # which nobody ever waits for


def test_given_viewers_then_they_are_woken_outside_of_the_hubs_lock() -> None:
    woken = threading.Event()

    def wake() -> None:
        callback()
        woken.set()

    hub = Hub(make_manager(), rate=1000.0)
    viewer = hub.join(wake)
    woken.clear()
    assert woken.wait(30)  # by the thread that looks
    hub.leave(viewer)
    hub.close()
    assert found() == []


def test_given_a_policy_and_a_clock_of_the_user_then_they_run_inside_the_managers_lock_as_documented() -> None:
    class Policy(LRUPolicy):
        def victim(self) -> Any:
            callback()
            return super().victim()

    manager = make_manager(policy=Policy)
    cached(manager, 16)
    manager.cache.evict(2)
    assert {lock for lock, _ in found()} == {"manager/manager.py lock"}
    assert "policy" in lock_watch.exceptions()["manager/manager.py lock"]


# --- the documentation ------------------------------------------------------------------------------------------------


def test_given_the_documented_exceptions_then_each_names_a_lock_that_exists() -> None:
    exceptions = lock_watch.exceptions()
    assert exceptions
    for name in exceptions:
        path, attribute = name.split()
        assert f"{attribute} = threading." in (SOURCES / path).read_text(), name


def test_every_lock_of_kvpool_is_made_where_the_watch_sees_it() -> None:
    for path in sorted(SOURCES.rglob("*.py")):
        source = path.read_text()
        for node in ast.walk(ast.parse(source)) if "threading" in source else ():
            imported = isinstance(node, ast.ImportFrom) and node.module == "threading"
            names = {alias.name for alias in node.names} if imported else set()  # type: ignore[attr-defined]
            assert not names & {"Lock", "RLock", "Condition"}, path
