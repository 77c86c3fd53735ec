"""Synthetic conversations through the real manager, numbers only: how much of the prompts a configuration reuses."""

from __future__ import annotations

import itertools

import numpy as np

from kvpool import KVCacheConfig, KVCacheHandle, KVCacheManager, LayerSpec

FULL = LayerSpec(kv_heads=1, head_dim=32)
MIB = 2**20


def hybrid(num_full: int, num_windowed: int, window: int) -> list[LayerSpec]:
    """Layers of a model with both kinds, all of one shape."""
    return [FULL] * num_full + [LayerSpec(kv_heads=1, head_dim=32, window=window)] * num_windowed


class Chats:
    """`num_chats` conversations below a few shared system prompts; each turn repeats all before it and adds new text.

    Who speaks next is drawn with a preference for those who spoke lately; a conversation that has grown to `max_tokens`
    starts anew. Everything follows from the seed, so a hit rate is a number, not a measurement.
    """

    def __init__(self, num_chats: int = 24, max_tokens: int = 2048, seed: int = 0) -> None:
        self.random = np.random.default_rng(seed)
        self.systems = [self._text(400) for _ in range(4)]
        self.max_tokens = max_tokens
        self.histories = [self._system() for _ in range(num_chats)]
        self.order = list(range(num_chats))

    def _text(self, num_tokens: int) -> list[int]:
        return self.random.integers(0, 50_000, num_tokens).tolist()

    def _system(self) -> list[int]:
        return list(self.systems[int(self.random.integers(len(self.systems)))])

    def run(self, manager: KVCacheManager, num_turns: int) -> float:
        """Plays so many turns, a few at a time; returns the fraction of prompt tokens that were reused."""
        live: list[KVCacheHandle] = []
        for turn in range(num_turns):
            place = min(int(self.random.geometric(2 / len(self.order))) - 1, len(self.order) - 1)
            chat = self.order.pop(len(self.order) - 1 - place)
            self.order.insert(int(self.random.integers(len(self.order) + 1)), chat)
            prompt = self.histories[chat] + self._text(int(self.random.integers(20, 200)))
            answer = self._text(int(self.random.integers(20, 200)))
            handle = manager.allocate(turn, prompt)
            manager.commit(handle)
            manager.extend(handle, len(answer))
            manager.commit(handle, answer)
            manager.take_copies()
            live.append(handle)
            if len(live) > 2:
                manager.free(live.pop(0))
            self.histories[chat] = prompt + answer
            if len(self.histories[chat]) > self.max_tokens:
                self.histories[chat] = self._system()
        for handle in live:
            manager.free(handle)
        stats = manager.stats()
        return sum(stats.hit_tokens.values()) / stats.prompt_tokens


def hit_rate(layers: list[LayerSpec], num_turns: int = 160, seed: int = 0, **memory: object) -> float:
    """The fraction of prompt tokens that a cache with this memory reuses."""
    # Not the time of day: policies learn from it, and a busy machine would teach them others
    seconds = itertools.count()
    config = KVCacheConfig(layers, **memory)  # type: ignore[arg-type]
    manager = KVCacheManager(config, clock=lambda: float(next(seconds)))
    rate = Chats(seed=seed).run(manager, num_turns)
    manager.check()
    return rate
