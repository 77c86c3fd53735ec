"""Copies of blocks, whole and in part: the reference, and the kernels against it."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from kvpool import KVCacheConfig, LayerSpec  # noqa: E402
from kvpool.kernels.copy import (  # noqa: E402
    copy_blocks,
    copy_blocks_reference,
    copy_tokens,
    copy_tokens_reference,
)
from kvpool.kernels.copy_triton import copy_blocks_triton, copy_tokens_triton  # noqa: E402
from kvpool.storage.layout import GroupLayout  # noqa: E402

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
POISON = 0xA5


def random_blocks(num_blocks: int, block_bytes: int) -> Any:
    torch.manual_seed(block_bytes)
    return torch.randint(0, 256, (num_blocks, block_bytes), dtype=torch.uint8)


def ids(*numbers: int) -> Any:
    return torch.tensor(numbers, dtype=torch.int32)


@pytest.mark.parametrize("block_bytes", [1, 6, 20, 48, 5000, 1 << 15])
def test_given_blocks_when_copied_on_a_cpu_then_only_the_targets_change(block_bytes: int) -> None:
    source, target = random_blocks(5, block_bytes), torch.full((4, block_bytes), POISON, dtype=torch.uint8)
    copy_blocks(source, target, ids(4, 0), ids(1, 3))
    assert torch.equal(target[[1, 3]], source[[4, 0]])
    assert (target[[0, 2]] == POISON).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("block_bytes", [1, 6, 20, 48, 5000, 1 << 15])
def test_given_the_kernel_when_it_copies_blocks_then_it_does_what_the_reference_does(
    block_bytes: int, device: str
) -> None:
    expected, source = random_blocks(6, block_bytes), random_blocks(6, block_bytes).to(device)
    copy_blocks_reference(expected, expected, ids(4, 0, 2), ids(1, 3, 5))
    copy_blocks_triton(source, source, ids(4, 0, 2).to(device), ids(1, 3, 5).to(device))
    assert torch.equal(source.cpu(), expected)


LAYOUTS = {
    "bfloat16": LayerSpec(kv_heads=2, head_dim=16),
    "float32, narrow": LayerSpec(kv_heads=1, head_dim=1, dtype="float32"),
    "int8, odd": LayerSpec(kv_heads=3, head_dim=5, dtype="int8"),
    "int4, K only": LayerSpec(kv_heads=1, head_dim=6, dtype="int4", k_only=True),
}


def layout_of(spec: LayerSpec) -> GroupLayout:
    return GroupLayout(KVCacheConfig([spec] * 3, 4, gpu_blocks=6).groups[0])


@pytest.mark.parametrize("spec", LAYOUTS.values(), ids=LAYOUTS)
def test_given_the_first_tokens_of_a_block_when_copied_then_all_layers_have_them_and_the_rest_is_untouched(
    spec: LayerSpec,
) -> None:
    layout = layout_of(spec)
    source = random_blocks(6, layout.block_bytes)
    target = torch.full_like(source, POISON)
    copy_tokens(source, target, ids(5), ids(2), ids(3), layout.runs)
    for layer in range(3):
        for (at, name), values in layout.views(source).items():
            if at == layer:
                copied = layout.view(target, layer, name)
                assert torch.equal(copied[2, :3].view(torch.uint8), values[5, :3].view(torch.uint8))
                assert (copied[2, 3].contiguous().view(torch.uint8) == POISON).all()
    assert (target[[0, 1, 3, 4, 5]] == POISON).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("spec", LAYOUTS.values(), ids=LAYOUTS)
def test_given_the_kernel_when_it_copies_tokens_then_it_does_what_the_reference_does(
    spec: LayerSpec, device: str
) -> None:
    layout = layout_of(spec)
    expected, data = random_blocks(6, layout.block_bytes), random_blocks(6, layout.block_bytes).to(device)
    pairs = ids(0, 5, 1), ids(4, 2, 3), ids(1, 3, 2)
    copy_tokens_reference(expected, expected, *pairs, layout.runs)
    copy_tokens_triton(data, data, *[numbers.to(device) for numbers in pairs], layout.runs)
    assert torch.equal(data.cpu(), expected)
