"""What the probe finds out about a model, and which models are refused, with which reason."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
from models import CHOSEN, REFUSED, SUPPORTED, WINDOW, random_prompt, tiny_config, tiny_model
from transformers import DynamicCache, LlamaModel, T5Config, T5ForConditionalGeneration

from kvpool.config.layers import DType, LayerSpec, index_part
from kvpool.errors import InvalidArgumentError, UnsupportedModelError
from kvpool.model import probing, self_check
from kvpool.model.forward import forward
from kvpool.model.hook import AttentionCall
from kvpool.model.probing import LayerShape, ModelShape, inspect_model
from kvpool.model.self_check import ContiguousAttention, positions_of

GQA = LayerShape(q_heads=4, kv_heads=2, k_dim=16, v_dim=16, scale=0.25)
MHA = LayerShape(q_heads=4, kv_heads=4, k_dim=16, v_dim=16, scale=0.25)


def like(layer: LayerShape, **changes) -> LayerShape:
    return LayerShape(**{**layer.__dict__, **changes})


GEMMA = like(GQA, scale=24**-0.5)
GEMMA2 = like(GEMMA, soft_cap=5.0)
WIDE = like(GQA, k_dim=24, v_dim=24, scale=24**-0.5, window=WINDOW)
SLIDING = like(GQA, window=WINDOW)
MLA = LayerShape(q_heads=4, kv_heads=1, k_dim=24, v_dim=16, scale=24**-0.5, k_only=True)
SINKS = like(GQA, sinks=True)
INDEXED = like(MLA, chosen=CHOSEN, index=index_part(16, "float32"), index_heads=16)
EXPECTED = {
    "llama": (GQA, GQA),
    "mistral": (WIDE, WIDE),
    "mixtral": (GQA, GQA),
    "qwen2": (GQA, SLIDING),
    "qwen3": (GQA, GQA),
    "qwen3_moe": (GQA, GQA),
    "gemma2": (like(GEMMA2, window=WINDOW), GEMMA2),
    "gemma3_text": (like(GEMMA, window=WINDOW), GEMMA),
    "phi3": (SLIDING, SLIDING),
    "gpt_oss": (like(SINKS, window=WINDOW), SINKS),
    "gpt2": (MHA, MHA),
    "gpt_neox": (MHA, MHA),
    "opt": (like(MHA, scale=1.0), like(MHA, scale=1.0)),
    "stablelm": (GQA, GQA),
    "deepseek_v3": (MLA, MLA),
    "deepseek_v32": (INDEXED, INDEXED),
    "glm_moe_dsa": (INDEXED, like(MLA, chosen=CHOSEN)),
    "olmo2": (GQA, GQA),
    "granite": (like(GQA, scale=0.4), like(GQA, scale=0.4)),
    "starcoder2": (SLIDING, SLIDING),
    "cohere2": (SLIDING, GQA),
    "smollm3": (GQA, GQA),
    "glm4": (GQA, GQA),
    "granitemoe": (like(GQA, scale=0.4), like(GQA, scale=0.4)),
    "nemotron": (GQA, GQA),
    "ministral3": (GQA, GQA),
    "phimoe": (GQA, GQA),
    "llama4_text": (like(GQA, chunk=WINDOW), GQA),
}
REASONS = {
    "lfm2": "keeps a state of each sequence .Lfm2ShortConv.",
    "diffllama": "layer 0 of .* computed attention 2 times",
    "qwen3_next": "keeps a state of each sequence .Qwen3NextGatedDeltaNet.",
    "falcon_h1": "keeps a state of each sequence .FalconH1Mixer.",
    "mamba": "keeps a state of each sequence .MambaMixer.",
    "bloom": "adds slopes by distance",
    "mpt": "adds slopes by distance",
}


@pytest.mark.quick("llama", "qwen3_moe", "gpt2", "olmo2", "glm4")
@pytest.mark.parametrize("family", SUPPORTED)
def test_a_supported_family_has_the_shape_of_its_configuration(family: str) -> None:
    shape = inspect_model(tiny_model(family))
    assert [like(layer, scale=0) for layer in shape.layers] == [like(layer, scale=0) for layer in EXPECTED[family]]
    assert [layer.scale for layer in shape.layers] == pytest.approx([layer.scale for layer in EXPECTED[family]])
    assert (shape.family, shape.dtype, shape.vocab_size, shape.max_positions) == (family, DType.FLOAT32, 160, 512)


@pytest.mark.parametrize("family", REFUSED)
def test_a_refused_family_is_refused_for_its_reason_and_keeps_its_own_attention(family: str) -> None:
    model = tiny_model(family)
    before = model.config._attn_implementation
    with pytest.raises(UnsupportedModelError, match=REASONS[family]) as caught:
        inspect_model(model)
    assert family in str(caught.value)
    assert model.config._attn_implementation == before


@pytest.mark.quick("llama-dtype0", "gpt_oss-dtype0", "qwen3_moe-dtype0")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["llama", "gpt_oss", "qwen3_moe"])
def test_rounding_in_16_bits_passes_the_self_check(family: str, dtype: torch.dtype) -> None:
    assert inspect_model(tiny_model(family).to(dtype)).dtype is DType(str(dtype))


def test_a_double_precision_model_is_refused_with_the_dtypes_that_work() -> None:
    with pytest.raises(UnsupportedModelError, match=r"attends in torch\.float64; load it in one of float32"):
        inspect_model(tiny_model("llama").double())


def test_a_model_in_training_mode_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match=r"model\.eval\(\)"):
        inspect_model(tiny_model("llama").train())


def test_layer_specs_carry_windows_unequal_dims_and_the_dtype_of_the_store() -> None:
    mla = inspect_model(tiny_model("deepseek_v3"))
    assert mla.layer_specs()[0] == LayerSpec(kv_heads=1, head_dim=24, k_only=True, dtype=DType.FLOAT32)
    gemma = inspect_model(tiny_model("gemma3_text"))
    assert gemma.layer_specs("fp8") == [
        LayerSpec(kv_heads=2, head_dim=16, window=WINDOW, dtype=DType.FP8_E4M3),
        LayerSpec(kv_heads=2, head_dim=16, dtype=DType.FP8_E4M3),
    ]


def test_attention_specs_say_what_backends_compute() -> None:
    spec = inspect_model(tiny_model("gemma2")).attention_spec(0, "int8")
    assert (spec.q_heads, spec.kv_heads, spec.head_dim, spec.v_dim) == (4, 2, 16, 16)
    assert (spec.window, spec.soft_cap, spec.sink_logits) == (WINDOW, 5.0, False)
    assert spec.scale == pytest.approx(24**-0.5)
    assert (spec.dtype, spec.kv_dtype) == (DType.FLOAT32, DType.INT8)
    assert inspect_model(tiny_model("gpt_oss")).attention_spec(1).sink_logits


# --- the self-check ------------------------------------------------------------------------------------------------


def test_a_model_that_slides_without_saying_so_fails_the_self_check() -> None:
    model = tiny_model("cohere2")
    model.model.layers[0].self_attn.sliding_window = None  # the mask is made from the configuration
    with pytest.raises(UnsupportedModelError, match="fails the self-check"):
        inspect_model(model)


@pytest.mark.quick("5")
@pytest.mark.parametrize("window", [5, WINDOW, 300, 4096])
def test_a_window_off_by_one_fails_the_self_check_however_long_it_is(
    window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("gemma3_text", sliding_window=window, max_position_embeddings=2**13)
    inspect_model(model)
    honest = self_check.attention

    def off_by_one(call: AttentionCall, *qkv: torch.Tensor) -> torch.Tensor:
        return honest(call._replace(window=call.window and call.window - 1), *qkv)

    monkeypatch.setattr(self_check, "attention", off_by_one)
    with pytest.raises(UnsupportedModelError, match="fails the self-check"):
        inspect_model(model)


def test_a_mixture_of_neighbouring_tokens_fails_the_self_check() -> None:
    model = tiny_model("llama")

    def shift(_module, _args, output):
        return output + 0.5 * output.roll(1, dims=1)

    model.model.layers[0].mlp.register_forward_hook(shift)
    with pytest.raises(UnsupportedModelError, match="fails the self-check"):
        inspect_model(model)


def test_ignored_sinks_fail_the_self_check(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = self_check.attention
    monkeypatch.setattr(self_check, "attention", lambda call, *kv: honest(call._replace(sinks=None), *kv))
    with pytest.raises(UnsupportedModelError, match="fails the self-check"):
        inspect_model(tiny_model("gpt_oss"))


def test_weights_that_are_not_numbers_fail_the_self_check() -> None:
    model = tiny_model("llama")
    model.lm_head.weight[3] = torch.nan
    with pytest.raises(
        UnsupportedModelError, match=r"logits that are NaN on a few tokens: its weight lm_head\.weight holds NaN"
    ):
        inspect_model(model)


def test_windows_are_back_after_the_self_check() -> None:
    model = tiny_model("gemma3_text", sliding_window=300)
    shape = inspect_model(model)
    assert [layer.window for layer in shape.layers] == [300, None]
    assert model.config.sliding_window == 300
    assert model.model.layers[0].self_attn.sliding_window == 300


def test_a_window_that_cannot_be_narrowed_is_crossed_by_a_longer_text() -> None:
    model = tiny_model("gemma3_text", sliding_window=40)
    sliding = model.model.layers[0].self_attn
    lengths: list[int] = []
    model.model.embed_tokens.register_forward_hook(lambda _module, args, _output: lengths.append(args[0].shape[1]))

    class Hidden(int):
        """A window that is found neither by its name nor by its type."""

    model.config.sliding_window = Hidden(40)
    sliding.sliding_window = Hidden(40)
    inspect_model(model)
    assert max(lengths) > 2 * 40


def test_a_learned_limit_of_positions_bounds_the_self_check() -> None:
    shape = inspect_model(tiny_model("gpt2", n_positions=6))
    assert shape.max_positions == 6


# --- far positions -------------------------------------------------------------------------------------------------


def far_scaled_llama4(**settings: Any) -> Any:
    """Llama 4 with full layers: beyond `floor_scale` tokens its queries grow with the place in the row, not the position."""
    full = dict(layer_types=["full_attention"] * 2, no_rope_layers=[1, 0], floor_scale=8192)
    return tiny_model("llama4_text", **{**full, "max_position_embeddings": 2**20, **settings})


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules that count tokens get no positions of kvpool's."""
    monkeypatch.setattr(probing, "use_positions", lambda model: None)


