"""Pages as opaque bytes: whatever the layout, what is read into a row comes back as it was."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch

from kvpool.errors import ConfigError
from kvpool.integrations.connector.engine_pages import EnginePages, HostRows
from kvpool.integrations.connector.step_orders import NO_PAGE
from kvpool.integrations.requests.weights_digest import config_id, weights_id

LAYOUTS = {
    "packed": lambda: torch.randn(6, 2, 4, 8),
    "keys and values apart": lambda: torch.randn(2, 6, 4, 8),
    "smaller pages in kernels": lambda: torch.randn(12, 4, 8),
    "bfloat16": lambda: torch.randn(6, 4, 8).to(torch.bfloat16),
    "layers side by side": lambda: torch.randn(6, 3, 4, 8)[:, 1],
}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_given_a_layout_then_pages_come_back_bit_for_bit(layout: str, device: str) -> None:
    layers = {name: LAYOUTS[layout]().to(device) for name in "ab"}
    before = {name: layer.clone() for name, layer in layers.items()}
    pages = EnginePages(layers, 6)
    host = HostRows(4, pages.row_bytes, pinned=device == "cuda")
    pages.read([[1, 5, 2]], [3, 0, 1], host)
    for layer in layers.values():
        layer.zero_()
    pages.write([[1, 5, 2]], [3, 0, 1], host)
    half = HostRows(6, pages.row_bytes, pinned=False)
    again = EnginePages(before, 6)
    again.read([range(6)], range(6), half)
    now = HostRows(6, pages.row_bytes, pinned=False)
    pages.read([range(6)], range(6), now)
    assert [(half.array[n] == now.array[n]).all() for n in (1, 2, 5)] == [True] * 3
    assert not now.array[[0, 3, 4]].any()


def test_given_a_shape_without_pages_then_the_layer_is_named() -> None:
    with pytest.raises(ConfigError, match="the cache of a has the shape"):
        EnginePages({"a": torch.zeros(7, 4)}, 6)
    with pytest.raises(ConfigError, match="not contiguous"):
        EnginePages({"a": torch.zeros(6, 4, 8).transpose(1, 2)}, 6)


def test_given_more_pages_then_the_layout_is_the_same_and_with_other_heads_it_is_not() -> None:
    assert EnginePages({"a": torch.zeros(6, 4, 8)}, 6).layout == EnginePages({"a": torch.zeros(9, 4, 8)}, 9).layout
    assert EnginePages({"a": torch.zeros(6, 4, 8)}, 6).layout != EnginePages({"a": torch.zeros(6, 8, 4)}, 6).layout
    assert EnginePages({"a": torch.zeros(6, 4)}, 6).layout != EnginePages({"b": torch.zeros(6, 4)}, 6).layout


def test_given_weights_then_their_content_decides_and_not_their_place(tmp_path: Path) -> None:
    for name, last in (("one", 1), ("copy", 1), ("other", 2)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(bytes(5000) + bytes([last]))
    one, copy, other = (weights_id(tmp_path / name) for name in ("one", "copy", "other"))
    assert one == copy != other
    with pytest.raises(ConfigError, match="model_id"):
        weights_id(tmp_path)


def test_given_a_configuration_then_names_do_not_count_and_positions_do() -> None:
    class Config:
        def __init__(self, **fields: object) -> None:
            self.fields = fields

        def to_dict(self) -> dict[str, object]:
            return self.fields

    assert config_id(Config(_name_or_path="a", theta=1)) == config_id(Config(_name_or_path="b", theta=1))
    assert config_id(Config(theta=1)) != config_id(Config(theta=2))


def test_given_two_groups_that_share_memory_then_a_row_holds_both_and_pages_that_left_their_window_stay() -> None:
    memory = torch.arange(6 * 8, dtype=torch.uint8).reshape(6, 8)
    layers = {"wide": memory, "narrow": memory}  # as vLLM lays out layers of different windows
    pages = EnginePages(layers, 6, [["wide"], ["narrow"]])
    host = HostRows(2, pages.row_bytes, pinned=False)
    assert pages.row_bytes == 16
    pages.read([[1, 2], [3, 4]], [0, 1], host)
    before = memory.clone()
    memory[:] = 0
    pages.write([[1, 2], [NO_PAGE, 4]], [0, 1], host)
    assert torch.equal(memory[[1, 2, 4]], before[[1, 2, 4]])
    assert not memory[[0, 3, 5]].any()
    assert pages.layout != EnginePages(layers, 6).layout
