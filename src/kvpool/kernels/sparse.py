"""Sparse attention: the tokens that an indexer chooses for each query.

An indexer has a short key for each token, the part `INDEX` of a layer. A query scores a key by the sum over the indexer's
heads of weight × relu(query · key), and sees the tokens of the highest scores.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvpool.config.layers import INDEX, ceil_div
from kvpool.errors import InvalidArgumentError
from kvpool.kernels.layout import LayerCache, StoredPart, current
from kvpool.kernels.write import read_values


@dataclass(eq=False)
class Choice:
    """What an indexer makes of the tokens of a step, and which tokens each of them sees."""

    layer: int  # of the model, which keeps the keys; layers after it may use what was chosen
    q: Tensor  # [token, head, element]
    k: Tensor  # [token, 1, element]
    weights: Tensor  # [token, head], float32
    most: int  # tokens that each query sees
    chosen: Tensor | None = None  # positions [token, at most `most`], int32, the best first; behind the visible, any

    def rows(self, some: slice) -> Choice:
        """The same of some tokens, of which nothing is chosen yet."""
        return Choice(self.layer, self.q[some], self.k[some], self.weights[some], self.most)


def score(
    choice: Choice, cache: LayerCache, starts: Tensor, positions: Tensor, indices: Tensor, scores: Tensor
) -> None:
    """Writes the scores [token, key], float32, of all keys that queries at `positions` see; -inf for the others.

    The block list of each query begins at `starts` of `indices`. Positions below 0 see nothing. Launches a Triton kernel.
    """
    from kvpool.kernels.sparse_triton import score_kernel

    part, (tokens, heads, dim) = _index_of(cache), choice.q.shape
    keys, tile = part.data, 64
    with current(keys.device):
        score_kernel[(tokens, ceil_div(scores.shape[1], tile))](
            choice.q,
            choice.weights,
            keys,
            starts,
            positions,
            indices,
            scores,
            *choice.q.stride()[:2],
            choice.weights.stride(0),
            *keys.stride()[:2],
            scores.shape[1],
            HEADS=heads,
            BLOCK_H=max(16, min(64, 1 << (heads - 1).bit_length())),
            DIM=dim,
            BLOCK_D=max(16, 1 << (dim - 1).bit_length()),
            PAGE=cache.block_size,
            KEYS=tile,
            num_warps=4,
        )


def score_reference(
    choice: Choice, cache: LayerCache, starts: Tensor, positions: Tensor, indices: Tensor, scores: Tensor
) -> None:
    """What `score` computes, one query after another."""
    size = cache.block_size
    scores.fill_(-torch.inf)
    for row, (start, position) in enumerate(zip(starts.tolist(), positions.tolist(), strict=True)):
        listed = torch.arange(min(position + 1, scores.shape[1]), device=scores.device)
        keys, own = (
            index_keys(cache, indices[start + listed // size].long() * size + listed % size),
            slice(row, row + 1),
        )
        scores[row, : len(listed)] = scores_of(choice.q[own], choice.weights[own], keys)[0]


def index_keys(cache: LayerCache, slots: Tensor) -> Tensor:
    """The indexer's keys in some slots, float32 [key, element]."""
    return read_values(_index_of(cache), slots)[:, 0].float()


def _index_of(cache: LayerCache) -> StoredPart:
    if (part := cache.get(INDEX)) is None:
        raise InvalidArgumentError(f"nothing is chosen yet, and the layer has no part {INDEX!r} to choose by")
    return part


def scores_of(q: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    """The scores [token, key] of keys, whether queries see them or not."""
    products = torch.matmul(q.float(), keys.T).relu_()
    return torch.matmul(weights.unsqueeze(1), products).squeeze(1)


def chosen_slots(chosen: Tensor, starts: Tensor, positions: Tensor, indices: Tensor, block_size: int) -> Tensor:
    """The slots of chosen positions [token, number], by block lists that begin at `starts` of `indices`.

    What a query does not see is in no list: its place is that of the first token.
    """
    seen = torch.where(chosen <= positions.unsqueeze(1), chosen, 0)
    blocks = indices[(starts.unsqueeze(1) + seen // block_size).long()]
    return blocks * block_size + seen % block_size
