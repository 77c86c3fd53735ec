"""A 30-second tour of the manager in the terminal: `python examples/demos/tour.py` (or `make tour`).

Every scene runs the real manager, draws its pool and prints what it counted. Nothing here is simulated.
"""

from __future__ import annotations

import argparse
import io
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvpool.config import KVCacheConfig, LayerSpec, Tier
from kvpool.core.handle import KVCacheHandle, SequenceBatch
from kvpool.manager import KVCacheManager
from kvpool.manager.guard import PressureChange
from kvpool.pools.arrays import Int32Array

COLOURS = (36, 35, 32, 34, 33, 31, 96, 95, 92, 94)
SYSTEM = list(range(96))  # a system prompt that requests share: 6 blocks


@dataclass
class Screen:
    """Where the tour is shown: colours and pauses only on a terminal."""

    colour: bool
    pause_seconds: float
    width: int = 32

    def paint(self, text: str, code: int) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if self.colour else text

    def scene(self, number: int, title: str, first: str, second: str) -> None:
        """A heading and two lines of explanation."""
        print()
        print(self.paint(f"{number}. {title}", 1))
        print(f"   {first}")
        print(f"   {second}")

    def numbers(self, *facts: str) -> None:
        print("   " + self.paint("→ ", 1) + " · ".join(facts))
        sys.stdout.flush()
        time.sleep(self.pause_seconds)

    def cell(self, symbol: str) -> str:
        """One block: letters in the colour of their owner, cached ones dim."""
        if symbol == ".":
            return self.paint(symbol, 90)
        if symbol in "#*":
            return self.paint(symbol, 1)
        code = COLOURS[(ord(symbol.upper()) - ord("A")) % len(COLOURS)]
        return self.paint(symbol, code) if symbol.isupper() else self.paint(self.paint(symbol, code), 2)


@dataclass
class Board:
    """Draws pool 0: `.` free, `A` in use by request A, `#` in use by several, `a` cached, `*` cached and pinned."""

    manager: KVCacheManager
    screen: Screen
    letters: dict[int, str] = field(default_factory=dict)  # who was last seen using a block

    def symbols(self) -> list[str]:
        """What to draw for every block of the pool, read from tables and tree."""
        symbols = ["."] * self.manager.inspect.num_blocks()
        for run in self.manager.inspect.runs():
            for ids in run.block_ids if run.tier == Tier.GPU else ():
                for block in ids[ids >= 0].tolist():
                    symbols[block] = "*" if run.is_pinned else self.letters.get(block, "o").lower()
        in_use: dict[int, str] = {}
        for handle in self.manager.handles:
            for group in range(len(self.manager.config.groups)):
                for block in handle.block_ids(group).tolist():
                    if block in in_use:
                        in_use[block] = "#"
                    elif block >= 0:
                        in_use[block] = self.letters[block] = self.letter(handle, group)
        for block, symbol in in_use.items():
            symbols[block] = symbol
        return symbols

    def letter(self, handle: KVCacheHandle, group: int) -> str:
        return str(handle.request_id)[group]  # one letter per layer group

    def draw(self, note: str) -> None:
        symbols, width = self.symbols(), self.screen.width
        for start in range(0, len(symbols), width):
            row = "".join(self.screen.cell(symbol) for symbol in symbols[start : start + width])
            print(f"     {row}   {note if not start else ''}".rstrip())


