"""The functions of transformers that move states on, done in the slots where states lie.

Modules that keep a state call them by a name in their own file. `forward_on_slots` is a module's forward in which these names
mean the functions here; the file, the class and the module stay as they are. The module takes `SlotStates` for the states in
its cache where it computes one token of every sequence, and `PackedStates` where it computes sequences one after another in
one row.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from functools import cache, partial
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import softplus

from kvpool.kernels.layout import PackedStates, Selection, SlotStates, SteppedStates
from kvpool.kernels.states import (
    convolve,
    convolve_one,
    delta_rule_one,
    delta_rule_steps,
    select,
    select_one,
    select_steps,
)


def _convolve(
    hidden_states: Tensor,
    conv_state: SlotStates,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:
    return convolve_one(hidden_states[..., 0], conv_state, weight, bias, _is_silu(activation)).unsqueeze(-1)


def _delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: SlotStates,
    output_final_state: bool = True,
    use_qk_l2norm_in_kernel: bool = False,
    **_: Any,
) -> tuple[Tensor, SlotStates]:
    query, key = _for_each_value(query, value), _for_each_value(key, value)
    q, k, v, decay, rate = (x[:, 0] for x in (query, key, value, g, beta))
    return delta_rule_one(q, k, v, decay, rate, initial_state, use_qk_l2norm_in_kernel).unsqueeze(1), initial_state


def _for_each_value(x: Tensor, value: Tensor) -> Tensor:
    """Queries or keys [sequence, token, head, key] for every head of values; newer transformers give one for several."""
    times = value.shape[2] // x.shape[2]
    return x if times == 1 else x.repeat_interleave(times, dim=2)


def _select(
    state: SlotStates,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    z: Tensor | None = None,
    **_: Any,
) -> Tensor:
    if hidden_states.dim() == 3:  # Mamba 2, with heads
        return select_one(hidden_states, Selection(dt, A, B, C, D, dt_bias, dt_softplus), state, z)
    d, bias = (None if x is None else x.unsqueeze(0) for x in (D, dt_bias))
    dt, b, c, x = (x.unsqueeze(1) for x in (dt, B, C, hidden_states))
    selection = Selection(dt, A.unsqueeze(0), b, c, d, bias, dt_softplus)
    return select_one(x, selection, state[:, None], None if z is None else z.unsqueeze(1)).squeeze(1)


class _Inputs(NamedTuple):
    """What a convolution of packed sequences is given: its new inputs, and where the earlier ones are."""

    new: Tensor  # [1, channel, token]
    earlier: PackedStates | SteppedStates


def take_inputs(layer: Any) -> Callable[..., _Inputs]:
    """What stands for the `update_conv_state` of a cache's layer: the convolution itself keeps the inputs."""
    return lambda conv_states, state_idx=0, **_: _Inputs(conv_states, layer.conv_states[state_idx])


def _convolve_packed(
    _own: Callable[..., Any],
    hidden_states: _Inputs,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **_: Any,
) -> Tensor:
    x = hidden_states.new[0].T
    return convolve(x, hidden_states.earlier, weight, bias, _is_silu(activation)).T.unsqueeze(0)