@pytest.mark.usefixtures("counting")
def test_a_model_that_counts_far_tokens_by_itself_is_refused_with_the_reason() -> None:
    with pytest.raises(UnsupportedModelError, match="at position 524280 or 1048560 it goes by something else"):
        inspect_model(far_scaled_llama4())


@pytest.mark.usefixtures("counting")
@pytest.mark.parametrize(
    "settings", [dict(attn_temperature_tuning=False), dict(max_position_embeddings=8191), dict(no_rope_layers=[1, 1])]
)
def test_the_same_model_is_accepted_where_it_never_does_so(settings: dict[str, Any]) -> None:
    assert inspect_model(far_scaled_llama4(**settings)).family == "llama4_text"


def test_queries_that_grow_with_position_ids_are_accepted_at_any_distance() -> None:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "llama_4_scaling_beta": 0.5}
    settings = dict(head_dim=16, max_position_embeddings=2**18, sliding_window=None)
    model = tiny_model("ministral3", rope_parameters={**rope, "original_max_position_embeddings": 64}, **settings)
    inspect_model(model)
    prompt = random_prompt(200)
    got = forward(model, prompt, torch.arange(200), None, ContiguousAttention().step({0: 200}))
    model.set_attn_implementation("eager")
    torch.testing.assert_close(got, model(input_ids=prompt[None], use_cache=False).logits[0], rtol=1e-3, atol=1e-3)


