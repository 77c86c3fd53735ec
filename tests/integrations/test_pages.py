"""Pages as opaque bytes: whatever the layout, what is read into a row comes back as it was."""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytest.importorskip("torch")

import torch

from kvpool.errors import ConfigError
from kvpool.integrations.connector.orders import NO_PAGE
from kvpool.integrations.connector.pages import EnginePages, HostRows, LinkedPages, Move

LAYOUTS = {
    "packed": lambda: torch.randn(6, 2, 4, 8),
    "keys and values apart": lambda: torch.randn(2, 6, 4, 8),
    "smaller pages in kernels": lambda: torch.randn(12, 4, 8),
    "bfloat16": lambda: torch.randn(6, 4, 8).to(torch.bfloat16),
    "layers side by side": lambda: torch.randn(6, 3, 4, 8)[:, 1],
    "heads before tokens in the shape, behind them in memory": lambda: torch.randn(6, 4, 2, 8).transpose(1, 2),
    "one head, whose stride says nothing": lambda: torch.randn(6, 4, 8).as_strided((6, 1, 4, 8), (32, 8, 8, 1)),
}


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def pages_on(device: str, layers: dict[str, torch.Tensor], groups: list[list[str]] | None = None) -> EnginePages:
    return (EnginePages if device == "cpu" else LinkedPages)(layers, 6, groups)


def wait_for(is_over: Callable[[], bool]) -> None:
    while not is_over():
        pass


def bytes_of(layers: dict[str, torch.Tensor]) -> HostRows:
    """All pages, one row for each."""
    pages = EnginePages({name: layer.cpu() for name, layer in layers.items()}, 6)
    rows = HostRows(6, pages.row_bytes)
    pages.read([Move([range(6)], range(6))], rows)
    return rows


def on(device: str, layout: str) -> torch.Tensor:
    """A layer with random pages; strides survive the way to a GPU."""
    made = LAYOUTS[layout]()
    return torch.empty_strided(made.shape, made.stride(), dtype=made.dtype, device=device).copy_(made)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_given_a_layout_then_pages_come_back_bit_for_bit(layout: str, device: str) -> None:
    layers = {name: on(device, layout) for name in "ab"}
    half = bytes_of(layers)
    pages = pages_on(device, layers)
    host = HostRows(4, pages.row_bytes, pages.gpu)
    moves = [Move([[1, 5]], [3, 0]), Move([[2]], [1])]
    pages.read(moves, host)
    pages.fence()
    for layer in layers.values():
        layer.zero_()
    wait_for(pages.write(moves, host))
    now = bytes_of(layers)
    assert [(half.array[n] == now.array[n]).all() for n in (1, 2, 5)] == [True] * 3
    assert not now.array[[0, 3, 4]].any()


def test_given_a_shape_without_pages_then_the_layer_is_named() -> None:
    with pytest.raises(ConfigError, match="the cache of a has the shape"):
        EnginePages({"a": torch.zeros(7, 4)}, 6)
    with pytest.raises(ConfigError, match="a page of a does not lie in one piece"):
        EnginePages({"a": torch.zeros(4, 6, 8).transpose(0, 1)}, 6)  # all pages of a head, then those of the next
    for layer in (torch.zeros(6, 4, 16)[..., :8], torch.zeros(12, 3, 4, 8)[:, 1]):
        with pytest.raises(ConfigError, match="does not lie in one piece"):
            EnginePages({"a": layer}, 6)


@pytest.mark.parametrize("device", DEVICES)
def test_given_layers_side_by_side_in_each_page_then_they_move_together_and_rows_are_as_with_layers_apart(
    device: str,
) -> None:
    apart = torch.randn(3, 6, 4, 8, device=device)
    beside = apart.transpose(0, 1).contiguous().transpose(0, 1)
    rows = []
    for memory, number in ((apart, 3), (beside, 1)):
        pages = pages_on(device, {str(n): memory[n] for n in range(3)})
        assert len(pages.parts) == number
        host = HostRows(4, pages.row_bytes, pages.gpu)
        wait_for(pages.read([Move([[1, 5, 2]], [3, 0, 1])], host))
        rows.append((host.array[[3, 0, 1]].tobytes(), pages.layout))
    assert rows[0] == rows[1]


@pytest.mark.parametrize("device", DEVICES)
def test_given_latents_beside_an_indexers_keys_then_a_block_of_both_moves_in_one_piece(device: str) -> None:
    memory = torch.randint(0, 256, (6, 16 * (576 * 2 + 132)), dtype=torch.uint8, device=device)
    latents = memory[:, : 16 * 576 * 2].view(torch.bfloat16).unflatten(1, (16, 576))
    keys = memory[:, 16 * 576 * 2 :].unflatten(1, (16, 132))
    before = memory.clone()
    pages = pages_on(device, {"layer": latents, "layer.indexer": keys})
    assert [(part.start, part.width) for part in pages.parts] == [(0, memory.shape[1])]
    host = HostRows(2, pages.row_bytes, pages.gpu)
    pages.read([Move([[4, 2]], [1, 0])], host)
    pages.fence()
    memory.zero_()
    wait_for(pages.write([Move([[4, 2]], [1, 0])], host))
    assert torch.equal(memory[[2, 4]], before[[2, 4]])
    assert not memory[[0, 1, 3, 5]].any()


