"""Attention over latents on Hopper: groups of warps that load, that score and that sum up, in one kernel.

All query heads share one key of two pieces, a latent and a rotary key, and the latent is the value, too. A program has 64
rows of queries (heads × tokens) and a range of keys. One group of warps multiplies queries by the keys of the next round
while it makes the weights of this one. Two others multiply these weights by one half of the latents each, so that the tensor
cores always have something to do. Whoever is done with its half of a round has the copy engine bring that of a later one.
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

from kvpool.kernels.prefill_gluon import release, rounds

ROWS = gl.constexpr(64)  # of queries × heads in a program
COLUMNS = gl.constexpr(64)  # elements in a row of 128 bytes, which the copy engine writes as tensor cores read them
MESSAGES = gl.constexpr(2)  # rounds of weights that there is room for


@gluon.jit
def latent_kernel(
    q,  # descriptors: boxes of [tokens, heads, COLUMNS]
    k,  # boxes of [1, tokens of a block, 1, COLUMNS]
    out,
    partial_values,
    partial_weights,
    indices,
    items,
    out_token,
    out_head,
    softmax_scale,
    v_factor,
    GROUP: gl.constexpr,  # query heads
    HEADS: gl.constexpr,  # of a program
    TILE_TOKENS: gl.constexpr,  # of partial results
    LATENT: gl.constexpr,
    ROTARY: gl.constexpr,
    PAGE: gl.constexpr,
    BOX: gl.constexpr,  # tokens of a box: a block, or as much of it as a round takes
    KEYS: gl.constexpr,
    STAGES: gl.constexpr,  # rounds of keys that there is room for
    CAUSAL: gl.constexpr,
):
    HALF: gl.constexpr = LATENT // 2
    PANELS: gl.constexpr = HALF // COLUMNS
    TAIL: gl.constexpr = ROTARY // COLUMNS
    BOXES: gl.constexpr = KEYS // BOX
    dtype: gl.constexpr = q.dtype
    flat: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    q_boxes = gl.allocate_shared_memory(dtype, [PANELS] + q.block_type.shape, q.layout)
    q_boxes_2 = gl.allocate_shared_memory(dtype, [PANELS] + q.block_type.shape, q.layout)
    q_tail = gl.allocate_shared_memory(dtype, [TAIL] + q.block_type.shape, q.layout)
    k_boxes = gl.allocate_shared_memory(dtype, [STAGES * PANELS * BOXES] + k.block_type.shape, k.layout)
    k_boxes_2 = gl.allocate_shared_memory(dtype, [STAGES * PANELS * BOXES] + k.block_type.shape, k.layout)
    k_tail = gl.allocate_shared_memory(dtype, [STAGES * TAIL * BOXES] + k.block_type.shape, k.layout)
    weights = gl.allocate_shared_memory(dtype, [MESSAGES, ROWS, KEYS], gl.NVMMASharedLayout(KEYS * 2, 16, 2))
    factors = gl.allocate_shared_memory(gl.float32, [MESSAGES, ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    barriers = _make_barriers(STAGES)

    q_first = q_boxes._reinterpret(dtype, [ROWS, HALF], flat)
    q_second = q_boxes_2._reinterpret(dtype, [ROWS, HALF], flat)
    q_rotary = q_tail._reinterpret(dtype, [ROWS, ROTARY], flat)
    first = k_boxes._reinterpret(dtype, [STAGES, KEYS, HALF], flat)
    second = k_boxes_2._reinterpret(dtype, [STAGES, KEYS, HALF], flat)
    rotary = k_tail._reinterpret(dtype, [STAGES, KEYS, ROTARY], flat)
    HEAD_BLOCKS: gl.constexpr = (GROUP + HEADS - 1) // HEADS
    item = items + gl.program_id(0) // HEAD_BLOCKS * 8
    first_head = gl.program_id(0) % HEAD_BLOCKS * HEADS
    messages = (weights, factors)
    results = (out, partial_values, out_token, out_head)
    if gl.load(item + 1) > 0:
        gl.warp_specialize(
            [
                (
                    _score,
                    (
                        q,
                        (q_boxes, q_boxes_2, q_tail),
                        (q_first, q_second, q_rotary),
                        (first, second, rotary),
                        messages,
                        barriers,
                        item,
                        first_head,
                        partial_weights,
                        softmax_scale,
                        v_factor,
                        GROUP,
                        HEADS,
                        TILE_TOKENS,
                        KEYS,
                        STAGES,
                        CAUSAL,
                    ),
                ),
                (
                    _sum_up,
                    (
                        0,
                        (k, k_boxes, k_tail, indices),
                        first,
                        messages,
                        barriers,
                        item,
                        first_head,
                        results,
                        GROUP,
                        HEADS,
                        TILE_TOKENS,
                        PAGE,
                        BOX,
                        KEYS,
                        STAGES,
                    ),
                ),
                (
                    _sum_up,
                    (
                        1,
                        (k, k_boxes_2, k_tail, indices),
                        second,
                        messages,
                        barriers,
                        item,
                        first_head,
                        results,
                        GROUP,
                        HEADS,
                        TILE_TOKENS,
                        PAGE,
                        BOX,
                        KEYS,
                        STAGES,
                    ),
                ),
            ],
            [4, 4],
            [184, 184],
        )


@gluon.jit
def _make_barriers(STAGES: gl.constexpr):
    """When queries are there, when the halves of keys are; when weights are, and when both groups that sum up left them."""
    q_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    first_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    second_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    w_ready = gl.allocate_shared_memory(gl.int64, [MESSAGES, 1], mbarrier.MBarrierLayout())
    w_free = gl.allocate_shared_memory(gl.int64, [MESSAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_ready, count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(first_ready.index(stage), count=1)
        mbarrier.init(second_ready.index(stage), count=1)
    for message in gl.static_range(MESSAGES):
        mbarrier.init(w_ready.index(message), count=1)
        mbarrier.init(w_free.index(message), count=2)
    fence_async_shared()
    return q_ready, (first_ready, second_ready), w_ready, w_free


@gluon.jit
def _multiply(queries, keys, barriers, turn, none, STAGES: gl.constexpr):
    """The scores of a round of keys, which are on their way."""
    first_ready, second_ready = barriers
    stage = turn % STAGES
    phase = turn // STAGES & 1
    mbarrier.wait(first_ready.index(stage), phase)
    mbarrier.wait(second_ready.index(stage), phase)
    scores = warpgroup_mma(queries[0], keys[0].index(stage).permute((1, 0)), none, use_acc=False, is_async=True)
    scores = warpgroup_mma(queries[1], keys[1].index(stage).permute((1, 0)), scores, is_async=True)
    return warpgroup_mma(queries[2], keys[2].index(stage).permute((1, 0)), scores, is_async=True)


@gluon.jit
def _score(
    q,
    q_boxes,
    queries,
    keys,
    messages,
    barriers,
    item,
    first_head,
    partial_weights,
    softmax_scale,
    v_factor,
    GROUP: gl.constexpr,
    HEADS: gl.constexpr,
    TILE_TOKENS: gl.constexpr,
    KEYS: gl.constexpr,
    STAGES: gl.constexpr,
    CAUSAL: gl.constexpr,
):
    """The weights of one round after another, and what the sums so far shrink by. At last, what the sums are divided by."""
    q_ready, k_ready, w_ready, w_free = barriers
    weights_at, factors_at = messages
    dtype: gl.constexpr = weights_at.dtype
    scores_in: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    rows_in: gl.constexpr = gl.SliceLayout(1, scores_in)
    PANELS: gl.constexpr = queries[0].shape[1] // COLUMNS
    TAIL: gl.constexpr = queries[2].shape[1] // COLUMNS
    token_start = gl.load(item)
    num_tokens = gl.load(item + 1)
    position = gl.load(item + 2)
    key_start = gl.load(item + 5)
    key_end = gl.load(item + 6)
    slot = gl.load(item + 7)
    mbarrier.expect(q_ready, ROWS * (2 * PANELS + TAIL) * COLUMNS * 2)
    for panel in gl.static_range(PANELS):
        place = [token_start, first_head, panel * COLUMNS]
        tma.async_copy_global_to_shared(q, place, q_ready, q_boxes[0].index(panel))
        place = [token_start, first_head, (PANELS + panel) * COLUMNS]
        tma.async_copy_global_to_shared(q, place, q_ready, q_boxes[1].index(panel))
    for panel in gl.static_range(TAIL):
        place = [token_start, first_head, (2 * PANELS + panel) * COLUMNS]
        tma.async_copy_global_to_shared(q, place, q_ready, q_boxes[2].index(panel))

    num_rounds = rounds(key_start, key_end, KEYS)
    all_see = key_end
    if CAUSAL:
        all_see = gl.minimum(position + 1, key_end)
    none = gl.zeros([ROWS, KEYS], gl.float32, scores_in)
    row = gl.arange(0, ROWS, rows_in)
    highest = gl.full([ROWS], float("-inf"), gl.float32, rows_in)
    total = gl.zeros([ROWS], gl.float32, rows_in)

    mbarrier.wait(q_ready, 0)
    scores = warpgroup_mma_wait(0, (_multiply(queries, keys, k_ready, 0, none, STAGES),))
    for turn in range(num_rounds):
        start = key_start + turn * KEYS
        after = gl.minimum(turn + 1, num_rounds - 1)  # behind the last round, its scores are made once more
        coming = _multiply(queries, keys, k_ready, after, none, STAGES)
        if start + KEYS > all_see:
            key = start + gl.arange(0, KEYS, gl.SliceLayout(0, scores_in))
            seen = (key < key_end)[None, :]
            if CAUSAL:
                seen = seen & (key[None, :] <= (position + row // HEADS)[:, None])
            scores = gl.where(seen, scores, float("-inf"))
        new_highest = gl.maximum(highest, gl.max(scores, 1) * softmax_scale)
        finite = gl.where(new_highest == float("-inf"), 0.0, new_highest)
        weights = gl.exp2(scores * softmax_scale - finite[:, None])
        shrink = gl.exp2(highest - finite)
        total = total * shrink + gl.sum(weights, 1)
        highest = new_highest
        message = turn % MESSAGES
        mbarrier.wait(w_free.index(message), (turn // MESSAGES & 1) ^ 1)
        weights_at.index(message).store(weights.to(dtype))
        factors_at.index(message).store(shrink)
        fence_async_shared()
        release(w_ready.index(message))
        scores = warpgroup_mma_wait(0, (coming,))

    message = num_rounds % MESSAGES
    mbarrier.wait(w_free.index(message), (num_rounds // MESSAGES & 1) ^ 1)
    # Nothing was seen: the sums are 0, `highest` weighs them with 0
    total = gl.where(total == 0.0, 1.0, total)
    factors_at.index(message).store(v_factor / total)
    release(w_ready.index(message))
    if slot >= 0:
        token = row // HEADS
        head = first_head + row % HEADS
        partial = (slot.to(gl.int64) * GROUP + head) * TILE_TOKENS + token
        gl.store(partial_weights + partial, highest + gl.log2(total), mask=(token < num_tokens) & (head < GROUP))


@gluon.jit
def _copy(
    WHICH: gl.constexpr,
    given,
    ready,
    item,
    turn,
    HALF: gl.constexpr,
    TAIL: gl.constexpr,
    PAGE: gl.constexpr,
    BOX: gl.constexpr,
    KEYS: gl.constexpr,
    STAGES: gl.constexpr,
):
    """One half of the latents of a round to their place, which is free; with the first half, the rotary keys."""
    k, k_boxes, k_tail, indices = given
    PANELS: gl.constexpr = HALF // COLUMNS
    BOXES: gl.constexpr = KEYS // BOX
    PANELS_WITH_TAIL: gl.constexpr = PANELS + (TAIL if WHICH == 0 else 0)
    key_end = gl.load(item + 6)
    start = gl.load(item + 5) + turn * KEYS
    table = indices + gl.load(item + 3)
    stage = turn % STAGES
    mbarrier.expect(ready.index(stage), KEYS * PANELS_WITH_TAIL * COLUMNS * 2)
    for box in gl.static_range(BOXES):
        listed = start + box * BOX
        block = gl.load(table + listed // PAGE, mask=listed < key_end, other=0)
        for panel in gl.static_range(PANELS):
            place = [block, listed % PAGE, 0, WHICH * HALF + panel * COLUMNS]
            target = k_boxes.index((stage * PANELS + panel) * BOXES + box)
            tma.async_copy_global_to_shared(k, place, ready.index(stage), target)
        if WHICH == 0:
            for panel in gl.static_range(TAIL):
                place = [block, listed % PAGE, 0, 2 * HALF + panel * COLUMNS]
                target = k_tail.index((stage * TAIL + panel) * BOXES + box)
                tma.async_copy_global_to_shared(k, place, ready.index(stage), target)


@gluon.jit
def _sum_up(
    WHICH: gl.constexpr,
    given,
    keys,
    messages,
    barriers,
    item,
    first_head,
    results,
    GROUP: gl.constexpr,
    HEADS: gl.constexpr,
    TILE_TOKENS: gl.constexpr,
    PAGE: gl.constexpr,
    BOX: gl.constexpr,
    KEYS: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Brings one half of the latents, and sums them up."""
    _queries, k_ready, w_ready, w_free = barriers
    ready = k_ready[WHICH]
    weights_at, factors_at = messages
    out, partial_values, out_token, out_head = results
    HALF: gl.constexpr = keys.shape[2]
    TAIL: gl.constexpr = given[2].shape[0] * BOX // (STAGES * KEYS)
    values_in: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    rows_in: gl.constexpr = gl.SliceLayout(1, values_in)
    key_start = gl.load(item + 5)
    key_end = gl.load(item + 6)
    num_rounds = rounds(key_start, key_end, KEYS)
    for turn in range(gl.minimum(num_rounds, STAGES)):
        _copy(WHICH, given, ready, item, turn, HALF, TAIL, PAGE, BOX, KEYS, STAGES)
    values = gl.zeros([ROWS, HALF], gl.float32, values_in)
    for turn in range(num_rounds):
        message = turn % MESSAGES
        stage = turn % STAGES
        mbarrier.wait(w_ready.index(message), turn // MESSAGES & 1)
        mbarrier.wait(ready.index(stage), turn // STAGES & 1)
        live = key_end - key_start - turn * KEYS
        if live < KEYS:
            _clear(keys.index(stage), live, HALF, KEYS)
        shrink = factors_at.index(message).load(rows_in)
        values = values * shrink[:, None]
        values = warpgroup_mma(weights_at.index(message), keys.index(stage), values)
        release(w_free.index(message))
        if turn + STAGES < num_rounds:
            _copy(WHICH, given, ready, item, turn + STAGES, HALF, TAIL, PAGE, BOX, KEYS, STAGES)

    message = num_rounds % MESSAGES
    mbarrier.wait(w_ready.index(message), num_rounds // MESSAGES & 1)
    values = values * factors_at.index(message).load(rows_in)[:, None]
    num_tokens = gl.load(item + 1)
    slot = gl.load(item + 7)
    row = gl.arange(0, ROWS, rows_in)
    token = row // HEADS
    head = first_head + row % HEADS
    used = (token < num_tokens) & (head < GROUP)
    column = WHICH * HALF + gl.arange(0, HALF, gl.SliceLayout(0, values_in))
    if slot < 0:
        place = (gl.load(item) + token).to(gl.int64) * out_token + head * out_head
        gl.store(out + place[:, None] + column[None, :], values.to(out.dtype.element_ty), mask=used[:, None])
    else:
        place = (slot.to(gl.int64) * GROUP + head) * TILE_TOKENS + token
        gl.store(partial_values + place[:, None] * (2 * HALF) + column[None, :], values, mask=used[:, None])


@gluon.jit
def _clear(rows, live, DIM: gl.constexpr, KEYS: gl.constexpr):
    """Zeros in the rows from `live` on, which nobody may have written: no weight makes a NaN vanish."""
    loaded_in: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    key = gl.arange(0, KEYS, gl.SliceLayout(1, loaded_in))
    rows.store(gl.where((key < live)[:, None], rows.load(loaded_in), 0.0))
    fence_async_shared()
    gl.thread_barrier()
