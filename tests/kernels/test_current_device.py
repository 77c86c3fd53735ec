"""Which GPU is the current one is changed only where it is another."""

from __future__ import annotations

from contextlib import nullcontext

import pytest

torch = pytest.importorskip("torch")

from kvpool.kernels.layout import current  # noqa: E402


def test_given_a_device_then_it_is_made_current_unless_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert isinstance(current(torch.device("cpu")), nullcontext)
    assert isinstance(current(torch.device("cuda:1")), nullcontext)
    other = current(torch.device("cuda:0"))
    assert isinstance(other, torch.cuda.device)
    assert other.idx == 0