def test_given_two_groups_that_follow_each_other_in_memory_then_their_parts_stay_apart() -> None:
    memory = torch.randn(6, 2, 4)
    pages = EnginePages({"a": memory[:, 0], "b": memory[:, 1]}, 6, [["a"], ["b"]])
    assert [(part.group, part.width) for part in pages.parts] == [(0, 16), (1, 16)]


def test_given_more_pages_then_the_layout_is_the_same_and_with_other_heads_it_is_not() -> None:
    assert EnginePages({"a": torch.zeros(6, 4, 8)}, 6).layout == EnginePages({"a": torch.zeros(9, 4, 8)}, 9).layout
    assert EnginePages({"a": torch.zeros(6, 4, 8)}, 6).layout != EnginePages({"a": torch.zeros(6, 8, 4)}, 6).layout
    assert EnginePages({"a": torch.zeros(6, 4)}, 6).layout != EnginePages({"b": torch.zeros(6, 4)}, 6).layout


@pytest.mark.parametrize("device", DEVICES)
def test_given_two_groups_that_share_memory_then_a_row_holds_both_and_pages_that_left_their_window_stay(
    device: str,
) -> None:
    memory = torch.arange(6 * 8, dtype=torch.uint8, device=device).reshape(6, 8)
    layers = {"wide": memory, "narrow": memory}  # as vLLM lays out layers of different windows
    pages = pages_on(device, layers, [["wide"], ["narrow"]])
    host = HostRows(2, pages.row_bytes, pages.gpu)
    assert pages.row_bytes == 16
    pages.read([Move([[1, 2], [3, 4]], [0, 1])], host)
    pages.fence()
    before = memory.clone()
    memory[:] = 0
    wait_for(pages.write([Move([[1, 2], [NO_PAGE, 4]], [0, 1])], host))
    assert torch.equal(memory[[1, 2, 4]], before[[1, 2, 4]])
    assert not memory[[0, 3, 5]].any()
    assert pages.layout != EnginePages(layers, 6).layout


# --- a GPU, which computes while pages are copied ---------------------------------------------------------------------


def busy(layer: torch.Tensor) -> None:
    """Some milliseconds of work for the GPU, behind which everything else on its stream waits."""
    big = torch.ones((2048, 2048), device=layer.device)
    for _ in range(60):
        big = (big @ big) / 2048


@pytest.mark.gpu
def test_given_pages_that_the_gpu_still_uses_then_rows_come_behind_that() -> None:
    layers = {name: torch.randn((600, 4096), device="cuda") for name in "ab"}
    right = {name: layer.clone() for name, layer in layers.items()}
    pages = LinkedPages(layers, 600)
    host = HostRows(600, pages.row_bytes, pages.gpu)
    moves = [Move([list(range(600))], list(range(600)))]
    pages.read(moves, host)
    pages.fence()
    for _ in range(3):
        busy(layers["a"])
        before = layers["b"].clone()
        for layer in layers.values():
            layer.zero_()
        pages.begin_step(fences_loads=True)
        wait_for(pages.write(moves, host))
        found = {name: layer.clone() for name, layer in layers.items()}
        assert torch.equal(before, right["b"])
        assert all(torch.equal(found[name], right[name]) for name in found)
    pages.close()
    host.close()


@pytest.mark.gpu
def test_given_work_that_the_step_orders_then_a_load_does_not_wait_for_it() -> None:
    layers = {"a": torch.zeros((64, 4096), device="cuda")}
    pages = LinkedPages(layers, 64)
    host = HostRows(64, pages.row_bytes, pages.gpu)
    host.array[:] = 7
    pages.begin_step(fences_loads=True)
    for _ in range(20):
        busy(layers["a"])
    step = torch.cuda.current_stream().record_event()
    wait_for(pages.write([Move([list(range(64))], list(range(64)))], host))
    assert not step.query()
    assert (layers["a"].view(torch.uint8) == 7).all()


@pytest.mark.gpu
def test_given_a_fence_then_the_rows_hold_what_the_pages_held_before_it() -> None:
    layers = {name: torch.zeros((64, 4096), device="cuda") for name in "ab"}
    pages = LinkedPages(layers, 64)
    host = HostRows(64, pages.row_bytes, pages.gpu)
    for value in (1.0, 2.0, 3.0):
        for layer in layers.values():
            busy(layer)
            layer.fill_(value)
        is_over = pages.read([Move([list(range(64))], list(range(64)))], host)
        pages.fence()
        for layer in layers.values():
            layer.fill_(-1.0)  # the engine gave the pages to somebody else
        wait_for(is_over)
        assert (host.array.view("float32") == value).all()
