"""Convolutions of `kvpool.kernels.states` as Triton kernels. The signatures are those of their references.

A program owns its channels of a state: it reads them from one slot and writes them to another, or to the same one.
"""

# mypy: disable-error-code="import-untyped,no-untyped-def,untyped-decorator"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvpool.kernels.layout import PackedStates, SlotStates, SteppedStates

_CHANNELS = 128  # that one program computes: one for each thread, so that values stay where they are
_TOKENS = 32  # of a sequence, in 64 channels


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
    ends,
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
    start = tl.load(starts + row).to(tl.int64)
    num_tokens = tl.load(ends + row) - start
    is_channel = (channel < num_channels) & (num_tokens > 0)
    slot = tl.load(sources + row).to(tl.int64)
    source = stored + slot * slot_stride + channel * INPUTS
    target = stored + tl.load(targets + row).to(tl.int64) * slot_stride + channel * INPUTS
    for i in tl.static_range(INPUTS):  # each place is read before it is written: places that are read lie behind it
        at = num_tokens + i - INPUTS  # below 0: an input of the state
        earlier = tl.load(source + num_tokens + i, mask=is_channel & (at < 0) & (slot >= 0), other=0.0)
        places = x + (start + at) * x_token + channel * x_channel
        newer = tl.load(places, mask=is_channel & (at >= 0), other=0.0)
        tl.store(target + i, earlier + newer.to(stored.dtype.element_ty), mask=is_channel)


def convolve_triton(
    x: Tensor, states: PackedStates | SteppedStates, weight: Tensor, bias: Tensor | None, activate: bool
) -> Tensor:
    """A causal convolution of each channel, for the next tokens of every sequence. Tokens of no sequence give zeros."""
    channels, rows = x.shape[1], len(states.sources)
    out = x.new_empty(x.shape) if isinstance(states, PackedStates) else x.new_zeros(x.shape)
    weight = weight.contiguous()
    inputs = states.stored.shape[2]
    longest = max(states.lengths) if isinstance(states, PackedStates) else len(x)
    _convolve_kernel[(triton.cdiv(longest, _TOKENS), triton.cdiv(channels, 64), rows)](
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
        states.ends,
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
