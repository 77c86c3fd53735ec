"""A pytest plugin that tries mutants, each in a forked child of a session that has collected its tests once.

`tools/mutants.py` starts it with a task in a file, and it writes what it finds, a line each, as JSON. First every test file
runs without a mutant: that says which tests pass here, which functions each of them calls, and how long it takes. Then a
child for each mutant puts the changed function in the place of the old one and runs the tests that call it. No file changes.
What is no function's body, such as a constant of a module or a default value, is changed while it is imported: then the tests
of that module run in a process of their own. A Python that a test starts sees the code unchanged.
"""

from __future__ import annotations

import ast
import contextlib
import gc
import hashlib
import importlib
import importlib.machinery
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from _pytest.runner import runtestprotocol

KILLED, TIMED_OUT, SURVIVED = "killed", "timed out", "survived"
FILE_SECONDS = 600.0  # for one test file without a mutant; one that takes longer is left out
QUICK = 0.05  # seconds

Line = tuple[str, int]  # a file below the root, and the first line of a function in it


class Usual(NamedTuple):
    """What a test does without a mutant."""

    seconds: float  # of the processor
    passes: bool
    calls: list[Line]


class Change(NamedTuple):
    """What a mutant changes: these bytes of a file become others."""

    path: str
    start: int
    end: int
    new: str

    def source(self, root: Path) -> bytes:
        """The changed file."""
        source = (root / self.path).read_bytes()
        return source[: self.start] + self.new.encode() + source[self.end :]


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests() -> None:
    """Makes the change before anything is imported that it is part of; files of fixtures may import it."""
    task = _task()
    if "change" in task:
        _change_on_import(Path(task["root"]), Change(*task["change"]))


def pytest_configure(config: pytest.Config) -> None:
    """Takes the task: all mutants of a run, or one that is made while its module is imported."""
    task = _task()
    if "change" in task:
        config.pluginmanager.register(_Fresh(task["tests"], Path(task["out"])))
    else:
        config.pluginmanager.register(_Trials(Path(task["root"]), task, config.args))


def _task() -> dict[str, Any]:
    task: dict[str, Any] = json.loads(Path(os.environ["MUTANTS_TASK"]).read_text())
    return task


# --- functions --------------------------------------------------------------------------------------------------------


def function_around(source: bytes, position: int) -> tuple[int, int] | None:
    """First and last line of the innermost function whose body holds this byte; None outside of them."""
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found = None
    for node in ast.walk(ast.parse(source)):  # outer ones first
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.end_lineno and node.end_col_offset:
            body, end = node.body[0], starts[node.end_lineno - 1] + node.end_col_offset
            if starts[body.lineno - 1] + body.col_offset <= position < end:
                found = min([node.lineno, *(d.lineno for d in node.decorator_list)]), node.end_lineno
    return found


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _plain(code: types.CodeType) -> Any:
    """What two codes have alike if they do the same, wherever they stand in their file."""
    constants = [_plain(c) if isinstance(c, types.CodeType) else (type(c), repr(c)) for c in code.co_consts]
    return code.co_name, code.co_code, code.co_names, code.co_varnames, code.co_freevars, constants


def _key(code: types.CodeType) -> tuple[str, str, int]:
    return code.co_filename, code.co_name, code.co_firstlineno


class Functions:
    """The functions of the source that have been made so far."""

    def __init__(self, source: Path) -> None:
        self._known: dict[tuple[str, str, int], list[types.FunctionType]] = {}
        prefix = f"{source}{os.sep}"
        for function in gc.get_objects():
            if type(function) is types.FunctionType and function.__code__.co_filename.startswith(prefix):
                self._known.setdefault(_key(function.__code__), []).append(function)

    def change(self, file: Path, source: bytes) -> bool:
        """Gives functions the code of a changed source. False if no function of this name and place differs."""
        changed = False
        for code in _codes(compile(source, str(file), "exec", dont_inherit=True)):
            for function in self._known.get(_key(code), ()):
                if _plain(function.__code__) != _plain(code):
                    try:
                        function.__code__ = code
                    except ValueError:  # another number of free variables
                        return False
                    changed = True
        return changed


