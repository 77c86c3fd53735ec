"""What adapters add to a matrix product: the reference against plain products, and the kernels against it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from kvpool.kernels.lora import (  # noqa: E402
    add_lora_reference,
    empty_weights,
    group_tokens,
    max_groups,
    padded_rank,
    tile_size,
)
from kvpool.kernels.lora_triton import add_lora_triton  # noqa: E402

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
CPU = torch.device("cpu")


def random_weights(sizes: tuple[int, ...], num_inputs: int, ranks: list[list[int]], dtype: Any = torch.float32) -> Any:
    """Weights with these ranks, [slot][part]; beyond them there are zeros."""
    weights = empty_weights(len(ranks), max(max(row) for row in ranks), num_inputs, sizes, dtype=dtype, device=CPU)
    for slot, row in enumerate(ranks):
        begin = 0
        for part, rank in enumerate(row):
            weights.a[slot, part, :rank] = torch.randn(rank, num_inputs) / num_inputs**0.5
            weights.b[slot, begin : begin + sizes[part], :rank] = torch.randn(sizes[part], rank)
            begin += sizes[part]
    weights.ranks.copy_(torch.tensor(ranks))
    weights.scales.copy_(torch.rand(len(ranks), len(sizes)) + 0.5)
    return weights


def on(device: str, weights: Any) -> Any:
    return weights._replace(**{name: getattr(weights, name).to(device) for name in ("a", "b", "scales", "ranks")})


def groups_of(slots: list[int], tile: int) -> Any:
    return torch.from_numpy(group_tokens(np.array(slots), tile))


def test_given_tokens_of_several_adapters_then_each_is_in_one_group_of_its_adapter() -> None:
    rng = np.random.default_rng(0)
    for tile in (1, 4, 16):
        slots = rng.integers(-1, 5, 100)
        groups = group_tokens(slots, tile)
        placed = {int(token): int(row[0]) for row in groups for token in row[1:] if token >= 0}
        assert placed == {token: slot for token, slot in enumerate(slots.tolist()) if slot >= 0}
        assert sum(int((row[1:] >= 0).sum()) for row in groups) == len(placed)


def test_given_no_adapter_then_there_is_no_group() -> None:
    assert group_tokens(np.array([-1, -1]), 4).shape == (0, 5)
    assert group_tokens(np.array([], np.int64), 4).shape == (0, 5)


@pytest.mark.parametrize("num_tokens", [1, 16, 17, 256, 257, 2048])
def test_given_the_worst_mixture_of_adapters_then_the_groups_fit_a_graph(num_tokens: int) -> None:
    for num_slots in (1, 3, 16):
        for slots in (np.arange(num_tokens) % num_slots, np.minimum(np.arange(num_tokens), num_slots - 1)):
            assert len(group_tokens(slots, tile_size(num_tokens))) <= max_groups(num_tokens, num_slots)


def test_given_adapters_in_slots_then_the_reference_adds_their_products_and_leaves_other_tokens_alone() -> None:
    torch.manual_seed(0)
    weights = random_weights((24, 8), 40, [[4, 0], [3, 8]])
    x, out = torch.randn(5, 40), torch.randn(5, 32)
    slots = [1, -1, 0, 1, -1]
    expected = out.clone()
    for token, slot in enumerate(slots):
        if slot >= 0:
            for part, (first, end) in enumerate([(0, 24), (24, 32)]):
                rank = int(weights.ranks[slot, part])
                delta = weights.b[slot, first:end, :rank] @ weights.a[slot, part, :rank] @ x[token]
                expected[token, first:end] += delta * weights.scales[slot, part]
    add_lora_reference(out, x, weights, groups_of(slots, 2))
    torch.testing.assert_close(out, expected)
    assert torch.equal(out[[1, 4]], expected[[1, 4]])


@pytest.mark.quick("odd-16-cpu")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("tile", [16, 64])
@pytest.mark.parametrize(
    ("sizes", "num_inputs", "ranks"),
    [
        ((200,), 100, [[5], [16], [0]]),  # none of these is a multiple of what a program computes
        (
            (192, 64, 64),
            1100,
            [[8, 0, 16], [17, 32, 1], [0, 0, 4]],
        ),  # joined projections, inputs divided among programs
        ((130, 130), 64, [[100, 64], [0, 128], [65, 0]]),  # ranks divided among programs
    ],
    ids=["odd", "joined", "high ranks"],
)
def test_given_the_kernels_then_they_add_what_the_reference_adds(
    sizes: tuple[int, ...], num_inputs: int, ranks: list[list[int]], tile: int, device: str
) -> None:
    torch.manual_seed(1)
    weights = random_weights(sizes, num_inputs, ranks)
    slots = torch.randint(-1, 3, (40,)).tolist()
    groups = torch.cat([groups_of(slots, tile), torch.full((2, tile + 1), -1, dtype=torch.int32)])  # as in a graph
    x, whole = torch.randn(40, num_inputs + 3), torch.randn(40, sum(sizes) + 5)
    expected = whole.clone()
    add_lora_reference(expected[:, : sum(sizes)], x[:, :num_inputs], weights, groups)
    moved = whole.to(device)
    add_lora_triton(moved[:, : sum(sizes)], x.to(device)[:, :num_inputs], on(device, weights), groups.to(device))
    torch.testing.assert_close(moved.cpu(), expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(moved.cpu()[:, sum(sizes) :], whole[:, sum(sizes) :])


@pytest.mark.parametrize("device", DEVICES)
def test_given_inputs_whose_columns_lie_together_then_the_kernels_read_them_right(device: str) -> None:
    """A mixer of Mamba transposes a prompt before one of its projections."""
    torch.manual_seed(3)
    weights, groups = random_weights((40,), 24, [[4], [8]]), groups_of([0, 1, 1, 0, -1, 1], 16)
    x, out = torch.randn(24, 6).t(), torch.randn(6, 40)
    expected, moved = out.clone(), out.to(device)
    add_lora_reference(expected, x, weights, groups)
    add_lora_triton(moved, x.to(device), on(device, weights), groups.to(device))
    torch.testing.assert_close(moved.cpu(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("device", DEVICES)
def test_given_16_bit_weights_then_the_kernels_round_as_the_reference_does(device: str) -> None:
    torch.manual_seed(2)
    dtype = torch.bfloat16 if device == "cuda" else torch.float16  # the interpreter multiplies the bits of bfloat16
    weights = random_weights((64,), 256, [[16], [8]], dtype)
    x, out = torch.randn(20, 256).to(dtype), torch.randn(20, 64).to(dtype)
    groups, expected, moved = groups_of([0, 1] * 10, 16), out.clone(), out.to(device)
    add_lora_reference(expected, x, weights, groups)
    add_lora_triton(moved, x.to(device), on(device, weights), groups.to(device))
    torch.testing.assert_close(moved.cpu(), expected, rtol=2e-2, atol=2e-2)


def test_given_a_rank_then_stacks_have_room_for_what_kernels_compute_at_once() -> None:
    assert all(
        padded_rank(rank) >= rank and padded_rank(rank) % min(64, padded_rank(rank)) == 0 for rank in range(1, 300)
    )
