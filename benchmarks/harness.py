"""The one harness of all benchmarks: repeats that alternate between kvpool and its peers, a table, JSON, bars.

A benchmark is a list of `Case`s handed to `main`:

    python benchmarks/control_plane.py                    a table for people
    python benchmarks/control_plane.py --json FILE        the same numbers as JSON (- writes to stdout)
    python benchmarks/control_plane.py --check            exit status 1 where a bar is missed
    python benchmarks/control_plane.py --quick            one repeat of each, for CI
    python benchmarks/control_plane.py --only decode      the cases whose name contains the word

Times are CPU time of the measuring thread, so that a busy machine does not change them much. The garbage collector
stays enabled, as in production: a case builds its pool, then calls `freeze_heap`, and so does every peer. A peer that
is not there is reported as absent and never as beaten.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import sys
import time
import traceback
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

ABSENT = "absent"
RECORDED = "recorded on another day"
VOCABULARY = 128_000
THREAD_TIME = "CPU time of the measuring thread"

Runner: TypeAlias = Callable[[], Sequence[float]]
"""Runs one repeat of a case and returns its samples, in the unit of the case."""


class PeerAbsentError(Exception):
    """A peer cannot be measured here: not installed, not started, or it stopped. The message says why."""


class NoPartError(PeerAbsentError):
    """A peer that is there but does nothing of the kind: its column stays empty, and no reason is listed."""


class Peer(Protocol):
    """Another system, measured in the same run. Every method may raise `PeerAbsentError`."""

    name: str

    def start(self) -> str:
        """Makes the peer ready and returns its version."""

    def setup(self, case: str, params: Mapping[str, Any]) -> None:
        """Builds the state of a named case; `NoPartError` where the peer has nothing to compare."""

    def repeat(self) -> Sequence[float]:
        """Runs one repeat of the case that was set up last."""

    def close(self) -> None:
        """Ends the peer; it is not used again."""


@dataclass(frozen=True)
class PeerCase:
    """What the drivers in `peers/` run for a case."""

    name: str
    params: Mapping[str, Any] = field(default_factory=dict)
    max_repeats: int | None = None  # for peers so slow that a few repeats have to do


@dataclass(frozen=True)
class Recorded:
    """A figure measured by hand, on another day: shown beside the others, marked as what it is."""

    peer: str
    value: float
    variant: str
    machine: str
    date: str


@dataclass(frozen=True)
class Verdict:
    """What one bar says. `ok` is None where it cannot be decided, for instance because the peer is absent."""

    text: str
    basis: str
    limit: float | None
    ok: bool | None


@dataclass(frozen=True)
class Case:
    """One line of the table. `kvpool` builds the state and returns the function that runs one repeat."""

    name: str
    unit: str
    better: Literal["lower", "higher"]
    kvpool: Callable[[], Runner]
    bars: tuple[Bar, ...] = ()
    peer_case: PeerCase | None = None
    recorded: tuple[Recorded, ...] = ()
    ceiling: float | None = None
    repeats: int = 20
    warmups: int = 1  # first repeats that are run and dropped, for kvpool and peers alike


@dataclass
class Result:
    """The samples of one case, by participant, and why a participant has none."""

    case: Case
    samples: dict[str, list[float]] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    error: str | None = None

    def value(self, name: str = "kvpool") -> float | None:
        """The median, None without samples."""
        return median(samples) if (samples := self.samples.get(name)) else None

    def p99(self, name: str = "kvpool") -> float | None:
        """99 % of the samples are at least as good as this one (nearest rank)."""
        if not (samples := self.samples.get(name)):
            return None
        ordered = sorted(samples, reverse=self.case.better == "higher")
        return ordered[max(0, -(-99 * len(ordered) // 100) - 1)]

    def verdicts(self, scale: float = 1.0) -> list[Verdict]:
        """Every bar of the case, judged. `scale`: see `machine_scale`."""
        return [bar(self, scale) if callable(bar) else _judge(self, bar) for bar in self.case.bars]


Bar: TypeAlias = "float | Callable[[Result, float], Verdict]"
"""A number is a limit in the unit of the case, from above where lower is better; or anything that judges a result."""


def _judge(result: Result, limit: float, basis: str = "absolute", reason: str = "") -> Verdict:
    lower, value = result.case.better == "lower", result.value()
    text = f"{'<=' if lower else '>='} {format_value(limit)} {result.case.unit}{reason}"
    ok = None if value is None else value <= limit if lower else value >= limit
    return Verdict(text, basis, limit, ok)


@dataclass(frozen=True)
class Times:
    """A bar: so many times better than a peer measured in the same run. Undecided where the peer is absent."""

    factor: float
    peer: str

    def __call__(self, result: Result, scale: float) -> Verdict:
        if (value := result.value(self.peer)) is None:
            return Verdict(f"{self.factor:g}x {self.peer} ({ABSENT})", "same run", None, None)
        limit = value / self.factor if result.case.better == "lower" else value * self.factor
        return _judge(result, limit, "same run", f" = {self.factor:g}x {self.peer}")


@dataclass(frozen=True)
class TimesRecorded:
    """A bar: so many times better than the best recorded figure, scaled to this machine where `machine_scale` knows."""

    factor: float

    def __call__(self, result: Result, scale: float) -> Verdict:
        if (best := best_recorded(result.case, result.samples)) is None:
            return Verdict(f"{self.factor:g}x the best recorded (none)", RECORDED, None, None)
        share = scale / self.factor
        limit = best.value * share if result.case.better == "lower" else best.value / share
        scaled = f", scaled by {scale:.2f}" if scale != 1.0 else ", another machine"
        return _judge(result, limit, RECORDED, f" = {self.factor:g}x {best.peer} ({RECORDED}{scaled})")


def best_recorded(case: Case, measured: Container[str]) -> Recorded | None:
    """The best recorded figure of the peers that were not measured in the run itself."""
    figures = [figure for figure in case.recorded if figure.peer not in measured]
    choose = min if case.better == "lower" else max
    return choose(figures, key=lambda figure: figure.value, default=None)


def machine_scale(results: Sequence[Result]) -> float:
    """Time taken here per time taken on the machine of the recorded figures; 1.0 where nothing tells.

    It is the median over all timed cases of a peer that was both recorded and measured in this run.
    """
    scales = []
    for result in results:
        for figure in result.case.recorded:
            here = result.value(figure.peer)
            if here and result.case.unit in ("ms", "s", "req/s"):
                scales.append(here / figure.value if result.case.better == "lower" else figure.value / here)
    return median(scales) if scales else 1.0


def freeze_heap() -> None:
    """Collects, then moves everything alive out of the collector's sight, as engines do once their pool is built."""
    gc.collect()
    gc.freeze()