class Tour:
    """Scenes that share one manager of 64 blocks of 16 tokens, and two that bring their own."""

    def __init__(self, screen: Screen) -> None:
        self.screen = screen
        layers = [LayerSpec(kv_heads=8, head_dim=128)] * 32
        config = KVCacheConfig(layers, gpu_blocks=64, host_blocks=32, offload_on_evict=False, watermark=0.0)
        self.manager = KVCacheManager(config)
        self.board = Board(self.manager, screen)

    def run(self) -> None:
        self.shared_prefix()
        self.copy_on_write()
        self.decoding()
        self.finished()
        self.pressure()
        self.sliding_window()
        self.swapping()
        self.timing()

    def admit(self, name: str, tokens: Sequence[int]) -> KVCacheHandle:
        """Allocates a prompt and says that its keys and values are written."""
        handle = self.manager.allocate(name, tokens)
        self.manager.commit(handle, len(tokens) - handle.num_cached_tokens)
        return handle

    def shared_prefix(self) -> None:
        self.screen.scene(
            1,
            "Admission and a shared prefix",
            "Request A brings a system prompt of 96 tokens and 40 of its own. Once written, its blocks can be found.",
            "Request B starts with the same system prompt: it reads A's blocks and computes only the rest.",
        )
        first = self.admit("A", SYSTEM + list(range(1000, 1040)))
        self.board.draw("A alone")
        print()
        second = self.admit("B", SYSTEM + list(range(2000, 2060)))
        self.board.draw("# = read by A and B")
        used = self.manager.stats().pool().referenced
        self.screen.numbers(
            f"A {first.num_blocks} blocks",
            f"B {second.num_blocks} blocks, {second.num_cached_tokens} tokens from the cache",
            f"together {used} instead of {first.num_blocks + second.num_blocks}",
        )

    def copy_on_write(self) -> None:
        self.screen.scene(
            2,
            "A fork and its copies-on-write",
            "C and D continue A (parallel samples). A fork copies nothing: all three read the same 9 blocks.",
            "When they write, each gets its own copy of the one half-filled block; the last writer keeps the original.",
        )
        manager = self.manager
        before = manager.stats().pool().referenced
        children = manager.fork(manager.get("A"), "C", "D")
        self.board.draw("forked")
        after_fork = manager.stats().pool().referenced
        batch = manager.batch([manager.get("A"), *children])
        manager.extend_batch(batch)
        copies = manager.take_copies()
        manager.commit_batch(batch, [7, 8, 9])
        print()
        self.board.draw("each has written one token")
        pairs = ", ".join(f"{int(op.src[0])}→{int(op.dst[0])} ({op.num_tokens} tokens)" for op in copies)
        self.screen.numbers(f"the fork took {after_fork - before} blocks", f"copied {pairs}")

    def decoding(self) -> None:
        self.screen.scene(
            3,
            "Decoding a batch",
            "One call makes room for a token of every sequence and says where to write it; one call commits them.",
            "Only a sequence that crosses a block boundary takes a block; the kernel reads the manager's own table.",
        )
        manager = self.manager
        batch = manager.batch(manager.handles)
        before = manager.stats().pool().referenced
        slots = np.empty((1, len(batch)), np.int32)
        for step in range(40):
            manager.extend_batch(batch, out=slots)
            manager.commit_batch(batch, [5000 + step * 10 + i for i in range(len(batch))])
        self.board.draw("after 40 steps of A, B, C, D")
        table = batch.csr()
        self.screen.numbers(
            f"{before} → {manager.stats().pool().referenced} blocks in use",
            f"last slots {slots[0].tolist()}",
            f"CSR lists: {len(table.indices)} block ids, last blocks hold {table.last_page_len.tolist()} tokens",
        )

    def finished(self) -> None:
        self.screen.scene(
            4,
            "Finished, cached, found again",
            "All four end. Their full blocks stay (small letters): there for whoever needs them, found by content.",
            "Request E is A's conversation with one more question: only the question is computed.",
        )
        manager = self.manager
        conversation = manager.get("A").token_ids.tolist()
        manager.free_batch(manager.handles)
        self.board.draw("nobody runs")
        print()
        prompt = conversation + list(range(3000, 3020))
        handle = self.admit("E", prompt)
        self.board.draw("E runs")
        stats = manager.stats().pool()
        self.screen.numbers(
            f"E reused {handle.num_cached_tokens} of {len(prompt)} tokens",
            f"{stats.referenced} in use + {stats.cached} cached + {stats.free} free = {stats.total}",
        )
        manager.free(handle)

    def pressure(self) -> None:
        self.screen.scene(
            5,
            "Eviction under pressure, leaves first",
            "F needs 54 blocks: idle runs give up their tails, least recently used first, parents after children.",
            "The system prompt is pinned (*) and stays in any case. A callback hears when the pressure changes.",
        )
        manager = self.manager
        heard: list[PressureChange] = []
        stop = manager.on_memory_pressure(heard.append)
        pin = manager.cache.pin(SYSTEM)
        self.board.draw("before: the system prompt is pinned")
        print()
        handle = manager.allocate("F", num_tokens=54 * 16)
        self.board.draw("F has its 54 blocks")
        kept = manager.match_prefix([*SYSTEM, 1]).num_tokens
        evicted = manager.stats().evictions["capacity"]
        manager.free(handle)
        manager.cache.unpin(pin)
        stop()
        levels = " → ".join(change.level.name for change in heard)
        self.screen.numbers(
            f"{evicted} blocks evicted", f"system prompt cached: {kept} of {len(SYSTEM)}", f"pressure {levels}"
        )

    def sliding_window(self) -> None:
        self.screen.scene(
            6,
            "A sliding-window group gives blocks back",
            "Half of this model's layers see only the last 64 tokens: full layers hold F blocks, windowed ones W.",
            "What falls out of the window can be taken by others (w) while the sequence still runs.",
        )
        layers = [LayerSpec(8, 128), LayerSpec(8, 128, window=64)] * 16
        manager = KVCacheManager(KVCacheConfig(layers, gpu_blocks=32, watermark=0.0))
        board = Board(manager, self.screen)
        handle = manager.allocate("FW", list(range(48)))
        manager.commit(handle, 48)
        board.draw("48 tokens")
        batch = manager.batch([handle])
        for token in range(48, 208):
            manager.extend_batch(batch)
            manager.commit_batch(batch, [token])
            board.symbols()  # looks who uses which block
        print()
        board.draw("208 tokens")
        full, windowed = (int((handle.block_ids(group) >= 0).sum()) for group in (0, 1))
        supply = manager.stats().pool()
        self.screen.numbers(
            f"full layers hold {full} blocks, windowed layers {windowed}",
            f"{supply.cached} given back and still cached, {supply.free} free",
        )
        manager.check()

    def swapping(self) -> None:
        self.screen.scene(
            7,
            "Swap out, swap in",
            "G and its fork H make room for an urgent request U: shared blocks travel once, tables forget GPU ids.",
            "Then they come back, still sharing. The manager plans the copies, in order; the data plane runs them.",
        )
        manager = self.manager
        manager.cache.reset()
        parent = manager.allocate("G", num_tokens=20 * 16)
        manager.commit(parent, 20 * 16)
        (child,) = manager.fork(parent, "H")
        manager.take_copies()
        self.board.draw("G and H share 20 blocks")
        out = manager.swap_out(parent, child)
        urgent = manager.allocate("U", num_tokens=50 * 16)
        print()
        self.board.draw(f"U runs, the host holds {manager.stats().pool(tier=Tier.HOST).referenced} blocks")
        manager.free(urgent)
        back = manager.swap_in(parent, child)
        print()
        self.board.draw("back")
        kinds = " then ".join(f"{op.kind.value} {op.num_blocks}" for op in manager.take_copies())
        self.screen.numbers(f"{out} blocks out for two requests of 20", f"{back} back", f"copies: {kinds}")
        manager.free_batch([parent, child])
        manager.check()

    def timing(self) -> None:
        self.screen.scene(
            8,
            "1,024 sequences, one decode step",
            "Each step reserves 1,024 places, returns their slots and commits the tokens; full blocks are published.",
            "Measured here and now, on this machine, in this Python process.",
        )
        count, steps = 1024, 96
        layers = [LayerSpec(kv_heads=8, head_dim=128)] * 32
        manager = KVCacheManager(KVCacheConfig(layers, gpu_blocks=count * 48))
        started = time.perf_counter()
        prompts = np.arange(count * 512, dtype=np.int32).reshape(count, 512)
        handles = [manager.allocate(i, prompts[i]) for i in range(count)]
        for handle in handles:
            manager.commit(handle, 512)
        admission = (time.perf_counter() - started) / count
        batch = manager.batch(handles)
        slots = np.empty((1, count), np.int32)
        tokens = np.arange(count, dtype=np.int32)
        times = [_timed(lambda: _step(manager, batch, slots, tokens)) for _ in range(steps)]
        started = time.perf_counter()
        manager.free_batch(batch)
        freed = time.perf_counter() - started
        median = statistics.median(times)
        self.screen.numbers(
            f"step: median {median * 1e6:.0f} µs, {median / count * 1e9:.0f} ns a sequence",
            f"worst {max(times) * 1e6:.0f} µs",
            f"admission {admission * 1e6:.0f} µs a request of 512 tokens",
            f"freeing all {freed * 1e3:.1f} ms",
        )


def _step(manager: KVCacheManager, batch: SequenceBatch, slots: Int32Array, tokens: Int32Array) -> None:
    manager.extend_batch(batch, out=slots)
    manager.commit_batch(batch, tokens)


def _timed(call: Callable[[], None]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="A 30-second tour of kvpool.")
    parser.add_argument("--fast", action="store_true", help="no pauses between the scenes")
    options = parser.parse_args(arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # arrows are nice to have, not worth a crash
    terminal = sys.stdout.isatty()
    screen = Screen(
        colour=terminal and "NO_COLOR" not in os.environ,
        pause_seconds=1.5 if terminal and not options.fast else 0.0,
    )
    print(screen.paint("kvpool: a paged KV-cache manager", 1))
    print("Each character is one block of 16 tokens: . free, A in use by A, # shared, a cached, * pinned")
    try:
        Tour(screen).run()
    except KeyboardInterrupt:
        return 130
    print()
    print("Every invariant holds (manager.check()). Next: examples/quickstart.py and docs/architecture.md")
    return 0


if __name__ == "__main__":
    sys.exit(main())
