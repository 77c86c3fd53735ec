"""What a model needs of the cache, read off the tensors of a probe forward; models that would run wrong are refused."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvpool.engine.hook import Attend, attending


@torch.no_grad()
def forward(model: Any, input_ids: Tensor, positions: Tensor, keep: Tensor | None, attend: Attend) -> Tensor:
    """Logits [row of `keep`, vocabulary] of one flattened step: the one way in which the engine calls a model.

    `input_ids` and `positions` [token] may belong to any number of sequences, in any order: only attention mixes tokens,
    and that is `attend`'s. `keep` lists the tokens whose logits are wanted; None: all. Nothing waits for the device.
    """
    with attending(attend):
        output = model(
            input_ids=input_ids.unsqueeze(0),
            position_ids=positions.unsqueeze(0),
            use_cache=False,
            logits_to_keep=0 if keep is None else keep,
        )
    logits: Tensor = output.logits[0]
    return logits
