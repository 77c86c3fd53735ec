"""A run of calls to tiers, by a seed and at a time that stands still, and tiers that fail. `test_same_*.py` use it."""

from __future__ import annotations

import hashlib
import logging
import os
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest

from kvpool.testing import value
from kvpool.tiers import KeyedTier, KeyPattern, MemoryTier, Outcome
from kvpool.tiers.codecs import Codec, UnreadableValueError
from kvpool.tiers.contract import CountedKeeper
from kvpool.tiers.disk.buffers import Buffer, Call, Job, Workers
from kvpool.tiers.remote.breaker import Breaker
from kvpool.tiers.remote.remote_tier import NodeError, Purging, RemoteTier, Share, StaleKeys, StoreNode
from kvpool.tiers.transport.chain import WatchedTier

NUM_KEYS = 60
SIZES = (0, 1, 100, 4096, 5000, 4096, 12_288, 9000, 30_000, 5000, 70_000, 33_000, 300_000)
WAITS = (0.0, 0.0, 0.5, 0.999, 1.0, 3.0, 4.999, 5.0, 29.0, 31.0, 60.0, 61.0)


def key(number: int) -> bytes:
    """Of one of two models and one of three tenants."""
    rest = hashlib.sha256(number.to_bytes(8, "little")).digest()[:20]
    return bytes([number % 2]) * 8 + bytes([number % 3]) * 2 + bytes([number % 5]) * 2 + rest


def content(number: int) -> bytes:
    """The value of a key; every fourth one is the same byte throughout."""
    size = SIZES[number % len(SIZES)]
    return bytes([number]) * size if number % 4 == 0 else value(number, size)


PATTERNS = [
    KeyPattern(bytes([1]) * 8),
    KeyPattern(tag=bytes([2]) * 2),
    KeyPattern(bytes([0]) * 8, bytes([1]) * 2 + bytes([3]) * 2),
    KeyPattern(bytes([9]) * 8),
]