@pytest.mark.usefixtures("counting")
def test_a_model_without_a_limit_of_positions_is_tried_far_out_too() -> None:
    model = far_scaled_llama4()
    del model.config.max_position_embeddings
    with pytest.raises(UnsupportedModelError, match="goes by something else than position_ids"):
        inspect_model(model)


@pytest.mark.parametrize("window", [512, 600])
def test_a_window_as_long_as_the_longest_text_hides_nothing_and_is_accepted(window: int) -> None:
    """phimoe masks by a window that it does not tell its attention function."""
    shape = inspect_model(tiny_model("phimoe", sliding_window=window))
    assert [layer.window for layer in shape.layers] == [None, None]
    assert inspect_model(tiny_model("gemma3_text", sliding_window=window)).layers[0].window == window


def test_a_window_of_the_configuration_that_only_the_cache_of_transformers_knows_is_refused() -> None:
    model = tiny_model("llama", sliding_window=WINDOW)
    text = torch.arange(40).unsqueeze(0)
    cache = DynamicCache(config=model.config)
    model(text[:, :-1], past_key_values=cache)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(model(text[:, -1:], past_key_values=cache).logits[0, -1], model(text).logits[0, -1])
    with pytest.raises(UnsupportedModelError, match=r"layer 0 .* attends to all earlier .* keeps the last 24,"):
        inspect_model(model)
    assert model.config._attn_implementation == "eager"
    inspect_model(tiny_model("llama", sliding_window=model.config.max_position_embeddings))


