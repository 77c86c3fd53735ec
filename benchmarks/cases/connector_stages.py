"""What `connector_peers.py` does with its engines: each stage runs once, and several lines of the table tell of it.

    near       a prompt that was asked before, from what stands next to vLLM: its own cache, a host, a server's memory, files
    far        after a restart of everything: from a disk, and from a Redis that another process filled
    overhead   prompts that share nothing with any other
    trace      requests with common beginnings through hosts of one size

In every stage the engines take turns, one prompt each, so that a machine with other work to do slows all of them alike.
"""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

from cases.connector_engines import (
    Answer,
    Engine,
    LmcacheServer,
    Place,
    example_transfer,
    kvpool_transfer,
)
from cases.tiers_redis import server as redis_server
from harness import PeerAbsentError, say

HOST_MIB = 512
DISK_BYTES = "4GB"
WORDS = 40_000  # token ids that prompts are made of
QUESTION = 40  # tokens of a trace's request behind what it has in common with others

Samples = dict[str, dict[str, list[float]]]
"""What was seen: by figure, then by the name of the engine."""


class Sizes:
    """How much is asked."""

    def __init__(self, quick: bool) -> None:
        self.prompt = 300 if quick else 1500
        self.rounds = 1 if quick else 5
        self.batches = 1 if quick else 6
        self.batch, self.batch_prompt, self.batch_new = (2, 100, 4) if quick else (8, 200, 24)
        self.documents, self.document, self.requests = (3, 128, 6) if quick else (24, 640, 80)


def prompt(rng: random.Random, length: int) -> list[int]:
    """Tokens at random."""
    return [rng.randrange(1000, WORDS) for _ in range(length)]


def trace(seed: int, num_requests: int, num_documents: int, length: int) -> list[list[int]]:
    """Questions about documents, few of which are asked about often; every fourth request is about one of its own."""
    rng = random.Random(seed)
    documents = [prompt(rng, length) for _ in range(num_documents)]
    weights = list(accumulate(1 / (rank + 1) for rank in range(num_documents)))
    asked = []
    for _ in range(num_requests):
        once = rng.random() < 0.25
        about = prompt(rng, length) if once else rng.choices(documents, cum_weights=weights)[0]
        asked.append(about + prompt(rng, QUESTION))
    return asked


