"""What all tests share: what they import, hypothesis profiles, the real traces, and the rule for tests that need a GPU."""

from __future__ import annotations

import functools
import gc
import importlib.util
import os
import signal
import sys
from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

REPO_ROOT = Path(__file__).resolve().parent.parent

sys.path.insert(0, str(REPO_ROOT / "tests"))  # for managers.py: tests are collected with --import-mode=importlib

import kvpool.replay.policies  # noqa: E402, F401  # known by name in all tests, as in every replay
import lock_watch  # noqa: E402

if os.environ.get("KVPOOL_LOCK_WATCH") != "0":  # an audit hook lets threads fail to start while they are traced
    lock_watch.install()

# Kernels run in Triton's interpreter where there is no GPU. Triton reads this when it is imported, which any test may cause.
if not any(Path("/dev").glob("nvidia[0-9]*")):
    os.environ.setdefault("TRITON_INTERPRET", "1")

# ci: the same examples on every run, so that a red build is about the change. all: more of them, for make test-all.
# dev: new examples each time, quick.
# thorough: for a night or after touching the pool or the prefix cache; `make test ARGS=--hypothesis-profile=thorough`.
_NO_CLOCK = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", _NO_CLOCK, max_examples=50, derandomize=True, print_blob=True)
settings.register_profile("all", _NO_CLOCK, max_examples=100, derandomize=True, print_blob=True)
settings.register_profile("dev", _NO_CLOCK, max_examples=50, derandomize=False)
settings.register_profile("thorough", _NO_CLOCK, max_examples=2000, derandomize=False, stateful_step_count=200)
settings.register_profile("quick", _NO_CLOCK, max_examples=25, derandomize=True)  # tools/mutants.py: hundreds of runs
settings.load_profile("ci" if os.environ.get("CI") else "dev")


@pytest.fixture(scope="session")
def traces_dir() -> Path:
    """Folder of the real request traces: `KVPOOL_TRACES`, else `../shared/traces` beside the checkout.

    A test that asks for it is skipped where neither exists. A `KVPOOL_TRACES` that is not a folder is an error: whoever
    set it wants those tests to run.
    """
    if configured := os.environ.get("KVPOOL_TRACES"):
        path = Path(configured)
        if not path.is_dir():
            pytest.fail(f"KVPOOL_TRACES={configured!r} is not a folder; correct it or unset it", pytrace=False)
        return path
    path = REPO_ROOT.parent / "shared" / "traces"
    if not path.is_dir():
        pytest.skip("no real traces: set KVPOOL_TRACES to a folder that holds them, or put them in ../shared/traces")
    return path


@pytest.fixture
def eager_thread_switches() -> Iterator[None]:
    """Threads take turns as often as they can, so that what two of them do at once shows."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


@pytest.fixture
def no_waiting() -> Iterator[None]:
    """A test that waits for ever, for instance in `open` of a FIFO, fails instead."""

    def stop(*_: object) -> None:
        raise AssertionError("it waits for something that never comes")

    earlier = signal.signal(signal.SIGALRM, stop)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, earlier)


@pytest.fixture(autouse=True)
def no_lock_over_io() -> Iterator[None]:
    """No lock of kvpool is held over a file, a socket or a log line, but those that docs/threads.md names."""
    lock_watch.findings.clear()
    yield
    allowed = lock_watch.exceptions()
    found = [finding for finding in lock_watch.findings if finding.lock not in allowed]
    assert not found, "under a lock: " + "; ".join(map(str, found[:5]))


_kinds_checked: set[tuple[Any, ...]] = set()


@pytest.fixture
def one_self_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines compare a model with its own attention once for all models of its kind, not whenever one starts.

    The comparison takes longer than what most tests of tiny models do. What it finds is tested in test_probing.py.
    """
    from kvpool.model import probing

    honest = probing.check_against_eager

    def check(model: Any, *arguments: Any, **options: Any) -> None:
        kind = type(model), str(sorted(vars(model.config).items())), str(model.dtype), str(model.device)
        if kind not in _kinds_checked:
            honest(model, *arguments, **options)
            _kinds_checked.add(kind)

    monkeypatch.setattr(probing, "check_against_eager", check)