def _change_on_import(root: Path, change: Change) -> None:
    file, honest = str(root / change.path), importlib.machinery.SourceFileLoader.get_code

    def get_code(self: Any, fullname: str) -> types.CodeType | None:
        if self.get_filename(fullname) != file:
            return honest(self, fullname)
        return compile(change.source(root), file, "exec", dont_inherit=True)

    importlib.machinery.SourceFileLoader.get_code = get_code  # type: ignore[method-assign]


# --- children ---------------------------------------------------------------------------------------------------------


class Child(NamedTuple):
    """A task in a process of its own."""

    name: Any
    work: Callable[[Path], int]  # writes to the file, and returns how the process ends
    seconds: float  # after which it is killed


def run_children(children: Iterator[Child], count: int) -> Iterator[tuple[Any, int | None, str, float]]:
    """(name, how it ended or None if it took too long, what it wrote, seconds) as they end; `count` at once."""
    running: dict[int, tuple[Child, float, Path]] = {}
    following = next(children, None)
    try:
        while following is not None or running:
            while following is not None and len(running) < count:
                folder = Path(tempfile.mkdtemp())
                running[_start(following, folder)] = following, time.monotonic(), folder
                following = next(children, None)
            for pid, (child, started, folder) in list(running.items()):
                done, status = os.waitpid(pid, os.WNOHANG)
                if done or time.monotonic() > started + child.seconds:
                    del running[pid]
                    _kill(pid, reap=not done)
                    code = os.waitstatus_to_exitcode(status) if done else None
                    said = (folder / "out").read_text() if (folder / "out").exists() else ""
                    shutil.rmtree(folder, ignore_errors=True)
                    yield child.name, None if code is not None and code < 0 else code, said, time.monotonic() - started
            time.sleep(0.01)
    finally:
        for pid in running:
            _kill(pid, reap=True)


def _start(child: Child, folder: Path) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 99
    try:
        os.setpgid(0, 0)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.environ["PYTEST_DEBUG_TEMPROOT"] = str(folder)  # for tmp_path, which no two children may share
        nowhere = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(nowhere, descriptor)
        code = child.work(folder / "out")
    except BaseException as error:  # whatever a mutant may raise
        (folder / "out").write_text(f"0\n{error!r}")
    finally:
        os._exit(code)


