"""Proves on a short random text that a model run in flattened steps computes what it computes by itself."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvpool.engine.hook import Attend, AttentionCall


class ContiguousAttention:
    """Attention in plain torch over keys and values that are kept whole: slow, and easy to believe.

        attention = ContiguousAttention()
        forward(model, both_prompts, positions, None, attention.step({0: 7, 1: 5}))   # sequence 0: 7 tokens, 1: 5
        forward(model, two_tokens, torch.tensor([7, 5]), None, attention.step({0: 1, 1: 1}))
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}  # (layer, sequence) -> K, V [token, head, dim]

    def step(self, num_tokens: dict[int, int]) -> Attend:
        """Attends for one step that has so many new tokens of each sequence, one sequence after another."""

        def attend(call: AttentionCall) -> Tensor:
            q, k, v = (torch.split(x, list(num_tokens.values())) for x in (call.q, call.k, call.v))
            return torch.cat([self._attend(call, *part) for part in zip(num_tokens, q, k, v, strict=True)])

        return attend

    def _attend(self, call: AttentionCall, sequence: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if (kept := self._kept.get((call.layer, sequence))) is not None:
            k, v = torch.cat([kept[0], k]), torch.cat([kept[1], v])
        self._kept[call.layer, sequence] = k, v
        return _causal_attention(call, q, k, v)


def _causal_attention(call: AttentionCall, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of the last tokens of one sequence over all of it."""
    group = q.shape[1] // k.shape[1]
    keys, values = (x.float().repeat_interleave(group, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.float(), keys) * call.scale
    if call.soft_cap is not None:
        scores = call.soft_cap * torch.tanh(scores / call.soft_cap)
    key_position = torch.arange(len(k), device=q.device)
    query_position = key_position[len(k) - len(q) :, None]
    hidden = key_position > query_position
    if call.window is not None:
        hidden |= key_position <= query_position - call.window
    scores = scores.masked_fill(hidden, -torch.inf)
    if call.sinks is not None:  # one more key, which has no value
        sinks = call.sinks.float()[:, None, None].expand(-1, len(q), 1)
        scores = torch.cat([scores, sinks], dim=-1)
    weights = scores.softmax(dim=-1)[..., : len(k)]
    return torch.einsum("hqk,khd->qhd", weights, values).to(q.dtype)


def positions_of(starts: Sequence[int], lengths: Sequence[int]) -> Tensor:
    """The positions of runs of tokens, one after another: `positions_of([0, 5], [2, 1])` is [0, 1, 5]."""
    return torch.cat([torch.arange(start, start + length) for start, length in zip(starts, lengths, strict=True)])
