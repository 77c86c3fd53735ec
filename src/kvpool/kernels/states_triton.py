"""The functions of `kvpool.kernels.states` as Triton kernels. The signatures are those of their references.

A program owns its part of a state: it reads it from one slot and writes it to another, or to the same one. No thread
reads what another one writes. With `STEPS` it computes the tokens `starts[row]..starts[row + 1]` of its sequence one after
another and leaves the state behind those before `ends[row]`; otherwise the row is the only token.
"""

# mypy: disable-error-code="import-untyped,no-untyped-def,untyped-decorator"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvpool.kernels.layout import Selection, SlotStates, SteppedStates, dense_rows

# Values of a head that one program of the delta rule computes, and its warps, measured on an H200 with heads of 128: many
# heads move 3.7 TB/s in programs of 64 values and 3.0 in those of 16, which in turn take 2.9 us for 32 heads instead of 3.8.
_MANY_HEADS = 256
_FEW, _MANY = (16, 1), (64, 4)
_STATE_ELEMENTS = (
    1024  # that one program of a state space model holds, in one warp: 3.7 TB/s; 3.3 with four times as much
)


@triton.jit
def _delta_rule_kernel(
    q,
    q_row,
    q_head,
    k,
    k_row,
    k_head,
    v,
    v_row,
    v_head,
    decay,
    decay_row,
    decay_head,
    beta,
    beta_row,
    beta_head,
    out,
    stored,
    slot_stride,
    sources,
    targets,
    starts,
    ends,
    scale,
    num_heads,
    KEYS: tl.constexpr,
    ALL_KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    TILE: tl.constexpr,
    DECAY_BY_KEY: tl.constexpr,
    NORMALIZE: tl.constexpr,
    STEPS: tl.constexpr,
):
    value = tl.program_id(0) * TILE + tl.arange(0, TILE)
    head = tl.program_id(1).to(tl.int64)
    row = tl.program_id(2).to(tl.int64)
    key = tl.arange(0, ALL_KEYS)
    is_key = key < KEYS
    is_value = value < VALUES
    inside = is_key[:, None] & is_value[None, :]
    place = head * (KEYS * VALUES) + key[:, None] * VALUES + value[None, :]
    source = tl.load(sources + row)
    target = stored + tl.load(targets + row) * slot_stride
    first, num_tokens, num_kept = row, 1, 1
    if STEPS:
        first = tl.load(starts + row)
        num_tokens, num_kept = tl.load(starts + row + 1) - first, tl.load(ends + row) - first
        inside = inside & (source >= 0) & (num_tokens > 0)
    state = tl.load(stored + source * slot_stride + place, mask=inside, other=0.0).to(tl.float32)
    if STEPS:
        inside = is_key[:, None] & is_value[None, :]
    for i in range(0, num_tokens):
        token = first + i
        queries = tl.load(q + token * q_row + head * q_head + key, mask=is_key, other=0.0).to(tl.float32)
        keys = tl.load(k + token * k_row + head * k_head + key, mask=is_key, other=0.0).to(tl.float32)
        values = tl.load(v + token * v_row + head * v_head + value, mask=is_value, other=0.0).to(tl.float32)
        step = tl.load(beta + token * beta_row + head * beta_head).to(tl.float32)
        if NORMALIZE:
            queries = queries * tl.rsqrt(tl.sum(queries * queries) + 1e-6)
            keys = keys * tl.rsqrt(tl.sum(keys * keys) + 1e-6)
        queries = queries * scale
        if DECAY_BY_KEY:
            left = tl.load(decay + token * decay_row + head * decay_head + key, mask=is_key, other=0.0).to(tl.float32)
            state = state * tl.exp(left)[:, None]
        else:
            state = state * tl.exp(tl.load(decay + token * decay_row + head * decay_head).to(tl.float32))
        # The state is read by queries before the keys change it, so that both sums need not wait for one another.
        known = tl.sum(state * keys[:, None], axis=0)
        found = tl.sum(state * queries[:, None], axis=0)
        delta = (values - known) * step
        state = state + keys[:, None] * delta[None, :]
        found = found + tl.sum(queries * keys) * delta
        if i + 1 == num_kept:
            tl.store(target + place, state.to(stored.dtype.element_ty), mask=inside)
        tl.store(out + (token * num_heads + head) * VALUES + value, found.to(out.dtype.element_ty), mask=is_value)


