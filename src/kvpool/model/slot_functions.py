"""The functions of transformers that move a state on by one token, done in the slots where states lie.

Modules that keep a state call them by a name in their own file. `forward_on_slots` is a module's forward in which these names
mean the functions here; the file, the class and the module stay as they are.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from types import FunctionType, MethodType
from typing import Any

from torch import Tensor

from kvpool.kernels.layout import Selection, SlotStates
from kvpool.kernels.states import convolve_one, delta_rule_one, select_one


def _convolve(
    hidden_states: Tensor,
    conv_state: SlotStates,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:
    if activation not in (None, "silu", "swish"):
        raise TypeError(f"no convolution on slots has the activation {activation}")
    return convolve_one(hidden_states[..., 0], conv_state, weight, bias, activation is not None).unsqueeze(-1)


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
    q, k, v, decay, rate = (x[:, 0] for x in (query, key, value, g, beta))
    return delta_rule_one(q, k, v, decay, rate, initial_state, use_qk_l2norm_in_kernel).unsqueeze(1), initial_state


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


_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "causal_conv1d_update": _convolve,
    "torch_recurrent_gated_delta_rule": _delta_rule,
    "recurrent_kimi_delta_attention": _delta_rule,
    "mamba_selective_state_update": _select,
    "mamba2_selective_state_update": _select,
}


def forward_on_slots(module: Any) -> Callable[..., Any] | None:
    """A module's forward for one token of every sequence, which takes `SlotStates` for the states in its cache.

    None where it calls none of the functions, or where something has hooks that the plain forward would pass by.
    """
    if "forward" in vars(module) or any(hasattr(part, "_hf_hook") for part in module.modules()):
        return None
    own = inspect.unwrap(type(module).forward)
    ours = {name: function for name, function in _FUNCTIONS.items() if name in own.__code__.co_names}
    if not ours:
        return None
    forward = FunctionType(own.__code__, {**own.__globals__, **ours}, own.__name__, own.__defaults__, own.__closure__)
    forward.__kwdefaults__ = own.__kwdefaults__
    return MethodType(forward, module)
