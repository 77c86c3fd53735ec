"""Changes kvpool in small ways, one at a time, and looks whether a test notices: what does no test prove?

    python tools/mutants.py [--number 100] [--seed 0] [--module WORD[:LINE]]... [--processes 2] [--minutes 60]
                            [--measured FILE] [--json FILE]

A mutant is one change in one file: `<` for `<=`, `and` for `or`, 3 for 2, a call left out. A sample is drawn by seed out of
the control plane, the tiers and the engine. First every test file that the sample needs runs once without a mutant: that
says how long it takes, and which tests fail here because something is not installed; those are left out. `--measured` keeps
that for the next run of the same tree, since it may take longer than the mutants. Then each mutant
meets the tests of its module, then those of its package and of the manager, the quick ones first, in a copy of the tree
and under a time limit. What survives is printed with its diff: a test is missing, the code is not needed, or the change
changes nothing. At the end stands how many were killed, by folder.
"""

from __future__ import annotations

import argparse
import ast
import compileall
import difflib
import hashlib
import json
import math
import os
import py_compile
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple, TypeVar

ROOT = Path(__file__).resolve().parent.parent
# What draws, serves or runs on a GPU. Name one with --module to change it all the same.
LEFT_OUT = (
    *("attention", "hf", "kernels", "storage", "server", "cluster", "clients", "integrations", "view", "web"),
    *("cli.py", "terminal.py", "compat", "replay", "__main__.py", "version.py"),
)
# Packages whose own tests are enough, and what else tests them.
APART = {
    "scheduling": ("stateful/test_scheduler_machine.py", "replay/test_costs.py"),
    "tiers": ("stateful/test_disk_tier.py", "engine/test_tiers.py"),
    "recording": ("replay/test_broken_files.py",),
    **dict.fromkeys(("engine", "replay", "compat", "storage", "server", "cluster", "view"), ()),
}
GENERAL = (  # tests of the whole manager
    *("manager", "sequences", "prefix", "pools", "events", "eviction/test_order_of_eviction.py", "test_rules.py"),
    *("test_stats.py", "stateful/test_wild_machine.py"),
)
NOT_COPIED = (".git", ".venv", ".wheels", "build", "dist", "htmlcov", "__pycache__", ".*_cache", ".hypothesis", "*.so")
PROFILE = "quick"  # of hypothesis, see tests/conftest.py
SLACK = 30.0  # seconds that a mutant may take beyond twice the time of its tests
MOST_SECONDS = 300.0  # for one test file without a mutant; one that takes longer is left out

KILLED, TIMED_OUT, SURVIVED = "killed", "timed out", "survived"


class Mutant(NamedTuple):
    """One change: these bytes of a file become others."""

    path: str  # below the root
    line: int
    kind: str
    start: int
    end: int
    new: bytes

    def apply(self, source: bytes) -> bytes:
        """The changed source."""
        return source[: self.start] + self.new + source[self.end :]

    def diff(self, source: bytes) -> str:
        """The change as people read it."""
        before, after = (text.decode().splitlines(keepends=True) for text in (source, self.apply(source)))
        return "".join(difflib.unified_diff(before, after, self.path, f"{self.path} ({self.kind})", n=1))


class Outcome(NamedTuple):
    """What became of a mutant."""

    mutant: Mutant
    result: str
    seconds: float
    killer: str  # the first test that failed


# --- mutants of a source ----------------------------------------------------------------------------------------------