def delta_rule_one_triton(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, states: SlotStates, normalize: bool
) -> Tensor:
    """The gated delta rule for the next token of every sequence. May be captured in a graph."""
    return _delta_rule(q, k, v, decay, beta, states, normalize)


def delta_rule_steps_triton(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, states: SteppedStates, normalize: bool
) -> Tensor:
    """The same for some tokens of every sequence, one after another. Tokens of no sequence give zeros."""
    return _delta_rule(q, k, v, decay, beta, states, normalize)


def _delta_rule(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, states: SlotStates, normalize: bool
) -> Tensor:
    q, k, v = (dense_rows(x) for x in (q, k, v))
    by_key = decay.dim() == 3
    decay = decay.contiguous() if by_key else decay
    heads, keys = q.shape[1:]
    rows, values = len(states.sources), v.shape[2]
    out, starts, ends = _steps(states, v.shape, v)
    tile, warps = _MANY if rows * heads >= _MANY_HEADS else _FEW
    tile = min(tile, triton.next_power_of_2(values))
    _delta_rule_kernel[(triton.cdiv(values, tile), heads, rows)](
        q,
        q.stride(0),
        q.stride(1),
        k,
        k.stride(0),
        k.stride(1),
        v,
        v.stride(0),
        v.stride(1),
        decay,
        decay.stride(0),
        decay.stride(1),
        beta,
        beta.stride(0),
        beta.stride(1),
        out,
        states.stored,
        states.stored.stride(0),
        states.sources,
        states.targets,
        starts,
        ends,
        keys**-0.5,
        heads,
        KEYS=keys,
        ALL_KEYS=triton.next_power_of_2(keys),
        VALUES=values,
        TILE=tile,
        DECAY_BY_KEY=by_key,
        NORMALIZE=normalize,
        STEPS=isinstance(states, SteppedStates),
        num_warps=warps,
    )
    return out