def cpu_ms(start_ns: int) -> float:
    """Milliseconds of CPU time of this thread since `start_ns`, a value of `time.thread_time_ns()`."""
    return (time.thread_time_ns() - start_ns) / 1e6


def random_tokens(seed: int, *shape: int) -> npt.NDArray[np.int32]:
    """Token ids that kvpool and the peers draw alike: the same seed gives the same prompts on both sides."""
    return np.random.default_rng(seed).integers(0, VOCABULARY, shape, dtype=np.int32)


def measure(case: Case, peers: Sequence[Peer], quick: bool = False) -> Result:
    """Runs one case: all participants are set up, then their repeats alternate."""
    result = Result(case)
    repeats = 1 if quick else case.repeats
    try:
        runner = case.kvpool()
        alive = [peer for peer in peers if case.peer_case and _take_part(peer, result, case.peer_case)]
        for index in range(-case.warmups, repeats):
            _keep(result, "kvpool", runner(), index)
            alive = [peer for peer in alive if _take_part(peer, result, index)]
    except PeerAbsentError as reason:  # what the case needs is not there: nothing is measured, nothing is claimed
        result.samples.clear()
        result.absent["kvpool"] = str(reason)
    except Exception as error:  # the other cases are still worth measuring; the error is shown and fails the run
        traceback.print_exc()
        result.error = f"{type(error).__name__}: {error}"
    finally:
        gc.unfreeze()
    return result