_COMPARISONS: dict[type[ast.cmpop], tuple[bytes, bytes]] = {
    ast.Lt: (rb"<", b"<="),
    ast.LtE: (rb"<=", b"<"),
    ast.Gt: (rb">", b">="),
    ast.GtE: (rb">=", b">"),
    ast.Eq: (rb"==", b"!="),
    ast.NotEq: (rb"!=", b"=="),
    ast.Is: (rb"\bis\b", b"is not"),
    ast.IsNot: (rb"\bis\s+not\b", b"is"),
    ast.In: (rb"\bin\b", b"not in"),
    ast.NotIn: (rb"\bnot\s+in\b", b"in"),
}
_ARITHMETIC: dict[type[ast.operator], tuple[bytes, bytes]] = {
    ast.Add: (rb"\+", b"-"),
    ast.Sub: (rb"-", b"+"),
    ast.Mult: (rb"\*", b"//"),
    ast.FloorDiv: (rb"//", b"*"),
    ast.Mod: (rb"%", b"//"),
    ast.BitAnd: (rb"&", b"|"),
    ast.BitOr: (rb"\|", b"&"),
}
_OPPOSITES = {"min": b"max", "max": b"min", "minimum": b"maximum", "maximum": b"minimum", "any": b"all", "all": b"any"}
_SKIPPED_FIELDS = ("annotation", "returns", "decorator_list", "type_params")


def mutants_of(source: bytes, path: str) -> list[Mutant]:
    """Every mutant of a file, in the order of its lines. Texts, annotations and error messages stay as they are."""
    return sorted(_Finder(source, path).find(), key=lambda mutant: (mutant.start, mutant.end, mutant.new))


class _Finder:
    def __init__(self, source: bytes, path: str) -> None:
        self.source, self.path = source, path
        self.line_starts = [0]
        for line in source.splitlines(keepends=True):
            self.line_starts.append(self.line_starts[-1] + len(line))

    def find(self) -> Iterator[Mutant]:
        for node in _relevant(ast.parse(self.source)):
            yield from self._of(node)

    def _of(self, node: ast.AST) -> Iterator[Mutant]:
        if isinstance(node, ast.Compare):
            yield from self._comparisons(node)
        elif isinstance(node, ast.BinOp):
            yield from self._operator(node.left, node.right, _ARITHMETIC.get(type(node.op)), "arithmetic")
        elif isinstance(node, ast.BoolOp):
            swap = (rb"\band\b", b"or") if isinstance(node.op, ast.And) else (rb"\bor\b", b"and")
            for left, right in zip(node.values, node.values[1:], strict=False):
                yield from self._operator(left, right, swap, "and/or")
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.Not, ast.USub)):
            if not (isinstance(node.op, ast.USub) and isinstance(node.operand, ast.Constant)):
                kind = "not" if isinstance(node.op, ast.Not) else "sign"
                yield self._replace(node, b"(" + self._text(node.operand) + b")", kind)
        elif isinstance(node, ast.Constant):
            yield from self._constants(node)
        elif isinstance(node, ast.Call):
            yield from self._opposite(node.func)
        elif isinstance(node, (ast.If, ast.While, ast.IfExp)):
            if isinstance(node.test, (ast.Name, ast.Attribute, ast.Call, ast.Subscript)):
                yield self._replace(node.test, b"(not " + self._text(node.test) + b")", "condition")
        elif isinstance(node, ast.stmt):
            yield from self._statements(node)

    def _comparisons(self, node: ast.Compare) -> Iterator[Mutant]:
        sides = [node.left, *node.comparators]
        for left, operator, right in zip(sides, node.ops, sides[1:], strict=False):
            yield from self._operator(left, right, _COMPARISONS[type(operator)], "comparison")

    def _operator(
        self, left: ast.expr, right: ast.expr, swap: tuple[bytes, bytes] | None, kind: str
    ) -> Iterator[Mutant]:
        if swap is None or isinstance(left, ast.JoinedStr) or isinstance(right, ast.JoinedStr):
            return
        start, end = self._span(left)[1], self._span(right)[0]
        if found := re.search(swap[0], self.source[start:end]):
            yield Mutant(self.path, left.lineno, kind, start + found.start(), start + found.end(), swap[1])

    def _constants(self, node: ast.Constant) -> Iterator[Mutant]:
        if isinstance(node.value, bool):
            yield self._replace(node, str(not node.value).encode(), "constant")
        elif isinstance(node.value, (int, float)):
            step = 1 if isinstance(node.value, int) else max(1.0, node.value / 2)  # one more than 2e10 changes nothing
            for other in (node.value + step, node.value - step) if node.value > 0 else (node.value + step,):
                yield self._replace(node, str(other).encode(), "constant")

    def _opposite(self, called: ast.expr) -> Iterator[Mutant]:
        name = called.id if isinstance(called, ast.Name) else called.attr if isinstance(called, ast.Attribute) else ""
        if name in _OPPOSITES:
            end = self._span(called)[1]
            yield Mutant(self.path, called.lineno, "opposite call", end - len(name), end, _OPPOSITES[name])

    def _statements(self, node: ast.stmt) -> Iterator[Mutant]:
        if isinstance(node, (ast.Break, ast.Continue)):
            yield self._replace(node, b"continue" if isinstance(node, ast.Break) else b"break", "loop")
        elif isinstance(node, ast.Return) and node.value is not None and not isinstance(node.value, ast.Constant):
            yield self._replace(node, b"return None", "return value")
        elif _can_be_left_out(node):
            yield self._replace(node, b"pass", "left out")
        if isinstance(node, ast.AugAssign):
            yield from self._operator(node.target, node.value, _ARITHMETIC.get(type(node.op)), "arithmetic")

    def _span(self, node: Any) -> tuple[int, int]:
        first, last = self.line_starts[node.lineno - 1], self.line_starts[node.end_lineno - 1]
        return first + node.col_offset, last + node.end_col_offset

    def _text(self, node: ast.AST) -> bytes:
        start, end = self._span(node)
        return self.source[start:end]

    def _replace(self, node: Any, new: bytes, kind: str) -> Mutant:
        return Mutant(self.path, node.lineno, kind, *self._span(node), new)


