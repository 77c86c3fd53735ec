"""What a cluster costs its router: looking a prompt up, following events, deciding.

    python benchmarks/cluster.py [--json FILE] [--check] [--quick] [--only WORD]

The index holds a million blocks of 16 tokens on 16 nodes; of every second prompt, half of the nodes have the first half only.
A lookup is all of `ClusterIndex.match`, from token ids in an array to the hits of every node: keys of the blocks, the way
through the index, lengths by node and medium. Memory is what Python's allocators handed out (tracemalloc), at its worst while
an index grows.
"""

from __future__ import annotations

import sys
import time
import tracemalloc
from functools import cache
from typing import Any

import numpy as np

import harness
import kvpool
from harness import Case, Runner, freeze_heap, random_tokens
from kvpool.cluster.index import ClusterIndex
from kvpool.cluster.router import Router
from kvpool.cluster.translator import WireTranslator, group_names
from kvpool.cluster.wire_events import BlockRemoved, BlockStored

SIZE = 16
NODES = 16
PROMPT_BLOCKS = 128
TURNS = 8
AT_ONCE = 200


def hashes_of(prompt: int, first: int, last: int) -> list[int]:
    return list(range(prompt * PROMPT_BLOCKS + first + 1, prompt * PROMPT_BLOCKS + last + 1))


def stored(prompt: int, tokens: Any, first: int, last: int) -> BlockStored:
    """Blocks `first..last` of a prompt, as a node announces them."""
    parent = hashes_of(prompt, first - 1, first)[0] if first else None
    return BlockStored(hashes_of(prompt, first, last), parent, tokens[first * SIZE : last * SIZE].tolist(), SIZE)


