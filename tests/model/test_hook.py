"""The attention hook and `forward`: a flattened step computes what the model computes by itself."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
from models import SUPPORTED, WINDOW, random_prompt, tiny_model

from kvpool.errors import KVPoolError, UnsupportedModelError
from kvpool.model.forward import forward
from kvpool.model.hook import AttentionCall, attending, use_kvpool_attention
from kvpool.model.positions import use_positions
from kvpool.model.self_check import ContiguousAttention, positions_of

LENGTHS = (2 * WINDOW + 7, WINDOW + 3, 1)  # two cross the window


def own_logits(model, prompt: torch.Tensor) -> torch.Tensor:
    """What the model says by itself."""
    return model(input_ids=prompt[None], use_cache=False).logits[0]


@pytest.mark.parametrize("family", SUPPORTED)
def test_packed_prompts_give_the_logits_of_each_alone(family: str) -> None:
    model = tiny_model(family)
    prompts = [random_prompt(length, seed=length) for length in LENGTHS]
    expected = torch.cat([own_logits(model, prompt) for prompt in prompts])
    assert use_kvpool_attention(model)
    use_positions(model)
    positions = positions_of([0, 0, 0], LENGTHS)
    attend = ContiguousAttention().step(dict(enumerate(LENGTHS)))
    logits = forward(model, torch.cat(prompts), positions, None, attend)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", SUPPORTED)
def test_chunks_of_several_prompts_in_changing_order_give_the_logits_of_each_alone(family: str) -> None:
    model = tiny_model(family)
    first, second = (random_prompt(length, seed=length) for length in LENGTHS[:2])
    expected_first, expected_second = own_logits(model, first), own_logits(model, second)
    assert use_kvpool_attention(model)
    use_positions(model)
    attention = ContiguousAttention()
    forward(model, first[:20], positions_of([0], [20]), None, attention.step({0: 20}))
    rest = len(second) - 1
    forward(
        model,
        torch.cat([second[:rest], first[20:50]]),
        positions_of([0, 20], [rest, 30]),
        None,
        attention.step({1: rest, 0: 30}),
    )
    logits = forward(
        model,
        torch.cat([first[50:], second[rest:]]),
        positions_of([50, rest], [len(first) - 50, 1]),
        None,
        attention.step({0: len(first) - 50, 1: 1}),
    )
    expected = torch.cat([expected_first[50:], expected_second[rest:]])
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", SUPPORTED)
def test_only_the_kept_rows_get_logits_in_the_order_asked(family: str) -> None:
    model = tiny_model(family)
    prompt = random_prompt(9)
    assert use_kvpool_attention(model)
    positions = torch.arange(9)
    everything = forward(model, prompt, positions, None, ContiguousAttention().step({0: 9}))
    keep = torch.tensor([8, 3])
    kept = forward(model, prompt, positions, keep, ContiguousAttention().step({0: 9}))
    torch.testing.assert_close(kept, everything[keep])


def test_the_callback_gets_token_major_views_and_what_the_layer_says_about_itself() -> None:
    model = tiny_model("gpt_oss")
    assert use_kvpool_attention(model)
    calls: list[AttentionCall] = []

    def attend(call: AttentionCall) -> torch.Tensor:
        calls.append(call)
        return call.q

    forward(model, random_prompt(5), torch.arange(5), None, attend)
    assert [call.layer for call in calls] == [0, 1]
    sliding, full = calls
    assert sliding.q.shape == (5, 4, 16)
    assert sliding.k.shape == sliding.v.shape == (5, 2, 16)
    assert (sliding.window, full.window) == (WINDOW, None)
    assert sliding.scale == pytest.approx(16**-0.5)
    assert sliding.soft_cap is None
    assert sliding.sinks is model.model.layers[0].self_attn.sinks


def test_keys_and_values_reach_the_callback_without_a_copy() -> None:
    model = tiny_model("llama")
    assert use_kvpool_attention(model)
    projected: list[int] = []
    received: list[int] = []
    model.model.layers[0].self_attn.v_proj.register_forward_hook(lambda *args: projected.append(args[-1].data_ptr()))

    def attend(call: AttentionCall) -> torch.Tensor:
        received.append(call.v.data_ptr())
        return call.q

    forward(model, random_prompt(5), torch.arange(5), None, attend)
    assert projected == received[:1]


def test_soft_cap_reaches_the_callback() -> None:
    model = tiny_model("gemma2")
    assert use_kvpool_attention(model)
    caps: list[float | None] = []

    def attend(call: AttentionCall) -> torch.Tensor:
        caps.append(call.soft_cap)
        return call.q

    forward(model, random_prompt(5), torch.arange(5), None, attend)
    assert caps == [5.0, 5.0]


def test_outside_attending_the_model_says_how_to_get_its_own_attention_back() -> None:
    model = tiny_model("llama")
    prompt = random_prompt(5)
    expected = own_logits(model, prompt)
    assert use_kvpool_attention(model)
    with pytest.raises(KVPoolError, match=r'set_attn_implementation\("sdpa"\)'):
        own_logits(model, prompt)
    model.set_attn_implementation("sdpa")
    torch.testing.assert_close(own_logits(model, prompt), expected)


def test_the_callback_is_gone_after_an_error_in_the_model() -> None:
    model = tiny_model("llama")
    assert use_kvpool_attention(model)

    def attend(call: AttentionCall) -> torch.Tensor:
        raise RuntimeError("attention failed")

    with pytest.raises(RuntimeError, match="attention failed"):
        forward(model, random_prompt(5), torch.arange(5), None, attend)
    with pytest.raises(KVPoolError, match="runs only under"):
        own_logits(model, random_prompt(5))


def test_nested_callbacks_do_not_mix() -> None:
    model = tiny_model("llama")
    assert use_kvpool_attention(model)
    prompt, positions = random_prompt(5), torch.arange(5)
    expected = forward(model, prompt, positions, None, ContiguousAttention().step({0: 5}))
    inner: list[torch.Tensor] = []
    outer = ContiguousAttention().step({0: 5})

    def attend(call: AttentionCall) -> torch.Tensor:
        inner.append(forward(model, prompt, positions, None, ContiguousAttention().step({0: 5})))
        return outer(call)

    logits = forward(model, prompt, positions, None, attend)
    torch.testing.assert_close([logits, *inner], [expected] * 3)


def test_a_mask_of_the_models_own_is_refused() -> None:
    model = tiny_model("llama")
    assert use_kvpool_attention(model)
    mask = torch.zeros(1, 1, 5, 5)
    with attending(lambda call: call.q), pytest.raises(UnsupportedModelError, match="mask or bias of its own"):
        model(input_ids=random_prompt(5)[None], attention_mask=mask, use_cache=False)


def test_a_model_without_the_interface_says_so() -> None:
    assert not use_kvpool_attention(tiny_model("gpt_neo"))


@pytest.mark.gpu
@pytest.mark.parametrize("family", [family for family in SUPPORTED if family != "phimoe"])  # it copies from the host
def test_a_step_can_be_captured_in_a_cuda_graph(family: str) -> None:
    model = tiny_model(family).to("cuda", torch.bfloat16)
    assert use_kvpool_attention(model)
    input_ids, positions, keep = random_prompt(6).cuda(), torch.arange(6).cuda(), torch.tensor([5, 2]).cuda()

    def step() -> torch.Tensor:
        return forward(model, input_ids, positions, keep, lambda call: ContiguousAttention().step({0: 6})(call))

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    input_ids.copy_(random_prompt(6, seed=1))
    graph.replay()
    torch.testing.assert_close(captured, step(), rtol=0.05, atol=0.05)
