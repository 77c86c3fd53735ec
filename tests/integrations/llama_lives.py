"""One life of a real `llama_cpp.Llama`, for test_llama_cpp_real.py: asked prompts, it prints its answers as JSON.

The task is JSON, too: `model`, `prompts`, `cache` (the settings of KVPoolCache; without them it has none),
`options` of Llama, and `fault`.
"""

from __future__ import annotations

import json
import os
import signal
import struct
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
from llama_cpp import Llama

from kvpool.integrations.llama_cpp import KVPoolCache
from kvpool.integrations.llama_states import StateBlob, StateStore
from kvpool.tiers.transport.chain import WatchedTier

MAX_TOKENS = 24
NUM_LAYERS, KEY_BYTES, HALF = (
    30,
    384,
    1,
)  # of SmolLM2: layers, bytes of a token's keys in one, ggml's number for float16


class CountingLlama(Llama):  # type: ignore[misc]  # not seen by mypy
    """Knows how many tokens of a prompt it computed."""

    num_computed: int | None = None

    def eval(self, tokens: Any) -> None:
        if self.num_computed is None:
            self.num_computed = len(tokens)
        super().eval(tokens)


def poison() -> None:
    """All keys of a state are zeros when they come, and nothing notices."""
    # What llama.cpp writes before the keys of a layer
    load, head = StateStore.load, struct.pack("<iQ", HALF, KEY_BYTES)

    def poisoned(self: StateStore, tokens: Any, num_live: int, take: Callable[[StateBlob], int]) -> int:
        def take_zeros(blob: StateBlob) -> int:
            keys = blob.state.tobytes().split(head)
            assert len(keys) == 1 + NUM_LAYERS
            zeros = [bytes(len(blob.tokens) * KEY_BYTES) + layer[len(blob.tokens) * KEY_BYTES :] for layer in keys[1:]]
            blob.state[:] = np.frombuffer(head.join([keys[0], *zeros]), np.uint8)
            return take(blob)

        return load(self, tokens, num_live, take_zeros)

    StateStore.load = poisoned  # type: ignore[method-assign]


def die_storing() -> None:
    """The process is killed when some pieces of a state are stored, and no signpost is."""
    store = WatchedTier.store

    def deadly(self: WatchedTier, keys: Any, data: Any, timeout: float) -> Any:
        store(self, keys[:2], data[:2], timeout)
        os.kill(os.getpid(), signal.SIGKILL)

    WatchedTier.store = deadly  # type: ignore[method-assign, assignment]


def answer(llama: CountingLlama, prompt: str) -> dict[str, Any]:
    """Greedy tokens, and how many of the prompt's were computed."""
    llama.num_computed = None
    done = llama.create_completion(prompt, max_tokens=MAX_TOKENS, temperature=0.0)
    num_prompt = done["usage"]["prompt_tokens"]
    tokens = np.asarray(llama.input_ids[num_prompt : llama.n_tokens]).tolist()
    return {"tokens": tokens, "text": done["choices"][0]["text"], "computed": llama.num_computed, "of": num_prompt}


def main() -> None:
    """Lives."""
    task = json.loads(sys.argv[1])
    {"poison": poison, "die": die_storing, "": lambda: None}[task.get("fault", "")]()
    llama = CountingLlama(task["model"], n_ctx=1024, verbose=False, **task.get("options", {}))
    stats = None
    if task.get("cache"):
        cache = KVPoolCache(llama, **task["cache"])
        llama.set_cache(cache)
    answers = [answer(llama, prompt) for prompt in task["prompts"]]
    if task.get("cache"):
        found = cache.stats()
        stats = {name: getattr(found, name) for name in ("hits", "failed", "late", "stored", "tokens_loaded")}
        cache.close()
    print(json.dumps({"answers": answers, "stats": stats}))


main()