def _delta_rule_packed(
    own: Callable[..., Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: PackedStates | SteppedStates,
    output_final_state: bool = True,
    use_qk_l2norm_in_kernel: bool = False,
    **_: Any,
) -> tuple[Tensor, SlotStates]:
    query, key = _for_each_value(query, value), _for_each_value(key, value)
    if isinstance(initial_state, SteppedStates):
        q, k, v, decay, rate = (x[0] for x in (query, key, value, g, beta))
        out = delta_rule_steps(q, k, v, decay, rate, initial_state, use_qk_l2norm_in_kernel)
        return out.unsqueeze(0), initial_state
    tokens, before = (query, key, value, g, beta), initial_state.gather()
    options = {"output_final_state": True, "use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel}
    if query.is_cuda and query.dtype.itemsize == 2 and (packed := _of_fla(by_key=g.dim() == 4)) is not None:
        # Alone, a sequence needs no borders, which it would read back to the host: that cannot be captured in a graph.
        borders = {} if len(before) == 1 else {"cu_seqlens": initial_state.starts}
        out, after = packed(*tokens, initial_state=before, **options, **borders)
    else:
        outs, states = [], []
        for i, one in enumerate(zip(*(torch.split(x, list(initial_state.lengths), 1) for x in tokens), strict=True)):
            q, k, v, decay, rate = one
            one_out, state = own(q, k, v, g=decay, beta=rate, initial_state=before[i : i + 1], **options)
            outs.append(one_out)
            states.append(state)
        out, after = torch.cat(outs, dim=1), torch.cat(states)
    initial_state.scatter(after)
    return out, initial_state


@cache
def _of_fla(by_key: bool) -> Callable[..., Any] | None:
    """The delta rule of packed sequences in flash-linear-attention; None where that is not installed."""
    try:
        if by_key:
            from fla.ops.kda import chunk_kda as function  # type: ignore[import-not-found]
        else:
            from fla.ops.gated_delta_rule import (  # type: ignore[import-not-found]
                chunk_gated_delta_rule as function,
            )
    except ImportError:
        return None
    found: Callable[..., Any] = function
    return found


def _select_packed(
    _own: Callable[..., Any],
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: PackedStates | SteppedStates | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    **_: Any,
) -> tuple[Tensor, SlotStates]:
    if initial_states is None:
        raise TypeError("a chunk of a prompt has no states to begin with")
    steps = dt[0].float() if dt_bias is None else dt[0].float() + dt_bias.float()
    steps = (softplus(steps) if dt_softplus else steps).clamp(*dt_limit)
    x = hidden_states[0]
    if isinstance(initial_states, SteppedStates):
        channels, size = x.shape[2], B.shape[-1]
        a, d = A[:, None, None].expand(-1, channels, size), None if D is None else D[:, None].expand(-1, channels)
        selection = Selection(steps.unsqueeze(-1).expand(-1, -1, channels), a, B[0], C[0], d, None, False)
        return select_steps(x.float(), selection, initial_states).unsqueeze(0), initial_states
    out = select(x, steps, A, B[0], C[0], initial_states)
    out = out if D is None else out + x.float() * D.float().unsqueeze(-1)
    return out.unsqueeze(0), initial_states


def _is_silu(activation: str | None) -> bool:
    if activation not in (None, "silu", "swish"):
        raise TypeError(f"no convolution on slots has the activation {activation}")
    return activation is not None


_OF_ONE_TOKEN: Mapping[str, Callable[..., Any]] = {
    "causal_conv1d_update": _convolve,
    "torch_recurrent_gated_delta_rule": _delta_rule,
    "recurrent_kimi_delta_attention": _delta_rule,
    "mamba_selective_state_update": _select,
    "mamba2_selective_state_update": _select,
}
_OF_PACKED_TOKENS: Mapping[str, Callable[..., Any]] = {  # each is given the function in whose place it stands
    "causal_conv1d_fn": _convolve_packed,
    "torch_chunk_gated_delta_rule": _delta_rule_packed,
    "chunk_kimi_delta_attention": _delta_rule_packed,
    "mamba2_chunk_scan": _select_packed,
}


def forward_on_slots(module: Any) -> Callable[..., Any] | None:
    """A module's forward that takes `SlotStates` and `PackedStates` for the states in its cache.

    None where it calls none of the functions, or where something has hooks that the plain forward would pass by.
    """
    if "forward" in vars(module) or any(hasattr(part, "_hf_hook") for part in module.modules()):
        return None
    own = inspect.unwrap(type(module).forward)
    called = set(own.__code__.co_names)
    ours = {name: function for name, function in _OF_ONE_TOKEN.items() if name in called}
    if not ours:
        return None
    for name in _OF_PACKED_TOKENS.keys() & called:
        ours[name] = partial(_OF_PACKED_TOKENS[name], own.__globals__[name])
    forward = FunctionType(own.__code__, {**own.__globals__, **ours}, own.__name__, own.__defaults__, own.__closure__)
    forward.__kwdefaults__ = own.__kwdefaults__
    return MethodType(forward, module)
