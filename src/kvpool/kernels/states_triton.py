"""The functions of `kvpool.kernels.states` as Triton kernels. The signatures are those of their references.

A program owns its part of a state: it reads it from one slot and writes it to another, or to the same one. No thread
reads what another one writes.
"""

# mypy: disable-error-code="import-untyped,no-untyped-def,untyped-decorator"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvpool.kernels.layout import PackedStates, Selection, SlotStates

_CHANNELS = 128  # of a convolution that one program computes: one for each thread, so that values stay where they are
_TOKENS = 32  # of a sequence, in 64 channels
# Values of a head that one program of the delta rule computes, and its warps, measured on an H200 with heads of 128: many
# heads move 3.7 TB/s in programs of 64 values and 3.0 in those of 16, which in turn take 2.9 us for 32 heads instead of 3.8.
_MANY_HEADS = 256
_FEW, _MANY = (16, 1), (64, 4)
_STATE_ELEMENTS = (
    1024  # that one program of a state space model holds, in one warp: 3.7 TB/s; 3.3 with four times as much
)


@triton.jit
def _convolve_one_kernel(
    x,
    x_row,
    x_channel,
    out,
    stored,
    slot_stride,
    sources,
    targets,
    weight,
    bias,
    num_channels,
    INPUTS: tl.constexpr,
    TAPS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACTIVATE: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    inside = channel < num_channels
    source = stored + tl.load(sources + row) * slot_stride + channel * INPUTS
    target = stored + tl.load(targets + row) * slot_stride + channel * INPUTS
    newest = tl.load(x + row * x_row + channel * x_channel, mask=inside, other=0.0).to(stored.dtype.element_ty)
    total = newest.to(tl.float32) * tl.load(weight + channel * TAPS + TAPS - 1, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        total += tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)
    for i in tl.static_range(INPUTS):
        # Input i was followed by INPUTS - i others, the newest one included.
        if (i > 0) | (TAPS > INPUTS):
            earlier = tl.load(source + i, mask=inside, other=0.0)
            if TAPS - 1 - INPUTS + i >= 0:
                tap = tl.load(weight + channel * TAPS + (TAPS - 1 - INPUTS + i), mask=inside, other=0.0)
                total += earlier.to(tl.float32) * tap.to(tl.float32)
            if i > 0:
                tl.store(target + (i - 1), earlier, mask=inside)
    tl.store(target + (INPUTS - 1), newest, mask=inside)
    if ACTIVATE:
        total = total * tl.sigmoid(total)
    tl.store(out + row * num_channels + channel, total.to(out.dtype.element_ty), mask=inside)


def convolve_one_triton(x: Tensor, states: SlotStates, weight: Tensor, bias: Tensor | None, activate: bool) -> Tensor:
    """A causal convolution of each channel, for one more token of every sequence. May be captured in a graph."""
    rows, channels = x.shape
    out = torch.empty(rows, channels, dtype=x.dtype, device=x.device)
    weight = weight.contiguous()
    grid = (rows, triton.cdiv(channels, _CHANNELS))
    _convolve_one_kernel[grid](
        x,
        x.stride(0),
        x.stride(1),
        out,
        states.stored,
        states.stored.stride(0),
        states.sources,
        states.targets,
        weight,
        weight if bias is None else bias,
        channels,
        INPUTS=states.stored.shape[2],
        TAPS=weight.shape[1],
        HAS_BIAS=bias is not None,
        ACTIVATE=activate,
        CHANNELS=_CHANNELS,
        num_warps=4,
    )
    return out


@triton.jit
def _convolve_kernel(
    x,
    x_token,
    x_channel,
    out,
    starts,
    stored,
    slot_stride,
    sources,
    weight,
    bias,
    num_channels,
    INPUTS: tl.constexpr,
    TAPS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACTIVATE: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    row = tl.program_id(2)
    start = tl.load(starts + row).to(tl.int64)
    num_tokens = tl.load(starts + row + 1) - start
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    if tl.program_id(0) * TOKENS < num_tokens:
        channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
        is_channel = channel < num_channels
        total = tl.zeros((TOKENS, CHANNELS), tl.float32)
        if HAS_BIAS:
            total += tl.load(bias + channel, mask=is_channel, other=0.0).to(tl.float32)[None, :]
        slot = tl.load(sources + row).to(tl.int64)
        for i in tl.static_range(TAPS):
            tap = tl.load(weight + channel * TAPS + i, mask=is_channel, other=0.0).to(tl.float32)
            at = token - (TAPS - 1 - i)  # below 0: an input of the state
            inside = ((at >= 0) & (token < num_tokens))[:, None] & is_channel[None, :]
            places = x + (start + at)[:, None] * x_token + channel[None, :] * x_channel
            inputs = tl.load(places, mask=inside, other=0.0).to(stored.dtype.element_ty).to(tl.float32)
            if tl.program_id(0) == 0:
                kept = ((at < 0) & (slot >= 0))[:, None] & is_channel[None, :]
                places = stored + slot * slot_stride + (INPUTS + at)[:, None] + channel[None, :] * INPUTS
                inputs += tl.load(places, mask=kept, other=0.0).to(tl.float32)
            total += inputs * tap[None, :]
        if ACTIVATE:
            total = total * tl.sigmoid(total)
        places = out + (start + token)[:, None] * num_channels + channel[None, :]
        tl.store(places, total.to(out.dtype.element_ty), mask=(token < num_tokens)[:, None] & is_channel[None, :])


@triton.jit
def _keep_inputs_kernel(
    x,
    x_token,
    x_channel,
    starts,
    stored,
    slot_stride,
    sources,
    targets,
    num_channels,
    INPUTS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    row = tl.program_id(1)
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    is_channel = channel < num_channels
    start = tl.load(starts + row).to(tl.int64)
    num_tokens = tl.load(starts + row + 1) - start
    slot = tl.load(sources + row).to(tl.int64)
    source = stored + slot * slot_stride + channel * INPUTS
    target = stored + tl.load(targets + row).to(tl.int64) * slot_stride + channel * INPUTS
    for i in tl.static_range(INPUTS):  # each place is read before it is written: places that are read lie behind it
        at = num_tokens + i - INPUTS  # below 0: an input of the state
        earlier = tl.load(source + num_tokens + i, mask=is_channel & (at < 0) & (slot >= 0), other=0.0)
        places = x + (start + at) * x_token + channel * x_channel
        newer = tl.load(places, mask=is_channel & (at >= 0), other=0.0)
        tl.store(target + i, earlier + newer.to(stored.dtype.element_ty), mask=is_channel)


def convolve_triton(x: Tensor, states: PackedStates, weight: Tensor, bias: Tensor | None, activate: bool) -> Tensor:
    """A causal convolution of each channel, for the next tokens of every sequence."""
    channels, rows = x.shape[1], len(states.lengths)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    weight = weight.contiguous()
    inputs = states.stored.shape[2]
    _convolve_kernel[(triton.cdiv(max(states.lengths), _TOKENS), triton.cdiv(channels, 64), rows)](
        x,
        *x.stride(),
        out,
        states.starts,
        states.stored,
        states.stored.stride(0),
        states.sources,
        weight,
        weight if bias is None else bias,
        channels,
        INPUTS=inputs,
        TAPS=weight.shape[1],
        HAS_BIAS=bias is not None,
        ACTIVATE=activate,
        TOKENS=_TOKENS,
        CHANNELS=64,
        num_warps=4,
    )
    # In a launch of its own: programs of the first one still read the states.
    _keep_inputs_kernel[(triton.cdiv(channels, _CHANNELS), rows)](
        x,
        *x.stride(),
        states.starts,
        states.stored,
        states.stored.stride(0),
        states.sources,
        states.targets,
        channels,
        INPUTS=inputs,
        CHANNELS=_CHANNELS,
        num_warps=4,
    )
    return out


@triton.jit
def _delta_rule_one_kernel(
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
    scale,
    num_heads,
    KEYS: tl.constexpr,
    ALL_KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    TILE: tl.constexpr,
    DECAY_BY_KEY: tl.constexpr,
    NORMALIZE: tl.constexpr,
):
    value = tl.program_id(0) * TILE + tl.arange(0, TILE)
    head = tl.program_id(1).to(tl.int64)
    row = tl.program_id(2).to(tl.int64)
    key = tl.arange(0, ALL_KEYS)
    is_key = key < KEYS
    is_value = value < VALUES
    inside = is_key[:, None] & is_value[None, :]
    place = head * (KEYS * VALUES) + key[:, None] * VALUES + value[None, :]
    state = tl.load(stored + tl.load(sources + row) * slot_stride + place, mask=inside, other=0.0).to(tl.float32)
    queries = tl.load(q + row * q_row + head * q_head + key, mask=is_key, other=0.0).to(tl.float32)
    keys = tl.load(k + row * k_row + head * k_head + key, mask=is_key, other=0.0).to(tl.float32)
    values = tl.load(v + row * v_row + head * v_head + value, mask=is_value, other=0.0).to(tl.float32)
    step = tl.load(beta + row * beta_row + head * beta_head).to(tl.float32)
    if NORMALIZE:
        queries = queries * tl.rsqrt(tl.sum(queries * queries) + 1e-6)
        keys = keys * tl.rsqrt(tl.sum(keys * keys) + 1e-6)
    queries = queries * scale
    if DECAY_BY_KEY:
        left = tl.load(decay + row * decay_row + head * decay_head + key, mask=is_key, other=0.0).to(tl.float32)
        state = state * tl.exp(left)[:, None]
    else:
        state = state * tl.exp(tl.load(decay + row * decay_row + head * decay_head).to(tl.float32))
    # The state is read by queries before the keys change it, so that both sums need not wait for one another.
    known = tl.sum(state * keys[:, None], axis=0)
    found = tl.sum(state * queries[:, None], axis=0)
    delta = (values - known) * step
    state = state + keys[:, None] * delta[None, :]
    found = found + tl.sum(queries * keys) * delta
    target = stored + tl.load(targets + row) * slot_stride
    tl.store(target + place, state.to(stored.dtype.element_ty), mask=inside)
    tl.store(out + (row * num_heads + head) * VALUES + value, found.to(out.dtype.element_ty), mask=is_value)


def delta_rule_one_triton(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, states: SlotStates, normalize: bool
) -> Tensor:
    """The gated delta rule for one more token of every sequence. May be captured in a graph."""
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    by_key = decay.dim() == 3
    decay = decay.contiguous() if by_key else decay
    rows, heads, keys = q.shape
    values = v.shape[2]
    out = torch.empty(rows, heads, values, dtype=v.dtype, device=v.device)
    tile, warps = _MANY if rows * heads >= _MANY_HEADS else _FEW
    tile = min(tile, triton.next_power_of_2(values))
    _delta_rule_one_kernel[(triton.cdiv(values, tile), heads, rows)](
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
        keys**-0.5,
        heads,
        KEYS=keys,
        ALL_KEYS=triton.next_power_of_2(keys),
        VALUES=values,
        TILE=tile,
        DECAY_BY_KEY=by_key,
        NORMALIZE=normalize,
        num_warps=warps,
    )
    return out


@triton.jit
def _softplus(x):
    small = tl.exp(-tl.abs(x))
    rounded = 1.0 + small
    # log(1 + small), exact also where adding 1 rounds most of it away
    log = tl.where(rounded == 1.0, small, tl.log(rounded) * (small / (rounded - 1.0)))
    return tl.maximum(x, 0.0) + log


@triton.jit
def _select_one_kernel(
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
    state = tl.load(stored + tl.load(sources + row) * slot_stride + place, mask=inside, other=0.0).to(tl.float32)
    values = tl.load(x + row * x_row + head * x_head + channel * x_channel, mask=is_channel, other=0.0).to(tl.float32)
    if TIED:  # all channels of a head have the same time step and decay
        step = tl.load(dt + row * dt_row + head * dt_head).to(tl.float32)
        if HAS_BIAS:
            step += tl.load(dt_bias + head * bias_head).to(tl.float32)
        if SOFTPLUS:
            step = _softplus(step)
        left = tl.exp(step * tl.load(a + head * a_head).to(tl.float32))
        state = state * left
        weighted = values * step
    else:
        steps = tl.load(dt + row * dt_row + head * dt_head + channel * dt_channel, mask=is_channel, other=0.0)
        steps = steps.to(tl.float32)
        if HAS_BIAS:
            bias = tl.load(dt_bias + head * bias_head + channel * bias_channel, mask=is_channel, other=0.0)
            steps += bias.to(tl.float32)
        if SOFTPLUS:
            steps = _softplus(steps)
        rates = a + head * a_head + channel[:, None] * a_channel + at[None, :] * a_state
        state = state * tl.exp(steps[:, None] * tl.load(rates, mask=inside, other=0.0).to(tl.float32))
        weighted = values * steps
    inputs = tl.load(b + row * b_row + group * b_group + at * b_state, mask=is_state, other=0.0).to(tl.float32)
    outputs = tl.load(c + row * c_row + group * c_group + at * c_state, mask=is_state, other=0.0).to(tl.float32)
    state = state + weighted[:, None] * inputs[None, :]
    target = stored + tl.load(targets + row) * slot_stride
    tl.store(target + place, state.to(stored.dtype.element_ty), mask=inside)
    found = tl.sum(state * outputs[None, :], axis=1)
    if HAS_D:
        passing = tl.load(d + head * d_head + channel * d_channel, mask=is_channel, other=0.0)
        found += values * passing.to(tl.float32)
    if HAS_GATE:
        gates = gate + row * gate_row + head * gate_head + channel * gate_channel
        opened = tl.load(gates, mask=is_channel, other=0.0).to(tl.float32)
        found = found * opened * tl.sigmoid(opened)
    tl.store(out + (row * num_heads + head) * CHANNELS + channel, found.to(out.dtype.element_ty), mask=is_channel)


def select_one_triton(x: Tensor, selection: Selection, states: SlotStates, gate: Tensor | None) -> Tensor:
    """A state space model for one more token of every sequence. May be captured in a graph."""
    rows, heads, channels = x.shape
    size = states.stored.shape[3]
    out = torch.empty(rows, heads, channels, dtype=x.dtype, device=x.device)
    dt, a, b, c = selection.dt, selection.a, selection.b, selection.c
    bias, d, z = (a if y is None else y for y in (selection.dt_bias, selection.d, gate))
    tile_size = triton.next_power_of_2(size)
    tile = min(triton.next_power_of_2(channels), max(1, _STATE_ELEMENTS // tile_size))
    tied = a.stride(1) == a.stride(2) == dt.stride(2) == 0 and (selection.dt_bias is None or bias.stride(1) == 0)
    _select_one_kernel[(triton.cdiv(channels, tile), heads, rows)](
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
        num_warps=1,
    )
    return out
