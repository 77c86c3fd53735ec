"""The model stays its owner's: nothing that the owner does to it changes answers silently, and it is left as it was."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from models import random_prompt, tiny_model  # noqa: E402

from kvpool.engine import Engine, SamplingParams  # noqa: E402
from kvpool.errors import InvalidArgumentError, SequenceStateError, StepError, UnsupportedModelError  # noqa: E402
from kvpool.hf import CachePool  # noqa: E402

GREEDY = SamplingParams(max_new_tokens=8, temperature=0.0)
PROMPT = random_prompt(40).tolist()


def answer(engine: Engine, prompt: list[int] = PROMPT) -> list[int]:
    return list(engine.generate([prompt], GREEDY)[0].token_ids)


def by_itself(model: Any, prompt: list[int] = PROMPT) -> list[int]:
    ids = torch.tensor([prompt])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False)
    return out[0, len(prompt) :].tolist()


def state_of(model: Any) -> dict[str, Any]:
    """Everything of a model that its owner can see, but the numbers."""
    found: dict[str, Any] = {"config": model.config.to_dict(), "attention": model.config._attn_implementation}
    for name, module in model.named_modules():
        found[name] = type(module), module.training, sorted(vars(module)), list(module._forward_pre_hooks)
        found[f"{name} rope"] = str(getattr(module, "rope_type", None))
    for name, tensor in model.state_dict(keep_vars=True).items():
        found[f"{name} of the weights"] = id(tensor), tensor.data_ptr(), tensor.dtype, tensor.requires_grad
    return found


@pytest.fixture
def model() -> Any:
    return tiny_model("llama")


@pytest.fixture
def engine(model: Any) -> Iterator[Engine]:
    with Engine(model, kv_blocks=64) as engine:
        yield engine


# --- attention -------------------------------------------------------------------------------------------------------


@pytest.mark.quick("sdpa")
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_given_an_owner_who_sets_attention_then_answers_stay_right_before_and_after(
    model: Any, engine: Engine, attention: str
) -> None:
    other = random_prompt(30, seed=2).tolist()
    wanted = by_itself(model), by_itself(model, other)
    model.set_attn_implementation(attention)
    assert (answer(engine), answer(engine, other)) == wanted
    model.set_attn_implementation("eager")
    assert (answer(engine), answer(engine, other)) == wanted
    assert by_itself(model) == wanted[0]


@pytest.mark.quick("<lambda>0")
@pytest.mark.parametrize("make", [lambda: tiny_model("llama"), lambda: tiny_model("qwen3_next")])
def test_given_engines_of_one_model_that_begin_end_and_answer_at_the_same_time_then_all_are_right(
    make: Callable[[], Any],
) -> None:
    model = make()
    prompts = [random_prompt(20 + i, seed=i).tolist() for i in range(4)]
    wanted = [by_itself(model, prompt) for prompt in prompts]
    wrong: list[Any] = []
    done = threading.Event()

    def keep_asking(ask: Callable[[list[int]], list[int]]) -> None:
        while not done.is_set():
            for prompt, tokens in zip(prompts, wanted, strict=True):
                try:
                    if (got := ask(prompt)) != tokens:
                        wrong.append(got)
                except Exception as error:
                    wrong.append(error)

    with Engine(model, kv_blocks=64) as first:
        callers = [
            threading.Thread(target=keep_asking, args=(lambda prompt: answer(first, prompt),)),
            threading.Thread(target=keep_asking, args=(lambda prompt: by_itself(model, prompt),)),
        ]
        for caller in callers:
            caller.start()
        for _ in range(2):
            with Engine(model, kv_blocks=64) as second:
                assert [answer(second, prompt) for prompt in prompts] == wanted
        done.set()
        for caller in callers:
            caller.join()
    assert wrong == []


def test_given_attention_that_does_not_reach_the_engine_then_a_step_fails_with_the_reason(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    wanted = answer(engine)
    with monkeypatch.context() as changed:
        changed.setitem(ALL_ATTENTION_FUNCTIONS, "kvpool", ALL_ATTENTION_FUNCTIONS["sdpa"])
        with pytest.raises(StepError, match="another program has replaced the attention that kvpool registered"):
            answer(engine, random_prompt(30, seed=2).tolist())
    assert answer(engine) == wanted


# --- as found --------------------------------------------------------------------------------------------------------


@pytest.mark.quick("<lambda>0")
@pytest.mark.parametrize(
    "make", [lambda: tiny_model("llama"), lambda: tiny_model("gemma3_text"), lambda: tiny_model("qwen3_next")]
)
def test_given_a_model_in_training_then_an_engine_and_a_pool_leave_it_exactly_as_it_was(
    make: Callable[[], Any],
) -> None:
    model = make().train()
    for number, parameter in enumerate(model.parameters()):
        parameter.requires_grad_(number % 2 == 0)
    before = state_of(model)
    with Engine(model, kv_blocks=64) as engine:
        assert state_of(model) == before
        answer(engine)
        assert state_of(model) == before
    assert state_of(model) == before


def test_given_a_model_that_is_refused_then_it_is_as_it_was() -> None:
    model = tiny_model("phimoe", sliding_window=100).train().requires_grad_(True)
    before = state_of(model)
    with pytest.raises(UnsupportedModelError, match="fails the self-check"):
        Engine(model, kv_blocks=64)
    with pytest.raises(UnsupportedModelError, match="fails the self-check"):
        CachePool(model.eval(), num_blocks=64)
    assert state_of(model.train()) == before


def test_given_another_dtype_then_the_engine_runs_a_copy_and_the_model_keeps_its_own(model: Any) -> None:
    before = state_of(model)
    with Engine(model, kv_blocks=64, dtype="bfloat16") as engine:
        assert engine.model.dtype == torch.bfloat16
        answer(engine)
    assert state_of(model) == before


# --- a model that changes --------------------------------------------------------------------------------------------


def test_given_a_model_that_is_set_to_training_then_answers_do_not_change() -> None:
    model = tiny_model("gpt2", resid_pdrop=0.5)
    with Engine(model, kv_blocks=64) as engine:
        wanted = answer(engine)
        model.train()
        assert answer(engine, random_prompt(30, seed=2).tolist()) == by_itself(
            model.eval(), random_prompt(30, seed=2).tolist()
        )
        assert answer(engine) == wanted


def in_place(model: Any) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.3).add_(0.01)


def through_data(model: Any) -> None:
    for parameter in model.parameters():
        parameter.data.mul_(1.3).add_(0.01)


def loaded(model: Any) -> None:
    model.load_state_dict(tiny_model("llama", seed=5).state_dict())


def in_inference_mode(model: Any) -> None:
    with torch.inference_mode():
        in_place(model)


def buffers_in_place(model: Any) -> None:
    model.model.rotary_emb.inv_freq.mul_(1.3)


def buffers_through_data(model: Any) -> None:
    model.model.rotary_emb.inv_freq.data.mul_(1.3)


CHANGES = [in_place, through_data, loaded, in_inference_mode, buffers_in_place, buffers_through_data]


@pytest.mark.quick("in_place")
@pytest.mark.parametrize("change", CHANGES)
def test_given_weights_that_change_in_place_then_nothing_of_the_old_ones_is_reused(
    model: Any, engine: Engine, change: Callable[[Any], None]
) -> None:
    old = answer(engine)
    change(model)
    wanted = by_itself(model)
    assert wanted != old
    (completion,) = engine.generate([PROMPT], GREEDY)
    assert (list(completion.token_ids), completion.num_cached_tokens) == (wanted, 0)
    assert engine.generate([PROMPT], GREEDY)[0].num_cached_tokens == 32


def test_given_a_buffer_that_the_model_replaces_while_it_runs_then_the_engine_keeps_its_own(
    model: Any, engine: Engine
) -> None:
    old = answer(engine)
    model.model.rotary_emb.register_buffer("inv_freq", model.model.rotary_emb.inv_freq * 1.3, persistent=False)
    (completion,) = engine.generate([PROMPT], GREEDY)
    assert (list(completion.token_ids), completion.num_cached_tokens) == (old, 32)


def test_given_weights_made_in_inference_mode_then_their_changes_are_noticed() -> None:
    with torch.inference_mode():
        model = tiny_model("llama")
    with Engine(model, kv_blocks=64) as engine:
        answer(engine)
        in_inference_mode(model)
        assert answer(engine) == by_itself(model)


def test_given_weights_that_change_then_tiers_give_no_old_prefix_and_keep_it_for_others(
    model: Any, tmp_path: Path
) -> None:
    old = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with Engine(model, kv_blocks=64, disk=tmp_path) as engine:
        first = answer(engine)
        assert engine._tiers is not None
        assert engine._tiers.flush()
        in_place(model)
        assert answer(engine) == by_itself(model) != first
    model.load_state_dict(old)
    with Engine(model, kv_blocks=64, disk=tmp_path) as engine:
        (completion,) = engine.generate([PROMPT], GREEDY)
        assert (list(completion.token_ids), completion.num_cached_tokens) == (first, 32)


def replaced_weight(model: Any) -> None:
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight * 2)


def converted(model: Any) -> None:
    model.to(torch.bfloat16)


def replaced_module(model: Any) -> None:
    model.model.layers[0].mlp = model.model.layers[1].mlp


@pytest.mark.quick("replaced_weight")
@pytest.mark.parametrize("change", [replaced_weight, converted, replaced_module])
def test_given_weights_or_modules_that_are_replaced_then_requests_are_refused_with_the_remedy(
    model: Any, engine: Engine, change: Callable[[Any], None]
) -> None:
    answer(engine)
    change(model)
    with pytest.raises(SequenceStateError, match=r"replaced or moved after .* close it and make a new one"):
        answer(engine)
    with Engine(model, kv_blocks=64) as another:
        assert answer(another) == by_itself(model)


# --- the caller's global state, and models of other packages ---------------------------------------------------------


@pytest.fixture
def restored() -> Iterator[None]:
    dtype, device = torch.get_default_dtype(), torch.get_default_device()
    yield
    torch.set_default_dtype(dtype)
    torch.set_default_device(device)


@pytest.mark.quick("dtype-llama", "device-qwen3_next", "autocast-llama", "inference-llama")
@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
@pytest.mark.parametrize("state", ["dtype", "device", "autocast", "inference"])
def test_given_any_global_state_of_the_caller_then_answers_are_the_same(
    state: str, family: str, restored: None
) -> None:
    model = tiny_model(family)
    wanted = by_itself(model)
    modes = {"autocast": torch.autocast("cpu", dtype=torch.bfloat16), "inference": torch.inference_mode()}
    if state == "dtype":
        torch.set_default_dtype(torch.bfloat16)
    elif state == "device":
        torch.set_default_device("meta")
    with modes.get(state, nullcontext()), Engine(model, kv_bytes=2**22) as engine:
        assert answer(engine) == wanted


def test_given_a_model_that_accelerate_prepared_for_mixed_precision_then_its_own_dtype_is_computed(model: Any) -> None:
    accelerate = pytest.importorskip("accelerate")
    wanted = by_itself(model)
    prepared = accelerate.Accelerator(cpu=True, mixed_precision="bf16").prepare_model(model, evaluation_mode=True)
    with Engine(prepared, kv_blocks=64) as engine:
        assert answer(engine) == wanted


def test_given_a_model_that_accelerate_offloaded_then_it_is_refused_with_the_remedy(model: Any) -> None:
    accelerate = pytest.importorskip("accelerate")
    with pytest.raises(InvalidArgumentError, match=r"not in memory .*; load it whole, without device_map"):
        Engine(accelerate.cpu_offload(model), kv_blocks=64)


def test_given_weights_that_are_nan_then_the_message_says_so_and_names_one(model: Any) -> None:
    model.model.layers[1].mlp.up_proj.weight[3] = torch.nan
    with pytest.raises(
        UnsupportedModelError, match=r"logits that are NaN .*model\.layers\.1\.mlp\.up_proj\.weight holds NaN"
    ):
        Engine(model, kv_blocks=64)


@pytest.mark.quick("pixel_values-images=", "assistant_model-draft_tokens")
@pytest.mark.parametrize(
    ("option", "remedy"),
    [
        ("max_new_tokens", r"write SamplingParams\(max_new_tokens=\.\.\.\)"),
        ("pixel_values", "images="),
        ("audio", "it left in 0.3: "),
        ("assistant_model", "draft_tokens"),
        ("logits_processor", "logits_processors"),
        ("no_such_thing", "it has on_chunk, on_end, priority, "),
    ],
)
def test_given_an_option_that_requests_do_not_have_then_the_error_names_it_and_the_remedy(
    engine: Engine, option: str, remedy: str
) -> None:
    for ask in (engine.submit, lambda prompt, **options: engine.generate([prompt], **options)):
        with pytest.raises(InvalidArgumentError, match=f"no option '{option}': .*{remedy}"):
            ask(PROMPT, **{option: 1})
