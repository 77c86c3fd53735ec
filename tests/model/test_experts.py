"""Mixtures of experts with two products for steps of few tokens: exactly those that are, with the same results."""

from __future__ import annotations

import logging
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from fusing import check_logits_stay  # noqa: E402
from hybrids import hybrid_model  # noqa: E402
from models import random_prompt, tiny_model  # noqa: E402
from torch import nn  # noqa: E402

from kvpool.engine import Engine, SamplingParams  # noqa: E402
from kvpool.kernels.layout import MOST_CHOICES  # noqa: E402
from kvpool.model.faster_layers import fuse_experts  # noqa: E402

# How many layers have experts. Those of llama4 and the whole of llama stay as they are.
EXPECTED = {"mixtral": 2, "qwen3_moe": 2, "gpt_oss": 2, "deepseek_v3": 1, "granitemoe": 2, "llama4_text": 0, "llama": 0}


@pytest.mark.quick("mixtral", "gpt_oss", "granitemoe")
@pytest.mark.parametrize("family", EXPECTED)
def test_given_a_model_when_its_experts_are_fused_then_its_logits_stay(family: str) -> None:
    check_logits_stay(tiny_model(family), fuse_experts, EXPECTED[family], tolerance=1e-4)


def experts_of(family: str) -> Any:
    return next(m for m in tiny_model(family).modules() if type(m).__name__.endswith("Experts"))


def inputs(experts: Any, num_tokens: int, per_token: int = 2) -> tuple[Any, Any, Any]:
    torch.manual_seed(0)
    shares, chosen = torch.rand(num_tokens, experts.num_experts).topk(per_token)
    return torch.randn(num_tokens, 64), chosen, shares


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])  # whose weights are transposed, with biases and its own gate
@pytest.mark.parametrize("num_tokens", [1, 7, MOST_CHOICES // 2])
def test_given_few_tokens_then_experts_compute_what_they_did_without_their_own_forward(
    family: str, num_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    experts = experts_of(family)
    given = inputs(experts, num_tokens)
    before = experts(*given)
    assert fuse_experts(experts) == 1
    monkeypatch.setattr(type(experts), "forward", None)
    torch.testing.assert_close(experts(*given), before, rtol=1e-4, atol=1e-4)


def test_given_many_tokens_then_experts_sort_them_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    experts = experts_of("mixtral")
    given = inputs(experts, MOST_CHOICES // 2 + 1)
    before = experts(*given)
    assert fuse_experts(experts) == 1
    monkeypatch.setattr("kvpool.model.faster_layers.expert_product", None)
    assert torch.equal(experts(*given), before)


def plain(experts: Any) -> None:
    pass


def hooked(experts: Any) -> None:
    experts.register_forward_hook(lambda module, args, out: out)


def double(experts: Any) -> None:
    experts._apply_gate = lambda x: x.chunk(2, dim=-1)[0]
    own = type(experts)
    experts.__class__ = type("Other", (own,), {"forward": lambda self, *args: 2 * own.forward(self, *args)})


def with_quantised_weights(experts: Any) -> None:
    experts.down_proj = nn.Parameter(experts.down_proj.to(torch.float8_e4m3fn), requires_grad=False)


@pytest.mark.parametrize(("change", "expected"), [(plain, 1), (hooked, 0), (double, 0), (with_quantised_weights, 0)])
def test_given_experts_that_do_something_else_then_they_stay(change: Any, expected: int) -> None:
    experts = experts_of("mixtral")
    change(experts)
    assert fuse_experts(experts) == expected


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "qwen3_moe", "qwen3_next"])
def test_given_a_gpu_then_steps_that_decode_with_experts_come_from_graphs_in_every_type(
    family: str, dtype: Any, caplog: pytest.LogCaptureFixture
) -> None:
    made = hybrid_model if family == "qwen3_next" else tiny_model
    prompts = [random_prompt(length, seed=length, vocab_size=128).tolist() for length in (5, 40, 17)]
    greedy = SamplingParams(max_new_tokens=24, ignore_eos=True)
    answers = []
    for device in ["cuda", "cpu"] if dtype is torch.float32 else ["cuda"]:
        with caplog.at_level(logging.INFO), Engine(made(family).to(device, dtype), kv_blocks=64) as engine:
            answers.append([out.token_ids for out in engine.generate(prompts, greedy)])
    assert "steps run without CUDA graphs" not in caplog.text
    if dtype is torch.bfloat16:  # torch multiplies many tokens of other types by reading which experts they chose
        assert "without CUDA graphs" not in caplog.text
    assert answers[0] == answers[-1]
