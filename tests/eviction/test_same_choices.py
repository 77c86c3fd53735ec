"""The same traffic makes each policy choose the same runs as ever, and learn the same.

`same_choices.txt` has a line for each case and a letter for every few requests. A change that is meant to choose otherwise
writes it again, and says in its commit what is else: `python tests/eviction/test_same_choices.py`. On the way the books of
every queue and of the ghosts are compared with a count of what is there.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from pathlib import Path
from random import Random
from typing import Any

import pytest

import kvpool.replay.policies  # noqa: F401  # known by name, also where this file is run
from kvpool import KVCacheConfig, KVCacheHandle, KVCacheManager, LayerSpec, Retention, ReuseHint, Tier, TokenRange
from kvpool.eviction import AdaptivePolicy, policy_names
from kvpool.eviction.policy import Queue

CHOICES = Path(__file__).with_name("same_choices.txt")
LOOK_EVERY = 8  # requests
# What the configuration says, and how many requests come
CASES: dict[str, tuple[dict[str, Any], int]] = {
    **{name: ({"eviction_policy": name}, 240) for name in policy_names() if name != "adaptive"},
    "cost in seconds": ({"eviction_policy": "cost", "objective": "seconds", "depth_cost": 0.05}, 160),
    "adaptive": ({"eviction_policy": "adaptive"}, 1200),
    "adaptive in seconds": ({"eviction_policy": "adaptive", "objective": "seconds", "depth_cost": 0.05}, 600),
    "adaptive above a host": ({"eviction_policy": "adaptive", "host_blocks": 60}, 400),
}
HINTS = (None, None, None, ReuseHint("stop"), ReuseHint("tool_calls"), ReuseHint(expected_seconds=4.0))
LOWEST = Retention([TokenRange(0, None, 0)])
HIGHER = Retention([TokenRange(0, None, 60)])


class Traffic:
    """Conversations that begin alike, part, go on or do not, some of them at once, and documents that come once."""

    def __init__(self, name: str) -> None:
        options, self.num_requests = CASES[name]
        self.rng = Random("conversations")
        self.now = 1000.0
        config = KVCacheConfig([LayerSpec(1, 8)], block_size=2, gpu_blocks=90, watermark=0.0, **options)
        self.manager = KVCacheManager(config, clock=lambda: self.now)
        self.policy: Any = self.manager._cache.orders.policies[Tier.GPU]
        self.fresh = iter(range(1000, 10**6))
        self.stems = [[next(self.fresh) for _ in range(2 * n)] for n in (2, 5, 9)]
        self.chats = [self.stems[n % 3] + self.some(3) for n in range(6)]
        self.live: list[KVCacheHandle] = []

    def some(self, most: int) -> list[int]:
        return [next(self.fresh) for _ in range(self.rng.randrange(1, 2 * most + 1))]

    def prompt(self) -> list[int]:
        rng = self.rng
        if rng.random() < 0.25:
            return self.some(rng.choice((4, 16)))
        number = rng.randrange(len(self.chats))
        if rng.random() < 0.15:
            self.chats[number] = rng.choice([*self.stems, self.chats[number - 1]]) + self.some(3)
        elif rng.random() < 0.8:
            self.chats[number] = self.chats[number] + self.some(2)
        if len(self.chats[number]) > 60:
            self.chats[number] = rng.choice(self.stems) + self.some(1)
        return self.chats[number]

    def request(self, number: int) -> None:
        rng = self.rng
        self.now += rng.choice((0.0, 0.001, 0.02, 0.3, 2.0, 9.0)) + (3000.0 if number % 97 == 96 else 0.0)
        while len(self.live) > rng.randrange(3):
            self.manager.free(self.live.pop(rng.randrange(len(self.live))), hint=rng.choice(HINTS))
        retention = rng.choice((None, None, None, None, None, None, LOWEST, HIGHER))
        handle = self.manager.allocate(number, self.prompt(), retention=retention)
        self.manager.commit(handle)
        self.live.append(handle)
        if rng.random() < 0.1:
            self.manager.cache.evict(rng.randrange(1, 4))

    def letters(self) -> str:
        digest, letters = hashlib.sha256(), ""
        for number in range(self.num_requests):
            self.request(number)
            if number % LOOK_EVERY == LOOK_EVERY - 1:
                runs = [(r.number, r.start, r.num_blocks, int(r.tier)) for r in self.manager.inspect.runs()]
                digest.update(repr((runs, self.known())).encode())
                letters += digest.hexdigest()[0]
        self.manager.check()
        return letters

    # --- what the policy knows ---------------------------------------------------------------------------------------

    def known(self) -> Any:
        policy = self.policy
        names = ("num_ghosts", "num_ghost_blocks", "_capacity", "_target", "_arrivals", "_moves", "_hand", "_clocks")
        said = [_short(getattr(policy, name, None)) for name in names]
        if isinstance(policy, AdaptivePolicy):
            said += self._learned(policy)
            queues: Iterable[Queue[Any]] = policy._order._rows.values()
        else:
            queues = getattr(policy, "_queues", None) or [policy._queue]
        return len(policy), said, [check_queue(queue) for queue in queues]

    @staticmethod
    def _learned(policy: AdaptivePolicy) -> list[Any]:
        learned, ghosts = policy._learned, policy._ghosts
        assert ghosts.num_blocks == sum(ghost.blocks for ghost in ghosts.by_fingerprint.values())
        assert list(ghosts.by_fingerprint.values()) == [
            ghost for ghost in ghosts._queue[ghosts._front :] if ghost.blocks
        ]
        assert all(len(ghost.sums) == 4 * ghost.blocks for ghost in ghosts.by_fingerprint.values())
        assert policy._len == sum(len(row) for row in policy._order._rows.values())
        assert policy._num_blocks == sum(row.num_blocks for row in policy._order._rows.values())
        numbers = (policy._now, policy._epochs[-1], policy._num_epochs, policy._inserted, policy._num_met)
        followed = [(ghost.cohort, ghost.blocks, ghost.turn, ghost.uses) for ghost in ghosts.by_fingerprint.values()]
        rows = [(row.number, row.weight, [_short(rate) for rate in row.rates]) for row in policy._order._rows.values()]
        counts = [_short(float(of.sum())) for of in (learned._hits, learned._exposure, learned._followed)]
        alive = learned._alive.tolist(), learned._alive_blocks.tolist()
        waits = learned.num_noted, learned.has_news, _short(learned._num_reuses), _short(policy._turnover)
        return [numbers, followed, rows, counts, alive, waits, policy._num_met_before]


def check_queue(queue: Queue[Any]) -> tuple[int, int]:
    """Compares the books of a queue with what is in it."""
    items = [*queue._ordered[queue._front :], *(late[1] for late in queue._heap)]
    live = [item for item in items if item.run is not None]
    assert len(queue) == len(live)
    assert queue.num_blocks == sum(item.blocks for item in live)
    assert queue._stale == len(items) - len(live)
    return len(queue), queue.num_blocks


def _short(value: Any) -> Any:
    """A number with as many digits as every machine gives it."""
    if isinstance(value, float) and value and math.isfinite(value):
        return float(f"{value:.5g}")
    return [_short(part) for part in value] if isinstance(value, (list, tuple)) else value


@pytest.mark.parametrize("name", CASES)
def test_given_the_same_traffic_then_a_policy_chooses_and_learns_as_ever(name: str) -> None:
    written = dict(line.rsplit(" ", 1) for line in CHOICES.read_text().splitlines())
    now, before = Traffic(name).letters(), written[name]
    changed = next((at for at, letter in enumerate(now) if letter != before[at]), len(now))
    assert now == before, f"{name!r} differs after {(changed + 1) * LOOK_EVERY} requests; is that meant?"


if __name__ == "__main__":
    CHOICES.write_text("".join(f"{name} {Traffic(name).letters()}\n" for name in CASES))
