"""A real vLLM engine whose events feed a ClusterIndex, run by the Python that has vLLM: `python vllm_inside.py MODEL`.

Prints, for each prompt, how many tokens the index says are cached and how many vLLM then found.
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
import time
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # no children that could outlive this process

from vllm import LLM, SamplingParams
from vllm.config import KVEventsConfig

from kvpool.cluster import ClusterIndex, NodeSubscriber

BLOCK = 32
BLOCKS = 40  # so few that prompts push each other out
PATIENCE = 60.0


def prompts(count: int) -> list[list[int]]:
    """Some beginnings that are shared, and ends that are not."""
    rng = random.Random(5)
    beginnings = [[rng.randrange(5, 150) for _ in range(BLOCK * rng.randrange(1, 7))] for _ in range(6)]
    return [
        [*rng.choice(beginnings), *(rng.randrange(5, 150) for _ in range(rng.randrange(1, 5 * BLOCK)))]
        for _ in range(count)
    ]


def held(index: ClusterIndex, prompt: list[int]) -> int:
    hit = index.match(prompt).get("vllm")
    return 0 if hit is None else hit.gpu


def main(model: str, folder: str) -> list[Any]:
    # vLLM listens at files; of TCP only at all addresses: to any other it connects.
    live, replay = f"ipc://{folder}/live", f"ipc://{folder}/replay"
    config = KVEventsConfig(enable_kv_cache_events=True, publisher="zmq", endpoint=live, replay_endpoint=replay)
    engine = LLM(
        model,
        enforce_eager=True,
        dtype="float32",
        block_size=BLOCK,
        skip_tokenizer_init=True,
        max_model_len=1024,
        num_gpu_blocks_override=BLOCKS,
        kv_events_config=config,
        max_num_seqs=1,
    )
    sampling = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False, ignore_eos=True)
    index = ClusterIndex(BLOCK)
    index.add_node("vllm")
    follower = NodeSubscriber(index, "vllm", live, replay)
    first = 0
    while not index.stats().num_blocks:  # vLLM does not say what was missed before the next message
        first += 1
        engine.generate([{"prompt_token_ids": [first % 100 + 5] * 2 * BLOCK}], sampling, use_tqdm=False)
        time.sleep(0.05)
    told = []
    for prompt in prompts(60):
        said = min(held(index, prompt), (len(prompt) - 1) // BLOCK * BLOCK)
        (output,) = engine.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
        told.append([said, output.num_cached_tokens or 0])
        whole, due = len(prompt) // BLOCK * BLOCK, time.monotonic() + PATIENCE
        while held(index, prompt) < whole:  # its last block is the newest there is
            assert time.monotonic() < due, "the events of a prompt did not come"
            time.sleep(0.002)
    follower.close()
    engine.llm_engine.engine_core.shutdown()
    return [told, index.stats()._asdict(), follower.stats._asdict()]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(main(sys.argv[1], folder)))
