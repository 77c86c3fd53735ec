"""llama.cpp with kvpool's cache: the first token of a prompt computed, from disk after a restart, and from a Redis.

    PYTHONPATH=SITE python benchmarks/llama_cache.py [--json FILE] [--check] [--quick] [--only WORD]

`make bench-llama` builds llama-cpp-python and runs it. SmolLM2 on a CPU, with as many threads as llama-cpp-python takes by
itself; every sample is a process of its own.
Times are wall time: on a busy machine read ratios, not milliseconds. Beside it: llama-cpp-python's own LlamaDiskCache.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from cases.tiers_redis import server as redis_server
from harness import Case, NoPartError, PeerCase, Runner, Times, argument_parser, main
from kvpool.model.loading import gguf_file

NUM_TOKENS, QUICK_TOKENS = 1500, 600
LIFE = Path(__file__).parent / "cases" / "llama_life.py"
OWN = "llama-cpp-python"
COMPUTED, FROM_DISK, FROM_REDIS = "computed", "from disk after a restart", "from Redis, filled by another process"
STORING, SIZE = "behind the last token, a new prompt is stored", "on disk, per token"


class Lives:
    """Processes that answer one prompt each, and must all answer alike."""

    def __init__(self, folder: Path, num_tokens: int) -> None:
        self.folder = folder
        self.num_tokens = num_tokens
        self._answers: dict[int, list[int]] = {}
        self._cold: dict[tuple[str, int], dict[str, Any]] = {}

    def live(self, seed: int = 0, **cache: Any) -> dict[str, Any]:
        """What one process took, with a cache or none."""
        task = {"model": str(gguf_file()), "num_tokens": self.num_tokens, "seed": seed, **cache}
        sources = os.pathsep.join(path for path in sys.path if path)
        done = subprocess.run(
            [sys.executable, str(LIFE), json.dumps(task)],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "PYTHONPATH": sources},
        )
        if done.returncode:
            raise RuntimeError(done.stderr[-2000:])
        result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        if self._answers.setdefault(seed, result["answer"]) != result["answer"]:
            raise RuntimeError(f"two answers to one prompt: {self._answers[seed]} and {result['answer']}")
        return result

    def disk(self, name: str) -> dict[str, Any]:
        """Settings of a cache on a disk of its own."""
        return {"disk": str(self.folder / name), "disk_bytes": "1GB", "timeout": 30}

    @functools.cached_property
    def redis(self) -> dict[str, Any]:
        """Settings of a cache in a Redis that this process starts."""
        return {"remote": f"redis://127.0.0.1:{redis_server()[0]}", "timeout": 30}

    def cold(self, seed: int, **cache: Any) -> dict[str, Any]:
        """What a prompt took that nobody had seen; measured once for all cases that tell of it."""
        kind = next(iter(cache))
        if (kind, seed) not in self._cold:
            self._cold[kind, seed] = self.live(seed, **cache)
        return self._cold[kind, seed]


def first_token(result: Mapping[str, Any]) -> list[float]:
    """In milliseconds."""
    return [1e3 * float(result["first"])]


def behind(result: Mapping[str, Any]) -> list[float]:
    """What the cache took behind the last token, in milliseconds."""
    return [1e3 * float(result["ended"])]


def cases(lives: Lives) -> list[Case]:
    """Where the first token comes from, what storing takes, and how much room."""

    def cold(figure: Callable[[Mapping[str, Any]], list[float]]) -> Callable[[], Runner]:
        def begun() -> Runner:
            seeds = itertools.count(1)
            return lambda: figure(lives.cold(next(seeds), kvpool=lives.disk("cold")))

        return begun

    def warm(settings: Callable[[], dict[str, Any]]) -> Callable[[], Runner]:
        def filled() -> Runner:
            lives.live(kvpool=settings())
            return lambda: first_token(lives.live(kvpool=settings()))

        return filled

    def size() -> Runner:
        from kvpool.tiers import DiskTier

        lives.live(kvpool=lives.disk("size"))
        with DiskTier(lives.folder / "size", 2**30) as tier:
            used = tier.stats().used_bytes or 0
        return lambda: [used / 1024 / lives.num_tokens]

    def case(name: str, kvpool: Callable[[], Runner], unit: str = "ms", bar: float | None = None) -> Case:
        bars = () if bar is None else (Times(bar, OWN),)
        full = name if name in (STORING, SIZE) else f"first token of {lives.num_tokens:,} tokens, {name}"
        return Case(full, unit, "lower", kvpool, bars, PeerCase(name), repeats=5, warmups=0)

    return [
        case(COMPUTED, cold(first_token)),
        case(FROM_DISK, warm(lambda: lives.disk("warm")), bar=1.0),
        case(FROM_REDIS, warm(lambda: lives.redis)),
        case(STORING, cold(behind)),
        case(SIZE, size, "KiB", bar=1.0),
    ]


class OwnDiskCache:
    """llama-cpp-python's own cache on a disk, and no cache for a prompt that is computed."""

    name = OWN

    def __init__(self, lives: Lives) -> None:
        self._lives = lives
        self._repeat: Runner = list

    def start(self) -> str:
        """Its version."""
        return metadata.version(OWN)

    def setup(self, case: str, params: Mapping[str, Any]) -> None:
        """The same prompt in the same order."""
        lives = self._lives
        if case == FROM_REDIS:
            raise NoPartError("it has no remote store")
        warm, cold = (str(lives.folder / f"own {name}") for name in (case, "cold"))
        if case in (FROM_DISK, SIZE):
            lives.live(own=warm)
        seeds = itertools.count(1)
        repeats: dict[str, Runner] = {
            COMPUTED: lambda: first_token(lives.cold(next(seeds), own=cold)),
            FROM_DISK: lambda: first_token(lives.live(own=warm)),
            STORING: lambda: behind(lives.cold(next(seeds), own=cold)),
            SIZE: lambda: [_bytes_below(Path(warm)) / 1024 / lives.num_tokens],
        }
        self._repeat = repeats[case]

    def repeat(self) -> Sequence[float]:
        """One more process."""
        return self._repeat()

    def close(self) -> None:
        """Nothing runs any more."""


def _bytes_below(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


if __name__ == "__main__":
    options = argument_parser(__doc__.splitlines()[0]).parse_args()
    if importlib.util.find_spec("llama_cpp") is None:
        sys.exit("llama-cpp-python is not installed: make bench-llama builds it")
    with tempfile.TemporaryDirectory(prefix="kvpool-bench-llama-") as directory:
        chosen = Lives(Path(directory), QUICK_TOKENS if options.quick else NUM_TOKENS)
        peers = [OwnDiskCache(chosen)]
        sys.exit(main(cases(chosen), peers, options, {"llama-cpp-python": metadata.version(OWN)}, clock="wall time"))
