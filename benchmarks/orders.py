"""In which order should waiting requests be served? Four kinds of traffic in simulated time: the real scheduler and manager,
with the costs of an 8-billion-parameter model on one large GPU instead of the GPU.

    python benchmarks/orders.py                        every traffic and order: some minutes of a core
    python benchmarks/orders.py --only agents          the kinds of traffic whose name contains the word
    python benchmarks/orders.py --order fcfs --seed 7  one order, other traffic of the same kinds

`others` is how many requests went before one, over those that waited when it came and two more: the most of all requests.
The default order says that it is 4 at most.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from heapq import heappop, heappush
from itertools import count

import numpy as np
import numpy.typing as npt

from kvpool import KVCacheConfig, KVCacheManager, LayerSpec
from kvpool.scheduling import LinearCostModel, Request, Scheduler, SchedulerConfig

Tokens = npt.NDArray[np.int32]
Client = Iterator[tuple[Tokens, int] | float]  # asks (a prompt, tokens to generate), or waits for so many seconds
BLOCK_SIZE = 64
TOKEN_BYTES = 131_072
LAYER = LayerSpec(kv_heads=8, head_dim=TOKEN_BYTES // 32)  # one, as large as those of the model together
GPU_BYTES, HOST_BYTES = 8 << 30, 60 << 30
ORDERS = ("fcfs", "longest_prefix_match", "soonest_first_token")
COSTS = {  # of steps on an H200, as benchmarks/figures/engine.md has them, and of its link
    "prefill_seconds_per_token": 2.0e-5,
    "decode_seconds_per_step": 6e-3,
    "transfer_bytes_per_second": 5.5e10,
}
SAMPLED = 1


class Desk:
    """Runs clients against a scheduler. A client goes on when its answer is there."""

    def __init__(self, order: str | Callable[[], object], seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.now = 0.0
        config = KVCacheConfig(
            [LAYER], BLOCK_SIZE, gpu_bytes=GPU_BYTES, host_bytes=HOST_BYTES, event_buffer_size=0, watermark=0.0
        )
        self.manager = KVCacheManager(config, clock=lambda: self.now)
        self.costs = LinearCostModel(**COSTS)
        limits = SchedulerConfig(policy=order)  # type: ignore[arg-type]
        self.scheduler = Scheduler(self.manager, limits, self.costs, clock=lambda: self.now)
        self._waiting: list[tuple[float, int, Client]] = []
        self._serials = count()
        self._client_of: dict[object, Client] = {}
        self._arrived: dict[object, float] = {}  # of those without a first token
        self._found: dict[object, tuple[int, int]] = {}  # how many waited when a request came, and had been admitted
        self._num_admitted = 0
        self.first_token: list[float] = []
        self.others = 0.0

    def start(self, client: Client, after: float = 0.0) -> None:
        """A client comes, now or later."""
        heappush(self._waiting, (self.now + after, next(self._serials), client))

    def draw(self, num_tokens: int) -> Tokens:
        """Tokens like no others."""
        return self.random.integers(2, 2**30, num_tokens, np.int32)

    def run(self) -> None:
        """Everything, until no client is left."""
        while self._waiting or self.scheduler.has_work:
            while self._waiting and self._waiting[0][0] <= self.now:
                self._go_on(heappop(self._waiting)[2])
            if self.scheduler.has_work:
                self._step()
            elif self._waiting:
                self.now = max(self.now, self._waiting[0][0])

    def _go_on(self, client: Client) -> None:
        wants = next(client, None)
        if isinstance(wants, float):
            self.start(client, wants)
        elif wants is not None:
            prompt, num_generated = wants
            name = next(self._serials)
            self._client_of[name] = client
            self._arrived[name] = self.now
            self._found[name] = self.scheduler.num_waiting, self._num_admitted
            self.scheduler.add(Request(name, prompt, num_generated))

    def _step(self) -> None:
        plan = self.scheduler.step()
        for sequence in plan.admitted:
            found = self._found.pop(sequence.request.id, None)
            if found is not None:
                num_waiting, num_before = found
                self.others = max(self.others, (self._num_admitted - num_before) / (num_waiting + 2))
                self._num_admitted += 1
        self.now += max(plan.seconds(self.costs, self.manager.config), 1e-6)
        for row in plan.sampling_rows.tolist():
            arrived = self._arrived.pop(plan.sequences[row].request.id, None)
            if arrived is not None:
                self.first_token.append(self.now - arrived)
        result = self.scheduler.complete(plan, [SAMPLED] * int(plan.num_samples.sum()))
        for done in result.finished:
            self._go_on(self._client_of.pop(done.request.id))


def conversations(desk: Desk) -> None:
    """96 people begin at once and take three turns each, with all that was said before them."""
    system = desk.draw(1500)

    def person() -> Client:
        said = system
        for _ in range(3):
            said = np.concatenate([said, desk.draw(int(desk.random.integers(100, 1500)))])
            yield said, 100
            said = np.concatenate([said, np.full(99, SAMPLED, np.int32)])

    for _ in range(96):
        desk.start(person())


def agents(desk: Desk) -> None:
    """40 coding agents come in half a minute. Each calls tools for a second or two between its fifteen requests."""
    system = desk.draw(3000)

    def agent() -> Client:
        said = system
        for _ in range(15):
            said = np.concatenate([said, desk.draw(int(100 + desk.random.exponential(900)))])
            yield said, 60
            said = np.concatenate([said, np.full(59, SAMPLED, np.int32)])
            yield float(desk.random.lognormal(0.3, 0.8))

    for _ in range(40):
        desk.start(agent(), float(desk.random.uniform(0, 30)))


def documents(desk: Desk) -> None:
    """Questions about 60 documents of a Zipf popularity, which come as they like, at times too many."""
    texts = [desk.draw(int(length)) for length in desk.random.integers(2000, 12_000, 60)]
    popularity = np.arange(1, 61) ** -0.9

    def question() -> Client:
        text = texts[int(desk.random.choice(60, p=popularity / popularity.sum()))]
        yield np.concatenate([text, desk.draw(int(desk.random.integers(20, 200)))]), 150

    at = 0.0
    for _ in range(400):
        at += float(desk.random.exponential(0.085))
        desk.start(question(), at)


def long_and_short(desk: Desk) -> None:
    """Short questions that nobody repeats, a sixth of them with 16,000 tokens to read first: these must not starve."""

    def question(num_tokens: int) -> Client:
        yield desk.draw(num_tokens), 80

    at = 0.0
    for _ in range(400):
        at += float(desk.random.exponential(0.09))
        is_long = desk.random.random() < 1 / 6
        desk.start(
            question(int(desk.random.integers(12_000, 20_000) if is_long else desk.random.integers(50, 800))), at
        )


TRAFFIC = (conversations, agents, documents, long_and_short)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", metavar="WORD", default="", help="kinds of traffic whose name contains the word")
    parser.add_argument("--order", action="append", help="a scheduling policy; may be given again")
    parser.add_argument("--seed", type=int, default=1, help="of the traffic")
    options = parser.parse_args()
    print(
        f"{'traffic':16} {'order':22} {'first token p50':>15} {'p90':>7} {'p99':>7} {'longest':>8} {'whole':>7} {'others':>7}"
    )
    for traffic in TRAFFIC:
        if options.only not in traffic.__name__:
            continue
        for order in options.order or ORDERS:
            desk = Desk(order, options.seed)
            traffic(desk)
            desk.run()
            p50, p90, p99, most = np.quantile(desk.first_token, [0.5, 0.9, 0.99, 1.0]).tolist()
            print(
                f"{traffic.__name__:16} {order:22} {p50:13.2f} s {p90:6.2f}s {p99:6.2f}s {most:7.2f}s {desk.now:6.1f}s "
                f"{desk.others:7.1f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
