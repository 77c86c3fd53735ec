"""A small trace that tests of replays share."""

from __future__ import annotations

import numpy as np

from kvpool.replay import Trace, TraceBuilder


def conversations(num_requests: int) -> Trace:
    """Conversations that grow turn by turn below three system prompts, interleaved; deterministic."""
    random = np.random.default_rng(7)
    builder = TraceBuilder("chat", unit=16)
    fresh = iter(range(100, 10**6))
    chats: list[list[int]] = []
    for number in range(num_requests):
        if len(chats) < 20 or random.random() < 0.2:
            system = int(random.integers(3)) * 10
            chats.append(list(range(system, system + 4)))
        chat = chats[int(random.integers(max(0, len(chats) - 25), len(chats)))]
        chat.extend(next(fresh) for _ in range(int(random.integers(1, 8))))
        builder.add(number * 250.0, list(chat), len(chat) * 16 - int(random.integers(16)), 20)
    return builder.build()
