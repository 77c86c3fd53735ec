"""Writing K and V into slots and reading them back: the reference, and the kernels against it."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from kvpool import DType, KVCacheConfig, LayerSpec  # noqa: E402
from kvpool.kernels import write  # noqa: E402
from kvpool.kernels.layout import LayerCache, StoredPart  # noqa: E402
from kvpool.kernels.quantization import dequantize, quantize  # noqa: E402
from kvpool.kernels.write import read_values, write_slots, write_slots_reference  # noqa: E402
from kvpool.kernels.write_triton import write_slots_triton  # noqa: E402
from kvpool.storage.layout import GroupLayout  # noqa: E402
from tool_files import compiled_module  # noqa: E402

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
POISON = 0xA5
SHAPES = {
    "two heads of 8": dict(kv_heads=2, head_dim=8),
    "other V": dict(kv_heads=3, head_dim=6, v_head_dim=10),
    "K only, odd": dict(kv_heads=1, head_dim=7, k_only=True),
    "beside an indexer's keys": dict(kv_heads=1, head_dim=6, extra_parts=[("index", "bfloat16", 1, 4)]),
}
NUM_BLOCKS, BLOCK_SIZE = 6, 4
SLOTS = [5, -1, 0, 23, 11, 12]


def make_layout(dtype: str, shape: dict[str, Any]) -> GroupLayout:
    config = KVCacheConfig([LayerSpec(dtype=DType(dtype), **shape)] * 2, BLOCK_SIZE, gpu_blocks=NUM_BLOCKS)
    return GroupLayout(config.groups[0], {0: (0.5, 2.0), 1: (0.25, 4.0)})


def poisoned(layout: GroupLayout, device: str) -> Any:
    return torch.full((NUM_BLOCKS, layout.block_bytes), POISON, dtype=torch.uint8, device=device)


def random_values(layout: GroupLayout, num_tokens: int, dtype: Any = torch.float32) -> dict[str, Any]:
    """Values for each part of a layer."""
    torch.manual_seed(num_tokens)
    parts = layout.group.attention.parts
    return {part.name: (torch.randn(num_tokens, part.heads, part.width) * 3).to(dtype) for part in parts}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("dtype", [d.value for d in DType])
def test_given_written_slots_when_read_then_they_hold_the_quantised_values_and_nothing_else_changed(
    dtype: str, shape: dict[str, Any]
) -> None:
    layout = make_layout(dtype, shape)
    data = poisoned(layout, "cpu")
    cache = layout.layer_cache(data, 1)
    values = random_values(layout, len(SLOTS))
    write_slots_reference(cache, torch.tensor(SLOTS), values)
    kept = [i for i, slot in enumerate(SLOTS) if slot >= 0]
    assert list(cache) == list(values) == [part.name for part in layout.group.attention.parts]
    for name, part in cache.items():
        expected = quantize(values[name][kept], part.dtype, part.factor)
        found = read_values(part, torch.tensor([SLOTS[i] for i in kept]))
        assert torch.equal(found, dequantize(expected, part.dtype, values[name].shape[-1], part.factor))
    changed = (data != POISON).sum().item()
    assert 0 < changed <= len(kept) * layout.group.bytes_per_token // 2


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    return compiled_module("_paged_attention", tmp_path_factory.mktemp("compiled"))


@pytest.fixture
def compiled(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write, "compiled_attention", lambda: module)


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("slots_type", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("dtype", [d.value for d in DType])
def test_given_compiled_code_when_it_writes_then_every_byte_is_the_reference_s(
    dtype: str, shape: dict[str, Any], slots_type: Any
) -> None:
    layout = make_layout(dtype, shape)
    values = random_values(layout, 2 * len(SLOTS))
    turned = {name: x.transpose(1, 2).contiguous().transpose(1, 2) for name, x in values.items()}
    for each in (values, turned):  # heads one after another, and elements of all heads side by side
        given = {name: x[::2] for name, x in each.items()}
        expected, data = poisoned(layout, "cpu"), poisoned(layout, "cpu")
        write_slots_reference(layout.layer_cache(expected, 1), torch.tensor(SLOTS), given)
        write_slots(layout.layer_cache(data, 1), torch.tensor(SLOTS, dtype=slots_type), given)
        assert torch.equal(data, expected)


@pytest.mark.usefixtures("compiled")
def test_given_a_layout_of_heads_before_tokens_then_compiled_code_writes_to_the_right_places() -> None:
    k, v = torch.randn(2, 3, 2, 8)
    stores = torch.zeros(2, NUM_BLOCKS, 2, BLOCK_SIZE, 8).transpose(2, 3)

    cache = LayerCache(k=StoredPart(DType.FLOAT32, stores[0], 8), v=StoredPart(DType.FLOAT32, stores[1], 8))

    write_slots(cache, torch.tensor([5, -1, 2]), {"k": k, "v": v})

    assert torch.equal(stores[0, 1, 1], k[0])
    assert torch.equal(stores[1, 0, 2], v[2])
    assert stores.count_nonzero() == 2 * k[[0, 2]].numel()


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("slot", [NUM_BLOCKS * BLOCK_SIZE, 2**40])
def test_given_a_slot_outside_the_store_then_compiled_code_raises_and_writes_nothing(slot: int) -> None:
    layout = make_layout("float32", SHAPES["two heads of 8"])
    data = poisoned(layout, "cpu")

    with pytest.raises(IndexError, match=f"slot {slot} is not one of the 24"):
        write_slots(layout.layer_cache(data, 0), torch.tensor([0, slot]), random_values(layout, 2))

    assert (data == POISON).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("dtype", [d.value for d in DType])
def test_given_the_kernel_when_it_writes_then_every_byte_is_the_reference_s(
    dtype: str, shape: dict[str, Any], given: Any, device: str
) -> None:
    layout = make_layout(dtype, shape)
    values = random_values(layout, len(SLOTS), given)
    for part in layout.group.attention.parts if device == "cpu" else ():
        if part.dtype.bits < 32 and not part.dtype.scale_bytes:
            # The interpreter cuts off where a GPU rounds: halves from -1.5 to 1.5 need no rounding in any type.
            values[part.name] = (values[part.name].float() * 2).round().clamp(-3, 3).to(given) / 2
    expected, data = poisoned(layout, "cpu"), poisoned(layout, device)
    write_slots_reference(layout.layer_cache(expected, 1), torch.tensor(SLOTS), values)
    slots = torch.tensor(SLOTS, dtype=torch.int32, device=device)
    write_slots_triton(layout.layer_cache(data, 1), slots, {name: x.to(device) for name, x in values.items()})
    assert torch.equal(data.cpu(), expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_given_slots_outside_the_store_when_the_kernel_writes_then_they_are_skipped(dtype: str, device: str) -> None:
    layout = make_layout(dtype, SHAPES["two heads of 8"])
    data = poisoned(layout, device)
    slots = torch.tensor([-1, NUM_BLOCKS * BLOCK_SIZE, 2**31 - 1], dtype=torch.int32, device=device)
    given = {name: x.to(device) for name, x in random_values(layout, 3).items()}
    write_slots_triton(layout.layer_cache(data, 0), slots, given)
    assert (data == POISON).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ["float16", "int8", "int4"])
def test_given_values_cut_from_a_fused_projection_then_the_kernel_needs_no_copy_and_no_other_answer(
    dtype: str, device: str
) -> None:
    layout = make_layout(dtype, SHAPES["two heads of 8"])
    fused = torch.randn(len(SLOTS), 48)
    k, v = fused[:, 16:32].view(-1, 2, 8), fused[:, 32:].view(-1, 2, 8)
    expected, data = poisoned(layout, "cpu"), poisoned(layout, device)
    write_slots_reference(layout.layer_cache(expected, 0), torch.tensor(SLOTS), {"k": k, "v": v})
    fused = fused.to(device)
    k, v = fused[:, 16:32].view(-1, 2, 8), fused[:, 32:].view(-1, 2, 8)
    slots = torch.tensor(SLOTS, dtype=torch.int32, device=device)
    write_slots_triton(layout.layer_cache(data, 0), slots, {"k": k, "v": v})
    assert torch.equal(data.cpu(), expected)
