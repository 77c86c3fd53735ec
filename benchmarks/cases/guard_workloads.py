"""Made-up traffic against which eviction policies are guarded; none of it is used to choose anything about a policy.

A workload is a set of *clients*, generators that ask a prompt and yield how many seconds they wait before they go on. `Desk`
runs them in the order of time and gives prompts their block ids: equal prefixes of whole blocks get equal ids, a partial
end gets one of its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from heapq import heappop, heappush

import numpy as np

from kvpool.replay.trace import Trace, TraceBuilder

Client = Iterator[float]
HOUR = 3600.0


class Desk:
    """Where clients ask. `seconds` is the time, `random` the only source of chance."""

    def __init__(self, name: str, block_size: int, seed: int, num_requests: int) -> None:
        self.random = np.random.default_rng(seed)
        self.seconds = 0.0
        self.block_size = block_size
        self._builder = TraceBuilder(name, unit=block_size, format="synthetic")
        self._num_requests = num_requests
        self._waiting: list[tuple[float, int, Client]] = []
        self._serials = itertools.count()
        self._ids = itertools.count()
        self._id_of: dict[tuple[int, object], int] = {}

    def start(self, client: Client, after: float = 0.0) -> None:
        """A client comes, now or later."""
        heappush(self._waiting, (self.seconds + after, next(self._serials), client))

    def run(self) -> Trace:
        """Lets clients ask until there are enough requests, or none of them is left."""
        while self._waiting and len(self._builder) < self._num_requests:
            self.seconds, _, client = heappop(self._waiting)
            wait = next(client, None)
            if wait is not None:
                self.start(client, wait)
        return self._builder.build()

    def ask(self, prompt: Prompt, stop: str | None = None) -> None:
        """One request."""
        ids = prompt.ids if prompt.num_tokens % self.block_size == 0 else [*prompt.ids, next(self._ids)]
        self._builder.add(self.seconds * 1000, ids, prompt.num_tokens, 100, stop=stop)

    def block(self, before: int, content: object) -> int:
        """The id of a block with this content behind another one; content that is None is like no other."""
        if content is None:
            return next(self._ids)
        return self._id_of.setdefault((before, content), len(self._id_of) + 2**30)

    def tokens(self, median: float, spread: float = 0.9) -> int:
        """A number of tokens whose logarithm is normal, at most 40 times the median."""
        return 1 + int(min(median * self.random.lognormal(0, spread), 40 * median))

    def zipf(self, count: int, skew: float = 1.0) -> int:
        """One of so many things, by popularity."""
        weights = np.arange(1, count + 1) ** -skew
        return int(self.random.choice(count, p=weights / weights.sum()))

    def pause(self, median: float, spread: float) -> float:
        """Seconds whose logarithm is normal."""
        return float(median * self.random.lognormal(0, spread))


class Prompt:
    """What a client sends: it only grows. Content with a name is shared by all who say it at the same place."""

    def __init__(self, desk: Desk) -> None:
        self.desk, self.ids, self.num_tokens = desk, list[int](), 0

    def say(self, num_tokens: int, name: object = None) -> Prompt:
        self.num_tokens += num_tokens
        block_size, ids = self.desk.block_size, self.ids
        while (len(ids) + 1) * block_size <= self.num_tokens:
            content = None if name is None else (name, len(ids))
            ids.append(self.desk.block(ids[-1] if ids else -1, content))
        return self


def _arrivals(desk: Desk, gap: Callable[[], float], client: Callable[[], Client]) -> Client:
    """New clients come for ever."""
    while True:
        desk.start(client())
        yield gap()


def _chat(desk: Desk, systems: int, goes_on: float, think: float, spread: float, first: float = 900) -> Client:
    """A conversation below one of the shared system prompts; people who talk longer are likelier to go on."""
    system = desk.zipf(systems)
    prompt = Prompt(desk).say(200 + 97 * system % 1800, system)
    prompt.say(desk.tokens(first))
    for turn in itertools.count():
        desk.ask(prompt)
        if desk.random.random() > goes_on + (1 - goes_on) * 0.6 * (1 - 0.7**turn):
            return
        prompt.say(desk.tokens(350) + desk.tokens(60))
        yield desk.pause(think, spread)


def _once(desk: Desk, median: float, stop: str | None = None) -> Client:
    """A prompt that nobody repeats."""
    desk.ask(Prompt(desk).say(desk.tokens(median)), stop)
    return
    yield


def _agent(desk: Desk, tools: int) -> Client:
    """A task: short waits for tools, now and then a long one for a person, and a fresh context when it is too long."""
    tool = desk.zipf(tools, 0.7)
    for _ in range(1 + desk.random.geometric(0.3)):
        prompt = Prompt(desk).say(3000 + 500 * tool, ("agent", tool))
        for _ in range(1 + desk.random.geometric(0.12)):
            prompt.say(desk.tokens(600, 1.1))
            waits = desk.random.random() < 0.88
            desk.ask(prompt, "tool_calls" if waits else "stop")
            yield desk.pause(4, 1.0) if waits else desk.pause(240, 1.4)


def _rag(desk: Desk, documents: int) -> Client:
    """A question about some of the documents, in the order in which a search found them."""
    prompt = Prompt(desk).say(700, "rag")
    for _ in range(int(desk.random.integers(1, 5))):
        document = desk.zipf(documents, 0.9)
        prompt.say(400 + 131 * document % 1500, ("document", document))
    desk.ask(prompt.say(desk.tokens(60)))
    return
    yield


def _circle(desk: Desk, num_prompts: int, blocks: int, every: float) -> Client:
    """The same prompts again and again, in the same order: the worst for LRU if they do not all fit."""
    for number in itertools.cycle(range(num_prompts)):
        desk.ask(Prompt(desk).say(blocks * desk.block_size, ("circle", number)))
        yield every


def _fashion(desk: Desk, every: float, period: float, things: int) -> Client:
    """A few prompts are used by everybody, until others are: the worst for what counts uses."""
    while True:
        thing = int(desk.seconds / period), desk.zipf(things, 0.8)
        desk.ask(Prompt(desk).say(1500, ("fashion", *thing)).say(desk.tokens(120)))
        yield desk.pause(every, 0.6)


def chat(desk: Desk) -> None:
    """People who talk, with system prompts of a few applications."""
    desk.start(_arrivals(desk, lambda: desk.pause(1.0, 1.0), lambda: _chat(desk, 60, 0.45, 60, 1.1)))


def public(desk: Desk) -> None:
    """A public chat: many who ask once, some who talk, pauses from seconds to hours, few shared prompts."""

    def visitor() -> Client:
        chance = desk.random.random()
        if chance < 0.3:
            return _once(desk, 500)
        return _chat(desk, 400, 0.55 if chance < 0.8 else 0.8, 90, 1.7, first=400 if chance < 0.9 else 4000)

    desk.start(_arrivals(desk, lambda: desk.pause(1.5, 1.2), visitor))


def scans(desk: Desk) -> None:
    """Conversations beside batches of long prompts that come once."""

    def batch() -> Client:
        for _ in range(int(desk.random.integers(20, 120))):
            yield from _once(desk, 3000)
            yield 0.3

    desk.start(_arrivals(desk, lambda: desk.pause(3.0, 1.0), lambda: _chat(desk, 20, 0.6, 40, 1.0)))
    desk.start(_arrivals(desk, lambda: desk.pause(200, 0.8), batch))


def agents(desk: Desk) -> None:
    """Coding agents that say why they stop."""
    desk.start(_arrivals(desk, lambda: desk.pause(12, 1.0), lambda: _agent(desk, 8)))


def rag(desk: Desk) -> None:
    """Questions about documents of a Zipf popularity."""
    desk.start(_arrivals(desk, lambda: desk.pause(0.5, 0.8), lambda: _rag(desk, 300)))


def loops(desk: Desk) -> None:
    """A circle of prompts, beside a little chat."""
    desk.start(_circle(desk, 400, 12, 0.7))
    desk.start(_arrivals(desk, lambda: desk.pause(6.0, 1.0), lambda: _chat(desk, 10, 0.4, 30, 1.0)))


def fashions(desk: Desk) -> None:
    """Prompts that are in use for ten minutes, beside prompts that come once."""
    desk.start(_fashion(desk, 0.8, 600, 150))
    desk.start(_arrivals(desk, lambda: desk.pause(1.2, 0.8), lambda: _once(desk, 1500)))


def phases(desk: Desk) -> None:
    """Half an hour each: chat, questions about documents, agents, a circle; then again."""

    def kinds() -> Client:
        for phase in itertools.count():
            until = desk.seconds + HOUR / 2
            while desk.seconds < until:
                if phase % 4 == 0:
                    desk.start(_chat(desk, 40, 0.5, 60, 1.1))
                elif phase % 4 == 1:
                    desk.start(_rag(desk, 200))
                elif phase % 4 == 2:
                    desk.start(_agent(desk, 5))
                else:
                    number = int(desk.seconds / 2.0) % 200
                    desk.ask(Prompt(desk).say(3000, ("circle", phase, number)))
                yield desk.pause((2.5, 2.0, 30.0, 2.0)[phase % 4], 0.7)

    desk.start(kinds())


def diurnal(desk: Desk) -> None:
    """A day of an hour: people talk when it is light, batches run in the dark, and agents work all the time."""

    def light() -> float:
        return 0.5 + 0.5 * float(np.sin(2 * np.pi * desk.seconds / HOUR))

    def day() -> Client:
        while True:
            desk.start(_chat(desk, 80, 0.5, 80, 1.2))
            yield desk.pause(1.2, 0.8) / max(0.1, light())

    def night() -> Client:
        while True:
            desk.start(_once(desk, 2500, "stop"))
            yield desk.pause(1.5, 0.8) / max(0.1, 1 - light())

    desk.start(day())
    desk.start(night())
    desk.start(_arrivals(desk, lambda: desk.pause(60, 1.0), lambda: _agent(desk, 4)))


WORKLOADS: dict[str, Callable[[Desk], None]] = {
    made.__name__: made for made in (chat, public, scans, agents, rag, loops, fashions, phases, diurnal)
}


def workload(name: str, block_size: int, seed: int, num_requests: int) -> Trace:
    """A trace of one kind of traffic; the same arguments give the same one."""
    desk = Desk(f"{name} {block_size} #{seed}", block_size, seed, num_requests)
    WORKLOADS[name](desk)
    return desk.run()