def _can_be_left_out(node: ast.stmt) -> bool:
    """Calls, errors, and changes of what others see; a local name that is never made is no subtle mistake."""
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Call)
    if isinstance(node, ast.Assign):
        return all(isinstance(target, (ast.Attribute, ast.Subscript)) for target in node.targets)
    return isinstance(node, (ast.Raise, ast.Delete, ast.AugAssign))


def _relevant(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes that a mutant may change."""
    if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
        return
    if isinstance(node, ast.keyword) and node.arg == "strict":  # of zip: an assertion too
        return
    yield node
    if isinstance(node, (ast.JoinedStr, ast.Raise, ast.Assert, ast.Import, ast.ImportFrom)):
        return
    for name, value in ast.iter_fields(node):
        if name not in _SKIPPED_FIELDS:
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from _relevant(child)


# --- which mutants, and which tests for them --------------------------------------------------------------------------


def all_mutants(root: Path, modules: Sequence[str] = ()) -> list[Mutant]:
    """The mutants of the control plane, or of the files whose path holds one of the words; `word:7` means line 7 of them."""
    found: list[Mutant] = []
    [package] = (path.parent for path in (root / "src").glob("*/__init__.py"))
    for file in sorted(package.rglob("*.py")):
        path, inner = file.relative_to(root).as_posix(), file.relative_to(package).as_posix()
        lines = _chosen_lines(path, inner, modules)
        if lines is not None:
            mutants = mutants_of(file.read_bytes(), path)
            found.extend(mutant for mutant in mutants if not lines or mutant.line in lines)
    return found


def _chosen_lines(path: str, inner: str, modules: Sequence[str]) -> set[int] | None:
    """The lines of a file that were asked for, none for all of them; None if the file is not meant at all."""
    if not modules:
        return None if inner.split("/")[0] in LEFT_OUT else set()
    matching = [module.partition(":") for module in modules if module.partition(":")[0] in path]
    if not matching:
        return None
    return set() if any(not line for _, _, line in matching) else {int(line) for _, _, line in matching}


def tests_for(root: Path, path: str) -> list[str]:
    """Test files for a module: those of its name first, those of its package, then those of the whole manager."""
    _, _, *folders, name = path.split("/")
    stem, tests = name.removesuffix(".py"), root / "tests"
    found = sorted({*tests.rglob(f"test_{stem}.py"), *tests.rglob(f"test_{stem}_*.py")})
    package = folders[0] if folders else ""
    for place in filter(None, (package, *APART.get(package, GENERAL))):
        found += sorted((tests / place).glob("test_*.py")) if not place.endswith(".py") else [tests / place]
    return [file.relative_to(root).as_posix() for file in dict.fromkeys(found) if file.exists()]


def names_module(test: str, path: str) -> bool:
    """Whether a test file is named after a module."""
    return f"{Path(test).stem}_".startswith(f"test_{Path(path).stem}_")


# --- running them -----------------------------------------------------------------------------------------------------


class Usual(NamedTuple):
    """What a test file does without a mutant."""

    seconds: float
    failing: tuple[str, ...]  # beginnings of test names


class Workplace:
    """A copy of the tree in which one mutant after the other is tried."""

    def __init__(self, root: Path, folder: Path) -> None:
        self.folder = folder
        shutil.copytree(root, folder, ignore=shutil.ignore_patterns(*NOT_COPIED))
        # Compiled files that are found by their content: by their time, those of a mutant would be taken for the source.
        compileall.compile_dir(folder / "src", quiet=2, invalidation_mode=py_compile.PycInvalidationMode.CHECKED_HASH)
        self._environment = {
            **os.environ,
            "CI": "true",
            "PYTHONPATH": os.pathsep.join(filter(None, (str(folder / "src"), os.environ.get("PYTHONPATH")))),
            "OMP_NUM_THREADS": "1",
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # they take longer to start than most mutants to be noticed
            "CUDA_VISIBLE_DEVICES": "",
            "TRITON_INTERPRET": "1",  # many processes at once
        }

    def pytest(self, limit: float, *words: str) -> tuple[int, str] | None:
        """Runs tests; returns how pytest ended and what it said, or None if it took too long."""
        command = [sys.executable, "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider", "--tb=no"]
        command += ["-p", "_hypothesis_pytestplugin", f"--hypothesis-profile={PROFILE}", "-m", "not slow", *words]
        with subprocess.Popen(
            command,
            cwd=self.folder,
            env=self._environment,
            text=True,
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        ) as process:
            try:
                said, _ = process.communicate(timeout=limit)
            except subprocess.TimeoutExpired:
                return None
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)  # with the processes that tests have started
        return process.returncode, said

    def measure(self, test: str) -> Usual:
        """Runs a test file without a mutant."""
        started = time.monotonic()
        done = self.pytest(MOST_SECONDS, test)
        seconds = time.monotonic() - started
        if done is None or done[0] not in (0, 1, 5):  # 5: no tests
            return Usual(seconds, (test,))
        return Usual(seconds, tuple(_failures(done[1])))

    def test(self, mutant: Mutant, tests: Sequence[str], left_out: Sequence[str], limit: float) -> Outcome:
        """Tries a mutant and takes it back."""
        file = self.folder / mutant.path
        source, started = file.read_bytes(), time.monotonic()
        file.write_bytes(mutant.apply(source))
        try:
            done = self.pytest(limit, "-x", *(f"--deselect={name}" for name in left_out), *tests)
        finally:
            file.write_bytes(source)
        seconds = time.monotonic() - started
        if done is None:
            return Outcome(mutant, TIMED_OUT, seconds, "")
        code, said = done
        killer = next(_failures(said), f"pytest ended with {code}: {said[-500:]}")
        return Outcome(mutant, SURVIVED if code == 0 else KILLED, seconds, "" if code == 0 else killer)


def _failures(said: str) -> Iterator[str]:
    """The tests that failed, by what pytest said; of names with a space only what stands before it."""
    for found in re.finditer(r"^(?:FAILED|ERROR) (\S+)", said, re.MULTILINE):
        yield found[1]


_T = TypeVar("_T")


class Workplaces(ThreadPoolExecutor):
    """So many copies of the tree, each with a thread of its own."""

    def __init__(self, root: Path, folder: Path, count: int) -> None:
        super().__init__(count)
        self._free: SimpleQueue[Workplace] = SimpleQueue()
        for place in self.map(lambda number: Workplace(root, folder / str(number)), range(count)):
            self._free.put(place)

    def each(self, tasks: Sequence[Callable[[Workplace], _T]]) -> Iterator[_T]:
        """What the tasks return, in the order in which they end."""
        for done in as_completed([self.submit(self._run, task) for task in tasks]):
            yield done.result()

    def _run(self, task: Callable[[Workplace], _T]) -> _T:
        place = self._free.get()
        try:
            return task(place)
        finally:
            self._free.put(place)


def run_all(
    root: Path,
    mutants: Sequence[Mutant],
    processes: int,
    limit: float | None = None,
    minutes: float = math.inf,
    measured: Path | None = None,
) -> Iterator[Outcome]:
    """What becomes of each mutant that is begun within so many minutes. Raises `RuntimeError` where no test passes."""
    end = time.monotonic() + minutes * 60
    tests_of = {path: tests_for(root, path) for path in dict.fromkeys(mutant.path for mutant in mutants)}
    with tempfile.TemporaryDirectory(prefix="mutants") as folder, Workplaces(root, Path(folder), processes) as places:
        kept = None if measured is None else Kept(measured, root)
        usual = _measure(places, sorted({test for tests in tests_of.values() for test in tests}), kept)

        def try_one(mutant: Mutant, place: Workplace) -> Outcome | None:
            if time.monotonic() > end:
                return None
            tests = [test for test in tests_of[mutant.path] if test in usual]
            tests.sort(key=lambda test: (not names_module(test, mutant.path), usual[test].seconds))
            failing = [name for test in tests for name in usual[test].failing]
            most = limit or sum(usual[test].seconds for test in tests) * 2 + SLACK
            return place.test(mutant, tests, failing, most)

        for outcome in places.each([partial(try_one, mutant) for mutant in mutants]):
            if outcome is not None:
                yield outcome


class Kept:
    """What earlier runs measured in this very tree: with any other source, other tests may fail without a mutant."""

    def __init__(self, path: Path, root: Path) -> None:
        self._path = path
        digest = hashlib.sha256()
        for file in sorted(file for folder in ("src", "tests") for file in (root / folder).rglob("*.py")):
            digest.update(repr((file.relative_to(root).as_posix(), file.read_bytes())).encode())
        self._tree = digest.hexdigest()

    def read(self) -> dict[str, Usual]:
        """By test file; nothing if the tree was another one."""
        found = json.loads(self._path.read_text()) if self._path.exists() else {}
        measured = found["measured"] if found.get("tree") == self._tree else {}
        return {test: Usual(seconds, tuple(failing)) for test, (seconds, failing) in measured.items()}

    def write(self, measured: dict[str, Usual]) -> None:
        """Replaces what is there."""
        self._path.write_text(json.dumps({"tree": self._tree, "measured": measured}, indent=2) + "\n")


def _measure(places: Workplaces, tests: Sequence[str], kept: Kept | None) -> dict[str, Usual]:
    """What test files do without a mutant, those with a test that can tell something; says what is left out."""
    known = {} if kept is None else kept.read()

    def measure(test: str, place: Workplace) -> tuple[str, Usual]:
        return test, place.measure(test)

    started = time.monotonic()
    for test, of_test in places.each([partial(measure, test) for test in tests if test not in known]):
        known[test] = of_test
        if kept is not None:
            kept.write(known)
    usual: dict[str, Usual] = {}
    for test in tests:
        failing = known[test].failing
        if failing:
            print(f"left out, for without a mutant it fails or takes too long: {', '.join(failing)}", flush=True)
        if test not in failing:
            usual[test] = known[test]
    if not usual:
        raise RuntimeError("without a mutant no test passes")
    total = sum(of_test.seconds for of_test in usual.values())
    print(f"{len(usual)} test files take {total:.0f} s, measured in {time.monotonic() - started:.0f} s", flush=True)
    return usual


def main(arguments: Sequence[str] | None = None) -> int:
    """Draws a sample, tries it, prints what survived; 1 if anything did."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--number", type=int, default=100, help="mutants in the sample (100); 0 for all")
    parser.add_argument("--seed", type=int, default=0, help="the same seed gives the same sample")
    parser.add_argument(
        "--module", action="append", default=[], metavar="WORD[:LINE]", help="only files with this in their path"
    )
    parser.add_argument(
        "--processes", type=int, default=2, help="mutants tried at once (2), each in a copy of the tree"
    )
    parser.add_argument("--limit", type=float, help="seconds for a mutant; default: twice what its tests take")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no mutant after so many minutes")
    parser.add_argument(
        "--measured", type=Path, metavar="FILE", help="keep what tests take without a mutant, and measure them once"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every outcome")
    parser.add_argument("--list", action="store_true", help="print the sample and try nothing")
    parser.add_argument("--root", type=Path, default=ROOT, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    root: Path = options.root
    population = all_mutants(root, options.module)
    sample = random.Random(options.seed).sample(population, min(options.number or len(population), len(population)))
    print(f"{len(sample)} of {len(population):,} mutants, seed {options.seed}", flush=True)
    sources = {mutant.path: (root / mutant.path).read_bytes() for mutant in sample}
    if options.list:
        print("\n".join(mutant.diff(sources[mutant.path]) for mutant in sorted(sample)))
        return 0
    outcomes = []
    try:
        for outcome in run_all(root, sample, options.processes, options.limit, options.minutes, options.measured):
            outcomes.append(outcome)
            _report(outcome, sources[outcome.mutant.path])
            if options.json is not None:  # after each, for a run that is cut short
                _write(options.json, outcomes, sources)
    except RuntimeError as error:
        print(f"mutants: {error}", file=sys.stderr)
        return 2
    print("\n" + _summary(outcomes))
    return 1 if any(outcome.result == SURVIVED for outcome in outcomes) else 0


def _report(outcome: Outcome, source: bytes) -> None:
    mutant = outcome.mutant
    print(
        f"{outcome.result:>9}  {outcome.seconds:5.0f} s  {mutant.path}:{mutant.line}  {mutant.kind}  {outcome.killer[:100]}"
    )
    if outcome.result == SURVIVED:
        print(mutant.diff(source))
    sys.stdout.flush()


def _summary(outcomes: Sequence[Outcome]) -> str:
    """How many of each folder below the package were noticed, and of all."""
    folders: dict[str, Counter[str]] = {}
    for outcome in outcomes:
        _, _, *folder, _ = outcome.mutant.path.split("/")
        for name in ((folder or ["."])[0], "all"):
            folders.setdefault(name, Counter())[outcome.result] += 1
    lines = []
    for name in sorted(folders, key=lambda name: (name == "all", name)):
        counts = folders[name]
        rate = 100 * (counts.total() - counts[SURVIVED]) / counts.total()
        results = ", ".join(f"{counts[result]} {result}" for result in (KILLED, TIMED_OUT, SURVIVED))
        lines.append(f"{name:<12} {counts.total():4} mutants: {results}; {rate:.0f} % noticed")
    return "\n".join(lines)


def _write(path: Path, outcomes: Sequence[Outcome], sources: dict[str, bytes]) -> None:
    path.write_text(json.dumps([_plain(outcome, sources) for outcome in sorted(outcomes)], indent=2) + "\n")


def _plain(outcome: Outcome, sources: dict[str, bytes]) -> dict[str, Any]:
    mutant = outcome.mutant
    return {
        "path": mutant.path,
        "line": mutant.line,
        "kind": mutant.kind,
        "result": outcome.result,
        "seconds": round(outcome.seconds, 1),
        "killer": outcome.killer,
        "diff": mutant.diff(sources[mutant.path]),
    }


if __name__ == "__main__":
    sys.exit(main())
