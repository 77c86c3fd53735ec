"""The Triton kernels of paged attention; `paged_attention.py` says what they compute and launches them."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped"
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def attend_kernel(
    q,
    k,
    v,
    k_scale,
    v_scale,
    k_zero,
    v_zero,
    out,
    partial_values,
    partial_weights,
    sink_logits,
    indices,
    items,
    q_token,
    q_head,
    out_token,
    out_head,
    k_block,
    k_token,
    k_head,
    v_block,
    v_token,
    v_head,
    k_scale_block,
    k_scale_token,
    k_scale_head,
    v_scale_block,
    v_scale_token,
    v_scale_head,
    score_scale,  # softmax scale × k factor; × log2(e) too where no soft cap comes between
    soft_cap,
    v_factor,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,  # query heads of one program, of GROUP
    TILE_TOKENS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,  # 0: none
    SINK_TOKENS: tl.constexpr,
    SINK_SLOTS: tl.constexpr,  # listed tokens before the gap
    CHUNK: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    SINK_LOGITS: tl.constexpr,
    SCALED: tl.constexpr,  # int8 or int4
    NIBBLES: tl.constexpr,  # int4
    NARROW: tl.constexpr,  # a byte or less an element
    K_ONLY: tl.constexpr,
    PRECISION: tl.constexpr,
):
    head_blocks: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    program = tl.program_id(0)
    kv_head = program % KV_HEADS
    head_block = program // KV_HEADS % head_blocks
    item = items + program // (KV_HEADS * head_blocks) * 8
    token_start = tl.load(item)
    num_tokens = tl.load(item + 1)
    if num_tokens == 0:
        return
    position = tl.load(item + 2)
    table = indices + tl.load(item + 3)
    gap = tl.load(item + 4)
    key_start = tl.load(item + 5)
    key_end = tl.load(item + 6)
    slot = tl.load(item + 7)

    row = tl.arange(0, ROWS)
    token = row // HEADS
    head_in_group = head_block * HEADS + row % HEADS
    head = kv_head * GROUP + head_in_group
    used = (token < num_tokens) & (head_in_group < GROUP)
    column = tl.arange(0, BLOCK_D)
    q_row = (token_start + token).to(tl.int64) * q_token + head * q_head
    queries = tl.load(
        q + q_row[:, None] + column[None, :], mask=used[:, None] & (column < HEAD_DIM)[None, :], other=0.0
    )
    if NARROW and queries.dtype == tl.bfloat16:  # bytes become float16 in a step or two, bfloat16 in several
        queries = queries.to(tl.float16)
    query_position = position + token
    if NIBBLES:
        query_sum = tl.sum(queries.to(tl.float32), axis=1)

    highest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if SINK_LOGITS:  # noqa: SIM102 (Triton would make the constant part of a condition at run time)
        if slot < 0:
            highest = tl.load(sink_logits + head, mask=used, other=0.0).to(tl.float32) * 1.4426950408889634
            total += 1.0
    values = tl.zeros([ROWS, BLOCK_V], tl.float32)

    k += kv_head * k_head
    v += kv_head * v_head
    k_scale += kv_head * k_scale_head
    k_zero += kv_head * k_scale_head
    v_scale += kv_head * v_scale_head
    v_zero += kv_head * v_scale_head
    all_see = key_start  # the keys before this one are seen by every query of the tile
    if WINDOW == 0 and CHUNK == 0:
        all_see = position + 1
    # Block ids are loaded a round ahead: the pipeline then has only K and V to prefetch, and no address to wait for.
    listed = key_start + tl.arange(0, KEYS)
    next_block = tl.load(table + listed // PAGE, mask=listed < key_end, other=0).to(tl.int64)
    for start in range(key_start, key_end, KEYS):
        listed = start + tl.arange(0, KEYS)
        live = listed < key_end
        block = next_block
        later = listed + KEYS
        next_block = tl.load(table + later // PAGE, mask=later < key_end, other=0).to(tl.int64)
        offset = listed % PAGE

        keys = _load(k + block * k_block + offset * k_token, live, HEAD_DIM, BLOCK_D, NIBBLES, queries.dtype)
        scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
        if SCALED:
            place = block * k_scale_block + offset * k_scale_token
            scores *= tl.load(k_scale + place, mask=live, other=0.0).to(tl.float32)[None, :]
            if NIBBLES:
                scores += query_sum[:, None] * tl.load(k_zero + place, mask=live, other=0.0).to(tl.float32)[None, :]
        scores *= score_scale
        if SOFT_CAP:
            # tanh by way of exp2: 1 - 2 / (e^2x + 1)
            grown = tl.exp2(scores * (2.8853900817779268 / soft_cap))
            scores = (1.0 - 2.0 / (grown + 1.0)) * (soft_cap * 1.4426950408889634)

        scores = tl.where(live[None, :], scores, float("-inf"))
        if CAUSAL and TILE_TOKENS > 1:  # noqa: SIM102 (the keys of a single query are chosen for it)
            if start + KEYS > all_see:
                key_position = listed + tl.where(listed >= SINK_SLOTS, gap, 0)
                seen = key_position[None, :] <= query_position[:, None]
                if WINDOW > 0:
                    near = key_position[None, :] > query_position[:, None] - WINDOW
                    seen = seen & (near | (key_position < SINK_TOKENS)[None, :])
                if CHUNK > 0:
                    seen = seen & (key_position[None, :] >= query_position[:, None] // CHUNK * CHUNK)
                scores = tl.where(seen, scores, float("-inf"))

        new_highest = tl.maximum(highest, tl.max(scores, axis=1))
        finite = tl.where(new_highest == float("-inf"), 0.0, new_highest)
        weights = tl.exp2(scores - finite[:, None])
        shrink = tl.exp2(highest - finite)
        total = total * shrink + tl.sum(weights, axis=1)
        values *= shrink[:, None]
        highest = new_highest

        if K_ONLY:
            stored = _load(k + block * k_block + offset * k_token, live, V_DIM, BLOCK_V, NIBBLES, queries.dtype)
            value_place = block * k_scale_block + offset * k_scale_token
        else:
            stored = _load(v + block * v_block + offset * v_token, live, V_DIM, BLOCK_V, NIBBLES, queries.dtype)
            value_place = block * v_scale_block + offset * v_scale_token
        if NIBBLES:
            zero = tl.load(v_zero + value_place, mask=live, other=0.0).to(tl.float32)
            values += tl.sum(weights * zero[None, :], axis=1)[:, None]
        if SCALED:
            weights *= tl.load(v_scale + value_place, mask=live, other=0.0).to(tl.float32)[None, :]
        values = tl.dot(weights.to(queries.dtype), stored, values, input_precision=PRECISION)

    total = tl.where(total == 0.0, 1.0, total)  # nothing was seen: the values are 0, and `highest` weighs them with 0
    values *= (v_factor / total)[:, None]
    value_column = tl.arange(0, BLOCK_V)
    mask = used[:, None] & (value_column < V_DIM)[None, :]
    if slot < 0:
        out_row = (token_start + token).to(tl.int64) * out_token + head * out_head
        tl.store(out + out_row[:, None] + value_column[None, :], values.to(out.dtype.element_ty), mask=mask)
    else:
        partial = (slot.to(tl.int64) * (KV_HEADS * GROUP) + head) * TILE_TOKENS + token
        tl.store(partial_values + partial[:, None] * V_DIM + value_column[None, :], values, mask=mask)
        tl.store(partial_weights + partial, highest + tl.log2(total), mask=used)


@triton.jit
def _load(rows, live, DIM: tl.constexpr, BLOCK: tl.constexpr, NIBBLES: tl.constexpr, DTYPE: tl.constexpr):
    """[keys, BLOCK] stored elements as DTYPE, zeros where nothing lives; of integers, the steps."""
    if NIBBLES:
        byte = tl.arange(0, BLOCK // 2)
        packed = tl.load(rows[:, None] + byte[None, :], mask=live[:, None] & (byte < (DIM + 1) // 2)[None, :], other=0)
        return tl.interleave(_small_integer(packed & 15, 1024, DTYPE), _small_integer(packed >> 4, 1024, DTYPE))
    column = tl.arange(0, BLOCK)
    if DIM == BLOCK:
        stored = tl.load(rows[:, None] + column[None, :], mask=live[:, None], other=0.0)
    else:
        stored = tl.load(rows[:, None] + column[None, :], mask=live[:, None] & (column < DIM)[None, :], other=0.0)
    if stored.dtype == tl.int8 and tl.float16 == DTYPE:
        return _small_integer(stored.to(tl.uint8, bitcast=True) ^ 128, 1152, DTYPE)
    return stored.to(DTYPE)


@triton.jit
def _small_integer(steps, BIAS: tl.constexpr, DTYPE: tl.constexpr):
    """uint8 steps, less BIAS - 1024, as floats. Conversion is slow; as the last bits of float16 1024 they need none."""
    if tl.float16 == DTYPE:
        return (steps.to(tl.uint16) | 0x6400).to(tl.float16, bitcast=True) - BIAS
    return steps.to(DTYPE) - (BIAS - 1024)


@triton.jit
def merge_kernel(
    out,
    partial_values,
    partial_weights,
    sink_logits,
    tiles,
    out_token,
    out_head,
    Q_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    V_DIM: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PARTS: tl.constexpr,
    SINK_LOGITS: tl.constexpr,
):
    program = tl.program_id(0)
    HEAD_BLOCKS: tl.constexpr = (Q_HEADS + HEADS - 1) // HEADS
    token = program // HEAD_BLOCKS % TILE_TOKENS
    tile = tiles + program // (HEAD_BLOCKS * TILE_TOKENS) * 4
    num_parts = tl.load(tile + 3)
    if (num_parts == 0) | (token >= tl.load(tile + 1)):
        return
    first = tl.load(tile + 2).to(tl.int64)
    head = program % HEAD_BLOCKS * HEADS + tl.arange(0, HEADS)
    is_head = head < Q_HEADS
    column = tl.arange(0, BLOCK_V)
    highest = tl.full([HEADS], float("-inf"), tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    if SINK_LOGITS:
        highest = tl.load(sink_logits + head, mask=is_head, other=0.0).to(tl.float32) * 1.4426950408889634
        total += 1.0
    values = tl.zeros([HEADS, BLOCK_V], tl.float32)
    for start in range(0, num_parts, PARTS):
        part = start + tl.arange(0, PARTS)
        live = (part < num_parts)[:, None] & is_head[None, :]
        partial = ((first + part)[:, None] * Q_HEADS + head[None, :]) * TILE_TOKENS + token
        weights = tl.load(partial_weights + partial, mask=live, other=float("-inf"))
        new_highest = tl.maximum(highest, tl.max(weights, axis=0))
        finite = tl.where(new_highest == float("-inf"), 0.0, new_highest)
        shrink = tl.exp2(highest - finite)
        share = tl.exp2(weights - finite[None, :])
        mask = live[:, :, None] & (column < V_DIM)[None, None, :]
        parts = tl.load(partial_values + partial[:, :, None] * V_DIM + column[None, None, :], mask=mask, other=0.0)
        values = values * shrink[:, None] + tl.sum(parts * share[:, :, None], axis=0)
        total = total * shrink + tl.sum(share, axis=0)
        highest = new_highest
    values /= tl.where(total == 0.0, 1.0, total)[:, None]
    row = (tl.load(tile) + token).to(tl.int64) * out_token + head[:, None] * out_head
    mask = is_head[:, None] & (column < V_DIM)[None, :]
    tl.store(out + row + column[None, :], values.to(out.dtype.element_ty), mask=mask)
