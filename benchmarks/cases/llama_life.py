"""One life of a `llama_cpp.Llama` for `llama_cache.py`: a process that answers one prompt and prints what that took.

The argument is JSON: `model`, `num_tokens` of the prompt, `seed` of it, and one of `kvpool` (settings of a KVPoolCache) and
`own` (a directory for llama-cpp-python's LlamaDiskCache), or neither.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import llama_cpp
import numpy as np
from llama_cpp import Llama

SHORT = 8


def cache_of(llama: Any, task: dict[str, Any]) -> Any:
    """The cache that was asked for."""
    if "own" in task:
        return llama_cpp.LlamaDiskCache(task["own"])
    from kvpool.integrations.llama_cpp import KVPoolCache

    return KVPoolCache(llama, **task["kvpool"])


def main() -> None:
    """Answers, and prints seconds to the first token, seconds until the completion is over, and the first tokens."""
    task = json.loads(sys.argv[1])
    llama = Llama(task["model"], n_ctx=2048, verbose=False)
    prompt = np.random.default_rng(task["seed"]).integers(100, llama.n_vocab(), task["num_tokens"]).tolist()
    for _ in llama.create_completion(prompt[:SHORT][::-1], max_tokens=2, temperature=0.0, stream=True):
        pass  # the weights are in memory now
    if "own" in task or "kvpool" in task:
        llama.set_cache(cache_of(llama, task))
    begin = time.perf_counter()
    chunks = llama.create_completion(prompt, max_tokens=8, temperature=0.0, stream=True)
    next(chunks)
    first = time.perf_counter() - begin
    for _ in chunks:
        over = time.perf_counter()
    ended = time.perf_counter() - over  # the cache's part, behind the last chunk
    answer = llama.input_ids[len(prompt) : llama.n_tokens].tolist()
    print(json.dumps({"first": first, "ended": ended, "answer": answer}))
    if "kvpool" in task:
        llama.cache.close()


main()
