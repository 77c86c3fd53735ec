"""Runs of blocks, and copies over the link where the driver has no call for a whole list of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from kvpool.errors import TransferError  # noqa: E402
from kvpool.storage import dma  # noqa: E402


def ids(*numbers: int) -> Any:
    return np.array(numbers, np.int32)


@pytest.mark.parametrize(
    ("src", "dst", "starts", "lengths"),
    [
        (ids(3), ids(9), [0], [1]),
        (ids(1, 2, 3), ids(7, 8, 9), [0], [3]),
        (ids(1, 2, 3), ids(7, 9, 8), [0, 1, 2], [1, 1, 1]),
        (ids(3, 2, 1), ids(3, 2, 1), [0, 1, 2], [1, 1, 1]),
        (ids(0, 1, 5, 6), ids(4, 5, 6, 7), [0, 2], [2, 2]),
    ],
)
def test_given_pairs_then_runs_are_those_that_follow_each_other_on_both_sides(
    src: Any, dst: Any, starts: list[int], lengths: list[int]
) -> None:
    found = dma.runs(src, dst)
    assert [part.tolist() for part in found] == [starts, lengths]


def test_given_memory_that_was_locked_in_parts_then_no_run_goes_beyond_one() -> None:
    found = dma.runs(ids(0, 1, 2, 3, 4), ids(6, 7, 8, 9, 10), ids(6, 7, 8, 9, 10) // 4)
    assert [part.tolist() for part in found] == [[0, 2], [2, 3]]


@pytest.mark.parametrize("is_locked", [True, False])
def test_given_memory_that_was_locked_in_parts_then_no_copy_goes_beyond_one(
    is_locked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies: list[tuple[int, int]] = []  # the first byte of the host, and how many
    source, target = torch.arange(80, dtype=torch.uint8).view(10, 8), torch.zeros(10, 8, dtype=torch.uint8)

    def places(sources: Any, targets: Any, sizes: Any) -> bool:
        copies.extend((int(at) - source.data_ptr(), int(size)) for at, size in zip(sources, sizes, strict=True))
        return True

    class Rows:
        def __init__(self, rows: Any) -> None:
            self.rows = rows

        def __getitem__(self, part: slice) -> Any:
            if self.rows is source:
                copies.append((8 * part.start, 8 * (part.stop - part.start)))
            return self.rows[part]

    monkeypatch.setattr(dma, "copy_places", places)
    monkeypatch.setattr(dma, "widest_view", Rows)
    every = ids(*range(1, 9))
    dma.copy_over_link(
        source, target, every, every + 1, dma.HostSide(4, is_locked)
    )  # on a CPU, the source is the host's
    assert copies == [(8, 24), (32, 32), (64, 8)]
    assert is_locked or torch.equal(target[2:10], source[1:9])


@pytest.mark.parametrize("block_bytes", [7, 64])
def test_given_no_driver_call_then_each_run_is_copied_by_itself(
    block_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dma, "_driver_call", lambda: None)
    source = torch.randint(0, 256, (6, block_bytes), dtype=torch.uint8)
    target = torch.zeros_like(source)
    dma.copy_over_link(source, target, ids(1, 2, 5), ids(3, 4, 0), dma.HostSide(6, False))
    assert torch.equal(target[[3, 4, 0]], source[[1, 2, 5]])
    assert (target[[1, 2, 5]] == 0).all()


@pytest.mark.gpu
@pytest.mark.parametrize("with_call", [True, False])
def test_given_many_scattered_blocks_then_all_arrive_both_ways(
    with_call: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not with_call:
        monkeypatch.setattr(dma, "_driver_call", lambda: None)
    device = torch.randint(0, 256, (500, 4096), dtype=torch.uint8, device="cuda")
    host = torch.zeros((500, 4096), dtype=torch.uint8, pin_memory=True)
    order = np.random.default_rng(0).permutation(500).astype(np.int32)
    every = np.arange(500, dtype=np.int32)
    torch.cuda.synchronize()  # other streams do not wait for the random numbers
    with torch.cuda.stream(torch.cuda.Stream()):
        dma.copy_over_link(device, host, every, order, dma.HostSide(500, True))
        back = torch.empty_like(device)
        dma.copy_over_link(host, back, order, every, dma.HostSide(500, True))
        torch.cuda.current_stream().synchronize()
    assert torch.equal(back, device)
    assert torch.equal(host[torch.from_numpy(order).long()], device.cpu())


def test_given_more_places_than_one_call_takes_then_every_place_is_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[list[list[int]]] = []
    monkeypatch.setattr(dma, "_driver_call", lambda: "driver")
    monkeypatch.setattr(dma, "_thread", SimpleNamespace(has_context=True))
    monkeypatch.setattr(dma, "_BATCH", 2)
    monkeypatch.setattr(dma, "_copy_batch", lambda _, *places: calls.append([part.tolist() for part in places]))
    sources, targets, sizes = (np.arange(first, first + 5, dtype=np.uint64) for first in (10, 20, 30))
    assert dma.copy_places(sources, targets, sizes)
    assert calls == [[[10, 11], [20, 21], [30, 31]], [[12, 13], [22, 23], [32, 33]], [[14], [24], [34]]]


@pytest.mark.gpu
def test_given_a_driver_that_refuses_then_it_is_a_transfer_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dma, "_driver_call", lambda: lambda *_: 1)
    device = torch.zeros((4, 64), dtype=torch.uint8, device="cuda")
    host = torch.zeros((4, 64), dtype=torch.uint8, pin_memory=True)
    with pytest.raises(TransferError, match="error 1"):
        dma.copy_over_link(device, host, ids(0, 2), ids(1, 3), dma.HostSide(4, True))
