"""What a step costs between the ranks of a divided model: the bytes of its message, and the time of both sides.

    python benchmarks/rank_messages.py --sequences 256 --context 1024

A real scheduler plans decode steps. Rank 0 encodes a step and sends it, another process receives and decodes it. A step of
5 ms may spend 100 µs (2 %) on rank 0.
"""

from __future__ import annotations

import argparse
import multiprocessing
import socket
import statistics
import time
from typing import Any

import numpy as np

from kvpool import KVCacheConfig, KVCacheManager, LayerSpec
from kvpool.engine.ranks import END, STEP, Channel
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


def follow(connection: socket.socket, answers: Any) -> None:
    """The other rank: decodes steps until the end, and says how long each took."""
    channel = Channel(connection, None)
    seconds: list[float] = []
    while True:
        kind, message = channel.receive()
        if kind == END:
            answers.put(statistics.median(seconds))
            return
        began = time.perf_counter()
        decode(message)
        seconds.append(time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    scheduler = decoding(options.sequences, options.context, options.block_size)
    ours, theirs = socket.socketpair()
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    process = context.Process(target=follow, args=(theirs, answers))
    process.start()
    channel, size = Channel(ours, 60.0), 0
    encoding, sending = [], []
    for _ in range(options.steps):
        plan = scheduler.step()
        lists = make_lists(plan, 1)  # which rank 0 needs for its own part of the step
        began = time.perf_counter()
        message = encode(StepInputs(plan.copies, plan), lists)
        encoded = time.perf_counter()
        channel.send(STEP, message)
        sent = time.perf_counter()
        size = len(message)
        encoding.append(encoded - began)
        sending.append(sent - encoded)
        finish(scheduler, plan)
        time.sleep(0.002)  # as between two steps: the other rank has read the message
    channel.send(END)
    decoded = answers.get()
    process.join()
    fast = [1e6 * sorted(values)[len(values) // 10] for values in (encoding, sending)]
    medians = [1e6 * statistics.median(values) for values in (encoding, sending)]
    print(f"{options.sequences} sequences of {options.context} tokens, one layer group: {size} bytes a step")
    print(f"rank 0: {medians[0]:.0f} µs to encode, {medians[1]:.0f} µs to send to one rank (medians)")
    print(f"the other rank: {1e6 * decoded:.0f} µs to decode")
    print(f"{sum(medians) / 5e3:.1%} of a step of 5 ms; {sum(fast) / 5e3:.1%} in the fastest tenth of the steps")


if __name__ == "__main__":
    main()
