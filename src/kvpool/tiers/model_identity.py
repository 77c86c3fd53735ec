"""Which model is this, down to its numbers? Blocks of one model must never reach another.

All weights are read, in a fraction of a second: the rows and the columns of every tensor are summed as integers, which is
exact and the same on any device, and changes when one number does, or when two change places.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from typing import Any

import torch
from torch import Tensor

from kvpool.tiers.identity import OF_TRANSFORMERS, settings_id

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def model_id(model: Any) -> str:
    """The class of a model and a digest of its configuration: positions, norms and scales are nowhere else."""
    return f"{type(model).__name__} {settings_id(model.config, OF_TRANSFORMERS)}"


@torch.no_grad()
def weights_id(model: Any) -> str:
    """A digest of all parameters and buffers of a model, also those that it does not save: names, types and contents."""
    tensors = sorted({**model.state_dict(), **dict(model.named_buffers())}.items())
    read: dict[tuple[int, torch.Size], int] = {}  # tied weights are read once
    sums: list[Tensor] = []
    for _, tensor in tensors:
        place = tensor.data_ptr(), tensor.shape
        if place not in read:
            read[place] = len(sums)
            sums.append(_content(tensor))
    ends = list(itertools.accumulate(map(len, sums), initial=0))
    contents = torch.cat([each.cpu() for each in sums]).numpy() if sums else None
    digest = hashlib.sha256()
    for name, tensor in tensors:
        digest.update(json.dumps([name, list(tensor.shape), str(tensor.dtype)]).encode())
        if contents is not None:
            index = read[tensor.data_ptr(), tensor.shape]
            digest.update(contents[ends[index] : ends[index + 1]].tobytes())
    return digest.hexdigest()


def _content(tensor: Tensor) -> Tensor:
    """int64: the words of a vector; of anything else the sums of its columns and of its rows."""
    last = tensor.shape[-1] if tensor.ndim > 1 else 1
    flat = tensor.detach().contiguous().view(-1)
    words = flat.view(_WORDS.get(flat.element_size(), torch.uint8))
    if tensor.ndim < 2 or not len(words):
        return words.to(torch.int64)
    table = words.view(-1, len(words) // (tensor.numel() // last))
    return torch.cat([table.sum(0, dtype=torch.int64), table.sum(1, dtype=torch.int64)])
