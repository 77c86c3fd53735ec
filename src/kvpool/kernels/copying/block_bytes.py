"""Blocks as bytes: where their tokens lie in them, and the widest words to copy them by."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Runs(NamedTuple):
    """Stretches of a block that hold one token after the other: `num_stretches` of them, `stride` bytes apart."""

    offset: int
    stride: int
    num_stretches: int
    token_bytes: int


def widest_view(data: Tensor) -> Tensor:
    """Rows of bytes as rows of the widest integers that divide them: copies of those are several times faster."""
    for dtype in (torch.int64, torch.int32, torch.int16):
        if data.shape[1] % dtype.itemsize == 0:
            return data.view(dtype)
    return data