def _keep(result: Result, name: str, samples: Sequence[float], index: int) -> None:
    if index >= 0:  # the others are warmups
        result.samples.setdefault(name, []).extend(samples)


def _take_part(peer: Peer, result: Result, step: PeerCase | int) -> bool:
    """Sets a peer up, or runs its repeat of this number; False once it is out. A peer that stops leaves no figure."""
    try:
        if isinstance(step, PeerCase):
            peer.setup(step.name, step.params)
            return True
        _keep(result, peer.name, peer.repeat(), step)
    except NoPartError:
        return False
    except PeerAbsentError as reason:
        result.samples.pop(peer.name, None)
        result.absent[peer.name] = str(reason)
        return False
    max_repeats = result.case.peer_case.max_repeats if result.case.peer_case else None
    return max_repeats is None or step + 1 < max_repeats


def report(results: Sequence[Result], versions: Mapping[str, str], clock: str = THREAD_TIME) -> dict[str, Any]:
    """The JSON form of a run."""
    scale = machine_scale(results)
    cases = [_case_report(result, scale) for result in results]
    host = {**machine(), "scale_to_recorded": scale}
    return {"machine": host, "versions": dict(versions), "clock": clock, "cases": cases}


def _case_report(result: Result, scale: float) -> dict[str, Any]:
    case, verdicts = result.case, result.verdicts(scale)
    peers: dict[str, float | str | None] = {name: result.value(name) for name in result.samples if name != "kvpool"}
    peers.update((name, ABSENT) for name in result.absent if name != "kvpool")
    return {
        "name": case.name,
        "unit": case.unit,
        "better": case.better,
        "kvpool": result.value(),
        "peers": peers,
        "ceiling": case.ceiling,
        "bar": "; ".join(verdict.text for verdict in verdicts) or None,
        "ok": _decide(result, verdicts),
        "bars": [vars(verdict) for verdict in verdicts],
        "p99": {name: result.p99(name) for name in result.samples},
        "samples": {name: len(samples) for name, samples in result.samples.items()},
        "recorded": [{**vars(figure), "status": RECORDED} for figure in case.recorded],
        "best_recorded": vars(best) if (best := best_recorded(case, result.samples)) else None,
        "absent": result.absent,
        "error": result.error,
    }


def _decide(result: Result, verdicts: Sequence[Verdict]) -> bool | None:
    """False where a bar is missed or kvpool failed, None where no bar could be decided."""
    if result.error is not None:
        return False
    decided = [verdict.ok for verdict in verdicts if verdict.ok is not None]
    return all(decided) if decided else None


def machine() -> dict[str, Any]:
    """The machine of this run, as far as the standard library knows it."""
    cpu_info = Path("/proc/cpuinfo")
    lines = cpu_info.read_text(encoding="utf-8").splitlines() if cpu_info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": names[0] if names else platform.processor() or "unknown processor",
        "arch": platform.machine(),
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.release()}",
    }


def format_value(value: float | str | None) -> str:
    """Three significant digits, thousands separated; words as they are."""
    if value is None or isinstance(value, str):
        return value or "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


_OK = {True: "ok", False: "MISSED", None: "-"}


def table(document: Mapping[str, Any]) -> str:
    """The table for people, from the JSON form."""
    peer_names = sorted({name for case in document["cases"] for name in case["peers"]})
    header = ["case", "unit", "kvpool", "p99", *(f"{name} (same run)" for name in peer_names), "recorded*", "bar", "ok"]
    rows = [header]
    for case in document["cases"]:
        peers = [format_value(case["peers"].get(name)) + _ratio(case, case["peers"].get(name)) for name in peer_names]
        value = "ERROR" if case["error"] else ABSENT if "kvpool" in case["absent"] else format_value(case["kvpool"])
        best = case["best_recorded"]
        recorded = f"{format_value(best['value'])} {best['peer']}" if best else "-"
        first, *more = [[bar["text"], _OK[bar["ok"]]] for bar in case["bars"]] or [["-", "-"]]
        p99 = format_value(case["p99"].get("kvpool"))
        rows.append([case["name"], case["unit"], value, p99, *peers, recorded, *first])
        rows.extend([*[""] * (len(header) - 2), *bar] for bar in more)
    widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
    rows.insert(1, ["-" * width for width in widths])
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([*lines, "", *_footnotes(document)])


