"""What a step costs between the ranks of a divided model: the bytes of its message, and the time of both sides.

    python benchmarks/rank_messages.py --sequences 256 --context 1024 --ranks 2

A real scheduler plans decode steps. Rank 0 writes each step into shared memory and tells the ranks of its machine, or sends
it over TCP, as to ranks on other machines, in turn. Other processes receive and decode it; here, TCP stays on the loopback
interface. A step of 5 ms may spend 100 µs (2 %) on rank 0.
"""

from __future__ import annotations

import argparse
import multiprocessing
import socket
import statistics
import time
from functools import partial
from typing import Any

import numpy as np

from kvpool import KVCacheConfig, KVCacheManager, LayerSpec
from kvpool.engine.rank_channel import END, Channel, StepMemory
from kvpool.engine.rank_meeting import listener_at, watch_link
from kvpool.engine.ranks import Ranks
from kvpool.engine.step_message import StepInputs, decode, encode, make_lists
from kvpool.scheduling import BatchPlan, Request, Scheduler, SchedulerConfig


def decoding(num_sequences: int, context: int, block_size: int) -> Scheduler:
    """A scheduler all of whose sequences decode behind `context` tokens of their own."""
    blocks = num_sequences * (context // block_size + 16)
    manager = KVCacheManager(KVCacheConfig([LayerSpec(8, 128)] * 32, block_size, gpu_blocks=blocks))
    scheduler = Scheduler(manager, SchedulerConfig(max_sequences=num_sequences, max_tokens_per_step=8192))
    numbers = np.random.default_rng(0)
    for number in range(num_sequences):
        prompt = numbers.integers(0, 100_000, context)
        scheduler.add(Request(number, prompt, max_new_tokens=10_000))
    while True:
        plan = scheduler.step()
        if plan.num_decode == num_sequences:
            return finish(scheduler, plan)
        finish(scheduler, plan)


def finish(scheduler: Scheduler, plan: BatchPlan) -> Scheduler:
    scheduler.complete(plan, np.full(len(plan.sampling_rows), 7, np.int32))
    return scheduler


class Others(Ranks):
    """Processes that only read steps, on this machine or as if they were on another one."""

    def __init__(self, size: int, *, elsewhere: bool) -> None:
        self.size, self.channels, self.machines, self._memory = size, [], [], StepMemory(size)
        context = multiprocessing.get_context("fork")
        self.answers = context.SimpleQueue()
        self.children = []
        for rank in range(1, size):
            ours, theirs = tcp_pair() if elsewhere else socket.socketpair()
            watch_link(ours, 60.0)
            process = context.Process(target=follow, args=(size, rank, theirs, self.answers))
            process.start()
            self.channels.append(Channel(ours, 60.0))
            self.channels[-1].give_memory(self._memory, rank)
            self.children.append(process)

    def end(self) -> float:
        """Ends them; returns how many seconds of its CPU one of them took for a step."""
        self.tell_all(END)
        seconds: float = self.answers.get()
        for process in self.children:
            process.join()
        return seconds


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with listener_at("127.0.0.1") as listener:
        ours = socket.create_connection(listener.getsockname())
        return ours, listener.accept()[0]


def follow(size: int, rank: int, connection: socket.socket, answers: Any) -> None:
    """Another rank: reads steps until the end, and says how much of its CPU one took."""
    channel = Channel(connection, None)
    channel.take_memory(size, rank)
    seconds: list[float] = []
    while True:
        began = time.thread_time()
        kind, message = channel.receive()
        if kind == END:
            answers.put(statistics.median(seconds))
            return
        decode(message)
        seconds.append(time.thread_time() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--ranks", type=int, default=2)
    options = parser.parse_args()
    scheduler = decoding(options.sequences, options.context, options.block_size)
    ways = {"shared memory": Others(options.ranks, elsewhere=False), "TCP": Others(options.ranks, elsewhere=True)}
    wall: dict[str, list[float]] = {name: [] for name in ways}
    cpu: dict[str, list[float]] = {name: [] for name in ways}
    size = 0
    for number in range(options.steps):
        plan, name = scheduler.step(), list(ways)[number % 2]
        lists = make_lists(
            plan, scheduler.manager.config.groups
        )  # which rank 0 needs for its own part of the step, as the next number
        assert not plan.has_unknown_tokens
        began, began_cpu = time.perf_counter(), time.thread_time()
        step = StepInputs(plan.copies, plan)
        ways[name].tell_step(partial(encode, step, lists))
        cpu[name].append(time.thread_time() - began_cpu)
        wall[name].append(time.perf_counter() - began)
        size = encode(step, lists, lambda count: np.empty(count, np.int32)).nbytes
        finish(scheduler, plan)
        time.sleep(0.002)  # as between two steps: the other ranks have read the message
    print(f"{options.sequences} sequences of {options.context} tokens, one layer group: {size} bytes a step")
    for name, others in ways.items():
        median, fast = statistics.median(wall[name]), sorted(wall[name])[len(wall[name]) // 10]
        on_cpu = statistics.median(cpu[name])
        print(
            f"{name}: {1e6 * median:.0f} µs on rank 0 for {options.ranks - 1} other ranks, {1e6 * fast:.0f} µs in the "
            f"fastest tenth, {1e6 * on_cpu:.0f} µs of its CPU ({on_cpu / 5e-3:.1%} of a step of 5 ms); "
            f"{1e6 * others.end():.0f} µs of the CPU of another rank"
        )


if __name__ == "__main__":
    main()
