"""One life of a real vLLM, run by the Python that has it: `python vllm_run.py '{"model": …, "extra": …, "rounds": […]}'`.

Each round answers the same prompts; between rounds vLLM's own cache is reset, so that what is reused came from the connector.
The last line of the output is JSON: for each round the tokens of every answer, and how many of each prompt were cached.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

WORDS = ["river", "stone", "lamp", "green", "seven", "quiet", "forest", "paper", "cloud", "winter", "engine", "coffee"]


def prompts(number: int) -> list[str]:
    """Prompts of some 470 tokens that differ from their first words on."""
    return [
        " ".join(WORDS[(i * i + k * 7 + i // 5) % 12] + (f" {i}" if i % 4 == k else "") for i in range(250))
        for k in range(number)
    ]


def main() -> None:
    """Answers and prints."""
    task = json.loads(sys.argv[1])
    from vllm import LLM, SamplingParams

    options: dict[str, Any] = {}
    if task["extra"] is not None:
        from vllm.config import KVTransferConfig

        options["kv_transfer_config"] = KVTransferConfig(
            kv_connector=task.get("connector", "KVPoolConnector"),
            kv_connector_module_path=task.get("module", "kvpool.integrations.vllm"),
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config=task["extra"],
        )
    engine = LLM(task["model"], enforce_eager=True, dtype="float32", block_size=32, max_model_len=1024, **options)
    sampling = SamplingParams(temperature=0.0, max_tokens=8)
    results: dict[str, Any] = {}
    for name in task["rounds"]:
        engine.reset_prefix_cache()
        answers = [engine.generate([prompt], sampling, use_tqdm=False)[0] for prompt in prompts(2)]
        results[name] = {
            "tokens": [list(answer.outputs[0].token_ids) for answer in answers],
            "cached": [answer.num_cached_tokens or 0 for answer in answers],
        }
    time.sleep(task.get("linger", 0))  # the last blocks are on their way to the tiers, and vLLM kills its workers
    print(json.dumps(results))


if __name__ == "__main__":
    main()
