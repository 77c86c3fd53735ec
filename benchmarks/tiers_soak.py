"""An hour of random traffic as fast as it goes: an engine with 10,000 blocks and tiers that are full. Nothing may grow.

    python benchmarks/tiers_soak.py                       # two hours of a request a second, in some minutes
    python benchmarks/tiers_soak.py --remote redis://127.0.0.1:6379

Requests overlap, share beginnings, are cancelled at times, and now and then everything cached is forgotten, so that it comes
back from the tiers. Some answers are compared with those of an engine without tiers. The disk and the engine's tables of keys
are full when it begins, the first hour fills the pool; memory, handles and threads of the second hour are held against its
beginning. Exit status 1 if something grew or was wrong.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Sized
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvpool.engine import Engine, SamplingParams
from kvpool.engine.generation import Generation
from kvpool.terminal import progress_bar
from kvpool.tiers import DiskTier, KeyedTier, open_tier
from kvpool.tiers.transport.block_keys import MAX_KNOWN
from kvpool.tiers.transport.chain import KNOWN_KEYS
from kvpool.tiers.transport.tier_transport import TierTransport

BLOCK_SIZE = 8
REQUESTS_AN_HOUR = 3600
NUM_BEGINNINGS = 400
AT_ONCE = 16
LOOKS = 24  # at memory and handles
CHECK_EVERY = 50
FORGET_EVERY = 1800
PARAMS = SamplingParams(max_new_tokens=8, ignore_eos=True)
SECONDS = 300.0  # until an answer that does not come is a failure
MOST_GROWTH = 0.02  # of the memory at the beginning of the second hour
VOCABULARY = 160
VALUE_BYTES = 4096  # of the model below


@dataclass(frozen=True)
class Look:
    """What a process holds."""

    requests: int
    rss_bytes: int
    handles: int
    threads: int
    cached_blocks: int
    disk_values: int
    table_keys: int


def tiny_model() -> Any:
    """A random model whose keys and values take 4 KiB a block."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(0)
    sizes = dict(
        hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2
    )
    config = LlamaConfig(vocab_size=VOCABULARY, head_dim=32, max_position_embeddings=512, **sizes)
    return AutoModelForCausalLM.from_config(config).eval()


def fill(tier: KeyedTier, num_values: int) -> None:
    """Has a tier hold as much as it can, of a model that nobody asks for."""
    value = bytes(VALUE_BYTES)
    for first in range(0, num_values, AT_ONCE):
        tier.store([os.urandom(32) for _ in range(first, first + AT_ONCE)], [value] * AT_ONCE, timeout=SECONDS)


def fill_tables(transport: TierTransport) -> list[Sized]:
    """Has the engine know as many blocks as it can remember, of prompts that nobody sends; returns what remembers them."""
    lineage = transport.offers.lineage
    digests = [os.urandom(32) for _ in range(MAX_KNOWN)]
    lineage.note(os.urandom(32), digests, [os.urandom(4) + digest for digest in digests])
    tables: list[Sized] = [lineage]
    for watched in transport.chain.watched:
        watched.known.add(os.urandom(32) for _ in range(KNOWN_KEYS))
        tables.append(watched.known)
    return tables