class Comparison:
    """Engines, started when a stage needs them, and what the stages saw."""

    def __init__(self, place: Place, sizes: Sizes) -> None:
        self._place = place
        self._sizes = sizes
        self._servers: list[LmcacheServer] = []
        self._engines: list[Engine] = []
        self.absent: dict[str, str] = {}

    # --- engines -----------------------------------------------------------------------------------------------------

    def _start(self, makers: dict[str, Callable[[], Engine]]) -> list[Engine]:
        """All at once; one that cannot run leaves its reason."""
        begun: list[tuple[str, Engine]] = []
        for name, make in makers.items():
            with self._excused(name):
                begun.append((name, make()))
                self._engines.append(begun[-1][1])
        ready = []
        for name, engine in begun:
            with self._excused(name):
                engine.wait()
                ready.append(engine)
        say(f"    {', '.join(engine.name for engine in ready)} run")
        return ready

    @contextmanager
    def _excused(self, name: str) -> Iterator[None]:
        """An engine that cannot run, or stops, is out; kvpool's own must run."""
        try:
            yield
        except PeerAbsentError as reason:
            if name.startswith("kvpool"):
                raise RuntimeError(str(reason)) from None
            say(f"    {name} is absent: {reason}")
            self.absent[name] = str(reason)

    def _lmcache(self, disk: Path | None = None) -> Engine:
        server = LmcacheServer(self._place, HOST_MIB, disk)
        self._servers.append(server)
        return Engine("lmcache", self._place, server.transfer, str(self._place.lmcache_site), [server.pid])

    def _kvpool(self, name: str = "kvpool", **extra: Any) -> Engine:
        return Engine(name, self._place, kvpool_transfer(host_bytes=f"{HOST_MIB}MiB", **extra))

    @cached_property
    def _near_engines(self) -> list[Engine]:
        folder = self._place.folder / "example"
        return self._start(
            {
                "vllm": lambda: Engine("vllm", self._place, None),
                "kvpool": self._kvpool,
                "lmcache": self._lmcache,
                "example": lambda: Engine("example", self._place, example_transfer(folder)),
            }
        )

    def _lasting_engines(self) -> list[Engine]:
        """Those that somebody might serve with."""
        return [engine for engine in self._near_engines if engine.name != "example" and engine.name not in self.absent]

    def _end_near(self) -> None:
        """Gives their memory back before others start."""
        self._end(self.__dict__.pop("_near_engines", ()))
        while self._servers:
            self._servers.pop().end()

    def _in_turns(self, engines: list[Engine], act: Callable[[Engine], object], *, backwards: bool = False) -> None:
        """Each engine once; one that stops is not asked again."""
        for engine in engines[:: -1 if backwards else 1]:
            with self._excused(engine.name):
                act(engine)
            if engine.name in self.absent:
                engines.remove(engine)

    def _end(self, engines: Sequence[Engine]) -> None:
        for engine in engines:
            engine.end()
            self._engines.remove(engine)

    def close(self) -> None:
        """Ends everything that was started."""
        self._end(list(self._engines))
        for server in self._servers:
            server.end()

    # --- stages ------------------------------------------------------------------------------------------------------

    @cached_property
    def near(self) -> Samples:
        """Every prompt is asked twice; in between vLLM forgets it, unless its own cache is what is asked for."""
        seen = _Seen()
        engines, rng = self._near_engines, random.Random(1)
        # What is made on first use
        self._in_turns(engines, lambda engine: engine.ask([prompt(rng, self._sizes.prompt)]))
        for _ in range(self._sizes.rounds):
            asked = prompt(rng, self._sizes.prompt)
            right: list[Answer] = []

            def cold(engine: Engine, asked: list[int] = asked, right: list[Answer] = right) -> None:
                engine.forget()
                (answer,) = engine.ask([asked])
                right.append(answer)
                seen.add("cold", engine, answer, right[0])

            def warm(engine: Engine, asked: list[int] = asked, right: list[Answer] = right) -> None:
                if engine.name != "vllm":
                    engine.forget()
                (answer,) = engine.ask([asked])
                seen.add("host", engine, answer, right[0])

            self._in_turns(engines, cold)
            self._in_turns(engines, warm)
        for engine in engines:
            seen.figure("memory", engine.name, engine.memory_mib())
        return seen.samples

    @cached_property
    def far(self) -> Samples:
        """One pair of processes fills disks and a Redis and ends; others find everything there."""
        self._end_near()
        seen = _Seen()
        redis = {"remote": f"redis://127.0.0.1:{redis_server()[0]}"} if shutil.which("redis-server") else {}
        disk, chunks = str(self._place.folder / "disk"), self._place.folder / "chunks"
        rng = random.Random(2)
        asked = [prompt(rng, self._sizes.prompt) for _ in range(self._sizes.rounds)]
        right: dict[int, Answer] = {}
        fillers = self._start(
            {
                "kvpool": lambda: self._kvpool(disk=disk, disk_bytes=DISK_BYTES, **redis),
                "lmcache": lambda: self._lmcache(chunks),
            }
        )
        for number, each in enumerate(asked):
            self._in_turns(fillers, lambda engine: right.setdefault(number, engine.ask([each])[0]))  # noqa: B023
        self._end(fillers)
        while self._servers:
            self._servers.pop().end()
        makers = {
            "kvpool": lambda: self._kvpool(disk=disk, disk_bytes=DISK_BYTES),
            "kvpool redis": lambda: self._kvpool("kvpool redis", **redis),
            "lmcache": lambda: self._lmcache(chunks),
        }
        readers = self._start({name: make for name, make in makers.items() if redis or name != "kvpool redis"})
        # What is made on first use
        self._in_turns(readers, lambda engine: engine.ask([prompt(rng, self._sizes.prompt)]))
        for number, each in enumerate(asked):
            new = prompt(rng, self._sizes.prompt)

            def read(engine: Engine, each: list[int] = each, number: int = number, new: list[int] = new) -> None:
                engine.forget()
                seen.add("disk", engine, engine.ask([each])[0], right[number])
                if engine.name == "kvpool redis":
                    seen.add("disk cold", engine, engine.ask([new])[0])

            self._in_turns(readers, read)
        self._end(readers)
        return seen.samples

    @cached_property
    def overhead(self) -> Samples:
        """Batches that share nothing, of each engine in turn: seconds, and seconds of CPU time of all its processes."""
        seen = _Seen()
        sizes, rng = self._sizes, random.Random(3)
        engines = self._lasting_engines()

        def run(engine: Engine, keep: bool = True) -> None:
            batch = [prompt(rng, sizes.batch_prompt) for _ in range(sizes.batch)]
            cpu, wall = engine.cpu_seconds(), time.perf_counter()
            engine.ask(batch, sizes.batch_new)
            if keep:
                seen.figure("batch wall", engine.name, time.perf_counter() - wall)
                seen.figure("batch cpu", engine.name, engine.cpu_seconds() - cpu)

        self._in_turns(engines, lambda engine: run(engine, keep=False))
        for number in range(sizes.batches):
            self._in_turns(engines, run, backwards=number % 2 == 1)
        return seen.samples

    @cached_property
    def trace(self) -> Samples:
        """Requests one after the other, each to every engine; hosts hold less than half of what is asked about."""
        seen = _Seen()
        sizes = self._sizes
        engines = self._lasting_engines()
        self._in_turns(engines, lambda engine: engine.forget())
        asked = trace(4, sizes.requests, sizes.documents, sizes.document)
        for each in asked:
            answers: list[Answer] = []

            def one(engine: Engine, each: list[int] = each, answers: list[Answer] = answers) -> None:
                (answer,) = engine.ask([each], 1)
                answers.append(answer)
                seen.add("trace", engine, answer, answers[0])
                seen.figure("trace tokens", engine.name, len(each))

            self._in_turns(engines, one)
        for engine in engines:
            seen.figure("trace memory", engine.name, engine.memory_mib())
        return seen.samples


class _Seen:
    """Collects samples by figure and engine."""

    def __init__(self) -> None:
        self.samples: Samples = {}

    def figure(self, figure: str, name: str, value: float) -> None:
        self.samples.setdefault(figure, {}).setdefault(name, []).append(value)

    def add(self, stage: str, engine: Engine, answer: Answer, right: Answer | None = None) -> None:
        """An answer: its time, its hit, and whether it says what it should."""
        self.figure(f"{stage} ms", engine.name, 1000 * answer.seconds)
        self.figure(f"{stage} hit", engine.name, answer.cached)
        if right is not None:
            self.figure(f"{stage} wrong", engine.name, float(answer.tokens != right.tokens))
