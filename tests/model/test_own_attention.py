"""Models whose modules compute attention by themselves are served, and stay as they are when kvpool does not attend."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from models import BY_THEMSELVES, WINDOW, random_prompt, tiny_model  # noqa: E402
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS  # noqa: E402

from kvpool.engine import Engine, SamplingParams  # noqa: E402
from kvpool.errors import KVPoolError, UnsupportedModelError  # noqa: E402
from kvpool.model import own_attention  # noqa: E402
from kvpool.model.probing import inspect_model, run_probe  # noqa: E402
from kvpool.scheduling import SchedulerConfig  # noqa: E402

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {family: (family, {}) for family in BY_THEMSELVES} | {
    "falcon with a key for each query": ("falcon", {"multi_query": False}),
    "falcon with grouped heads": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
}


@pytest.mark.quick("gptj")
@pytest.mark.transformers
@pytest.mark.parametrize("variant", VARIANTS)
def test_tokens_are_those_of_generate_in_chunks_and_from_the_cache(variant: str) -> None:
    family, settings = VARIANTS[variant]
    model = tiny_model(family, **settings)
    prompts = [random_prompt(length, seed=length).tolist() for length in (61, 18, 7)]
    with Engine(
        model,
        block_size=8,
        kv_blocks=64,
        scheduler=SchedulerConfig(max_tokens_per_step=16, max_sequences=4),
        model_defaults=False,
    ) as engine:
        answers = [engine.generate(prompts, SamplingParams(max_new_tokens=10, ignore_eos=True)) for _ in range(2)]
    expected = [
        model.generate(torch.tensor([prompt]), max_new_tokens=10, min_new_tokens=10, do_sample=False, eos_token_id=None)
        for prompt in prompts
    ]
    for got in answers:
        assert [each.token_ids for each in got] == [
            own[0, len(p) :].tolist() for own, p in zip(expected, prompts, strict=True)
        ]
    assert answers[1][0].num_cached_tokens == 60


@pytest.mark.parametrize(("family", "settings"), [("bloom", {}), ("mpt", {}), ("falcon", {"alibi": True})])
def test_a_model_with_slopes_by_distance_is_refused_for_them(family: str, settings: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModelError, match=r"slopes by distance \(ALiBi\)"):
        inspect_model(tiny_model(family, **settings))


def test_shapes_have_windows_and_heads() -> None:
    assert [layer.window for layer in inspect_model(tiny_model("gpt_neo")).layers] == [None, WINDOW]
    grouped = tiny_model("falcon", new_decoder_architecture=True, num_kv_heads=2)
    assert inspect_model(grouped).layers[0].kv_heads == 2


@pytest.mark.parametrize("variant", VARIANTS)
def test_no_mask_is_built_for_kvpools_attention(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # It would be of the length of a whole step, squared, and transformers copies from the CPU for it: no graph can have that.
    model = tiny_model(VARIANTS[variant][0], **VARIANTS[variant][1])
    inspect_model(model)
    for name in ("eager", "sdpa"):
        monkeypatch.setitem(ALL_MASK_ATTENTION_FUNCTIONS._global_mapping, name, None)
    run_probe(model)


@pytest.mark.gpu
@pytest.mark.parametrize("variant", VARIANTS)
def test_steps_run_from_graphs_on_a_gpu(variant: str) -> None:
    model = tiny_model(VARIANTS[variant][0], **VARIANTS[variant][1]).cuda()
    prompts = [random_prompt(length, seed=length).tolist() for length in (61, 18, 7)]
    with Engine(model, block_size=16, kv_blocks=64, model_defaults=False) as engine:
        assert engine.graphs.num_graphs
        answers = engine.generate(prompts, SamplingParams(max_new_tokens=10, ignore_eos=True))
    for prompt, answer in zip(prompts, answers, strict=True):
        own = model.generate(torch.tensor([prompt]).cuda(), max_new_tokens=10, do_sample=False, eos_token_id=None)
        assert answer.token_ids == own[0, len(prompt) :].tolist()


def test_a_model_stays_its_owners_beside_an_engine_and_after_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    model, prompt = tiny_model("falcon"), random_prompt(20)[None]
    before = model(prompt).logits
    with Engine(model, block_size=16, kv_blocks=16):
        torch.testing.assert_close(model(prompt).logits, before)
    inspect_model(model)
    with pytest.raises(KVPoolError, match="load it again"):
        model(prompt)

    refused = tiny_model("falcon")
    monkeypatch.setattr(own_attention, "flat", lambda part: -part[0].transpose(0, 1))
    with pytest.raises(UnsupportedModelError, match="fails the self-check"):
        inspect_model(refused)
    assert refused.config._attn_implementation == "eager"
    assert not any("forward" in vars(module) for module in refused.modules())