class Traffic:
    """Prompts as they come: popular beginnings, ends of their own."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self._beginnings = [self._tokens(int(self.random.integers(64, 200))) for _ in range(NUM_BEGINNINGS)]

    def _tokens(self, count: int) -> list[int]:
        tokens: list[int] = self.random.integers(3, VOCABULARY, count).tolist()
        return tokens

    def prompt(self) -> list[int]:
        """The next one."""
        popular = min(int(self.random.zipf(1.3)), NUM_BEGINNINGS) - 1
        return [*self._beginnings[popular], *self._tokens(int(self.random.integers(1, 80)))]


class Soak:
    """One run."""

    def __init__(self, engine: Engine, plain: Engine, seed: int) -> None:
        self.engine = engine
        self.plain = plain
        # A model so small computes faster than anything loads: never measured, it is loaded
        assert engine._tiers is not None
        engine._tiers.transport.decider.observe_prompt = lambda num_tokens, seconds: None  # type: ignore[method-assign]
        self.tables = fill_tables(engine._tiers.transport)
        self.stored_before = sum(measured.stats.stored for measured in engine._tiers.stats().tiers)
        self.traffic = Traffic(seed)
        self.looks: list[Look] = []
        self.checked = self.wrong = self.cancelled = 0

    def run(self, requests: int, advance: Any) -> None:
        """Sends so many requests, a few at once, and looks at the process at regular distances."""
        running: deque[tuple[list[int], Generation, bool]] = deque()
        random = self.traffic.random
        for number in range(1, requests + 1):
            prompt = self.traffic.prompt()
            generation = self.engine.submit(prompt, PARAMS)
            is_dropped = random.random() < 0.05
            if is_dropped:
                generation.cancel()
            running.append((prompt, generation, is_dropped))
            if len(running) >= AT_ONCE:
                self._finish(*running.popleft())
            if number % FORGET_EVERY == 0:
                self.engine.manager.cache.reset()
            advance(1)
            if number % max(1, requests // LOOKS) == 0:
                while running:
                    self._finish(*running.popleft())
                self.looks.append(self._look(number))
        while running:
            self._finish(*running.popleft())

    def _finish(self, prompt: list[int], generation: Generation, is_dropped: bool) -> None:
        result = generation.result(SECONDS)
        self.cancelled += is_dropped
        if not is_dropped and self.traffic.random.random() < 1 / CHECK_EVERY:
            self.checked += 1
            self.wrong += result.token_ids != self.plain.generate([prompt], PARAMS)[0].token_ids

    def _look(self, requests: int) -> Look:
        self.engine.manager.check()
        gc.collect()
        stats = self.engine.stats()
        assert stats.tiers is not None
        return Look(
            requests,
            int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"),
            len(os.listdir("/proc/self/fd")),
            threading.active_count(),
            sum(pool.cached for pool in stats.cache.pools),
            stats.tiers.tiers[0].stats.num_values or 0,
            sum(map(len, self.tables)),
        )

    def problems(self) -> list[str]:
        """What grew in the second half, leaked or was wrong."""
        assert self.engine._tiers is not None
        found = [] if self.engine._tiers.flush(SECONDS) else ["blocks are still on their way into tiers"]
        self.engine.manager.check()
        stats = self.engine.stats()
        link = stats.tiers
        assert link is not None
        if (link.held, link.leases, link.blocks_waiting, link.staging_bytes) != (0, (), 0, 0):
            found.append(
                f"held {link.held}, leases {link.leases}, waiting {link.blocks_waiting}, lent {link.staging_bytes}"
            )
        if any(pool.referenced for pool in stats.cache.pools):
            found.append("blocks are referenced, and no request runs")
        if self.engine._tiers._collector._progress:
            found.append(f"{len(self.engine._tiers._collector._progress)} requests are remembered that are over")
        if link.stores.stored != sum(measured.stats.stored for measured in link.tiers) - self.stored_before:
            found.append("engine and tiers count stored blocks differently")
        half = self.looks[len(self.looks) // 2 :]
        begin, end = half[0], half[-1]
        if end.rss_bytes > begin.rss_bytes * (1 + MOST_GROWTH):
            found.append(f"memory grew from {begin.rss_bytes / 2**20:.0f} to {end.rss_bytes / 2**20:.0f} MiB")
        found += [
            f"{what} grew from {getattr(begin, what)} to {getattr(end, what)}"
            for what in ("handles", "threads")
            if getattr(end, what) > getattr(begin, what) + 2
        ]
        return found + ([f"{self.wrong} of {self.checked} answers are wrong"] if self.wrong else [])


def main() -> int:
    """Runs it, prints what it saw, and says whether something grew."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hours", type=float, default=2.0, help="of a request a second (2); the first half warms up")
    parser.add_argument(
        "--blocks", type=int, default=10_000, help="of the engine, and about as many values on the disk"
    )
    parser.add_argument("--remote", help="a store to share as well, such as redis://127.0.0.1:6379")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", help="write what was seen to a file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    requests, model, started = round(options.hours * REQUESTS_AN_HOUR), tiny_model(), time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        tiers: list[KeyedTier] = [DiskTier(folder, options.blocks * 8192)]
        tiers += [open_tier(options.remote)] if options.remote else []
        fill(tiers[0], options.blocks)
        with (
            Engine(model, block_size=BLOCK_SIZE, kv_blocks=128) as plain,  # whose memory is all in use soon
            Engine(model, block_size=BLOCK_SIZE, kv_blocks=options.blocks, tiers=tiers) as engine,
        ):
            soak = Soak(engine, plain, options.seed)
            with progress_bar("requests", requests) as advance:
                soak.run(requests, advance)
            problems, stats = soak.problems(), engine.stats().tiers
        for tier in tiers:
            tier.close()
    seconds = time.monotonic() - started
    assert stats is not None
    print(f"{'requests':>9}{'RSS MiB':>9}{'handles':>9}{'threads':>9}{'cached':>9}{'on disk':>9}{'tables':>9}")
    for look in soak.looks:
        print(
            f"{look.requests:9,}{look.rss_bytes / 2**20:9.1f}{look.handles:9}{look.threads:9}"
            f"{look.cached_blocks:9,}{look.disk_values:9,}{look.table_keys:9,}"
        )
    print(
        f"{requests:,} requests in {seconds:.0f} s ({soak.cancelled} cancelled); {soak.checked} answers compared, "
        f"{soak.wrong} wrong; {stats.stores.stored:,} blocks stored, {stats.stores.dropped:,} dropped; "
        f"{stats.prompt_tokens_loaded:,} tokens came in {stats.imports:,} loads"
    )
    for problem in problems:
        print(f"PROBLEM: {problem}")
    if options.json:
        Path(options.json).write_text(
            json.dumps({"looks": [asdict(look) for look in soak.looks], "problems": problems})
        )
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
