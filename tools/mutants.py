"""Changes kvpool in small ways, one at a time, and looks whether a test notices: what does no test prove?

    python tools/mutants.py [--number 100] [--seed 0] [--module WORD[:LINE]]... [--processes 2] [--seconds 40]
                            [--minutes 60] [--measured FILE] [--json FILE]

A mutant is one change in one file: `<` for `<=`, `and` for `or`, 3 for 2, a call left out. A sample is drawn by seed out of
the control plane, the tiers and the engine. The tests of those packages are collected and run once without a mutant; those
that fail here, because something is not installed, are left out. `--measured` keeps what they call for the next run. Then
each mutant meets the tests that call the changed function, those of its module and package first, in a forked process
(`mutant_trials.py`). What survives is printed with its diff: a test is missing, the code is not needed, or the change changes
nothing. At the end stands how many were killed, by folder.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import json
import math
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
# What draws, serves or runs on a GPU. Name one with --module to change it all the same.
LEFT_OUT = (
    *("attention", "hf", "kernels", "storage", "server", "cluster", "integrations", "view", "web"),
    *("cli.py", "terminal.py", "compat", "replay", "__main__.py", "version.py"),
)
# Packages whose own tests are enough, and what else tests them.
APART = {
    "scheduling": ("stateful/test_scheduler_machine.py", "replay/test_costs.py", "test_formats.py"),
    "tiers": ("stateful/test_disk_tier.py", "engine/test_tiers.py", "test_formats.py"),
    "recording": ("replay/test_broken_files.py", "replay/test_commands.py", "test_formats.py"),
    **dict.fromkeys(("engine", "replay", "compat", "storage", "server", "cluster", "view"), ()),
}
GENERAL = (  # tests of the whole manager
    *("manager", "sequences", "prefix", "pools", "events", "eviction/test_order_of_eviction.py", "test_rules.py"),
    *("test_stats.py", "stateful/test_same_answers.py", "stateful/test_wild_machine.py"),
)
DEFAULTS = "test_defaults.py"  # looks at every default of the public interface, and calls none of it
PROFILE = "quick"  # of hypothesis, see tests/conftest.py
SECONDS = 40.0  # of tests for one mutant, as they take without it

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
    num_tests: int  # that call it


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


def places_of(root: Path, paths: Iterable[str]) -> list[str]:
    """Folders and files of tests for these modules: those of their packages, and those of the whole manager."""
    packages = dict.fromkeys(Path(path).parts[2].removesuffix(".py") for path in paths)
    places = [place for package in packages for place in (package, *APART.get(package, GENERAL), DEFAULTS)]
    names = [f"tests/{place}" for place in dict.fromkeys(places)]
    found = [name for name in names if (root / name).exists()]
    return found or ["tests"]


# --- running them -----------------------------------------------------------------------------------------------------


def run_all(
    root: Path,
    mutants: Sequence[Mutant],
    processes: int,
    limit: float | None = None,
    minutes: float = math.inf,
    measured: Path | None = None,
    seconds: float = SECONDS,
) -> Iterator[Outcome]:
    """What becomes of each mutant that is begun within so many minutes. Raises `RuntimeError` where no test passes."""
    with tempfile.TemporaryDirectory(prefix="mutants") as folder:
        out, task = Path(folder, "out"), Path(folder, "task")
        out.touch()
        words = ["-q", "--no-header", "--tb=no", "-p", "no:cacheprovider"]
        words += ["-p", "_hypothesis_pytestplugin", f"--hypothesis-profile={PROFILE}", "-m", "not slow"]
        words += ["-p", "mutant_trials"]
        always = f"tests/{DEFAULTS}::"
        changes = [(m.path, m.start, m.end, m.new.decode()) for m in mutants]
        task.write_text(
            json.dumps(
                dict(
                    root=str(root),
                    words=words,
                    out=str(out),
                    mutants=changes,
                    processes=processes,
                    limit=limit,
                    always=always,
                )
                | dict(minutes=minutes, seconds=seconds, measured=measured and str(measured.resolve()))
            )
        )
        command = [sys.executable, "-m", "pytest", *words, *places_of(root, [mutant.path for mutant in mutants])]
        with (
            Path(folder, "log").open("w") as log,
            subprocess.Popen(
                command,
                cwd=root,
                env=_environment(root, task) | {"TMPDIR": folder},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            ) as session,
        ):
            try:
                yield from _outcomes(mutants, _lines(out, session))
            finally:
                session.terminate()
            if session.wait():
                raise RuntimeError(f"without a mutant no test can be run: {Path(folder, 'log').read_text()[-2000:]}")


def _outcomes(mutants: Sequence[Mutant], lines: Iterable[str]) -> Iterator[Outcome]:
    for line in lines:
        said = json.loads(line)
        if "mutant" in said:
            yield Outcome(mutants[said.pop("mutant")], **said)
        elif "left_out" in said:
            print(f"left out, for without a mutant it fails or takes too long: {said['left_out']}", flush=True)
        elif said["tests"]:
            print("{tests} tests take {take:.0f} s, measured in {seconds:.0f} s".format(**said), flush=True)
        else:
            raise RuntimeError("without a mutant no test passes")


def _environment(root: Path, task: Path) -> dict[str, str]:
    paths = (str(root / "src"), str(Path(__file__).parent), os.environ.get("PYTHONPATH"))
    return {
        **os.environ,
        "MUTANTS_TASK": str(task),
        "CI": "true",
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # they take longer to start than most mutants to be noticed
        "KVPOOL_LOCK_WATCH": "0",  # it watches threads that are traced here
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "TRITON_INTERPRET": "1",  # many processes at once
    }


def _lines(file: Path, session: subprocess.Popen[bytes]) -> Iterator[str]:
    """The lines of a file until the process that writes it has ended."""
    with file.open() as lines:
        text, ended = "", False
        while not ended:
            ended = session.poll() is not None
            while part := lines.readline():
                text += part
                if text.endswith("\n"):
                    yield text
                    text = ""
            if not ended:
                time.sleep(0.05)


def main(arguments: Sequence[str] | None = None) -> int:
    """Draws a sample, tries it, prints what survived; 1 if anything did."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--number", type=int, default=100, help="mutants in the sample (100); 0 for all")
    parser.add_argument("--seed", type=int, default=0, help="the same seed gives the same sample")
    parser.add_argument(
        "--module", action="append", default=[], metavar="WORD[:LINE]", help="only files with this in their path"
    )
    parser.add_argument("--processes", type=int, default=2, help="mutants tried at once (2)")
    parser.add_argument("--limit", type=float, help="seconds for a mutant; default: ten times what its tests take")
    parser.add_argument(
        "--seconds",
        type=float,
        default=SECONDS,
        help="of tests for a mutant, quick ones and those of its package first (40)",
    )
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no mutant after so many minutes")
    parser.add_argument(
        "--measured",
        type=Path,
        metavar="FILE",
        help="keep what tests do without a mutant, and measure those of a file once",
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
        limits = options.limit, options.minutes, options.measured, options.seconds
        for outcome in run_all(root, sample, options.processes, *limits):
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
        print(f"{outcome.num_tests} tests call it\n{mutant.diff(source)}")
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
        "num_tests": outcome.num_tests,
        "diff": mutant.diff(sources[mutant.path]),
    }


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # and ends the session that tries mutants
    sys.exit(main())
