"""Attention of long chunks on Hopper: a warp that loads, and two groups of warps that compute, in one persistent kernel.

The same work items as in `paged_attention_triton.py`, for plain attention over 16-bit floats. K and V come block by block
through the copy engine, two rounds ahead of their use, so that no warp that computes ever makes an address or waits for
one. Each computing group has 64 of the 128 rows of a tile; it multiplies the keys of the next round while the softmax of
this one goes on, and the two groups take turns at the tensor cores by themselves.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped, assignment, misc"
# ruff: noqa: RUF005 (Triton adds tuples, and does not unpack them)
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

GROUP_ROWS = gl.constexpr(64)  # of queries × heads in one computing group
# Elements in a row of 128 bytes, which the copy engine writes in the order that tensor cores read
COLUMNS = gl.constexpr(64)


@gluon.jit(do_not_specialize=["num_units"])  # a variant takes seconds to compile
def prefill_kernel(
    q,  # descriptors: boxes of [tokens, heads of a group, COLUMNS]
    k,  # boxes of [1, tokens of a block, 1, COLUMNS]
    v,
    out,
    partial_values,
    partial_weights,
    indices,
    items,
    num_units,  # items × KV heads
    out_token,
    out_head,
    softmax_scale,
    v_factor,
    KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    DIM: gl.constexpr,
    PAGE: gl.constexpr,
    BOX: gl.constexpr,  # tokens of a box: a block, or as much of it as a round takes
    KEYS: gl.constexpr,
    STAGES: gl.constexpr,  # rounds of K and V that there is room for
    Q_STAGES: gl.constexpr,  # units whose queries there is room for
    CAUSAL: gl.constexpr,
):
    HALVES: gl.constexpr = DIM // COLUMNS
    BOXES: gl.constexpr = KEYS // BOX
    dtype: gl.constexpr = q.dtype
    q_boxes = gl.allocate_shared_memory(dtype, [Q_STAGES * 2 * HALVES] + q.block_type.shape, q.layout)
    k_boxes = gl.allocate_shared_memory(dtype, [STAGES * HALVES * BOXES] + k.block_type.shape, k.layout)
    v_boxes = gl.allocate_shared_memory(dtype, [STAGES * HALVES * BOXES] + v.block_type.shape, v.layout)
    barriers = make_barriers(STAGES, Q_STAGES)

    flat: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    q_rows = q_boxes._reinterpret(dtype, [Q_STAGES * 2, GROUP_ROWS, DIM], flat)
    k_rows = k_boxes._reinterpret(dtype, [STAGES, KEYS, DIM], flat)
    v_rows = v_boxes._reinterpret(dtype, [STAGES, KEYS, DIM], flat)
    shared = (q_rows, k_rows, v_rows, barriers)
    given = (out, partial_values, partial_weights, items, num_units, out_token, out_head, softmax_scale, v_factor)
    gl.warp_specialize(
        [
            (compute, (0, shared, given, KV_HEADS, GROUP, DIM, KEYS, STAGES, Q_STAGES, CAUSAL)),
            (compute, (1, shared, given, KV_HEADS, GROUP, DIM, KEYS, STAGES, Q_STAGES, CAUSAL)),
            (
                _copy,
                (
                    q,
                    k,
                    v,
                    q_boxes,
                    k_boxes,
                    v_boxes,
                    barriers,
                    indices,
                    items,
                    num_units,
                    KV_HEADS,
                    GROUP,
                    DIM,
                    PAGE,
                    BOX,
                    KEYS,
                    STAGES,
                    Q_STAGES,
                ),
            ),
        ],
        [4, 1],
        [240, 24],
    )


@gluon.jit
def make_barriers(STAGES: gl.constexpr, Q_STAGES: gl.constexpr):
    """For queries, keys and values: when a place is ready, and when both groups that compute have left it."""
    q_ready = gl.allocate_shared_memory(gl.int64, [Q_STAGES, 1], mbarrier.MBarrierLayout())
    q_free = gl.allocate_shared_memory(gl.int64, [Q_STAGES, 1], mbarrier.MBarrierLayout())
    k_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(Q_STAGES):
        mbarrier.init(q_ready.index(stage), count=1)
        mbarrier.init(q_free.index(stage), count=2)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_ready.index(stage), count=1)
        mbarrier.init(v_ready.index(stage), count=1)
        mbarrier.init(k_free.index(stage), count=2)
        mbarrier.init(v_free.index(stage), count=2)
    fence_async_shared()
    return q_ready, q_free, k_ready, k_free, v_ready, v_free


@gluon.jit
def copy_queries(
    q,
    q_boxes,
    q_ready,
    q_free,
    number,
    token_start,
    kv_head,
    GROUP: gl.constexpr,
    DIM: gl.constexpr,
    Q_STAGES: gl.constexpr,
):
    """The queries of a unit, the `number`th of this program, as soon as there is room."""
    HALVES: gl.constexpr = DIM // COLUMNS
    ready = q_ready.index(number % Q_STAGES)
    mbarrier.wait(q_free.index(number % Q_STAGES), (number // Q_STAGES & 1) ^ 1)
    mbarrier.expect(ready, 2 * GROUP_ROWS * DIM * 2)
    for box in gl.static_range(2 * HALVES):
        token = token_start + box // HALVES * (GROUP_ROWS // GROUP)
        target = q_boxes.index(number % Q_STAGES * (2 * HALVES) + box)
        tma.async_copy_global_to_shared(q, [token, kv_head * GROUP, box % HALVES * COLUMNS], ready, target)


@gluon.jit
def _copy(
    q,
    k,
    v,
    q_boxes,
    k_boxes,
    v_boxes,
    barriers,
    indices,
    items,
    num_units,
    KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    DIM: gl.constexpr,
    PAGE: gl.constexpr,
    BOX: gl.constexpr,
    KEYS: gl.constexpr,
    STAGES: gl.constexpr,
    Q_STAGES: gl.constexpr,
):
    """Queries, keys and values of one unit after another, as far ahead as there is room."""
    q_ready, q_free, k_ready, k_free, v_ready, v_free = barriers
    HALVES: gl.constexpr = DIM // COLUMNS
    BOXES: gl.constexpr = KEYS // BOX
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
            for _round in range(rounds(key_start, key_end, KEYS)):
                start = key_start + _round * KEYS
                stage = turn % STAGES
                phase = (turn // STAGES & 1) ^ 1
                blocks = ()
                for box in gl.static_range(BOXES):
                    listed = start + box * BOX
                    blocks = blocks + (gl.load(table + listed // PAGE, mask=listed < key_end, other=0),)
                first = stage * (HALVES * BOXES)
                mbarrier.wait(k_free.index(stage), phase)
                mbarrier.expect(k_ready.index(stage), KEYS * DIM * 2)
                for box in gl.static_range(BOXES):
                    for half in gl.static_range(HALVES):
                        place = [blocks[box], (start + box * BOX) % PAGE, kv_head, half * COLUMNS]
                        tma.async_copy_global_to_shared(
                            k, place, k_ready.index(stage), k_boxes.index(first + half * BOXES + box)
                        )
                mbarrier.wait(v_free.index(stage), phase)
                mbarrier.expect(v_ready.index(stage), KEYS * DIM * 2)
                for box in gl.static_range(BOXES):
                    for half in gl.static_range(HALVES):
                        place = [blocks[box], (start + box * BOX) % PAGE, kv_head, half * COLUMNS]
                        tma.async_copy_global_to_shared(
                            v, place, v_ready.index(stage), v_boxes.index(first + half * BOXES + box)
                        )
                turn += 1


@gluon.jit
def rounds(key_start, key_end, KEYS: gl.constexpr):
    """At least one: a tile that sees nothing is computed as any other, all of it left out."""
    return gl.maximum((key_end - key_start + KEYS - 1) // KEYS, 1)


@gluon.jit
def compute(
    WHICH: gl.constexpr,
    shared,
    given,
    KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    DIM: gl.constexpr,
    KEYS: gl.constexpr,
    STAGES: gl.constexpr,
    Q_STAGES: gl.constexpr,
    CAUSAL: gl.constexpr,
):
    """Rows 64 × WHICH on of every unit."""
    q_rows, k_rows, v_rows, barriers = shared
    q_ready, q_free, k_ready, k_free, v_ready, v_free = barriers
    out, partial_values, partial_weights, items, num_units, out_token, out_head, softmax_scale, v_factor = given
    scores_in: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    values_in: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    weights_in: gl.constexpr = gl.DotOperandLayout(0, values_in, 2)
    rows_in: gl.constexpr = gl.SliceLayout(1, values_in)
    dtype: gl.constexpr = q_rows.dtype
    TILE_TOKENS: gl.constexpr = 2 * GROUP_ROWS // GROUP
    none = gl.zeros([GROUP_ROWS, KEYS], gl.float32, scores_in)
    number = 0
    turn = 0
    for unit in range(gl.program_id(0), num_units, gl.num_programs(0)):
        item = items + unit // KV_HEADS * 8
        num_tokens = gl.load(item + 1)
        if num_tokens > 0:
            position = gl.load(item + 2)
            key_start = gl.load(item + 5)
            key_end = gl.load(item + 6)
            slot = gl.load(item + 7)
            all_see = key_end
            if CAUSAL:
                all_see = gl.minimum(position + 1, key_end)
            num_rounds = rounds(key_start, key_end, KEYS)
            whole = gl.maximum((all_see - key_start) // KEYS, 0)  # rounds in which every query sees every key

            queries = q_rows.index(number % Q_STAGES * 2 + WHICH)
            mbarrier.wait(q_ready.index(number % Q_STAGES), number // Q_STAGES & 1)
            mbarrier.wait(k_ready.index(turn % STAGES), turn // STAGES & 1)
            scores = warpgroup_mma(queries, k_rows.index(turn % STAGES).permute((1, 0)), none, use_acc=False)
            release(k_free.index(turn % STAGES))
            if whole == 0:
                scores = _leave_out(scores, key_start, key_end, position, WHICH, GROUP, KEYS, CAUSAL, scores_in)
            highest = gl.max(scores, 1) * softmax_scale
            finite = gl.where(highest == float("-inf"), 0.0, highest)
            weights = gl.exp2(scores * softmax_scale - finite[:, None])
            total = gl.sum(weights, 1)
            operand = gl.convert_layout(weights.to(dtype), weights_in)
            values = gl.zeros([GROUP_ROWS, DIM], gl.float32, values_in)
            turn += 1
            for _round in range(1, gl.maximum(whole, 1)):
                values, operand, highest, total = _round_of(
                    values,
                    operand,
                    highest,
                    total,
                    queries,
                    k_rows,
                    v_rows,
                    k_ready,
                    k_free,
                    v_ready,
                    v_free,
                    turn,
                    key_start + _round * KEYS,
                    key_end,
                    position,
                    softmax_scale,
                    none,
                    False,
                    WHICH,
                    GROUP,
                    KEYS,
                    STAGES,
                    CAUSAL,
                    scores_in,
                    values_in,
                    weights_in,
                )
                turn += 1
            for _round in range(gl.maximum(whole, 1), num_rounds):
                values, operand, highest, total = _round_of(
                    values,
                    operand,
                    highest,
                    total,
                    queries,
                    k_rows,
                    v_rows,
                    k_ready,
                    k_free,
                    v_ready,
                    v_free,
                    turn,
                    key_start + _round * KEYS,
                    key_end,
                    position,
                    softmax_scale,
                    none,
                    True,
                    WHICH,
                    GROUP,
                    KEYS,
                    STAGES,
                    CAUSAL,
                    scores_in,
                    values_in,
                    weights_in,
                )
                turn += 1
            release(q_free.index(number % Q_STAGES))
            number += 1

            last = (turn - 1) % STAGES
            mbarrier.wait(v_ready.index(last), (turn - 1) // STAGES & 1)
            live = key_end - key_start - (num_rounds - 1) * KEYS
            if live < KEYS:
                _clear(v_rows.index(last), live, DIM, KEYS)
            values = warpgroup_mma(operand, v_rows.index(last), values)
            release(v_free.index(last))

            # Nothing was seen: the values are 0, `highest` weighs them with 0
            total = gl.where(total == 0.0, 1.0, total)
            values = values * (v_factor / gl.convert_layout(total, rows_in))[:, None]
            row = WHICH * GROUP_ROWS + gl.arange(0, GROUP_ROWS, rows_in)
            token = row // GROUP
            head = unit % KV_HEADS * GROUP + row % GROUP
            used = token < num_tokens
            column = gl.arange(0, DIM, gl.SliceLayout(0, values_in))
            if slot < 0:
                place = (gl.load(item) + token).to(gl.int64) * out_token + head * out_head
                gl.store(out + place[:, None] + column[None, :], values.to(out.dtype.element_ty), mask=used[:, None])
            else:
                place = (slot.to(gl.int64) * (KV_HEADS * GROUP) + head) * TILE_TOKENS + token
                gl.store(partial_values + place[:, None] * DIM + column[None, :], values, mask=used[:, None])
                weight = gl.convert_layout(highest + gl.log2(gl.convert_layout(total, highest.type.layout)), rows_in)
                gl.store(partial_weights + place, weight, mask=used)


@gluon.jit
def _round_of(
    values,
    operand,
    highest,
    total,
    queries,
    k_rows,
    v_rows,
    k_ready,
    k_free,
    v_ready,
    v_free,
    turn,
    start,
    key_end,
    position,
    softmax_scale,
    none,
    SOME_HIDDEN: gl.constexpr,
    WHICH: gl.constexpr,
    GROUP: gl.constexpr,
    KEYS: gl.constexpr,
    STAGES: gl.constexpr,
    CAUSAL: gl.constexpr,
    scores_in: gl.constexpr,
    values_in: gl.constexpr,
    weights_in: gl.constexpr,
):
    """The softmax of one round of keys, while the values of the round before are added up."""
    stage = turn % STAGES
    before = (turn - 1) % STAGES
    mbarrier.wait(k_ready.index(stage), turn // STAGES & 1)
    coming = warpgroup_mma(queries, k_rows.index(stage).permute((1, 0)), none, use_acc=False, is_async=True)
    mbarrier.wait(v_ready.index(before), (turn - 1) // STAGES & 1)
    adding = warpgroup_mma(operand, v_rows.index(before), values, is_async=True)
    scores = warpgroup_mma_wait(1, (coming,))
    release(k_free.index(stage))
    if SOME_HIDDEN:
        scores = _leave_out(scores, start, key_end, position, WHICH, GROUP, KEYS, CAUSAL, scores_in)
    new_highest = gl.maximum(highest, gl.max(scores, 1) * softmax_scale)
    finite = new_highest
    if SOME_HIDDEN:
        finite = gl.where(new_highest == float("-inf"), 0.0, new_highest)
    weights = gl.exp2(scores * softmax_scale - finite[:, None])
    shrink = gl.exp2(highest - finite)
    total = total * shrink + gl.sum(weights, 1)
    new_operand = gl.convert_layout(weights.to(queries.dtype), weights_in)
    values, _unused = warpgroup_mma_wait(0, (adding, operand))
    release(v_free.index(before))
    values = values * gl.convert_layout(shrink, gl.SliceLayout(1, values_in))[:, None]
    return values, new_operand, new_highest, total


@gluon.jit
def release(barrier):
    gl.thread_barrier()
    mbarrier.arrive(barrier, count=1)


@gluon.jit
def _leave_out(
    scores,
    start,
    key_end,
    position,
    WHICH: gl.constexpr,
    GROUP: gl.constexpr,
    KEYS: gl.constexpr,
    CAUSAL: gl.constexpr,
    scores_in: gl.constexpr,
):
    """Scores of keys that a query does not see become -inf."""
    key = start + gl.arange(0, KEYS, gl.SliceLayout(0, scores_in))
    seen = (key < key_end)[None, :]
    if CAUSAL:
        row = WHICH * GROUP_ROWS + gl.arange(0, GROUP_ROWS, gl.SliceLayout(1, scores_in))
        seen = seen & (key[None, :] <= (position + row // GROUP)[:, None])
    return gl.where(seen, scores, float("-inf"))


@gluon.jit
def _clear(rows, live, DIM: gl.constexpr, KEYS: gl.constexpr):
    """Zeros in the rows from `live` on, which nobody may have written: no weight makes a NaN vanish."""
    loaded_in: gl.constexpr = gl.BlockedLayout([1, 8], [32 // (DIM // 8), DIM // 8], [4, 1], [1, 0])
    key = gl.arange(0, KEYS, gl.SliceLayout(1, loaded_in))
    rows.store(gl.where((key < live)[:, None], rows.load(loaded_in), 0.0))
    fence_async_shared()
    gl.thread_barrier()
