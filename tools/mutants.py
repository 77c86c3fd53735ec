"""Changes the control plane in small ways, one at a time, and looks whether a test notices: what does no test prove?

    python tools/mutants.py [--number 100] [--seed 0] [--module WORD[:LINE]]... [--json FILE] [--list]

A mutant is one change in one file: `<` for `<=`, `and` for `or`, 3 for 2, a call left out. A sample is drawn by seed, and
each mutant meets the tests of its module, then those of the manager, then the state machines, in a copy of the tree and
under a time limit. What survives is printed with its diff: a test is missing, the code is not needed, or the change
changes nothing.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
# What moves bytes or draws: not the control plane. Name one with --module to change it all the same.
LEFT_OUT = (
    *("attention", "engine", "hf", "kernels", "storage", "server", "cluster", "integrations", "tiers"),
    *("cli.py", "tour.py", "terminal.py", "compat", "replay", "__main__.py", "version.py"),
)
APART = ("scheduling", "recording", "replay", "compat")  # packages whose own tests are enough beside a machine
GENERAL = (  # tests of the whole manager, quick ones first
    *("manager/test_manager.py", "test_survivors.py", "test_rules.py", "test_regressions.py"),
    "test_bugs_of_earlier_systems.py",
    *("sequences", "prefix", "manager", "pools", "events", "test_stats.py", "stateful/test_wild_machine.py"),
)
SCHEDULER_MACHINE = "stateful/test_scheduler_machine.py"
NOT_COPIED = (".git", ".venv", ".wheels", "build", "dist", "htmlcov", "__pycache__", ".*_cache", ".hypothesis", "*.so")
PROFILE = "quick"  # of hypothesis, see tests/conftest.py
SLACK = 30.0  # seconds that a mutant may take beyond twice the time of all tests

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
    ast.Lt: (rb"<", b"<="), ast.LtE: (rb"<=", b"<"), ast.Gt: (rb">", b">="), ast.GtE: (rb">=", b">"),
    ast.Eq: (rb"==", b"!="), ast.NotEq: (rb"!=", b"=="), ast.Is: (rb"\bis\b", b"is not"),
    ast.IsNot: (rb"\bis\s+not\b", b"is"), ast.In: (rb"\bin\b", b"not in"), ast.NotIn: (rb"\bnot\s+in\b", b"in"),
}  # fmt: skip
_ARITHMETIC: dict[type[ast.operator], tuple[bytes, bytes]] = {
    ast.Add: (rb"\+", b"-"), ast.Sub: (rb"-", b"+"), ast.Mult: (rb"\*", b"//"), ast.FloorDiv: (rb"//", b"*"),
    ast.Mod: (rb"%", b"//"), ast.BitAnd: (rb"&", b"|"), ast.BitOr: (rb"\|", b"&"),
}  # fmt: skip
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
            for other in (node.value + 1, node.value - 1) if node.value > 0 else (node.value + 1,):
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
    """Test files for a module, those that know it best first."""
    _, _, *folders, name = path.split("/")
    stem, tests = name.removesuffix(".py"), root / "tests"
    found = sorted({*tests.rglob(f"test_{stem}.py"), *tests.rglob(f"test_{stem}_*.py")})
    package = folders[0] if folders else ""
    for place in filter(None, (package, *((SCHEDULER_MACHINE,) if package in APART else GENERAL))):
        found += sorted((tests / place).glob("test_*.py")) if not place.endswith(".py") else [tests / place]
    return [file.relative_to(root).as_posix() for file in dict.fromkeys(found) if file.exists()]


# --- running them -----------------------------------------------------------------------------------------------------


class Workplace:
    """A copy of the tree in which one mutant after the other is tried."""

    def __init__(self, root: Path, folder: Path) -> None:
        self.folder = folder
        shutil.copytree(root, folder, ignore=shutil.ignore_patterns(*NOT_COPIED))
        self._environment = {
            **os.environ, "CI": "true", "PYTHONPATH": str(folder / "src"), "OMP_NUM_THREADS": "1",
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # they take longer to start than most mutants to be noticed
            "PYTHONDONTWRITEBYTECODE": "1",  # compiled files of a second ago would be taken for those of a mutant
        }  # fmt: skip

    def run(self, tests: Sequence[str], limit: float | None = None) -> tuple[str, str]:
        """Runs tests until one fails; returns what became of the mutant, and the test."""
        command = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "-p", "no:cacheprovider", "--tb=no"]
        command += ["-p", "_hypothesis_pytestplugin", f"--hypothesis-profile={PROFILE}", "-m", "not slow", *tests]
        try:
            done = subprocess.run(
                command, cwd=self.folder, env=self._environment, capture_output=True, text=True, timeout=limit
            )
        except subprocess.TimeoutExpired:
            return TIMED_OUT, ""
        if done.returncode == 0:
            return SURVIVED, ""
        failed = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
        return KILLED, failed[1] if failed else f"pytest ended with {done.returncode}: {done.stdout[-500:]}"

    def test(self, mutant: Mutant, tests: Sequence[str], limit: float) -> Outcome:
        """Tries a mutant and takes it back."""
        file = self.folder / mutant.path
        source, started = file.read_bytes(), time.monotonic()
        file.write_bytes(mutant.apply(source))
        try:
            result, killer = self.run(tests, limit)
        finally:
            file.write_bytes(source)
        return Outcome(mutant, result, time.monotonic() - started, killer)


def run_all(root: Path, mutants: Sequence[Mutant], jobs: int, limit: float | None) -> Iterator[Outcome]:
    """What becomes of each mutant. Raises `RuntimeError` where the tests fail without one."""
    with tempfile.TemporaryDirectory(prefix="mutants") as folder, ThreadPoolExecutor(jobs) as pool:
        free: SimpleQueue[Workplace] = SimpleQueue()
        for number in range(jobs):
            free.put(Workplace(root, Path(folder) / str(number)))
        tests_of = {mutant.path: tests_for(root, mutant.path) for mutant in mutants}
        usual = _usual_seconds(free, list(dict.fromkeys(test for tests in tests_of.values() for test in tests)))
        most = limit or usual * 2 + SLACK

        def test(mutant: Mutant) -> Outcome:
            place = free.get()
            try:
                return place.test(mutant, tests_of[mutant.path], most)
            finally:
                free.put(place)

        yield from pool.map(test, mutants)


def _usual_seconds(free: SimpleQueue[Workplace], tests: Sequence[str]) -> float:
    """How long all tests take without a mutant; they must pass, or they could not tell anything."""
    place, started = free.get(), time.monotonic()
    result, failed = place.run(tests)
    free.put(place)
    if result != SURVIVED:
        raise RuntimeError(f"without a mutant {failed} fails already")
    return time.monotonic() - started


def main(arguments: Sequence[str] | None = None) -> int:
    """Draws a sample, tries it, prints what survived; 1 if anything did."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--number", type=int, default=100, help="mutants in the sample (100); 0 for all")
    parser.add_argument("--seed", type=int, default=0, help="the same seed gives the same sample")
    parser.add_argument(
        "--module", action="append", default=[], metavar="WORD[:LINE]", help="only files with this in their path"
    )
    parser.add_argument("--jobs", type=int, default=2, help="mutants tried at once (2)")
    parser.add_argument("--limit", type=float, help="seconds for a mutant; default: twice what all tests take")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every outcome")
    parser.add_argument("--list", action="store_true", help="print the sample and try nothing")
    parser.add_argument("--root", type=Path, default=ROOT, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    root: Path = options.root
    population = all_mutants(root, options.module)
    size = min(options.number or len(population), len(population))
    sample = sorted(random.Random(options.seed).sample(population, size))
    print(f"{size} of {len(population):,} mutants, seed {options.seed}", flush=True)
    sources = {mutant.path: (root / mutant.path).read_bytes() for mutant in sample}
    if options.list:
        print("\n".join(mutant.diff(sources[mutant.path]) for mutant in sample))
        return 0
    outcomes = []
    try:
        for outcome in run_all(root, sample, options.jobs, options.limit):
            outcomes.append(outcome)
            _report(outcome, sources[outcome.mutant.path])
    except RuntimeError as error:
        print(f"mutants: {error}", file=sys.stderr)
        return 2
    counts = Counter(outcome.result for outcome in outcomes)
    print(
        f"\n{len(outcomes)} mutants: "
        + ", ".join(f"{counts[result]} {result}" for result in (KILLED, TIMED_OUT, SURVIVED))
    )
    if options.json is not None:
        options.json.write_text(json.dumps([_plain(outcome, sources) for outcome in outcomes], indent=2) + "\n")
    return 1 if counts[SURVIVED] else 0


def _report(outcome: Outcome, source: bytes) -> None:
    mutant = outcome.mutant
    print(
        f"{outcome.result:>9}  {outcome.seconds:5.0f} s  {mutant.path}:{mutant.line}  {mutant.kind}  {outcome.killer[:100]}"
    )
    if outcome.result == SURVIVED:
        print(mutant.diff(source))
    sys.stdout.flush()


def _plain(outcome: Outcome, sources: dict[str, bytes]) -> dict[str, Any]:
    mutant = outcome.mutant
    return {
        "path": mutant.path, "line": mutant.line, "kind": mutant.kind, "result": outcome.result,
        "seconds": round(outcome.seconds, 1), "killer": outcome.killer, "diff": mutant.diff(sources[mutant.path]),
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