@cache
def full_index(num_blocks: int, turns: int) -> tuple[ClusterIndex, Any]:
    """Prompts that were announced in as many pieces as they have turns, one piece of all prompts after the other."""
    index = ClusterIndex(SIZE, seed=1)
    for node in range(NODES):
        index.add_node(node)
    prompts = random_tokens(0, num_blocks // PROMPT_BLOCKS, PROMPT_BLOCKS * SIZE)
    step = PROMPT_BLOCKS // turns
    for first in range(0, PROMPT_BLOCKS, step):
        for number, tokens in enumerate(prompts):
            event = stored(number, tokens, first, first + step)
            last = min(first + step, PROMPT_BLOCKS // 2)
            half = stored(number, tokens, first, last) if first < last else None
            for node in range(NODES):
                if number % 2 == 0 or node % 2:
                    index.apply(node, [event])
                elif half is not None:
                    index.apply(node, [half])
    return index, prompts


def timed(operation: Any, inputs: Any) -> list[float]:
    """Microseconds of CPU time of each call."""
    found = []
    for each in inputs:
        start = time.thread_time_ns()
        operation(each)
        found.append((time.thread_time_ns() - start) / 1e3)
    return found


def lookup(num_blocks: int, turns: int = 1, *, is_cached: bool = True) -> Runner:
    index, prompts = full_index(num_blocks, turns)
    chosen = prompts[np.random.default_rng(2).integers(0, len(prompts), AT_ONCE)]
    if not is_cached:
        chosen = chosen + 1
    hits = index.match(chosen[0])
    assert len(hits) == (NODES if is_cached else 0)
    freeze_heap()
    return lambda: timed(index.match, chosen)


def follow(num_blocks: int) -> Runner:
    """Microseconds a block: one is stored and removed again, in events of a whole prompt."""
    index, prompts = full_index(num_blocks, 1)
    new = random_tokens(3, 50, PROMPT_BLOCKS * SIZE)
    events = [
        (
            stored(len(prompts) + at, tokens, 0, PROMPT_BLOCKS),
            BlockRemoved(hashes_of(len(prompts) + at, 0, PROMPT_BLOCKS)),
        )
        for at, tokens in enumerate(new)
    ]
    freeze_heap()
    return lambda: [each / PROMPT_BLOCKS for each in timed(lambda pair: index.apply(3, pair), events)]


def decide(num_blocks: int) -> Runner:
    """Microseconds a decision, with a session each, while requests begin and end."""
    index, prompts = full_index(num_blocks, 1)
    router = Router(index)
    for node in range(NODES):
        router.add_node(node)
    rng = np.random.default_rng(4)
    running: list[Any] = []
    freeze_heap()

    def one(number: int) -> None:
        route = router.route(prompts[number], session=number)
        running.append(route)
        route.first_token()
        if len(running) > 8 * NODES:
            running.pop(0).end()

    return lambda: timed(one, rng.integers(0, len(prompts), AT_ONCE).tolist())


def bytes_indexed(num_blocks: int, *, named: bool = False) -> Runner:
    """The most that a block takes while an index grows to this size from an eighth of it, in bytes.

    `named` counts instead what one more node takes for each block that it calls otherwise than the first.
    """
    index = ClusterIndex(SIZE, seed=1)
    for node in range(2):
        index.add_node(node)
    prompts = random_tokens(0, num_blocks // PROMPT_BLOCKS, PROMPT_BLOCKS * SIZE)
    first, worst = len(prompts) // 8, 0.0
    if named:
        for number, tokens in enumerate(prompts):
            index.apply(0, [stored(number, tokens, 0, PROMPT_BLOCKS)])
    tracemalloc.start()
    for number, tokens in enumerate(prompts, 1):
        index.apply(1, [stored(number + len(prompts), tokens, 0, PROMPT_BLOCKS)])
        if number > first:
            worst = max(worst, tracemalloc.get_traced_memory()[0] / number / PROMPT_BLOCKS)
    tracemalloc.stop()
    return lambda: [worst]


def bytes_published(num_blocks: int) -> Runner:
    """What a publisher keeps for a block that is cached, in bytes."""
    config = kvpool.KVCacheConfig([kvpool.LayerSpec(kv_heads=1, head_dim=8)], SIZE, gpu_blocks=num_blocks)
    manager = kvpool.KVCacheManager(config)
    subscription, translator = manager.subscribe(), WireTranslator(group_names(config))
    tracemalloc.start()
    translated = 0
    for number, tokens in enumerate(random_tokens(0, num_blocks // PROMPT_BLOCKS, PROMPT_BLOCKS * SIZE)):
        handle = manager.allocate(number, tokens)
        manager.commit(handle, len(tokens) - handle.num_cached_tokens)
        manager.free(handle)
        before = tracemalloc.get_traced_memory()[0]
        translator.translate(subscription.poll().events)
        translated += tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    return lambda: [translated / translator.num_blocks]


def cases(quick: bool) -> list[Case]:
    """All cases, in the order of the table."""
    million, router_blocks = (20_000, 20_000) if quick else (1_000_000, 1_600_000)
    size = f"{million:,} blocks x {NODES} nodes"
    tokens = PROMPT_BLOCKS * SIZE
    once: dict[str, Any] = {"repeats": 1, "warmups": 0}
    return [
        Case(f"look up {tokens} tokens, {size}", "µs", "lower", lambda: lookup(million), (50.0,)),
        Case(f"the same, announced in {TURNS} turns", "µs", "lower", lambda: lookup(million, TURNS)),
        Case("the same, cached nowhere", "µs", "lower", lambda: lookup(million, is_cached=False)),
        Case("follow a block stored and removed", "µs", "lower", lambda: follow(million)),
        Case(
            "memory of a block, on any number of nodes",
            "bytes",
            "lower",
            lambda: bytes_indexed(million),
            (180.0,),
            **once,
        ),
        Case(
            "more, for a node with names of its own",
            "bytes",
            "lower",
            lambda: bytes_indexed(million, named=True),
            **once,
        ),
        Case("kept by the publisher of a block", "bytes", "lower", lambda: bytes_published(million // 5), **once),
        Case(
            f"decide, {NODES} nodes, {router_blocks:,} blocks", "µs", "lower", lambda: decide(router_blocks), (500.0,)
        ),
    ]


if __name__ == "__main__":
    options = harness.argument_parser(__doc__.splitlines()[0]).parse_args()
    versions = {"kvpool": getattr(kvpool, "__version__", "from source")}
    sys.exit(harness.main(cases(options.quick), [], options, versions))