def _ratio(case: Mapping[str, Any], peer: float | str | None) -> str:
    if not isinstance(peer, float | int) or not peer or not case["kvpool"]:
        return ""
    ratio = peer / case["kvpool"] if case["better"] == "lower" else case["kvpool"] / peer
    return f"  {ratio:.1f}x"


def _footnotes(document: Mapping[str, Any]) -> list[str]:
    host, versions = document["machine"], document["versions"]
    lines = [
        f"machine: {host['cpu']}, {host['arch']}, {host['cores']} cores, {host['system']}",
        "versions: " + ", ".join(f"{name} {version}" for name, version in versions.items()),
        f"values are medians; times are {document['clock']}; p99: 99 % of the samples are at least as good",
    ]
    figures = [figure for case in document["cases"] if (figure := case["best_recorded"])]
    sources = sorted({"{peer} {variant}: {machine}, {date}".format_map(figure) for figure in figures})
    lines.extend(f"* {RECORDED}, not in this run: {source}" for source in sources)
    if sources and (scale := host["scale_to_recorded"]) != 1.0:
        lines.append(f"* scaled by {scale:.2f}: the time a peer takes in this run over the time it took when recorded")
    reasons = sorted({f"{name}: {why}" for case in document["cases"] for name, why in case["absent"].items()})
    lines.extend(f"absent: {reason}" for reason in reasons)
    lines.extend(f"error: {case['name']}: {case['error']}" for case in document["cases"] if case["error"])
    return lines


def argument_parser(description: str) -> argparse.ArgumentParser:
    """The options that all benchmarks share; a benchmark adds its own."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", metavar="FILE", help="write JSON; - for stdout, then the table goes to stderr")
    parser.add_argument("--check", action="store_true", help="exit with status 1 where a bar is missed")
    parser.add_argument("--quick", action="store_true", help="one repeat of each, for CI")
    parser.add_argument("--only", metavar="WORD", default="", help="run only the cases whose name contains WORD")
    return parser


def main(
    cases: Sequence[Case],
    peers: Sequence[Peer],
    options: argparse.Namespace,
    versions: Mapping[str, str],
    clock: str = THREAD_TIME,
) -> int:
    """Runs the cases and prints; returns the exit status: 1 for an error, and with --check for a missed bar."""
    chosen = [case for case in cases if options.only in case.name]
    peer_versions = {peer.name: _start(peer) for peer in peers}
    results = []
    try:
        for number, case in enumerate(chosen, 1):
            say(f"[{number}/{len(chosen)}] {case.name} ...")
            result = measure(case, peers, options.quick)
            shown = [f"{name} {format_value(result.value(name))} {case.unit}" for name in result.samples]
            say(f"    {', '.join(shown) or result.error or ABSENT}")
            results.append(result)
    finally:
        for peer in peers:
            peer.close()
    all_versions = {"python": platform.python_version(), "numpy": np.__version__, **versions, **peer_versions}
    document = report(results, all_versions, clock)
    print(table(document), file=sys.stderr if options.json == "-" else sys.stdout)
    if options.json == "-":
        print(json.dumps(document, indent=2))
    elif options.json:
        Path(options.json).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    return int(any(case["error"] or (options.check and case["ok"] is False) for case in document["cases"]))


def _start(peer: Peer) -> str:
    say(f"starting {peer.name} ...")
    try:
        return peer.start()
    except PeerAbsentError as reason:
        say(f"{peer.name} is absent: {reason}")
        return ABSENT


def say(text: str) -> None:
    """Tells how far a run is, beside its result."""
    print(text, file=sys.stderr, flush=True)
