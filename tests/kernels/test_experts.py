"""The products of a mixture of experts: the reference against plain products, and the kernel against it."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from kvpool.kernels.experts import expert_product, expert_product_reference  # noqa: E402
from kvpool.kernels.experts_triton import expert_product_triton  # noqa: E402
from kvpool.kernels.layout import MOST_CHOICES  # noqa: E402

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
TYPES = [
    ("cpu", torch.float32),  # Triton's interpreter multiplies no bfloat16
    *(pytest.param("cuda", dtype, marks=pytest.mark.gpu) for dtype in (torch.float32, torch.bfloat16, torch.float16)),
]
SIZES = [(1, 8, 2), (5, 4, 4), (33, 3, 2), (65, 5, 2)]  # tokens, experts, choices of a token


def choices(num_tokens: int, num_experts: int, per_token: int) -> Any:
    """Different experts for each token; the first ones are chosen more often."""
    likely = torch.rand(num_tokens, num_experts) + torch.arange(num_experts, 0, -1) / num_experts
    return likely.topk(per_token).indices


def test_given_choices_then_the_reference_multiplies_each_token_by_the_weights_of_its_experts() -> None:
    torch.manual_seed(0)
    x, weights, bias = torch.randn(5, 24), torch.randn(4, 40, 24), torch.randn(4, 40)
    experts, scales = choices(5, 4, 2), torch.rand(5, 2)
    pairs = [(token, int(expert)) for token in range(5) for expert in experts[token]]
    plain = torch.stack([weights[expert] @ x[token] for token, expert in pairs])
    added = plain + bias[[expert for _, expert in pairs]]
    torch.testing.assert_close(expert_product_reference(x, weights, None, experts), plain)
    torch.testing.assert_close(expert_product_reference(x, weights, bias, experts), added)
    scaled = added * scales.reshape(-1, 1)
    torch.testing.assert_close(expert_product_reference(x, weights, bias, experts, scales), scaled)
    rows = torch.stack([x[token] for token, _ in pairs])  # one for each choice
    torch.testing.assert_close(expert_product_reference(rows, weights, None, experts), plain)
    torch.testing.assert_close(expert_product(x, weights, bias, experts, scales), scaled)


@pytest.mark.quick("False-33-3-2-cpu-dtype0", "True-1-8-2-cpu-dtype0")
@pytest.mark.parametrize(("device", "dtype"), TYPES)
@pytest.mark.parametrize(("num_tokens", "num_experts", "per_token"), SIZES)
@pytest.mark.parametrize("is_transposed", [False, True])
def test_given_any_step_then_the_kernel_gives_what_the_reference_gives(
    device: str, dtype: Any, num_tokens: int, num_experts: int, per_token: int, is_transposed: bool
) -> None:
    torch.manual_seed(num_tokens)
    weights = torch.randn(num_experts, 40, 72) if is_transposed else torch.randn(num_experts, 72, 40)
    weights = (weights / 8).to(device, dtype)
    weights = weights.transpose(1, 2) if is_transposed else weights
    bias = torch.randn(num_experts, 72).to(device, dtype)
    experts = choices(num_tokens, num_experts, per_token).to(device)
    scales = torch.rand(num_tokens, per_token).to(device)  # float32 in some models of bfloat16
    bound = 2 * torch.finfo(dtype).eps
    by_token, by_choice = (torch.randn(number, 40).to(device, dtype) for number in (num_tokens, experts.numel()))
    for x, *given in ((by_token, None, experts, None), (by_choice, bias, experts, scales)):
        got = expert_product_triton(x, weights, *given)
        torch.testing.assert_close(got, expert_product_reference(x, weights, *given), rtol=bound, atol=8 * bound)


@pytest.mark.parametrize("device", DEVICES)
def test_given_a_matrix_wider_than_one_program_then_every_output_is_there(device: str) -> None:
    torch.manual_seed(0)
    x, weights = torch.randn(3, 300, device=device), torch.randn(2, 200, 300, device=device) / 16
    experts = torch.tensor([[0, 1], [1, 0], [1, 0]], device=device)
    got = expert_product_triton(x, weights, None, experts)
    torch.testing.assert_close(got, expert_product_reference(x, weights, None, experts), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("device", DEVICES)
def test_given_inputs_and_choices_whose_columns_lie_together_then_they_are_read_right(device: str) -> None:
    torch.manual_seed(0)
    x, weights = torch.randn(24, 6, device=device).t(), torch.randn(4, 8, 24, device=device)
    experts = choices(6, 4, 2).t().contiguous().t().to(device)
    scales = torch.rand(2, 6, device=device).t()
    got = expert_product_triton(x, weights, None, experts, scales)
    torch.testing.assert_close(got, expert_product_reference(x, weights, None, experts, scales), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("device", DEVICES)
def test_given_as_many_choices_as_there_may_be_for_one_expert_then_all_are_computed(device: str) -> None:
    torch.manual_seed(0)
    x, weights = torch.randn(MOST_CHOICES, 16, device=device), torch.randn(2, 8, 16, device=device)
    experts = torch.ones(MOST_CHOICES, 1, dtype=torch.int64, device=device)
    got = expert_product_triton(x, weights, None, experts)
    torch.testing.assert_close(got, x @ weights[1].t(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("device", DEVICES)
def test_given_no_token_then_nothing_is_computed(device: str) -> None:
    x, weights = torch.empty(0, 16, device=device), torch.randn(2, 8, 16, device=device)
    assert expert_product_triton(x, weights, None, torch.empty(0, 2, dtype=torch.int64, device=device)).shape == (0, 8)