def _steps(states: SlotStates, shape: torch.Size, like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A tensor for the results, and the borders of sequences, for which anything will do if each has one token."""
    if isinstance(states, SteppedStates):
        return like.new_zeros(shape), states.starts, states.ends
    return like.new_empty(shape), states.sources, states.sources


@triton.jit
def _softplus(x):
    small = tl.exp(-tl.abs(x))
    rounded = 1.0 + small
    # log(1 + small), exact also where adding 1 rounds most of it away
    log = tl.where(rounded == 1.0, small, tl.log(rounded) * (small / (rounded - 1.0)))
    return tl.maximum(x, 0.0) + log


@triton.jit
def _select_kernel(
    x,
    x_row,
    x_head,
    x_channel,
    gate,
    gate_row,
    gate_head,
    gate_channel,
    dt,
    dt_row,
    dt_head,
    dt_channel,
    dt_bias,
    bias_head,
    bias_channel,
    a,
    a_head,
    a_channel,
    a_state,
    b,
    b_row,
    b_group,
    b_state,
    c,
    c_row,
    c_group,
    c_state,
    d,
    d_head,
    d_channel,
    out,
    stored,
    slot_stride,
    head_stride,
    sources,
    targets,
    starts,
    ends,
    num_heads,
    group_size,
    SIZE: tl.constexpr,
    CHANNELS: tl.constexpr,
    TILE: tl.constexpr,
    TILE_SIZE: tl.constexpr,
    TIED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_D: tl.constexpr,
    HAS_GATE: tl.constexpr,
    SOFTPLUS: tl.constexpr,
    STEPS: tl.constexpr,
):
    channel = tl.program_id(0) * TILE + tl.arange(0, TILE)
    head = tl.program_id(1).to(tl.int64)
    row = tl.program_id(2).to(tl.int64)
    group = head // group_size
    at = tl.arange(0, TILE_SIZE)
    is_channel = channel < CHANNELS
    is_state = at < SIZE
    inside = is_channel[:, None] & is_state[None, :]
    place = head * head_stride + channel[:, None] * SIZE + at[None, :]
    source = tl.load(sources + row)
    target = stored + tl.load(targets + row) * slot_stride
    first, num_tokens, num_kept = row, 1, 1
    if STEPS:
        first = tl.load(starts + row)
        num_tokens, num_kept = tl.load(starts + row + 1) - first, tl.load(ends + row) - first
        inside = inside & (source >= 0) & (num_tokens > 0)
    state = tl.load(stored + source * slot_stride + place, mask=inside, other=0.0).to(tl.float32)
    if STEPS:
        inside = is_channel[:, None] & is_state[None, :]
    for i in range(0, num_tokens):
        token = first + i
        values = tl.load(x + token * x_row + head * x_head + channel * x_channel, mask=is_channel, other=0.0)
        values = values.to(tl.float32)
        if TIED:  # all channels of a head have the same time step and decay
            step = tl.load(dt + token * dt_row + head * dt_head).to(tl.float32)
            if HAS_BIAS:
                step += tl.load(dt_bias + head * bias_head).to(tl.float32)
            if SOFTPLUS:
                step = _softplus(step)
            left = tl.exp(step * tl.load(a + head * a_head).to(tl.float32))
            state = state * left
            weighted = values * step
        else:
            steps = tl.load(dt + token * dt_row + head * dt_head + channel * dt_channel, mask=is_channel, other=0.0)
            steps = steps.to(tl.float32)
            if HAS_BIAS:
                bias = tl.load(dt_bias + head * bias_head + channel * bias_channel, mask=is_channel, other=0.0)
                steps += bias.to(tl.float32)
            if SOFTPLUS:
                steps = _softplus(steps)
            rates = a + head * a_head + channel[:, None] * a_channel + at[None, :] * a_state
            state = state * tl.exp(steps[:, None] * tl.load(rates, mask=inside, other=0.0).to(tl.float32))
            weighted = values * steps
        inputs = tl.load(b + token * b_row + group * b_group + at * b_state, mask=is_state, other=0.0).to(tl.float32)
        outputs = tl.load(c + token * c_row + group * c_group + at * c_state, mask=is_state, other=0.0).to(tl.float32)
        state = state + weighted[:, None] * inputs[None, :]
        if i + 1 == num_kept:
            tl.store(target + place, state.to(stored.dtype.element_ty), mask=inside)
        found = tl.sum(state * outputs[None, :], axis=1)
        if HAS_D:
            passing = tl.load(d + head * d_head + channel * d_channel, mask=is_channel, other=0.0)
            found += values * passing.to(tl.float32)
        if HAS_GATE:
            gates = gate + token * gate_row + head * gate_head + channel * gate_channel
            opened = tl.load(gates, mask=is_channel, other=0.0).to(tl.float32)
            found = found * opened * tl.sigmoid(opened)
        place_out = out + (token * num_heads + head) * CHANNELS + channel
        tl.store(place_out, found.to(out.dtype.element_ty), mask=is_channel)


def select_one_triton(x: Tensor, selection: Selection, states: SlotStates, gate: Tensor | None) -> Tensor:
    """A state space model for the next token of every sequence. May be captured in a graph."""
    return _select(x, selection, states, gate)


def select_steps_triton(x: Tensor, selection: Selection, states: SteppedStates) -> Tensor:
    """The same for some tokens of every sequence, one after another. Tokens of no sequence give zeros."""
    return _select(x, selection, states, None)


def _select(x: Tensor, selection: Selection, states: SlotStates, gate: Tensor | None) -> Tensor:
    heads, channels = x.shape[1:]
    rows, size = len(states.sources), states.stored.shape[3]
    out, starts, ends = _steps(states, x.shape, x)
    dt, a, b, c = selection.dt, selection.a, selection.b, selection.c
    bias, d, z = (a if y is None else y for y in (selection.dt_bias, selection.d, gate))
    tile_size = triton.next_power_of_2(size)
    tile = min(triton.next_power_of_2(channels), max(1, _STATE_ELEMENTS // tile_size))
    tied = a.stride(1) == a.stride(2) == dt.stride(2) == 0 and (selection.dt_bias is None or bias.stride(1) == 0)
    _select_kernel[(triton.cdiv(channels, tile), heads, rows)](
        x,
        *x.stride(),
        z,
        *z.stride(),
        dt,
        *dt.stride(),
        bias,
        *bias.stride()[:2],
        a,
        *a.stride(),
        b,
        *b.stride(),
        c,
        *c.stride(),
        d,
        *d.stride()[:2],
        out,
        states.stored,
        states.stored.stride(0),
        states.stored.stride(1),
        states.sources,
        states.targets,
        starts,
        ends,
        heads,
        heads // b.shape[1],
        SIZE=size,
        CHANNELS=channels,
        TILE=tile,
        TILE_SIZE=tile_size,
        TIED=tied,
        HAS_BIAS=selection.dt_bias is not None,
        HAS_D=selection.d is not None,
        HAS_GATE=gate is not None,
        SOFTPLUS=selection.softplus,
        STEPS=isinstance(states, SteppedStates),
        num_warps=1,
    )
    return out