def _kill(pid: int, *, reap: bool) -> None:
    """Ends a child with the processes that its tests have started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    if reap:
        os.waitpid(pid, 0)


# --- a session --------------------------------------------------------------------------------------------------------


class _Trials:
    """Collects once, measures, tries."""

    def __init__(self, root: Path, task: dict[str, Any], arguments: Sequence[str]) -> None:
        self.root, self.task, self.arguments = root, task, arguments
        self.failed: str | None = None
        self.seen: dict[int, types.CodeType] = {}  # by id, for their hashes are slow
        self.of_fixtures: dict[str, set[Line]] = {}  # calls of fixtures that several tests share
        self.items: dict[str, pytest.Item] = {}
        self.usual: dict[str, Usual] = {}
        self.callers: dict[
            str, list[tuple[int, str]]
        ] = {}  # by file: first lines of functions, and tests that call them
        self.functions: Functions

    def say(self, **words: Any) -> None:
        with open(self.task["out"], "a") as file:
            file.write(json.dumps(words) + "\n")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.say(left_out=report.nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and self.failed is None:
            self.failed = report.nodeid

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Iterator[Any]:
        if fixturedef.scope == "function":
            return (yield)
        before, self.seen = self.seen, {}
        try:
            return (yield)
        finally:
            self.of_fixtures.setdefault(fixturedef.argname, set()).update(self._lines())
            self.seen = before

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> None:
        code = 1
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # with all children
        try:
            self.items = {item.nodeid: item for item in session.items}
            self.measure()
            self.try_all()
            code = 0
        finally:
            sys.stdout.flush()
            os._exit(code)

    # --- without a mutant

    def _see(self, frame: types.FrameType, event: str, _: Any) -> None:
        if event == "call":
            self.seen[id(frame.f_code)] = frame.f_code

    def _lines(self) -> set[Line]:
        prefix = f"{self.root / 'src'}{os.sep}"
        codes = [code for code in list(self.seen.values()) if code.co_filename.startswith(prefix)]
        return {(os.path.relpath(code.co_filename, self.root), code.co_firstlineno) for code in codes}

    def measure(self) -> None:
        """Finds what each test does, but for files of which an earlier run knows it."""
        kept = Kept(self.task["measured"] and Path(self.task["measured"]), self.root)
        files: dict[str, list[pytest.Item]] = {}
        for item in self.items.values():
            files.setdefault(item.nodeid.partition("::")[0], []).append(item)
        started = time.monotonic()
        missing = (
            Child(file, lambda out, items=items: self._measure_file(items, out), FILE_SECONDS)  # type: ignore[misc]
            for file, items in files.items()
            if not kept.knows(file)
        )
        for file, code, said, _ in run_children(missing, self.task["processes"]):
            kept.learn(file, {} if code or not said else json.loads(said))
        kept.save()
        for file in files:
            self.usual |= {test: usual for test, usual in kept.of(file).items() if test in self.items}
            if not kept.of(file):
                self.say(left_out=file)
        for test, usual in self.usual.items():
            if not usual.passes:
                self.say(left_out=test)
            for path, line in usual.calls if usual.passes else ():
                self.callers.setdefault(path, []).append((line, test))
        passing = [usual.seconds for usual in self.usual.values() if usual.passes]
        self.say(tests=len(passing), take=sum(passing), seconds=time.monotonic() - started)

    def _measure_file(self, items: list[pytest.Item], out: Path) -> int:
        found = {}
        for item, following in zip(items, [*items[1:], None], strict=True):
            self.failed, self.seen, started = None, {}, time.process_time()
            _profile(self._see)
            try:
                runtestprotocol(item, nextitem=following, log=True)
            finally:
                _profile(None)
            calls = self._lines().union(*(self.of_fixtures.get(name, ()) for name in _fixtures_of(item)))
            found[item.nodeid] = Usual(time.process_time() - started, self.failed is None, sorted(calls))
        out.write_text(json.dumps(found))
        return 0

    # --- with mutants

    def try_all(self) -> None:
        end = time.monotonic() + self.task["minutes"] * 60
        changes = [Change(*change) for change in self.task["mutants"]]
        for path in {change.path for change in changes}:
            try:
                importlib.import_module(".".join(Path(path).with_suffix("").parts[1:]).removesuffix(".__init__"))
            except ImportError:
                continue  # something is not installed: no test calls it here
        self.functions = Functions(self.root / "src")
        gc.freeze()  # children look at it and copy none of it

        def children() -> Iterator[Child]:
            for number, change in enumerate(changes):
                tests = self.tests_of(change)
                if time.monotonic() > end:
                    return
                most = self.task["limit"] or 30 + 10 * sum(self.usual[test].seconds for test in tests)
                yield Child(number, lambda out, c=change, t=tests: self._try(c, t, out), most)  # type: ignore[misc]

        for number, code, said, seconds in run_children(children(), self.task["processes"]):
            result = {0: SURVIVED, None: TIMED_OUT}.get(code, KILLED)
            num_tests, _, killer = said.partition("\n")
            if result == KILLED and not killer:
                killer = f"the process ended with {code}"
            self.say(mutant=number, result=result, seconds=seconds, killer=killer, num_tests=int(num_tests or 0))

    def tests_of(self, change: Change) -> list[str]:
        """Those that call the function, or something of the module, or any if nothing of it is called.

        A default value is part of no function: the tests that look at all of them are always among those of its module.
        """
        around = self.called_around(change)
        first, last = around or (0, sys.maxsize)
        chosen = {test for line, test in self.callers.get(change.path, ()) if first <= line <= last}
        if not chosen:
            chosen = {test for test, usual in self.usual.items() if usual.passes}
        if around is None:
            chosen |= {
                test for test, usual in self.usual.items() if usual.passes and test.startswith(self.task["always"])
            }
        path = Path(change.path)
        return self.within_limit(chosen, f"tests/{path.parts[2]}/", f"/test_{path.stem}.py::")

    def called_around(self, change: Change) -> tuple[int, int] | None:
        """First and last line of the function that changes, if a test calls it and not only one that it made on import."""
        around = function_around((self.root / change.path).read_bytes(), change.start)
        lines = [line for line, _ in self.callers.get(change.path, ())]
        return around if around and around[0] in lines else None

    def within_limit(self, tests: set[str], own: str, namesake: str) -> list[str]:
        """As many as a mutant may meet: those named like its module first, then quick ones, then others. Of either
        kind those of its package come first.

        Runs that were written down (`test_same_…`) come right after the quick ones: hardly a mutant escapes them.
        """
        always: str = self.task["always"]

        def order(test: str) -> tuple[bool, bool, bool, bool, float, str]:
            seconds = QUICK if "/test_same_" in test else self.usual[test].seconds
            is_slow, is_other = seconds > QUICK, not test.startswith(own)
            return not test.startswith(always), namesake not in test, is_slow, is_other, seconds, test

        chosen, seconds = [], 0.0
        for test in sorted(tests, key=order):
            if seconds < self.task["seconds"]:
                chosen.append(test)
                seconds += self.usual[test].seconds
        return chosen

    def _try(self, change: Change, tests: list[str], out: Path) -> int:
        """In a child: 0 if all tests pass, else 1 and the test that failed."""
        out.write_text(f"{len(tests)}\n")
        if not tests:
            return 0
        in_place = self.called_around(change) is not None
        if not in_place or not self.functions.change(self.root / change.path, change.source(self.root)):
            return self._try_fresh(change, tests, out)
        self.failed = None
        items = [self.items[test] for test in tests]
        for item, following in zip(items, [*items[1:], None], strict=True):
            # a test that works for so much longer never ends, and the signal ends the process
            signal.setitimer(signal.ITIMER_PROF, self.usual[item.nodeid].seconds * 4 + 4)
            runtestprotocol(item, nextitem=following, log=True)
            if self.failed is not None:
                out.write_text(f"{len(tests)}\n{self.failed}")
                return 1
        return 0

    def _try_fresh(self, change: Change, tests: list[str], out: Path) -> int:
        """In a process that imports the changed module."""
        task = out.with_suffix(".json")
        task.write_text(json.dumps({"root": str(self.root), "change": change, "tests": tests, "out": str(out)}))
        files = dict.fromkeys(test.partition("::")[0] for test in tests)
        command = [sys.executable, "-m", "pytest", *self.task["words"], "-x", *files]
        return subprocess.run(command, env={**os.environ, "MUTANTS_TASK": str(task)}, check=False).returncode


class _Fresh:
    """Runs some of the tests that are collected, in the order in which they are named."""

    def __init__(self, tests: list[str], out: Path) -> None:
        self.tests, self.out = tests, out

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        found = {item.nodeid: item for item in items}
        items[:] = [found[test] for test in self.tests if test in found]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.out.write_text(f"{len(self.tests)}\n{report.nodeid}")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.out.write_text(f"{len(self.tests)}\n{report.nodeid}")


def _profile(function: Any) -> None:
    threading.setprofile(function)
    sys.setprofile(function)


def _fixtures_of(item: pytest.Item) -> Sequence[str]:
    names: Sequence[str] = getattr(item, "fixturenames", ())
    return names


class Kept:
    """What tests did in an earlier run: of the same source and the same helpers of tests, by test file."""

    def __init__(self, path: Path | None, root: Path) -> None:
        self._path, self._root = path, root
        files = [*(root / "src").rglob("*.py"), *(root / "tests").rglob("*.py")]
        self._tree = _digest(*sorted(file for file in files if not file.name.startswith("test_")))
        self._digests: dict[str, str] = {}
        self._found: dict[str, Any] = {}
        if path is not None and path.exists():
            kept = json.loads(path.read_text())
            self._found = kept["files"] if kept["tree"] == self._tree else {}

    def _digest_of(self, file: str) -> str:
        if file not in self._digests:
            self._digests[file] = _digest(self._root / file)
        return self._digests[file]

    def knows(self, file: str) -> bool:
        """Whether this very file was measured."""
        return file in self._found and self._found[file][0] == self._digest_of(file)

    def of(self, file: str) -> dict[str, Usual]:
        """By test; nothing if the file took too long."""
        return {test: Usual(*usual) for test, usual in self._found[file][1].items()}

    def learn(self, file: str, usual: dict[str, Any]) -> None:
        """Notes what a file was found to do."""
        self._found[file] = self._digest_of(file), usual

    def save(self) -> None:
        """For later runs."""
        if self._path is not None:
            self._path.write_text(json.dumps({"tree": self._tree, "files": self._found}))


def _digest(*files: Path) -> str:
    digest = hashlib.sha256()
    for file in files:
        digest.update(repr((file.name, file.read_bytes())).encode())
    return digest.hexdigest()
