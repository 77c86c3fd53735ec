"""Models that count tokens by themselves get the positions of each step, and count again when kvpool does not attend."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from models import COUNTED, WINDOW, random_prompt, tiny_model  # noqa: E402

from kvpool.engine import Engine, SamplingParams  # noqa: E402
from kvpool.errors import UnsupportedModelError  # noqa: E402
from kvpool.model import probing  # noqa: E402
from kvpool.model.probing import inspect_model  # noqa: E402
from kvpool.scheduling import SchedulerConfig  # noqa: E402

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {family: (family, {}) for family in COUNTED} | {
    "llama4_text": ("llama4_text", {}),
    "llama4_text with a chunk that ends inside a block": ("llama4_text", {"attention_chunk_size": 21}),
    "llama4_text with chunks alone": ("llama4_text", {"layer_types": ["chunked_attention"] * 2}),
}


def own_answer(model: Any, prompt: list[int], count: int) -> list[int]:
    options = dict(min_new_tokens=count, do_sample=False, num_beams=1, eos_token_id=None, forced_eos_token_id=None)
    tokens = model.generate(torch.tensor([prompt]), max_new_tokens=count, **options)
    answer: list[int] = tokens[0, len(prompt) :].tolist()
    return answer


@pytest.mark.quick("bart")
@pytest.mark.parametrize("variant", VARIANTS)
def test_tokens_are_those_of_generate_in_chunks_and_from_the_cache(variant: str) -> None:
    """The longest prompt has three chunks of attention and takes five steps; the shortest ends inside the first chunk."""
    family, settings = VARIANTS[variant]
    model = tiny_model(family, **settings)
    prompts = [random_prompt(length, seed=length).tolist() for length in (3 * WINDOW + 5, 30, 7)]
    expected = [own_answer(model, prompt, 30) for prompt in prompts]
    steps = SchedulerConfig(max_tokens_per_step=16, max_sequences=4)
    with Engine(model, block_size=8, kv_blocks=64, scheduler=steps, model_defaults=False) as engine:
        for _ in range(2):
            results = engine.generate(prompts, SamplingParams(max_new_tokens=30, ignore_eos=True))
            assert [result.token_ids for result in results] == expected
        engine.manager.check()
    assert results[0].num_cached_tokens == 3 * WINDOW + 4


def test_a_prefix_is_found_again_after_its_chunks_left_the_chunked_layers() -> None:
    """The second prompt parts from the first one at the end of a chunk, which needs no block of chunks before it."""
    model = tiny_model("llama4_text")
    first = random_prompt(100, seed=1).tolist()
    second = [*first[: 2 * WINDOW], *random_prompt(20, seed=2).tolist()]
    with Engine(model, block_size=8, kv_blocks=64, model_defaults=False) as engine:
        for prompt in (first, second):
            (result,) = engine.generate([prompt], SamplingParams(max_new_tokens=10, ignore_eos=True))
            assert result.token_ids == own_answer(model, prompt, 10)
    assert result.num_cached_tokens == 2 * WINDOW


@pytest.mark.parametrize("family", ["bart", "llama4_text"])
def test_a_model_still_counts_by_itself_after_the_engine_and_after_a_refusal(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, prompt = tiny_model(family), random_prompt(40)[None]
    before = model(prompt).logits
    inspect_model(model)
    model.set_attn_implementation("eager")
    torch.testing.assert_close(model(prompt).logits, before)

    def refuse(*_: Any, **__: Any) -> None:
        raise UnsupportedModelError("for a test")

    refused = tiny_model(family)
    monkeypatch.setattr(probing, "check_against_eager", refuse)
    with pytest.raises(UnsupportedModelError, match="for a test"):
        inspect_model(refused)
    torch.testing.assert_close(refused(prompt).logits, before)
    assert not any(module._forward_pre_hooks for module in refused.modules())


def test_without_the_positions_of_a_step_such_a_model_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probing, "use_positions", lambda model: None)
    for family in ("bart", "llama4_text"):
        with pytest.raises(UnsupportedModelError, match="fails the self-check"):
            inspect_model(tiny_model(family))
