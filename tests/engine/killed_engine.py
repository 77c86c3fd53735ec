"""Run by test_tiers_kills.py: engines with a disk tier that are killed while they answer, one after another.

    killed_engine.py DIRECTORY ROUNDS SEED

Each child is forked with torch and a tiny model in memory, makes an engine on the directory, answers prompts without end, and
is killed in the middle of a system call that changes a file. The next child makes an engine on what is left, and this process
prints as a JSON line what that one answered, beside what an engine without tiers answers.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path += [str(Path(__file__).parent), str(Path(__file__).resolve().parents[1] / "tiers")]

import torch
from deadly_writes import die_in_a_write
from models import random_prompt, tiny_model

from kvpool.engine import Engine, SamplingParams
from kvpool.tiers.disk.upkeep import Upkeep

torch.set_num_threads(1)
CAPACITY = 2**21  # full after some rounds, so that values are evicted too
PARAMS = SamplingParams(max_new_tokens=4, ignore_eos=True)
PROMPTS = [random_prompt(70, seed=seed).tolist() for seed in range(6)]
MODEL: Any = tiny_model("gemma2")
OPTIONS: dict[str, Any] = {"block_size": 8, "kv_blocks": 128, "tier_timeout": 60.0}


def in_a_child(call: Callable[[], object]) -> tuple[Any, int]:
    """What a call returns in a process of its own, and the signal that ended this."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading)
        status = 1
        try:
            os.write(writing, json.dumps(call()).encode())
            status = 0
        finally:
            os._exit(status)
    os.close(writing)
    with os.fdopen(reading) as stream:
        written = stream.read()
    _, status = os.waitpid(child, 0)
    return json.loads(written or "null"), os.WTERMSIG(status)


def answers(engine: Engine) -> list[list[int]]:
    return [result.token_ids for result in engine.generate(PROMPTS, PARAMS)]


def compute() -> list[list[int]]:
    with Engine(MODEL, block_size=8, kv_blocks=128) as engine:
        return answers(engine)


def answer_and_die(directory: str, seed: int) -> None:
    rng = random.Random(seed)
    die_in_a_write(rng, rng.randrange(1, 250))
    engine = Engine(MODEL, disk=directory, disk_bytes=CAPACITY, **OPTIONS)
    while True:
        others = [random_prompt(rng.randrange(20, 90), seed=rng.randrange(1000)).tolist() for _ in range(4)]
        engine.generate([*others, rng.choice(PROMPTS)], PARAMS)
        engine.manager.cache.reset()


def look(directory: str) -> dict[str, Any]:
    """What an engine makes of what is left, and whether every value in it is whole."""
    with Engine(MODEL, disk=directory, disk_bytes=CAPACITY, **OPTIONS) as engine:
        results = engine.generate(PROMPTS, PARAMS)
        engine.manager.check()
        tiers = engine.stats().tiers
        assert tiers is not None
        failures = tiers.tiers[0].stats.load_failures
    with Upkeep(Path(directory)) as upkeep:
        damaged = upkeep.verify(lambda count: None).damaged
    return {
        "answers": [result.token_ids for result in results],
        "cached": sum(result.num_cached_tokens for result in results),
        "load_failures": failures,
        "damaged": damaged,
    }


def main(directory: str, rounds: int, seed: int) -> None:
    expected, _ = in_a_child(compute)
    for number in range(rounds):
        _, signal = in_a_child(lambda number=number: answer_and_die(directory, seed * 100_000 + number))
        found, _ = in_a_child(lambda: look(directory))
        print(
            json.dumps(
                {"signal": signal, "right": found is not None and found["answers"] == expected, **(found or {})}
            ),
            flush=True,
        )


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