@pytest.fixture
def patient_tiers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines wait and look for prefixes in tiers whatever that takes.

    On a busy machine a tiny model computes faster than a thread gets to look, and a tier would not be asked.
    """
    monkeypatch.setattr("kvpool.tiers.transport.tier_transport.SHORTEST_WAIT", 30.0)
    monkeypatch.setattr("kvpool.tiers.transport.deciding.Decider.is_worth_looking", lambda self, num_tokens: True)


@functools.cache
def _missing_gpu_reason() -> str | None:
    """Why tests marked `gpu` cannot run here, or None when they can. Imports torch: asked only when one is selected."""
    if importlib.util.find_spec("torch") is None:
        return "needs a CUDA device: torch is not installed"
    import torch

    return None if torch.cuda.is_available() else "needs a CUDA device: torch finds none"


_IS_WORKER = "PYTEST_XDIST_WORKER" in os.environ
if _IS_WORKER:
    gc.disable()  # while half of what is installed is imported, which leaves no garbage


_ROOMS = [
    path
    for path in sorted((REPO_ROOT / "tests").iterdir())
    if path.name.startswith("test_") or any(path.glob("test_*.py"))
]


def pytest_configure(config: pytest.Config) -> None:
    """Each worker of the whole suite begins to collect in another room of the tests.

    pytest rewrites the assertions of every test file that it has not seen, which takes as long as all imports. So each worker
    does it for a part of them, and finds the others done.
    """
    if _IS_WORKER and config.args == ["tests"]:
        number, workers = os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw"), os.environ["PYTEST_XDIST_WORKER_COUNT"]
        sizes = [
            sum(file.stat().st_size for file in (room.glob("*.py") if room.is_dir() else [room])) for room in _ROOMS
        ]
        first = bisect_left(list(accumulate(sizes)), sum(sizes) * int(number) / int(workers))
        config.args = [str(room) for room in (*_ROOMS[first:], *_ROOMS[:first])]


def pytest_collection_finish(session: pytest.Session) -> None:
    """What a worker of the whole suite has imported stays to the end: no collection needs to look at it again."""
    if _IS_WORKER:
        gc.freeze()
        gc.enable()


def _files() -> set[Path]:
    """Everything in the working tree that is not hidden and not made by building or importing."""
    found = set()
    for folder, folders, names in os.walk(REPO_ROOT):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in _MADE]
        found.update(Path(folder, name) for name in names if not (name.startswith(".") or name.endswith(".pyc")))
    return found


_MADE = {"__pycache__", "build", "dist", "site", "htmlcov", "results", "node_modules"}
_files_before = frozenset[Path]() if _IS_WORKER else frozenset(_files())


def pytest_sessionfinish(session: pytest.Session) -> None:
    """The run fails if the working tree has files afterwards that it had not before: tests write to `tmp_path`."""
    if not _IS_WORKER and (left := sorted(_files() - _files_before)):
        names = ", ".join(str(path.relative_to(REPO_ROOT)) for path in left)
        print(f"\nthe tests left files in the working tree: {names}", file=sys.stderr)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """`@pytest.mark.quick("llama", "gemma2")`: `make test` runs these cases of a test, `make test-all` the others, too."""
    if _IS_WORKER:  # all of them must find the same order
        places = {room: place for place, room in enumerate(_ROOMS)}
        items.sort(key=lambda item: next((places[at] for at in (item.path, *item.path.parents) if at in places), 0))
    unknown: set[tuple[str, str]] = set()
    known: set[tuple[str, str]] = set()
    for item in items:
        if quick := item.get_closest_marker("quick"):
            test, _, case = item.nodeid.removesuffix("]").partition("[")
            unknown.update((test, named) for named in quick.args)
            known.add((test, case))
            if case not in quick.args and not item.get_closest_marker("gpu"):
                item.add_marker("slow")
    if (unknown := unknown - known) and not any("::" in argument for argument in config.args):
        raise pytest.UsageError(f"no such case of a test: {sorted(unknown)}")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and (reason := _missing_gpu_reason()):
        pytest.skip(reason)
