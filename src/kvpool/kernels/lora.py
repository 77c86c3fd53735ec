"""The part of LoRA adapters in a matrix product: low-rank products, grouped by the adapter of each token, added in place."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvpool.kernels.layout import LoraWeights, current
from kvpool.pools.arrays import Int32Array


def group_tokens(slots: npt.NDArray[np.integer], tile: int) -> Int32Array:
    """Tokens grouped by their adapters: rows [slot, token, token, ...] of `tile` tokens each; -1 stands for no token.

    `slots` has the slot of each token's adapter, or -1 for a token without one. Such tokens are in no row.

    >>> group_tokens(np.array([1, -1, 0, 1, 1]), 2).tolist()
    [[0, 2, -1], [1, 0, 3], [1, 4, -1]]
    """
    tokens = np.argsort(slots, kind="stable").astype(np.int32)
    tokens = tokens[np.count_nonzero(slots < 0) :]
    used, starts, counts = np.unique(slots[tokens], return_index=True, return_counts=True)
    firsts = np.cumsum(-(-counts // tile)) - -(-counts // tile)  # the first row of each adapter
    within = np.arange(len(tokens)) - np.repeat(starts, counts)
    rows = np.repeat(firsts, counts) + within // tile
    groups = np.full((int(rows[-1]) + 1 if len(rows) else 0, tile + 1), -1, np.int32)
    groups[rows, 0] = np.repeat(used, counts)
    groups[rows, 1 + within % tile] = tokens
    return groups


def tile_size(num_tokens: int) -> int:
    """Tokens of a row of `group_tokens` on a GPU. Decoding tokens have many adapters, chunks of prompts have one."""
    return 16 if num_tokens <= 256 else 64


def max_groups(num_tokens: int, num_slots: int) -> int:
    """The most rows that `group_tokens` gives with that tile size, for a graph that has room for any step."""
    return min(num_tokens, num_tokens // tile_size(num_tokens) + num_slots)


def start_lora(
    x: Tensor, weights: LoraWeights, groups: Tensor, side: torch.cuda.Stream | None
) -> Callable[[Tensor], None]:
    """Starts to compute what adapters add for inputs `x`; the function it returns adds that to an output, in place.

    See `add_lora_reference`. On a GPU the first product runs on the stream `side`, beside what is launched until that
    function is called. May be captured in a graph.
    """
    if side is None:
        return lambda out: add_lora_reference(out, x, weights, groups)
    from kvpool.kernels.lora_triton import expand_triton, shrink_triton

    with current(x.device):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            low = shrink_triton(x, weights, groups)

    def finish(out: Tensor) -> None:
        with current(x.device):
            torch.cuda.current_stream().wait_stream(side)
            expand_triton(out, low, weights, groups)

    return finish


def add_lora_reference(out: Tensor, x: Tensor, weights: LoraWeights, groups: Tensor) -> None:
    """`out[token, part] += scale * b @ (a @ x[token])` with the weights of each token's adapter, in torch.

    `x` is [token, in], `out` is [token, out of all parts]; `groups` is what `group_tokens` gives, on the device. Rows with
    slot -1 do nothing. Slots and tokens are trusted. It computes in float32, because some CPUs are slow with 16-bit types.
    """
    ends = list(accumulate(weights.sizes))
    for group in groups:
        slot, tokens = int(group[0]), group[1:][group[1:] >= 0].long()
        if slot < 0:
            continue
        inputs = x.index_select(0, tokens).float()
        for part, (end, size) in enumerate(zip(ends, weights.sizes, strict=True)):
            rank = int(weights.ranks[slot, part])
            if rank:
                low = (inputs @ weights.a[slot, part, :rank].float().T).to(x.dtype).float()
                high = low @ weights.b[slot, end - size : end, :rank].float().T * weights.scales[slot, part]
                columns = out[:, end - size : end]
                columns.index_copy_(0, tokens, (columns.index_select(0, tokens).float() + high).to(out.dtype))


def empty_weights(
    num_slots: int, rank: int, num_inputs: int, sizes: tuple[int, ...], *, dtype: torch.dtype, device: torch.device
) -> LoraWeights:
    """Weights for that many slots, none of which holds an adapter. `rank` is rounded up to what kernels compute at once."""
    rank = padded_rank(rank)
    parts = len(sizes)
    return LoraWeights(
        torch.zeros(num_slots, parts, rank, num_inputs, dtype=dtype, device=device),
        torch.zeros(num_slots, sum(sizes), rank, dtype=dtype, device=device),
        torch.zeros(num_slots, parts, dtype=torch.float32, device=device),
        torch.zeros(num_slots, parts, dtype=torch.int32, device=device),
        sizes,
    )


def padded_rank(rank: int) -> int:
    """The next power of two from 16 on, or the next multiple of 64 above that.

    >>> [padded_rank(rank) for rank in (1, 16, 17, 64, 65)]
    [16, 16, 32, 64, 128]
    """
    return 16 if rank <= 16 else 32 if rank <= 32 else -(-rank // 64) * 64
