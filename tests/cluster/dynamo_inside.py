"""Feeds Dynamo's own indexer from a manager and compares what it answers with the manager's own answers.

Run in a network namespace of its own, because that indexer listens at every address:
`python dynamo_inside.py DYNAMO_PYTHON SEED`. Prints the number of answers that were compared.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from kvpool import KVCacheConfig, KVCacheManager, LayerSpec, Tier
from kvpool.cluster.publisher import EventPublisher

BLOCK_SIZE = 4
HTTP = "http://127.0.0.1:8090"
WORKERS = 2
MODEL = {"model_name": "default"}
ROUNDS = 6
WAIT_SECONDS = 60


def post(path: str, body: dict[str, Any]) -> Any:
    """An answer of the indexer."""
    request = urllib.request.Request(HTTP + path, json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=10) as answer:
        return json.load(answer)


def until(is_so: Callable[[], bool], what: str) -> None:
    """Waits for another process, which takes what it takes."""
    end = time.monotonic() + WAIT_SECONDS
    while not is_so():
        if time.monotonic() > end:
            raise SystemExit(f"in {WAIT_SECONDS} seconds it did not come true that {what}")
        time.sleep(0.02)


def listens() -> bool:
    try:
        with urllib.request.urlopen(f"{HTTP}/workers", timeout=5):
            return True
    except (urllib.error.URLError, ConnectionError):
        return False


def traffic(manager: KVCacheManager, rng: random.Random, stems: list[list[int]], names: list[int]) -> list[int]:
    """One request: a known stem, perhaps longer than last time, in a pool that must evict for it."""
    stem = rng.choice(stems)
    prompt = stem[: rng.randrange(BLOCK_SIZE, len(stem) + 1)] + [rng.randrange(50) for _ in range(rng.randrange(9))]
    names[0] += 1
    handle = manager.allocate(names[0], prompt)
    manager.commit(handle, len(prompt) - handle.num_cached_tokens)
    manager.free(handle)
    if rng.random() < 0.01:
        manager.cache.reset()
    return prompt


def own_answer(manager: KVCacheManager, prompt: list[int]) -> dict[str, int]:
    """Tokens of whole blocks down to each tier; the last token of a prompt is always computed, so one more is asked for."""
    found = manager.match_prefix([*prompt, 0]).tokens_by_tier
    gpu = found.get(Tier.GPU, 0)
    cpu = gpu + found.get(Tier.HOST, 0)
    return {"gpu": gpu, "cpu": cpu, "disk": cpu + found.get(Tier.DISK, 0)}


def their_answers(prompt: list[int]) -> list[dict[str, int]]:
    instances = post("/query", {**MODEL, "token_ids": prompt})["instances"]
    return [{name: instances.get(str(at), {}).get(name, 0) for name in ("gpu", "cpu", "disk")} for at in range(WORKERS)]


def registered(at: int, publisher: EventPublisher) -> None:
    where = {"endpoint": publisher.endpoint, "replay_endpoint": publisher.replay_endpoint}
    post("/register", {**MODEL, **where, "instance_id": at, "block_size": BLOCK_SIZE, "dp_rank": 0})


def main(dynamo: str, seed: int) -> None:
    rng = random.Random(seed)
    config = KVCacheConfig([LayerSpec(1, 8)], BLOCK_SIZE, gpu_blocks=24, host_blocks=16, disk_blocks=16, watermark=0.0)
    managers = [KVCacheManager(config) for _ in range(WORKERS)]
    stems = [[rng.randrange(50) for _ in range(40)] for _ in range(8)]
    names, num_compared, most_cached = [0], 0, 0
    with ExitStack() as stack:
        # The first keeps all messages, the second so few that whoever comes late needs everything that is cached.
        publishers = [
            stack.enter_context(EventPublisher(manager, "tcp://127.0.0.1:0", keep_messages=keep, heartbeat=0.2))
            for manager, keep in zip(managers, (10_000, 1), strict=True)
        ]
        for _ in range(60):
            traffic(rng.choice(managers), rng, stems, names)
        command = [dynamo, "-m", "dynamo.indexer", "--port", "8090", "--block-size", str(BLOCK_SIZE)]
        indexer = stack.enter_context(subprocess.Popen(command, stdout=sys.stderr))
        stack.callback(indexer.terminate)
        until(listens, "the indexer listens")
        for at, publisher in enumerate(publishers):
            registered(at, publisher)
        for _ in range(ROUNDS):
            for stem in stems:
                own = [own_answer(manager, stem) for manager in managers]
                until(lambda stem=stem, own=own: their_answers(stem) == own, f"the answers for {stem} are {own}")
                num_compared += WORKERS
                most_cached = max(most_cached, *(answer["disk"] for answer in own))
            for _ in range(40):
                traffic(rng.choice(managers), rng, stems, names)
    print(json.dumps({"compared": num_compared, "most_cached": most_cached}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
