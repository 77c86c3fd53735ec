"""States in slots, read and written in place: convolutions, the gated delta rule, and the update of a state space model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad, silu, softplus

from kvpool.kernels.layout import PackedStates, Selection, SlotStates, SteppedStates, current

_CHUNK = 128  # tokens that a matrix product takes in one


def convolve_one(x: Tensor, states: SlotStates, weight: Tensor, bias: Tensor | None, activate: bool) -> Tensor:
    """A causal convolution of each channel, for one more token of every sequence.

    `x` and the result are [sequence, channel], `weight` is [channel, tap], `bias` [channel]. A state is [channel, input], the
    newest input last: it moves on by one. `activate` applies SiLU.
    """
    if x.is_cuda:
        from kvpool.kernels.convolution_triton import convolve_one_triton

        with current(x.device):
            return convolve_one_triton(x, states, weight, bias, activate)
    return convolve_one_reference(x, states, weight, bias, activate)


def convolve_one_reference(
    x: Tensor, states: SlotStates, weight: Tensor, bias: Tensor | None, activate: bool
) -> Tensor:
    """What `convolve_one` does, with torch."""
    inputs = torch.cat([states.gather(), x.to(states.dtype).unsqueeze(-1)], dim=-1)
    states.scatter(inputs[..., 1:])
    out = (inputs[..., -weight.shape[1] :].float() * weight.float()).sum(-1)
    out = out if bias is None else out + bias.float()
    return (silu(out) if activate else out).to(x.dtype)


def convolve(
    x: Tensor, states: PackedStates | SteppedStates, weight: Tensor, bias: Tensor | None, activate: bool
) -> Tensor:
    """The same for the next tokens of every sequence; `x` and the result are [token, channel]."""
    if x.is_cuda:
        from kvpool.kernels.convolution_triton import convolve_triton

        with current(x.device):
            return convolve_triton(x, states, weight, bias, activate)
    return convolve_reference(x, states, weight, bias, activate)


def convolve_reference(
    x: Tensor, states: PackedStates | SteppedStates, weight: Tensor, bias: Tensor | None, activate: bool
) -> Tensor:
    """What `convolve` does, with torch, one sequence after another."""
    if isinstance(states, SteppedStates):
        return _step_by_step(
            x, states, states.dtype, lambda token, copy: convolve_one_reference(x[token], copy, weight, bias, activate)
        )
    taps, outputs, kept = weight.float().T, [], []
    for before, tokens in zip(states.gather(), torch.split(x, list(states.lengths)), strict=True):
        inputs = torch.cat([before.T, tokens.to(states.dtype)])  # [input, channel]
        kept.append(inputs[-states.shape[2] :].T)
        seen = pad(inputs, (0, 0, 1, 0)).float()[-(len(tokens) + len(taps) - 1) :]
        out = torch.zeros(tokens.shape, dtype=torch.float32, device=x.device)
        for i, tap in enumerate(taps):
            out.addcmul_(seen[i : i + len(tokens)], tap)
        outputs.append(out)
    states.scatter(torch.stack(kept))
    out = torch.cat(outputs) if bias is None else torch.cat(outputs) + bias.float()
    return (silu(out) if activate else out).to(x.dtype)


def delta_rule_one(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, states: SlotStates, normalize: bool
) -> Tensor:
    """The gated delta rule for one more token of every sequence.

    `q`, `k` are [sequence, head, key], `v` and the result [sequence, head, value], `beta` [sequence, head], a state
    [head, key, value]. `decay` is the logarithm of what is left of the state, for each head or for each of its keys:
    [sequence, head] or [sequence, head, key]. `normalize` gives queries and keys the length 1; queries are divided by the
    root of their size.
    """
    if q.is_cuda:
        from kvpool.kernels.states_triton import delta_rule_one_triton

        with current(q.device):
            return delta_rule_one_triton(q, k, v, decay, beta, states, normalize)
    return delta_rule_one_reference(q, k, v, decay, beta, states, normalize)


def delta_rule_one_reference(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, states: SlotStates, normalize: bool
) -> Tensor:
    """What `delta_rule_one` does, with torch."""
    queries, keys = q.float(), k.float()
    if normalize:
        queries, keys = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (queries, keys))
    decay = decay.float().exp().reshape(*decay.shape[:2], -1, 1)
    state = states.gather().float() * decay
    delta = (v.float() - torch.einsum("nhkv,nhk->nhv", state, keys)) * beta.float().unsqueeze(-1)
    state += keys.unsqueeze(-1) * delta.unsqueeze(-2)
    states.scatter(state)
    return torch.einsum("nhkv,nhk->nhv", state, queries * q.shape[-1] ** -0.5).to(v.dtype)


def delta_rule_steps(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, states: SteppedStates, normalize: bool
) -> Tensor:
    """`delta_rule_one` for some tokens of every sequence, one after another: [token, ...] instead of [sequence, ...]."""
    if q.is_cuda:
        from kvpool.kernels.states_triton import delta_rule_steps_triton

        with current(q.device):
            return delta_rule_steps_triton(q, k, v, decay, beta, states, normalize)
    return delta_rule_steps_reference(q, k, v, decay, beta, states, normalize)


def delta_rule_steps_reference(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, states: SteppedStates, normalize: bool
) -> Tensor:
    """What `delta_rule_steps` does, with torch."""

    def one(token: slice, states: SlotStates) -> Tensor:
        return delta_rule_one_reference(q[token], k[token], v[token], decay[token], beta[token], states, normalize)

    return _step_by_step(v, states, torch.float32, one)


def _step_by_step(
    like: Tensor, states: SteppedStates, dtype: torch.dtype, one: Callable[[slice, SlotStates], Tensor]
) -> Tensor:
    """Calls `one` for each token of each sequence, with a copy of its state that moves on from call to call."""
    out, copies, alone = torch.zeros_like(like), states.gather().to(dtype), torch.zeros(1, dtype=torch.int64)
    starts, ends = states.starts.tolist(), states.ends.tolist()
    for row, (start, stop, end) in enumerate(zip(starts[:-1], starts[1:], ends, strict=True)):
        copy = SlotStates(copies[row : row + 1], alone, alone)
        for token in range(start, stop):
            out[token : token + 1] = one(slice(token, token + 1), copy)
            if token + 1 == end:
                states.stored[states.targets[row]] = copy.stored[0].to(states.dtype)
    return out


def select_one(x: Tensor, selection: Selection, states: SlotStates, gate: Tensor | None) -> Tensor:
    """A state space model (Mamba 1 and 2) for one more token of every sequence.

    `x`, `gate` and the result are [sequence, head, channel], a state is [head, channel, state]. The result is multiplied by
    the SiLU of `gate`.
    """
    if x.is_cuda:
        from kvpool.kernels.states_triton import select_one_triton

        with current(x.device):
            return select_one_triton(x, selection, states, gate)
    return select_one_reference(x, selection, states, gate)


def select_one_reference(x: Tensor, selection: Selection, states: SlotStates, gate: Tensor | None) -> Tensor:
    """What `select_one` does, with torch."""
    dt = selection.dt.float()
    dt = dt if selection.dt_bias is None else dt + selection.dt_bias.float()
    dt = (softplus(dt) if selection.softplus else dt).unsqueeze(-1)
    repeats = x.shape[1] // selection.b.shape[1]
    b, c = (y.float().repeat_interleave(repeats, dim=1).unsqueeze(2) for y in (selection.b, selection.c))
    state = states.gather().float() * torch.exp(dt * selection.a.float()) + dt * b * x.float().unsqueeze(-1)
    states.scatter(state)
    out = (state * c).sum(-1)
    out = out if selection.d is None else out + x.float() * selection.d.float()
    return (out if gate is None else out * silu(gate.float())).to(x.dtype)


def select_steps(x: Tensor, selection: Selection, states: SteppedStates) -> Tensor:
    """`select_one` for some tokens of every sequence, one after another: [token, ...] instead of [sequence, ...]."""
    if x.is_cuda:
        from kvpool.kernels.states_triton import select_steps_triton

        with current(x.device):
            return select_steps_triton(x, selection, states)
    return select_steps_reference(x, selection, states)


def select_steps_reference(x: Tensor, selection: Selection, states: SteppedStates) -> Tensor:
    """What `select_steps` does, with torch."""

    def one(token: slice, states: SlotStates) -> Tensor:
        part = replace(selection, **{name: getattr(selection, name)[token] for name in ("dt", "b", "c")})
        return select_one_reference(x[token], part, states, None)

    return _step_by_step(x, states, torch.float32, one)


def select(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, states: PackedStates) -> Tensor:
    """Mamba 2 for the next tokens of every sequence, in chunks, with matrix products; in float32.

    `x` and the result are [token, head, channel], `dt` is [token, head], `a` [head], `b` and `c` [token, group, state].
    """
    outputs, kept, start = [], [], 0
    for before, length in zip(states.gather().float(), states.lengths, strict=True):
        part = slice(start, start + length)
        out, state = _select(x[part].float(), dt[part].float(), a.float(), b[part].float(), c[part].float(), before)
        outputs.append(out)
        kept.append(state)
        start += length
    states.scatter(torch.stack(kept))
    return torch.cat(outputs)


def _select(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """The tokens of one sequence behind a state [head, channel, state]: what they give, and the state behind them."""
    length, heads, channels = x.shape
    groups, size = b.shape[1], min(_CHUNK, length)
    chunks = -(-length // size)
    # [chunk, group, head of the group, token, ...]; tokens that fill up have time steps of 0, and leave the state alone
    x, b, c, dt = (pad(y.flatten(1), (0, 0, 0, chunks * size - length)) for y in (x, b, c, dt))
    dt = dt.reshape(chunks, size, groups, -1).permute(0, 2, 3, 1)
    x = x.reshape(chunks, size, groups, -1, channels).permute(0, 2, 3, 1, 4) * dt.unsqueeze(-1)
    b, c = (y.reshape(chunks, size, groups, 1, -1).permute(0, 2, 3, 1, 4) for y in (b, c))
    passed = (dt * a.view(groups, -1, 1)).cumsum(-1)  # the logarithm of what is left at a token, since its chunk began
    between = passed.unsqueeze(-1) - passed.unsqueeze(-2)
    later = torch.ones(size, size, dtype=torch.bool, device=x.device).triu(1)
    out = (c @ b.transpose(-1, -2) * between.masked_fill(later, -torch.inf).exp()) @ x
    left = passed[..., -1:]
    added = (x * (left - passed).exp().unsqueeze(-1)).transpose(-1, -2) @ b
    before, state = [], state.view(groups, -1, *state.shape[1:])
    for more, share in zip(added, left.exp().unsqueeze(-1), strict=True):
        before.append(state)
        state = torch.addcmul(more, state, share)
    out += c @ torch.stack(before).transpose(-1, -2) * passed.exp().unsqueeze(-1)
    return out.permute(0, 3, 1, 2, 4).reshape(-1, heads, channels)[:length], state.flatten(0, 1)
