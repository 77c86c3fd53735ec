"""What a forward pass of a model says about its tokens: which they are, how many need logits, which rows are unusual."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvpool.errors import InvalidArgumentError
from kvpool.pools.arrays import BoolArray


def num_logits(kwargs: dict[str, Any], num_tokens: int) -> int:
    """How many of the last tokens need logits."""
    wanted = kwargs.get("logits_to_keep")
    if isinstance(wanted, Tensor) or kwargs.get("labels") is not None:  # of which tokens: counted from the first one
        return num_tokens
    return wanted or 1  # a caller that does not say so wants the next token


def irregular_rows(kwargs: dict[str, Any], start: int, num_rows: int, num_tokens: int) -> BoolArray:
    """Rows whose keys depend on more than the ids up to them: some tokens are masked, or lie at unusual positions."""
    irregular = torch.zeros(num_rows, dtype=torch.bool)
    mask, positions = kwargs.get("attention_mask"), kwargs.get("position_ids")
    if isinstance(mask, Tensor) and mask.ndim == 2:
        irregular = (mask == 0).any(-1)
    elif mask is not None:  # a mask of the caller's own making, which may say anything
        irregular.fill_(True)
    if positions is not None:
        usual = torch.arange(start, start + num_tokens, device=positions.device)
        unusual = (positions != usual).any(-1).reshape(-1, positions.shape[-2]).any(0)
        irregular = irregular.to(unusual.device) | unusual
    return irregular.cpu().numpy()  # at once, at the end: a GPU is waited for


def input_ids(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The ids of its tokens, [row, token]."""
    token_ids = kwargs.get("input_ids", args[0] if args else None)
    if not isinstance(token_ids, Tensor):
        raise InvalidArgumentError("a PagedCache finds prompts by their token ids: pass input_ids, not inputs_embeds")
    if token_ids.ndim != 2:
        raise InvalidArgumentError(f"input_ids must be [row, token], got shape {tuple(token_ids.shape)}")
    return token_ids
