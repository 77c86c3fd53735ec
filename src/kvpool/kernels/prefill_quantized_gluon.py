"""Attention of long chunks on Hopper over quantised K and V: the kernel of `prefill_gluon.py` with another producer.

Eight warps read stored words, make float16 of them with their scales, and write these to where the tensor cores read
them. The two groups that compute are the same, and know of nothing but float16.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped, assignment, misc"
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from kvpool.kernels.prefill_gluon import COLUMNS, GROUP_ROWS, compute, copy_queries, make_barriers, release, rounds

# A word of 32 bits has four elements, or eight of int4. Two at a time become a register of two float16, in their order.
# As the last bits of the float16 1024, an integer is that much more than 1024.
_INT8 = gl.constexpr("""{
    .reg .b32 steps, low, high, bias;
    mov.b32 bias, 0x64806480;
    xor.b32 steps, $2, 0x80808080;
    prmt.b32 low, steps, 0x64646464, 0x4140;
    prmt.b32 high, steps, 0x64646464, 0x4342;
    sub.f16x2 low, low, bias;
    sub.f16x2 high, high, bias;
    mul.f16x2 $0, low, $3;
    mul.f16x2 $1, high, $3;
}""")
_E4M3 = gl.constexpr("""{
    .reg .b16 low, high;
    mov.b32 {low, high}, $2;
    cvt.rn.f16x2.e4m3x2 $0, low;
    cvt.rn.f16x2.e4m3x2 $1, high;
}""")
_E5M2 = gl.constexpr("""{
    prmt.b32 $0, $2, 0, 0x1404;
    prmt.b32 $1, $2, 0, 0x3424;
}""")
_INT4 = gl.constexpr("""{
    .reg .b32 a, b, c, d, by, less;
    mov.b32 by, 0x2c003c00;
    mov.b32 less, 0xd400e400;
    prmt.b32 a, $4, 0x64646464, 0x4040;
    prmt.b32 b, $4, 0x64646464, 0x4141;
    prmt.b32 c, $4, 0x64646464, 0x4242;
    prmt.b32 d, $4, 0x64646464, 0x4343;
    and.b32 a, a, 0xfff0ff0f;
    and.b32 b, b, 0xfff0ff0f;
    and.b32 c, c, 0xfff0ff0f;
    and.b32 d, d, 0xfff0ff0f;
    fma.rn.f16x2 a, a, by, less;
    fma.rn.f16x2 b, b, by, less;
    fma.rn.f16x2 c, c, by, less;
    fma.rn.f16x2 d, d, by, less;
    fma.rn.f16x2 $0, a, $5, $6;
    fma.rn.f16x2 $1, b, $5, $6;
    fma.rn.f16x2 $2, c, $5, $6;
    fma.rn.f16x2 $3, d, $5, $6;
}""")
CONVERTERS = gl.constexpr(8)  # warps


@gluon.jit(do_not_specialize=["num_units"])
def prefill_quantized_kernel(
    q,  # a descriptor of float16: boxes of [tokens, heads of a group, COLUMNS]
    k,  # words
    v,
    k_scale,
    v_scale,
    v_zero,
    out,
    partial_values,
    partial_weights,
    indices,
    items,
    num_units,  # items × KV heads
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
    softmax_scale,
    v_factor,
    KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    DIM: gl.constexpr,
    PAGE: gl.constexpr,
    KEYS: gl.constexpr,
    STAGES: gl.constexpr,  # rounds of K and V that there is room for
    Q_STAGES: gl.constexpr,  # units whose queries there is room for
    CAUSAL: gl.constexpr,
    K_STORED: gl.constexpr,  # "e4m3", "e5m2" or "int8"
    V_STORED: gl.constexpr,  # or "int4"
):
    HALVES: gl.constexpr = DIM // COLUMNS
    flat: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    paired: gl.constexpr = gl.NVMMASharedLayout(128, 32, 2)
    q_boxes = gl.allocate_shared_memory(gl.float16, [Q_STAGES * 2 * HALVES] + q.block_type.shape, q.layout)  # noqa: RUF005
    k_rows = gl.allocate_shared_memory(gl.float16, [STAGES, KEYS, DIM], flat)
    v_rows = gl.allocate_shared_memory(gl.float16, [STAGES, KEYS, DIM], flat)
    barriers = make_barriers(STAGES, Q_STAGES)

    q_rows = q_boxes._reinterpret(gl.float16, [Q_STAGES * 2, GROUP_ROWS, DIM], flat)
    k_pairs = k_rows._reinterpret(gl.int32, [STAGES * HALVES, KEYS, COLUMNS // 2], paired)
    v_pairs = v_rows._reinterpret(gl.int32, [STAGES * HALVES, KEYS, COLUMNS // 2], paired)
    shared = (q_rows, k_rows, v_rows, barriers)
    given = (out, partial_values, partial_weights, items, num_units, out_token, out_head, softmax_scale, v_factor)
    strides = (
        (k_block, k_token, k_head, k_scale_block, k_scale_token, k_scale_head),
        (v_block, v_token, v_head, v_scale_block, v_scale_token, v_scale_head),
    )
    stored = (q, k, v, k_scale, v_scale, v_zero, strides)
    gl.warp_specialize(
        [
            (compute, (0, shared, given, KV_HEADS, GROUP, DIM, KEYS, STAGES, Q_STAGES, CAUSAL)),
            (compute, (1, shared, given, KV_HEADS, GROUP, DIM, KEYS, STAGES, Q_STAGES, CAUSAL)),
            (
                _convert,
                (
                    stored,
                    q_boxes,
                    k_pairs,
                    v_pairs,
                    barriers,
                    indices,
                    items,
                    num_units,
                    KV_HEADS,
                    GROUP,
                    DIM,
                    PAGE,
                    KEYS,
                    STAGES,
                    Q_STAGES,
                    K_STORED,
                    V_STORED,
                ),
            ),
        ],
        [4, CONVERTERS],
        [200, 56],  # registers: with fewer the converters are slower, and they set the pace
    )


@gluon.jit
def _convert(
    stored,
    q_boxes,
    k_pairs,
    v_pairs,
    barriers,
    indices,
    items,
    num_units,
    KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    DIM: gl.constexpr,
    PAGE: gl.constexpr,
    KEYS: gl.constexpr,
    STAGES: gl.constexpr,
    Q_STAGES: gl.constexpr,
    K_STORED: gl.constexpr,
    V_STORED: gl.constexpr,
):
    """Queries, keys and values of one unit after another, as far ahead as there is room."""
    q, k, v, k_scale, v_scale, v_zero, strides = stored
    q_ready, q_free, k_ready, k_free, v_ready, v_free = barriers
    HALVES: gl.constexpr = DIM // COLUMNS
    # A thread has the same rows of both, so that ids and places are those of K for V
    k_in: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [CONVERTERS, 1], [1, 0])
    v_in: gl.constexpr = gl.BlockedLayout([1, 2 if V_STORED == "int4" else 4], [8, 4], [CONVERTERS, 1], [1, 0])
    key = gl.arange(0, KEYS, gl.SliceLayout(1, k_in))
    ALIGNED: gl.constexpr = KEYS % PAGE == 0  # every round begins with a block
    offset = key % PAGE
    number = 0
    turn = 0
    for unit in range(gl.program_id(0), num_units, gl.num_programs(0)):
        item = items + unit // KV_HEADS * 8
        kv_head = unit % KV_HEADS
        if gl.load(item + 1) > 0:
            token_start = gl.load(item)
            table = indices + gl.load(item + 3)
            key_start = gl.load(item + 5)
            key_end = gl.load(item + 6)
            copy_queries(q, q_boxes, q_ready, q_free, number, token_start, kv_head, GROUP, DIM, Q_STAGES)
            number += 1
            # Words are loaded half a row ahead of their use, and the ids of blocks a round ahead
            place = key_start + key
            if not ALIGNED:
                offset = place % PAGE
            live = place < key_end
            ids = gl.load(table + place // PAGE, mask=live, other=0)
            words = _load_words(k, strides[0], kv_head, ids, offset, live, 0, k_in)
            k_scales, _none = _load_scales(k_scale, k_scale, strides[0], kv_head, ids, offset, live, K_STORED, k_in)
            for _round in range(rounds(key_start, key_end, KEYS)):
                stage = turn % STAGES
                phase = (turn // STAGES & 1) ^ 1
                place += KEYS
                next_live = place < key_end
                next_ids = gl.load(table + place // PAGE, mask=next_live, other=0)
                v_scales, zeros = _load_scales(v_scale, v_zero, strides[1], kv_head, ids, offset, live, V_STORED, v_in)
                mbarrier.wait(k_free.index(stage), phase)
                for half in gl.static_range(HALVES):
                    if half + 1 < HALVES:
                        coming = _load_words(k, strides[0], kv_head, ids, offset, live, half + 1, k_in)
                    else:
                        coming = _load_words(v, strides[1], kv_head, ids, offset, live, 0, v_in)
                    _store(k_pairs.index(stage * HALVES + half), words, k_scales, k_scales, K_STORED)
                    words = coming
                fence_async_shared()
                release(k_ready.index(stage))
                mbarrier.wait(v_free.index(stage), phase)
                for half in gl.static_range(HALVES):
                    if half + 1 < HALVES:
                        coming = _load_words(v, strides[1], kv_head, ids, offset, live, half + 1, v_in)
                    else:
                        ids = next_ids
                        live = next_live
                        if not ALIGNED:
                            offset = place % PAGE
                        coming = _load_words(k, strides[0], kv_head, ids, offset, live, 0, k_in)
                        k_scales, _none = _load_scales(
                            k_scale, k_scale, strides[0], kv_head, ids, offset, live, K_STORED, k_in
                        )
                    _store(v_pairs.index(stage * HALVES + half), words, v_scales, zeros, V_STORED)
                    words = coming
                fence_async_shared()
                release(v_ready.index(stage))
                turn += 1


@gluon.jit
def _load_words(data, strides, kv_head, ids, offset, live, HALF: gl.constexpr, words_in: gl.constexpr):
    """The words of half a row (of COLUMNS elements) of some keys or values; 0 where none is `live`."""
    block, token, head, _scale_block, _scale_token, _scale_head = strides
    WORDS: gl.constexpr = words_in.size_per_thread[1] * words_in.threads_per_warp[1]
    rows_in: gl.constexpr = gl.SliceLayout(1, words_in)
    word = HALF * WORDS + gl.arange(0, WORDS, gl.SliceLayout(0, words_in))
    rows = gl.convert_layout(ids.to(gl.int64) * block + (offset * token + kv_head * head), rows_in)
    inside = gl.convert_layout(live, rows_in)
    return gl.load(data + rows[:, None] + word[None, :], mask=inside[:, None], other=0)


@gluon.jit
def _load_scales(scale, zero, strides, kv_head, ids, offset, live, STORED: gl.constexpr, words_in: gl.constexpr):
    """Scales and zero points of some keys or values, each as a pair of equal float16; 0 where none is `live`."""
    _block, _token, _head, block, token, head = strides
    scales = ids
    zeros = ids
    if STORED == "int8" or STORED == "int4":
        places = ids.to(gl.int64) * block + (offset * token + kv_head * head)
        factor = gl.load(scale + places, mask=live, other=0.0).to(gl.float32)
        most = 515.5  # no product is beyond float16
        if STORED == "int4":
            base = gl.load(zero + places, mask=live, other=0.0)
            zeros = _twice(base)
            most = (65400.0 - base.to(gl.float32)) * (1.0 / 15.0)
        scales = _twice(gl.minimum(factor, most).to(gl.float16))
    rows_in: gl.constexpr = gl.SliceLayout(1, words_in)
    return gl.convert_layout(scales, rows_in), gl.convert_layout(zeros, rows_in)


@gluon.jit
def _twice(numbers):
    """Each float16 in both halves of an int32."""
    bits = numbers.to(gl.int16, bitcast=True).to(gl.int32) & 0xFFFF
    return bits | (bits << 16)


@gluon.jit
def _store(pairs, words, scales, zeros, STORED: gl.constexpr):
    """Makes float16 of words, and writes them where the tensor cores read them."""
    two: gl.constexpr = (gl.int32, gl.int32)
    if STORED == "int4":
        args = [words, scales[:, None], zeros[:, None]]
        four: gl.constexpr = (gl.int32, gl.int32, gl.int32, gl.int32)
        a, b, c, d = gl.inline_asm_elementwise(_INT4, "=r,=r,=r,=r,r,r,r", args, four, True, 1)
        made = gl.join(gl.join(a, c), gl.join(b, d))
    elif STORED == "int8":
        a, b = gl.inline_asm_elementwise(_INT8, "=r,=r,r,r", [words, scales[:, None]], two, True, 1)
        made = gl.join(a, b)
    elif STORED == "e4m3":
        a, b = gl.inline_asm_elementwise(_E4M3, "=r,=r,r", [words], two, True, 1)
        made = gl.join(a, b)
    else:
        a, b = gl.inline_asm_elementwise(_E5M2, "=r,=r,r", [words], two, True, 1)
        made = gl.join(a, b)
    pairs.store(made.reshape([words.shape[0], COLUMNS // 2]))
