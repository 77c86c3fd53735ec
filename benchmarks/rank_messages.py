"""What a step costs between the ranks of a divided model: the bytes of its message, and the time of both sides.

    python benchmarks/rank_messages.py --sequences 256 --context 1024 --ranks 2

A real scheduler plans decode steps. Rank 0 writes each step into shared memory and tells the other ranks, or sends it over
their sockets, in turn. Other processes receive and decode it. A step of 5 ms may spend 100 µs (2 %) on rank 0.
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
from kvpool.engine.ranks import END, PLACE, STEP, STEP_AT, Channel, Ranks
from kvpool.engine.step_memory import StepMemory
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
    """Processes that only read steps."""

    def __init__(self, size: int) -> None:
        self.size, self.channels, self._memory = size, [], StepMemory(size)
        context = multiprocessing.get_context("fork")
        self.answers = context.SimpleQueue()
        self.children = []
        for rank in range(1, size):
            ours, theirs = socket.socketpair()
            self.channels.append(Channel(ours, 60.0))
            process = context.Process(target=follow, args=(rank, theirs, self._memory, self.answers))
            process.start()
            self.children.append(process)


def follow(rank: int, connection: socket.socket, memory: StepMemory, answers: Any) -> None:
    """Another rank: reads steps until the end, and says how long each way took."""
    channel = Channel(connection, None)
    seconds: dict[bytes, list[float]] = {STEP: [], STEP_AT: []}
    while True:
        kind, message = channel.receive()
        if kind == END:
            answers.put([statistics.median(each) for each in seconds.values()])
            return
        began = time.perf_counter()
        if kind == STEP_AT:
            message = memory.read(rank, *PLACE.unpack(message))
        decode(message)
        seconds[kind].append(time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--ranks", type=int, default=2)
    options = parser.parse_args()
    scheduler = decoding(options.sequences, options.context, options.block_size)
    others, size = Others(options.ranks), 0
    shared, nowhere = others._memory, StepMemory(options.ranks)
    nowhere.close()  # so that it has no room
    wall: dict[bool, list[float]] = {True: [], False: []}
    cpu: dict[bool, list[float]] = {True: [], False: []}
    for number in range(options.steps):
        plan, in_memory = scheduler.step(), number % 2 == 0
        lists = make_lists(plan, 1)  # which rank 0 needs for its own part of the step, as the next number
        assert not plan.has_unknown_tokens
        others._memory = shared if in_memory else nowhere
        began, began_cpu = time.perf_counter(), time.thread_time()
        step = StepInputs(plan.copies, plan)
        others.tell_step(partial(encode, step, lists))
        cpu[in_memory].append(time.thread_time() - began_cpu)
        wall[in_memory].append(time.perf_counter() - began)
        size = encode(step, lists, lambda count: np.empty(count, np.int32)).nbytes
        finish(scheduler, plan)
        time.sleep(0.002)  # as between two steps: the other ranks have read the message
    others.tell_all(END)
    decoded = others.answers.get()
    for process in others.children:
        process.join()
    print(f"{options.sequences} sequences of {options.context} tokens, one layer group: {size} bytes a step")
    for in_memory, name, theirs in ((True, "shared memory", decoded[1]), (False, "sockets", decoded[0])):
        on_cpu = statistics.median(cpu[in_memory])
        median, fast = statistics.median(wall[in_memory]), sorted(wall[in_memory])[len(wall[in_memory]) // 10]
        print(
            f"{name}: {1e6 * median:.0f} µs on rank 0 for {options.ranks - 1} other ranks, {1e6 * fast:.0f} µs in the "
            f"fastest tenth, {1e6 * on_cpu:.0f} µs of its CPU; {1e6 * theirs:.0f} µs on another rank; "
            f"{median / 5e-3:.1%} of a step of 5 ms"
        )


if __name__ == "__main__":
    main()
