"""Policies that remember what they evicted decide in a replay as they did live: they know content by all that precedes it."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from kvpool import KVCacheConfig, KVCacheManager, LayerSpec, ReuseHint, ReuseScope, Tier
from kvpool.recording import TraceRecorder, replay_recording
from managers import Clock

REMEMBERING = ["adaptive", "2q", "arc", "s3fifo"]
SEEDS = range(5, 10)  # more of them, and everything else that a manager does, are in tests/stateful
NUM_REQUESTS = 120


def talk(manager: KVCacheManager, clock: Clock, rng: random.Random) -> None:
    """Chats of three words in blocks of two: they say the same at the same depth behind different beginnings."""
    texts: list[list[int]] = [[]]
    for number in range(NUM_REQUESTS):
        text = rng.choice(texts[-12:])
        prompt = [*text[: rng.randrange(len(text) + 1)], *rng.choices(range(3), k=rng.randrange(1, 9))][:30]
        clock.now += rng.choice((0.0, 0.3, 5.0))
        scope = ReuseScope(tenant=rng.choice(("", "", "t")))
        hint = ReuseHint(rng.choice(("stop", "tool_calls"))) if rng.random() < 0.2 else None
        handle = manager.allocate(number, prompt, scope=scope, hint=hint)
        manager.commit(handle)
        texts.append(prompt)
        manager.free(handle)


@pytest.mark.quick("adaptive-None", "adaptive-6")
@pytest.mark.parametrize("host_blocks", [None, 6])
@pytest.mark.parametrize("policy", REMEMBERING)
def test_given_a_policy_that_remembers_when_recordings_are_replayed_then_hits_are_equal(
    policy: str, host_blocks: int | None, tmp_path: Path
) -> None:
    path = tmp_path / "chats.kvtrace"
    for seed in SEEDS:
        rng, clock = random.Random(seed), Clock()
        config = KVCacheConfig(
            [LayerSpec(1, 8)],
            2,
            gpu_blocks=rng.randrange(16, 30),
            host_blocks=host_blocks,
            eviction_policy=policy,
            cache_unfilled_blocks=seed % 2 == 0,
        )
        manager = KVCacheManager(config, clock=clock)
        with TraceRecorder(path).attach(manager):
            talk(manager, clock, rng)
        live, again = manager.stats(), replay_recording(path)
        assert live.evictions["capacity"] > NUM_REQUESTS // 4
        assert (again.hit_blocks, again.hit_tokens, again.evictions) == (
            live.hit_blocks,
            live.hit_tokens,
            live.evictions,
        ), f"seed {seed}"
        assert host_blocks is None or live.hit_blocks[Tier.HOST.name]
