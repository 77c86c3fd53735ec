"""The Triton kernel of an indexer's scores; `sparse.py` says what it computes and launches it."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped"
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_keys"])
def score_kernel(
    q,
    weights,
    keys,
    starts,
    positions,
    indices,
    scores,
    q_token,
    q_head,
    weights_token,
    key_block,
    key_token,
    num_keys,
    HEADS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAGE: tl.constexpr,
    KEYS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    key = tl.program_id(1) * KEYS + tl.arange(0, KEYS)
    position = tl.load(positions + token)
    seen = key <= position
    total = tl.zeros([KEYS], tl.float32)
    if tl.program_id(1) * KEYS <= position:
        element = tl.arange(0, BLOCK_D)
        block = tl.load(indices + tl.load(starts + token) + key // PAGE, mask=seen, other=0).to(tl.int64)
        places = block * key_block + key % PAGE * key_token
        inside = seen[:, None] & (element < DIM)[None, :]
        some = tl.load(keys + places[:, None] + element[None, :], mask=inside, other=0.0)
        for first in tl.static_range(0, HEADS, BLOCK_H):
            head = first + tl.arange(0, BLOCK_H)
            inside = (head < HEADS)[:, None] & (element < DIM)[None, :]
            row = q + token * q_token + head * q_head
            queries = tl.load(row[:, None] + element[None, :], mask=inside, other=0.0).to(some.dtype)
            products = tl.dot(queries, tl.trans(some), input_precision="ieee")
            weight = tl.load(weights + token * weights_token + head, mask=head < HEADS, other=0.0)
            total += tl.sum(tl.maximum(products, 0.0) * weight[:, None], axis=0)
    tl.store(scores + token * num_keys + key, tl.where(seen, total, float("-inf")), mask=key < num_keys)