class Run:
    """What the steps of a case say, and the time."""

    def __init__(self, name: str, folder: Path) -> None:
        self.rng = Random(name)
        self.folder = folder
        self.now = 1000.0
        self.said: list[str] = []
        self._heard: list[str] = []
        self._jobs: deque[Job] = deque()

    def say(self, *what: object) -> None:
        words = [*map(str, what), *(f"log: {line}" for line in self._heard)]
        self._heard.clear()
        self.said.append(" | ".join(words).replace(str(self.folder), "FOLDER"))

    def some(self, most: int = 6) -> list[int]:
        """Numbers of keys: often neighbours, now and then one of them twice."""
        count, start = self.rng.randrange(1, most + 1), self.rng.randrange(NUM_KEYS)
        if self.rng.random() < 0.5:
            return [(start + at) % NUM_KEYS for at in range(count)]
        return [self.rng.randrange(NUM_KEYS) for _ in range(count)]

    @contextmanager
    def going(self) -> Iterator[Run]:
        """Stops the time, and listens to the log."""
        handler = logging.Handler()
        handler.emit = lambda record: self._heard.append(record.getMessage())  # type: ignore[method-assign]
        log = logging.getLogger("kvpool")
        ids = Random("ids")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(time, "monotonic", lambda: self.now)
            patch.setattr(time, "time_ns", lambda: int(self.now * 1e9))
            patch.setattr(time, "sleep", self.wait)
            patch.setattr(os, "urandom", ids.randbytes)
            patch.setattr(os, "getpid", lambda: 4321)
            patch.setattr(Workers, "submit", lambda workers, job: self._jobs.append(job))
            patch.setattr(Call, "next", self._worked_off(Call.next))
            patch.setattr(Workers, "close", self._worked_off(Workers.close))
            patch.setattr(Workers, "take_buffer", self._waited_for(Workers.take_buffer))
            log.addHandler(handler)
            try:
                yield self
            finally:
                log.removeHandler(handler)

    def _worked_off(self, method: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """The same after all jobs."""

        def worked_off(called: Any) -> Any:
            self._work_off()
            return method(called)

        return worked_off

    def _waited_for(self, method: Callable[[Workers, float], Buffer | None]) -> Callable[..., Buffer | None]:
        """The same after all jobs, if a caller would wait."""

        def waited_for(workers: Workers, deadline: float) -> Buffer | None:
            if workers._buffers.empty() and deadline > self.now:
                self._work_off()
            return method(workers, deadline)

        return waited_for

    def _work_off(self) -> None:
        while self._jobs:
            self._jobs.popleft()()

    def wait(self, seconds: float) -> None:
        self.now = round(self.now + seconds, 6)


def short(outcomes: Sequence[Outcome | bool]) -> str:
    return "".join(outcome.name[0] if isinstance(outcome, Outcome) else str(int(outcome)) for outcome in outcomes)


def figures(tier: KeyedTier) -> str:
    return " ".join(
        f"{name}={round(found, 6) if isinstance(found, float) else found}"
        for name, found in vars(tier.stats()).items()
        if found and name != "name"
    )


class Kept(CountedKeeper):
    ended = 0

    def _end(self) -> None:
        self.ended += 1


def call(run: Run, tier: KeyedTier | WatchedTier, verb: str) -> str:
    """One call with random keys; what it answered. Whatever is `OK` must be what was stored."""
    numbers = run.some()
    keys = [key(number) for number in numbers]
    timeout = run.rng.choice((0.004, 1.0, 1.0, 1.0))
    if verb == "store":
        answer = short(tier.store(keys, [content(number) for number in numbers], timeout=timeout))
    elif verb == "load":
        extra = run.rng.choice((0, 0, 0, 10, -1))
        out = [bytearray(max(0, len(content(number)) + extra)) for number in numbers]
        keeper = Kept()
        options = {"keeper": keeper} if run.rng.random() < 0.3 else {}
        outcomes = tier.load(keys, out, timeout=timeout, **options)
        keeper.release()
        for number, outcome, found in zip(numbers, outcomes, out, strict=True):
            assert outcome != Outcome.OK or found.startswith(content(number))
        answer = f"{extra} {short(outcomes)} {keeper.ended}"
    elif verb == "contains":
        answer = short(tier.contains(keys, timeout=timeout))
    elif verb == "contains_prefix":
        assert isinstance(tier, KeyedTier)
        answer = str(tier.contains_prefix(keys))
    elif verb == "remove":
        answer = short(tier.remove(keys[:2], timeout=timeout))
    else:
        answer = str(tier.purge(run.rng.choice(PATTERNS), timeout=timeout))
    return f"{verb} {numbers} {answer}"


VERBS = [*["store"] * 6, *["load"] * 4, "contains", "contains_prefix", "remove", "remove", "purge"]


# --- tiers that fail now and then ------------------------------------------------------------------------------------


class Slow(MemoryTier):
    """Takes some hundredths of a second for a call; sometimes it raises, or answers nonsense."""

    def __init__(self, run: Run, capacity: int, name: str) -> None:
        super().__init__(capacity, name=name)
        self._run = run

    def _guarded(self, called: Any, timeout: float | None) -> Any:
        self._run.wait(self._run.rng.choice((0.01, 0.01, 0.03)))
        chosen = self._run.rng.random()
        if chosen < 0.03:
            raise RuntimeError("out of order")
        return ["nonsense"] if chosen < 0.06 else super()._guarded(called, timeout)


class Runs(Codec):
    """A value of one byte throughout becomes that byte; others stay. Some cannot be read again."""

    identity = "runs"

    def __init__(self, run: Run) -> None:
        self._run = run

    def encode(self, data: memoryview) -> list[Any]:
        self._run.wait(0.002)
        return [b"r", data[:1]] if len(set(data[:64])) == 1 else [b"w", data]

    def decode(self, encoded: memoryview, out: memoryview) -> None:
        self._run.wait(0.001)
        chosen = self._run.rng.random()
        if chosen < 0.05:
            raise UnreadableValueError("spoilt") if chosen < 0.025 else ValueError("not a run")
        out[:] = bytes(encoded[1:]) * out.nbytes if encoded[:1] == b"r" else encoded[1:]


class AtOnce:
    """Instead of the threads of a node."""

    def submit(self, called: Callable[..., None], *arguments: Any) -> Future[None]:
        done: Future[None] = Future()
        try:
            done.set_result(called(*arguments))
        except Exception as error:
            done.set_exception(error)
        return done

    def shutdown(self, **_: Any) -> None:
        pass


def done_at_once(pool: object, job: Job, drop: Job) -> bool:
    """Instead of `ThreadPool.submit`."""
    job()
    return True


class Remote(RemoteTier[StoreNode]):
    """Three nodes that are dictionaries, and fail in every way now and then."""

    def __init__(self, run: Run) -> None:
        super().__init__("remote", max_value_bytes=50_000)
        self.stale = StaleKeys(clock=lambda: run.now)
        self._run = run
        self._held: dict[str, dict[bytes, bytes]] = {}
        self.nodes = []
        for number, name in enumerate(("one", "two", "three")):
            breaker = Breaker(proven=number != 1, clock=lambda: run.now)
            self.nodes.append(StoreNode(name, 1, breaker))
            self.nodes[-1].threads.shutdown()
            self.nodes[-1].threads = AtOnce()  # type: ignore[assignment]
            self._held[name] = {}

    def _nodes(self) -> list[StoreNode]:
        return self.nodes

    def _node_of(self, key: bytes) -> StoreNode:
        return self.nodes[key[-1] % 3]

    def _probe(self, node: StoreNode) -> None:
        if self._run.rng.random() < 0.6:
            raise OSError(self._run.rng.choice(("still down", "")))

    def _trouble(self) -> None:
        self._run.wait(self._run.rng.choice((0.0, 0.001, 0.015)))
        chosen = self._run.rng.random()
        if chosen < 0.04:
            self._run.wait(self._run.rng.choice((0.001, 0.004, 0.5)))
            raise TimeoutError
        if chosen < 0.07:
            raise NodeError("it restarts")

    def _serve_each(self, share: Share[StoreNode], serve: Callable[[dict[bytes, bytes], bytes, int], Outcome]) -> None:
        held = self._held[share.node.name]
        with share.node.asking():
            for at, each in enumerate(share.keys):
                self._trouble()
                share.seconds_left()
                share.outcomes[at] = serve(held, each, at)

    def _find_share(self, share: Share[StoreNode]) -> None:
        self._serve_each(share, lambda held, each, at: Outcome.OK if each in held else Outcome.MISS)

    def _load_share(self, share: Share[StoreNode]) -> None:
        def serve(held: dict[bytes, bytes], each: bytes, at: int) -> Outcome:
            found, view = held.get(each), share.views[at]
            if found is None or len(found) > view.nbytes or self._run.rng.random() < 0.1:
                self.stale.add(each)
                return Outcome.MISS
            view[: len(found)] = found
            self.left_unfilled(view.nbytes - len(found))
            return Outcome.OK

        self._serve_each(share, serve)

    def _store_share(self, share: Share[StoreNode]) -> None:
        def serve(held: dict[bytes, bytes], each: bytes, at: int) -> Outcome:
            if share.node.is_full():
                return Outcome.REFUSED
            if self._run.rng.random() < 0.1:
                share.node.refused()
                return Outcome.REFUSED
            held[each] = bytes(share.views[at])
            self.stale.discard(each)
            return Outcome.OK

        self._serve_each(share, serve)

    def _remove_share(self, share: Share[StoreNode]) -> None:
        self._serve_each(share, lambda held, each, at: Outcome.MISS if held.pop(each, None) is None else Outcome.OK)

    def _purge_share(self, purging: Purging[StoreNode]) -> None:
        held = self._held[purging.node.name]
        with purging.node.asking():
            for each in [each for each in held if purging.pattern.matches(each)]:
                self._trouble()
                purging.seconds_left()
                if self._run.rng.random() < 0.1:
                    purging.num_left += 1
                    continue
                del held[each]
                purging.removed += 1

    def _list_node(self, node: StoreNode, deadline: float) -> Iterator[dict[bytes, int]]:
        for each, found in self._held[node.name].items():
            self._trouble()
            yield {each: len(found)}


# --- what was written down -------------------------------------------------------------------------------------------

Cases = Mapping[str, Callable[[Run], None]]


def said(name: str, cases: Cases) -> list[str]:
    """What the steps of a case say."""
    with tempfile.TemporaryDirectory() as folder, Run(name, Path(folder)).going() as run:
        cases[name](run)
        return run.said


def letters(lines: Sequence[str]) -> str:
    """One letter for each step; from the first that is else on, all are."""
    digest, found = hashlib.sha256(), ""
    for line in lines:
        digest.update(line.encode())
        found += digest.hexdigest()[0]
    return found


def assert_same(name: str, cases: Cases, written: Path) -> None:
    before = dict(line.rsplit(" ", 1) for line in written.read_text().splitlines())[name]
    lines = said(name, cases)
    now = letters(lines)
    changed = next((at for at, letter in enumerate(now) if letter != before[at : at + 1]), len(now) - 1)
    assert now == before, f"{name!r} differs at step {changed} or before; is that meant? It said: {lines[changed]}"


def write_down(cases: Cases, written: Path) -> None:
    """Writes the letters of all cases, or prints what the steps of a case say that is named on the command line."""
    if sys.argv[1:]:
        print("\n".join(said(sys.argv[1], cases)))
    else:
        written.write_text("".join(f"{name} {letters(said(name, cases))}\n" for name in cases))
