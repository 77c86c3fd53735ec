"""A real vLLM publishes its events, and the index says of every prompt what vLLM then finds in its own cache.

`make test-vllm` runs it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
PATIENCE = 900

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif("KVPOOL_VLLM_PYTHON" not in os.environ, reason="needs vLLM: run make test-vllm"),
]


def test_given_random_prompts_and_eviction_when_vllm_publishes_then_the_index_knows_what_vllm_finds(
    tmp_path: Path,
) -> None:
    pytest.importorskip("torch")
    sys.path.insert(0, str(HERE.parent / "engine"))
    from models import tiny_model

    tiny_model("llama", hidden_size=128, max_position_embeddings=2048).save_pretrained(tmp_path)
    surroundings = {
        **os.environ,
        "PYTHONPATH": str(HERE.parents[1] / "src"),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": os.environ.get("VLLM_CPU_OMP_THREADS_BIND", "0"),
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
    }
    command = [os.environ["KVPOOL_VLLM_PYTHON"], str(HERE / "vllm_inside.py"), str(tmp_path)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    inside = subprocess.Popen(command, env=surroundings, start_new_session=True, **pipes)  # type: ignore[call-overload]
    try:
        out, err = inside.communicate(timeout=PATIENCE)
    finally:
        if inside.poll() is None:
            os.killpg(inside.pid, signal.SIGKILL)  # and whatever vLLM started
            inside.wait()
    assert inside.returncode == 0, err[-4000:]
    told, index, feed = json.loads(out.splitlines()[-1])
    assert [said for said, _ in told] == [found for _, found in told]
    assert sum(found > 0 for _, found in told) >= 10  # prefixes were shared
    assert any(told[at][1] == 0 for at in range(20, 60))  # and pushed out again
    print(json.dumps({"prompts": len(told), "found": sum(found for _, found in told), **index, **feed}))