def test_a_shorter_window_that_attention_is_not_told_of_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="fails the self-check"):
        inspect_model(tiny_model("phimoe", sliding_window=511))


# --- what a model raises or lacks ----------------------------------------------------------------------------------


def test_what_a_models_own_forward_raises_is_one_error_with_its_cause() -> None:
    model = tiny_model("llama")
    model.model.layers[1].mlp = None
    with pytest.raises(UnsupportedModelError, match=r"its own forward raised TypeError .*'NoneType'") as caught:
        inspect_model(model)
    assert isinstance(caught.value.__cause__, TypeError)
    assert "\n" not in str(caught.value)
    assert model.config._attn_implementation == "eager"


def test_a_model_without_a_head_is_refused_for_that() -> None:
    with pytest.raises(UnsupportedModelError, match=r"LlamaModel \(llama\) has no language-model head"):
        inspect_model(LlamaModel(tiny_config("llama")).eval())


def test_given_a_loaded_model_with_an_encoder_then_the_refusal_says_who_runs_it() -> None:
    config = T5Config(d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, vocab_size=20)
    with pytest.raises(
        UnsupportedModelError, match="an encoder beside its decoder, which only transformers or vLLM run"
    ):
        inspect_model(T5ForConditionalGeneration(config).eval())


def test_what_is_no_model_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match=r"Linear\(.*\) is no model of transformers"):
        inspect_model(torch.nn.Linear(2, 2))


# --- rotary embeddings that change with length -----------------------------------------------------------------------


def longrope() -> torch.nn.Module:
    factors = {"short_factor": [1.0 + i / 8 for i in range(8)], "long_factor": [4.0 + i for i in range(8)]}
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 64, **factors}
    return tiny_model("phi3", sliding_window=None, rope_parameters=rope, original_max_position_embeddings=64)


def test_longrope_ends_where_its_frequencies_would_change() -> None:
    assert inspect_model(longrope()).max_positions == 64


def test_longrope_equals_transformers_up_to_its_end_even_after_a_longer_text() -> None:
    model = longrope()
    prompt = random_prompt(64)
    expected = model(input_ids=prompt[None], use_cache=False).logits[0]
    model(input_ids=random_prompt(100)[None], use_cache=False)  # now the long frequencies are in force
    inspect_model(model)
    logits = forward(model, prompt, torch.arange(64), None, ContiguousAttention().step({0: 64}))
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_a_far_position_does_not_change_the_other_sequences_of_a_step(kind: str) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    model = longrope() if kind == "longrope" else tiny_model("llama", max_position_embeddings=64, rope_parameters=rope)
    inspect_model(model)
    prompt = random_prompt(9)
    alone = forward(model, prompt, torch.arange(9), None, ContiguousAttention().step({0: 9}))
    positions = positions_of([0, 200], [9, 1])
    together = forward(
        model, torch.cat([prompt, prompt[:1]]), positions, None, ContiguousAttention().step({0: 9, 1: 1})
    )
    torch.testing.assert_close(together[:9], alone)


def test_a_model_shape_is_a_value() -> None:
    assert inspect_model(tiny_model("llama")) == inspect_model(tiny_model("llama", seed=1))
    assert isinstance(hash(ModelShape("llama", (GQA,), DType.FLOAT32, 160, None)), int)


@pytest.mark.gpu
@pytest.mark.parametrize("family", SUPPORTED)
def test_a_supported_family_passes_on_a_gpu_in_bfloat16(family: str) -> None:
    shape = inspect_model(tiny_model(family).to("cuda", torch.bfloat16))
    assert (shape.dtype, len(shape.layers)) == (DType.BFLOAT16, 2)
