"""States in slots, read and written in place: convolutions, the gated delta rule, and the update of a state space model."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from kvpool.kernels.layout import Selection, SlotStates, current


def convolve_one(x: Tensor, states: SlotStates, weight: Tensor, bias: Tensor | None, activate: bool) -> Tensor:
    """A causal convolution of each channel, for one more token of every sequence.

    `x` and the result are [sequence, channel], `weight` is [channel, tap], `bias` [channel]. A state is [channel, input], the
    newest input last: it moves on by one. `activate` applies SiLU.
    """
    if x.is_cuda:
        from kvpool.kernels.states_triton import convolve_one_triton

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
    x: Tensor,
    starts: Tensor,
    max_tokens: int,
    states: SlotStates,
    weight: Tensor,
    bias: Tensor | None,
    activate: bool,
) -> Tensor:
    """A causal convolution of each channel, for the next tokens of every sequence, one sequence after another.

    `x` and the result are [token, channel]; sequence i has the tokens from `starts[i]` to `starts[i + 1]`, at least one and
    at most `max_tokens`. It begins if its source is -1. All else is as in `convolve_one`.
    """
    if x.is_cuda:
        from kvpool.kernels.states_triton import convolve_triton

        with current(x.device):
            return convolve_triton(x, starts, max_tokens, states, weight, bias, activate)
    return convolve_reference(x, starts, max_tokens, states, weight, bias, activate)


def convolve_reference(
    x: Tensor,
    starts: Tensor,
    max_tokens: int,
    states: SlotStates,
    weight: Tensor,
    bias: Tensor | None,
    activate: bool,
) -> Tensor:
    """What `convolve` does, with torch, one sequence after another."""
    taps, outputs = weight.shape[1], []
    before = states.stored.index_select(0, states.sources.clamp(min=0))
    before = before.masked_fill((states.sources < 0)[:, None, None], 0)
    for i, tokens in enumerate(torch.split(x, starts.diff().tolist())):
        inputs = torch.cat([before[i], tokens.to(states.dtype).T], dim=-1)
        states.stored[states.targets[i]] = inputs[:, -states.shape[2] :]
        seen = torch.nn.functional.pad(inputs, (1, 0))[:, -(len(tokens) + taps - 1) :]
        outputs.append(torch.einsum("cnt,ct->nc", seen.float().unfold(-1, taps, 1), weight.float()))
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
