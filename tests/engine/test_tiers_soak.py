"""Hours of traffic in a minute: requests overlap and are cancelled, tiers lose blocks and fail at times, nothing grows."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from models import random_prompt, tiny_model  # noqa: E402

from kvpool.engine import Engine, SamplingParams  # noqa: E402
from kvpool.tiers import DiskTier, MemoryTier, Outcome  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_self_check")]
SECONDS = 120.0
ROUNDS = 40


class Moody(MemoryTier):
    """A shared store that loses values, fails and refuses, each sometimes."""

    def __init__(self) -> None:
        super().__init__(2**20, name="moody")
        self.random = np.random.default_rng(0)

    def _contains(self, keys: Sequence[bytes], deadline: float) -> list[bool]:
        self._perhaps_fail()
        return super()._contains(keys, deadline)

    def _load(self, keys: Sequence[bytes], out: Sequence[memoryview], deadline: float) -> list[Outcome]:
        self._perhaps_fail()
        found = super()._load(keys, out, deadline)
        return [Outcome.FAILED if self.random.random() < 0.05 else outcome for outcome in found]

    def _store(self, keys: Sequence[bytes], data: Sequence[memoryview], deadline: float) -> list[Outcome]:
        self._perhaps_fail()
        return super()._store(keys, data, deadline)

    def _perhaps_fail(self) -> None:
        if self.random.random() < 0.1:
            raise ConnectionError("the store is in a bad mood")


def prompts(random: np.random.Generator, systems: Sequence[list[int]]) -> list[list[int]]:
    """Some requests that arrive together: a common beginning, an own end."""
    found = []
    for _ in range(int(random.integers(1, 6))):
        beginning = systems[min(int(random.zipf(1.5)), len(systems)) - 1]
        found.append([*beginning, *random.integers(3, 160, int(random.integers(1, 40))).tolist()])
    return found


def num_files() -> int:
    return len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 0


@pytest.mark.usefixtures("patient_tiers")
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_given_hours_of_traffic_then_answers_stay_right_and_nothing_grows(family: str, tmp_path: Path) -> None:
    random = np.random.default_rng(7)
    systems = [random_prompt(72, seed=seed).tolist() for seed in range(12)]
    model: Any = tiny_model(family)
    params = SamplingParams(max_new_tokens=6, ignore_eos=True)
    files: list[int] = []
    threads: list[int] = []
    options = {"block_size": 8, "kv_blocks": 64, "tier_timeout": SECONDS}
    with (
        DiskTier(tmp_path, 2**20) as disk,
        Moody() as moody,
        Engine(model, block_size=8, kv_blocks=512) as plain,
        Engine(model, tiers=[disk, moody], **options) as engine,
    ):
        for number in range(ROUNDS):
            batch = prompts(random, systems)
            generations = [engine.submit(prompt, params) for prompt in batch]
            dropped = generations.pop() if random.random() < 0.3 else None
            if dropped is not None:
                dropped.cancel()
            answers = [generation.result(SECONDS).token_ids for generation in generations]
            assert answers == [result.token_ids for result in plain.generate(batch[: len(answers)], params)]
            if dropped is not None:
                dropped.result(SECONDS)
            if number % 10 == 9:
                engine.manager.check()
                engine.manager.cache.reset()
                files.append(num_files())
                threads.append(threading.active_count())
        assert engine._tiers is not None
        assert engine._tiers.flush(SECONDS)
        stats = engine.stats()
        assert stats.tiers is not None
        assert (stats.tiers.held, stats.tiers.leases, stats.tiers.blocks_waiting, stats.tiers.staging_bytes) == (
            0,
            (),
            0,
            0,
        )
        assert all(pool.referenced == 0 for pool in stats.cache.pools)
        assert stats.tiers.prompt_tokens_loaded > 0
        for measured in stats.tiers.tiers:
            assert measured.stats.used_bytes is not None
            assert measured.stats.used_bytes <= 2**20
        offered = stats.tiers.stores
        assert offered.stored == sum(measured.stats.stored for measured in stats.tiers.tiers)
        engine.manager.check()
    assert files[-1] <= files[1] + 1
    assert threads[-1] <= threads[1] + 1
