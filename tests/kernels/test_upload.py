"""Small arrays on their way to a GPU: past the copy engines while a transfer occupies them."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from kvpool.kernels import copy as uploads  # noqa: E402
from kvpool.kernels.copy import note_transfers, upload  # noqa: E402
from kvpool.kernels.copy_triton import copy_words  # noqa: E402

CPU = torch.device("cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs the compiled kernel")
@pytest.mark.parametrize("count", [1, 1023, 1024, 3000])
def test_given_words_then_the_kernel_copies_all_of_them_and_nothing_behind(count: int) -> None:
    source = torch.arange(count, dtype=torch.int32)
    target = torch.full((count + 8,), -1, dtype=torch.int32)
    copy_words(source, target[:count])
    assert torch.equal(target[:count], source)
    assert (target[count:] == -1).all()


def test_given_transfers_under_way_then_uploads_go_by_a_kernel_until_all_of_them_are_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    by_kernel: list[Any] = []
    monkeypatch.setattr(uploads, "upload_by_kernel", lambda host, target: by_kernel.append(host))
    host, target = torch.arange(4, dtype=torch.int32), torch.zeros(4, dtype=torch.int32)

    upload(host, target)
    assert torch.equal(target, host)
    assert not by_kernel
    for owner in ("one", "another"):
        note_transfers(CPU, owner, True)
    note_transfers(CPU, "one", False)
    upload(host, target)
    assert len(by_kernel) == 1
    upload(torch.ones(3, dtype=torch.bool), torch.zeros(3, dtype=torch.bool))  # no whole words
    upload(host[:0], target[:0])
    assert len(by_kernel) == 1
    note_transfers(CPU, "another", False)
    upload(host, target)
    assert len(by_kernel) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float32])
def test_given_many_uploads_by_kernels_then_each_holds_what_was_sent(dtype: Any) -> None:
    device = torch.device("cuda", 0)
    sent = []
    note_transfers(device, "test", True)
    for number in range(300):  # more than are kept at a time
        host = torch.randint(0, 99, (1 + number % 5, 1 + 7 * number)).to(dtype)
        target = torch.full(host.shape, -1, dtype=dtype, device=device)
        upload(host.pin_memory(), target)
        sent.append((host, target))
    note_transfers(device, "test", False)
    assert all(torch.equal(target.cpu(), host) for host, target in sent)
