"""The Triton kernels of paged attention; `paged_attention.py` says what they compute and launches them."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped, assignment, misc"
# ruff: noqa: RUF005 (Triton adds tuples, and does not unpack them)
from __future__ import annotations

import triton
import triton.language as tl

# Two words of 16 bits in a register, taken apart into registers of two float16 each: element i of both words in the i-th.
# A small integer needs no conversion: as the last bits of the float16 1024 it is that much more than 1024. Alone it is a
# subnormal float16, so many times 2 ** -24, which tensor cores multiply as any other; the results are multiplied by 2 ** 24.
# Nibbles are left so, every second of them 16 times as large. So are bytes of K, with 128 added: no bit is a sign then.
_NIBBLES = tl.constexpr("""{
    .reg .b32 rest;
    shr.b32 rest, $4, 8;
    and.b32 $0, $4, 0x000f000f;
    and.b32 $1, $4, 0x00f000f0;
    and.b32 $2, rest, 0x000f000f;
    and.b32 $3, rest, 0x00f000f0;
}""")
_BYTES = tl.constexpr("""{
    .reg .b32 steps, low, high, bias;
    mov.b32 bias, 0x64806480;
    xor.b32 steps, $2, 0x80808080;
    prmt.b32 low, steps, 0x64646464, 0x4240;
    prmt.b32 high, steps, 0x64646464, 0x4341;
    sub.f16x2 $0, low, bias;
    sub.f16x2 $1, high, bias;
}""")
_RAISED_BYTES = tl.constexpr("""{
    .reg .b32 steps;
    xor.b32 steps, $2, 0x80808080;
    prmt.b32 $0, steps, 0, 0x4240;
    prmt.b32 $1, steps, 0, 0x4341;
}""")
_E4M3 = tl.constexpr("""{
    .reg .b32 sorted;
    .reg .b16 low, high;
    prmt.b32 sorted, $2, 0, 0x3120;
    mov.b32 {low, high}, sorted;
    cvt.rn.f16x2.e4m3x2 $0, low;
    cvt.rn.f16x2.e4m3x2 $1, high;
}""")
_E5M2 = tl.constexpr("""{
    prmt.b32 $0, $2, 0, 0x2404;
    and.b32 $1, $2, 0xff00ff00;
}""")


@triton.jit
def attend_kernel(
    q,
    k,
    v,
    k_scale,
    v_scale,
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
    score_scale,  # of scores before a soft cap
    soft_cap,
    softmax_scale,  # of what goes into exp2, positive
    v_factor,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,  # query heads of one program, of GROUP
    TILE_TOKENS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    TAIL: tl.constexpr,  # elements of a key behind those that are the value, too; 0 unless K_ONLY
    BLOCK_T: tl.constexpr,
    PAGE: tl.constexpr,
    SLOTS: tl.constexpr,  # lists are of slots, in any order, and not of blocks
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    CAUSAL: tl.constexpr,
    ALIGNED: tl.constexpr,  # every round begins with a block
    WINDOW: tl.constexpr,  # 0: none
    SINK_TOKENS: tl.constexpr,
    SINK_SLOTS: tl.constexpr,  # listed tokens before the gap
    CHUNK: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    NEGATED: tl.constexpr,  # queries change their sign, in place of the scale
    SINK_LOGITS: tl.constexpr,
    K_STORED: tl.constexpr,  # what a word of K holds: "float", or K_PARTS elements of "e4m3", "e5m2" or "int8"
    V_STORED: tl.constexpr,  # or "int4"
    K_PARTS: tl.constexpr,
    V_PARTS: tl.constexpr,
    K_ONLY: tl.constexpr,
    PRECISION: tl.constexpr,
    ASSEMBLER: tl.constexpr,  # words are taken apart by machine instructions, which the interpreter does not know
):
    head_blocks: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    NIBBLES: tl.constexpr = V_STORED == "int4"
    SCALED: tl.constexpr = K_STORED == "int8"
    MAIN: tl.constexpr = HEAD_DIM - TAIL
    D_WORDS: tl.constexpr = BLOCK_D // K_PARTS
    T_WORDS: tl.constexpr = BLOCK_T // K_PARTS
    SAME: tl.constexpr = K_ONLY and K_STORED == "float" and BLOCK_D == BLOCK_V  # what is loaded of K is V, too
    V_WORDS: tl.constexpr = BLOCK_V // V_PARTS
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
    q_row = (token_start + token).to(tl.int64) * q_token + head * q_head
    queries = ()  # a word's elements of K are multiplied apart: part i holds the elements i, K_PARTS + i, ...
    tails = ()
    for part in tl.static_range(K_PARTS):
        column = tl.arange(0, D_WORDS) * K_PARTS + part
        queries = queries + (_queries(q + q_row[:, None], column, used, MAIN, K_STORED, NEGATED),)
        if TAIL > 0:
            column = tl.arange(0, T_WORDS) * K_PARTS + part
            tails = tails + (_queries(q + MAIN + q_row[:, None], column, used, TAIL, K_STORED, NEGATED),)
    query_position = position + token
    IN_PLACE: tl.constexpr = ASSEMBLER and tl.float16 == queries[0].dtype
    RAISED: tl.constexpr = IN_PLACE and SCALED and K_PARTS == 2
    raised = tl.zeros([ROWS], tl.float32)  # what 128 more in each element of K adds to scores
    if RAISED:
        for part in tl.static_range(K_PARTS):
            raised += tl.sum(queries[part].to(tl.float32), axis=1) * (128.0 * 2.0**-24)
            if TAIL > 0:
                raised += tl.sum(tails[part].to(tl.float32), axis=1) * (128.0 * 2.0**-24)

    highest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if SINK_LOGITS:  # noqa: SIM102 (Triton would make the constant part of a condition at run time)
        if slot < 0:
            highest = tl.load(sink_logits + head, mask=used, other=0.0).to(tl.float32) * 1.4426950408889634
            total += 1.0
    values = ()
    for _ in tl.static_range(V_PARTS):
        values = values + (tl.zeros([ROWS, V_WORDS], tl.float32),)
    zeros = tl.zeros([ROWS], tl.float32)  # the sum of zero points, which all elements of a row have in common

    k += kv_head * k_head
    v += kv_head * v_head
    k_scale += kv_head * k_scale_head
    v_scale += kv_head * v_scale_head
    v_zero += kv_head * v_scale_head
    all_see = key_start  # every query of the tile sees the keys before this one
    if TILE_TOKENS == 1 or (not CAUSAL and WINDOW == 0):  # the keys of a single query are chosen for it
        all_see = key_end
    elif WINDOW == 0 and CHUNK == 0:
        all_see = tl.minimum(position + 1, key_end)
    # Block ids are loaded a round ahead: the pipeline then has only K and V to prefetch, and no address to wait for. Scales
    # are too small for it; they are loaded a round ahead too, by ids of the round before that.
    key = tl.arange(0, KEYS)
    offset = key % PAGE
    LISTED: tl.constexpr = 1 if SLOTS else PAGE
    next_block = _block_ids(table, key_start, key, key_end, LISTED, ALIGNED)
    scale_block = next_block
    next_scales = ()
    next_zeros = ()
    if SCALED:
        first_block = next_block
        if SLOTS:
            first_block = next_block // PAGE
            offset = (next_block % PAGE).to(tl.int32)
        elif not ALIGNED:
            offset = (key_start + key) % PAGE
        k_place = first_block * k_scale_block + offset * k_scale_token
        v_place = first_block * v_scale_block + offset * v_scale_token
        next_scales = _load_both(k_scale + k_place, v_scale + v_place, key < key_end - key_start)
        if NIBBLES:
            next_zeros = (_load_some(v_zero + v_place, key < key_end - key_start),)
        scale_block = _block_ids(table, key_start + KEYS, key, key_end, LISTED, ALIGNED)
    for start in range(key_start, key_end, KEYS):
        live = key < key_end - start
        block = next_block
        next_block = _block_ids(table, start + KEYS, key, key_end, LISTED, ALIGNED)
        if SLOTS:
            offset = (block % PAGE).to(tl.int32)
            block = block // PAGE
        elif not ALIGNED:
            offset = (start + key) % PAGE
        scales = next_scales
        v_zeros = next_zeros
        if SCALED:
            later = offset
            later_block = scale_block
            if SLOTS:
                later = (scale_block % PAGE).to(tl.int32)
                later_block = scale_block // PAGE
            elif not ALIGNED:
                later = (start + KEYS + key) % PAGE
            k_place = later_block * k_scale_block + later * k_scale_token
            v_place = later_block * v_scale_block + later * v_scale_token
            next_scales = _load_both(k_scale + k_place, v_scale + v_place, key < key_end - start - KEYS)
            if NIBBLES:
                next_zeros = (_load_some(v_zero + v_place, key < key_end - start - KEYS),)
            scale_block = _block_ids(table, start + 2 * KEYS, key, key_end, LISTED, ALIGNED)

        # What stands first in a sum of addresses is the same in every round. Keys behind the last are those of block 0:
        # their scores are left out below. Values behind the last are zeros, as no weight makes a NaN vanish.
        words = tl.arange(0, D_WORDS)
        if K_STORED == "float":
            places = (k + offset * k_token)[:, None] + words[None, :] + (block * k_block)[:, None]
            inside = (words < MAIN)[None, :]
            if SAME:
                inside = inside & live[:, None]
            keys = _load(places, inside, MAIN == BLOCK_D and not SAME).to(queries[0].dtype)
            scores = tl.dot(queries[0], tl.trans(keys), input_precision=PRECISION)
            if TAIL > 0:
                words = tl.arange(0, T_WORDS)
                places = (k + MAIN + offset * k_token)[:, None] + words[None, :] + (block * k_block)[:, None]
                rest = _load(places, (words < TAIL)[None, :], TAIL == BLOCK_T).to(queries[0].dtype)
                scores = tl.dot(tails[0], tl.trans(rest), scores, input_precision=PRECISION)
        else:
            places = (k + offset * k_token)[None, :] + words[:, None] + (block * k_block)[None, :]
            loaded = _load(places, (words < (MAIN + K_PARTS - 1) // K_PARTS)[:, None], MAIN == BLOCK_D)
            keys = _take_apart(loaded, "raised" if RAISED else K_STORED, K_PARTS, queries[0].dtype, ASSEMBLER)
            scores = tl.zeros([ROWS, KEYS], tl.float32) - raised[:, None]
            for part in tl.static_range(K_PARTS):
                scores = tl.dot(queries[part], keys[part], scores, input_precision=PRECISION)
            if TAIL > 0:
                words = tl.arange(0, T_WORDS)
                places = (k + MAIN // K_PARTS + offset * k_token)[None, :] + words[:, None] + (block * k_block)[None, :]
                loaded = _load(places, (words < (TAIL + K_PARTS - 1) // K_PARTS)[:, None], TAIL == BLOCK_T)
                rest = _take_apart(loaded, "raised" if RAISED else K_STORED, K_PARTS, queries[0].dtype, ASSEMBLER)
                for part in tl.static_range(K_PARTS):
                    scores = tl.dot(tails[part], rest[part], scores, input_precision=PRECISION)
        if SCALED:
            scores *= (scales[0] * (2.0**24 if RAISED else 1.0))[None, :]
        if SOFT_CAP:
            # tanh by way of exp2: 1 - 2 / (e^2x + 1)
            grown = tl.exp2(scores * (score_scale * 2.8853900817779268 / soft_cap))
            scores = 1.0 - 2.0 / (grown + 1.0)

        if start + KEYS > all_see:
            seen = live[None, :]
            if (CAUSAL or WINDOW > 0) and TILE_TOKENS > 1:
                listed = start + key
                key_position = listed + tl.where(listed >= SINK_SLOTS, gap, 0)
                seen = seen & _visible(
                    query_position[:, None], key_position[None, :], CAUSAL, WINDOW, SINK_TOKENS, CHUNK
                )
            scores = tl.where(seen, scores, float("-inf"))

        # The scale of scores is positive, so that their maximum may be taken before it: one instruction does the rest.
        new_highest = tl.maximum(highest, tl.max(scores, axis=1) * softmax_scale)
        finite = tl.where(new_highest == float("-inf"), 0.0, new_highest)
        weights = tl.exp2(scores * softmax_scale - finite[:, None])
        shrink = tl.exp2(highest - finite)
        total = total * shrink + tl.sum(weights, axis=1)
        highest = new_highest

        if NIBBLES:
            zeros = zeros * shrink + tl.sum(weights * v_zeros[0][None, :], axis=1)
        if SCALED:
            weights *= scales[1][None, :]
        weights = weights.to(queries[0].dtype)
        v_words = tl.arange(0, V_WORDS)
        if SAME:
            stored = (keys,)
        else:
            if K_ONLY:
                places = (k + offset * k_token)[:, None] + v_words[None, :] + (block * k_block)[:, None]
            else:
                places = (v + offset * v_token)[:, None] + v_words[None, :] + (block * v_block)[:, None]
            inside = live[:, None]
            if V_DIM != BLOCK_V:
                inside = inside & (v_words < (V_DIM + V_PARTS - 1) // V_PARTS)[None, :]
            loaded_values = _load(places, inside, False)
            if V_STORED == "float":
                stored = (loaded_values.to(queries[0].dtype),)
            else:
                stored = _take_apart(loaded_values, V_STORED, V_PARTS, queries[0].dtype, ASSEMBLER)
        grown_values = ()
        for part in tl.static_range(V_PARTS):
            kept = values[part] * shrink[:, None]
            grown_values = grown_values + (tl.dot(weights, stored[part], kept, input_precision=PRECISION),)
        values = grown_values

    total = tl.where(total == 0.0, 1.0, total)  # nothing was seen: the values are 0, and `highest` weighs them with 0
    out_row = (token_start + token).to(tl.int64) * out_token + head * out_head
    partial = (slot.to(tl.int64) * (KV_HEADS * GROUP) + head) * TILE_TOKENS + token
    for part in tl.static_range(V_PARTS):
        some = values[part]  # type: ignore[var-annotated]
        if NIBBLES:
            if IN_PLACE and V_PARTS == 4:
                some *= 2.0**24 if part % 2 == 0 else 2.0**20
            some += zeros[:, None]
        some *= (v_factor / total)[:, None]
        column = tl.arange(0, V_WORDS) * V_PARTS + part
        mask = used[:, None] & (column < V_DIM)[None, :]
        if slot < 0:
            tl.store(out + out_row[:, None] + column[None, :], some.to(out.dtype.element_ty), mask=mask)
        else:
            tl.store(partial_values + partial[:, None] * V_DIM + column[None, :], some, mask=mask)
    if slot >= 0:
        tl.store(partial_weights + partial, highest + tl.log2(total), mask=used)


@triton.jit
def _queries(rows, column, used, DIM: tl.constexpr, K_STORED: tl.constexpr, NEGATED: tl.constexpr):
    """Some elements of queries, zeros beyond `DIM`."""
    some = tl.load(rows + column[None, :], mask=used[:, None] & (column < DIM)[None, :], other=0.0)
    # Bytes become float16 in a step or two, bfloat16 in several
    if K_STORED != "float" and some.dtype == tl.bfloat16:
        some = some.to(tl.float16)
    if NEGATED:
        some = -some
    return some


@triton.jit
def _load_both(k_places, v_places, live):
    """The scales of some keys and values."""
    return (_load_some(k_places, live), _load_some(v_places, live))


@triton.jit
def _load_some(places, live):
    """Scales or zero points, float32."""
    return tl.load(places, mask=live, other=0.0).to(tl.float32)


@triton.jit
def _block_ids(table, start, key, key_end, PAGE: tl.constexpr, ALIGNED: tl.constexpr):
    """The blocks of some keys from `start` on, 0 behind the last."""
    if ALIGNED:
        place = start // PAGE + key // PAGE
    else:
        place = (start + key) // PAGE
    return tl.load(table + place, mask=key < key_end - start, other=0).to(tl.int64)


@triton.jit
def _load(places, inside, WHOLE: tl.constexpr):
    """What is stored at some places, zeros outside; with WHOLE, all are inside."""
    if WHOLE:
        loaded = tl.load(places)
    else:
        loaded = tl.load(places, mask=inside, other=0)
    return loaded


@triton.jit
def _visible(query, key, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SINK_TOKENS: tl.constexpr, CHUNK: tl.constexpr):
    """Whether queries see keys, by position: `AttentionSpec.visible`."""
    seen = (key <= query) | (not CAUSAL)
    if WINDOW > 0:
        seen = seen & ((key > query - WINDOW) | (key < SINK_TOKENS))
    if CHUNK > 0:
        seen = seen & (key >= query // CHUNK * CHUNK)
    return seen


@triton.jit
def _take_apart(words, STORED: tl.constexpr, PARTS: tl.constexpr, DTYPE: tl.constexpr, ASSEMBLER: tl.constexpr):
    """The elements of stored words as DTYPE, in PARTS tensors shaped as the words; of integers, the steps.

    With ASSEMBLER, nibbles and "raised" bytes are subnormal numbers.
    """
    BITS: tl.constexpr = 4 if STORED == "int4" else 8
    parts = ()
    if ASSEMBLER and tl.float16 == DTYPE and PARTS * BITS == 16:
        if STORED == "int4":
            parts = tl.inline_asm_elementwise(
                _NIBBLES, "=r,=r,=r,=r,r", [words], (tl.float16, tl.float16, tl.float16, tl.float16), True, 2
            )
        elif STORED == "raised":
            parts = tl.inline_asm_elementwise(_RAISED_BYTES, "=r,=r,r", [words], (tl.float16, tl.float16), True, 2)
        elif STORED == "int8":
            parts = tl.inline_asm_elementwise(_BYTES, "=r,=r,r", [words], (tl.float16, tl.float16), True, 2)
        elif STORED == "e4m3":
            parts = tl.inline_asm_elementwise(_E4M3, "=r,=r,r", [words], (tl.float16, tl.float16), True, 2)
        else:
            parts = tl.inline_asm_elementwise(_E5M2, "=r,=r,r", [words], (tl.float16, tl.float16), True, 2)
    else:
        for part in tl.static_range(PARTS):
            field = (words >> (part * BITS)) & ((1 << BITS) - 1)
            if STORED == "int8":
                field = field.to(tl.int8)
            elif STORED == "e4m3":
                field = field.to(tl.uint8).to(tl.float8e4nv, bitcast=True)
            elif STORED == "e5m2":
                field = field.to(tl.uint8).to(tl.float8e5, bitcast=True)
            parts = parts + (field.to(DTYPE),)
    return parts


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
