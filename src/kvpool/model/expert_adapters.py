"""What adapters add to mixtures of experts: to the weights of all experts of a layer, and to the router that chooses them.

These are parameters of modules that are no linear layers. peft calls them target parameters, and writes the matrices of all
experts of a layer as one. What adapters add is computed as a mixture of experts, too: it has one for each slot and expert.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode

from kvpool.kernels.experts import expert_product
from kvpool.kernels.layout import MOST_CHOICES
from kvpool.model.adapter_steps import current_step
from kvpool.model.faster_layers import expert_weights, few_choices, first_product, is_experts


class ParameterSizes(NamedTuple):
    """A parameter that is no linear layer's weight: the matrices of experts, or the one of a router."""

    num_experts: int | None  # None: of a router
    inputs: int
    outputs: int


class ExpertStack(NamedTuple):
    """What adapters add to one product of a mixture of experts, each adapter in a slot of its own."""

    a: Tensor  # [slot, expert, rank, in]
    b: Tensor  # [slot, expert, out, rank]
    scales: Tensor  # [slot], float32; 0: the adapter leaves this product as it is


@torch.no_grad()
def parameter_sizes(module: nn.Module) -> Mapping[str, ParameterSizes]:
    """The parameters of a module that adapters may target, by name; none if it is no mixture of experts and no router."""
    if is_experts(module):
        shapes = {name: expert_weights(module, name)[0].shape for name in (first_product(module), "down_proj")}
        return {name: ParameterSizes(experts, inputs, outputs) for name, (experts, outputs, inputs) in shapes.items()}
    weight = module._parameters.get("weight")
    if weight is None or weight.ndim != 2 or isinstance(module, nn.Embedding) or any(module.children()):
        return {}
    return {"weight": ParameterSizes(None, weight.shape[1], weight.shape[0])}


def empty_stack(
    num_slots: int, rank: int, sizes: ParameterSizes, *, dtype: torch.dtype, device: torch.device
) -> ExpertStack:
    """A stack for experts that holds no adapter."""
    assert sizes.num_experts is not None
    return ExpertStack(
        torch.zeros(num_slots, sizes.num_experts, rank, sizes.inputs, dtype=dtype, device=device),
        torch.zeros(num_slots, sizes.num_experts, sizes.outputs, rank, dtype=dtype, device=device),
        torch.zeros(num_slots, dtype=torch.float32, device=device),
    )


class Override:
    """Another forward of a module, until it is removed."""

    def __init__(self, module: nn.Module, new: Callable[..., Any]) -> None:
        """`new` is called with the forward that the module has, and with what that would be called with."""
        self._module, self._before = module, vars(module).get("forward")
        module.forward = partial(new, module.forward)

    def remove(self) -> None:
        """The module has its forward again."""
        del self._module.forward
        if self._before is not None:
            self._module.forward = self._before


class ExpertAdapters:
    """Adds what adapters add to the products of one mixture of experts; `stacks` has their stacks by parameter."""

    def __init__(self, owner: object, stacks: Mapping[str, ExpertStack], module: nn.Module) -> None:
        self._owner = owner
        self._stacks = stacks
        self._module = module

    def forward(self, own: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        step = current_step()
        if step is None or step.stacks is not self._owner:
            return own(hidden_states, top_k_index, top_k_weights)  # type: ignore[no-any-return]
        tokens = max(1, MOST_CHOICES // top_k_index.shape[1])  # as many as a kernel looks at
        slots = step.slots(len(hidden_states))
        columns = (hidden_states, top_k_index, top_k_weights, slots)
        parts = [self._few(*part) for part in zip(*(torch.split(column, tokens) for column in columns), strict=True)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _few(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, slots: Tensor) -> Tensor:
        added = partial(self._added, slots, top_k_index)
        return few_choices(self._module, hidden_states, top_k_index, top_k_weights, added)

    def _added(self, slots: Tensor, top_k_index: Tensor, name: str, x: Tensor, shares: Tensor | None) -> Tensor | None:
        """What adapters add to the product `name` for each choice of an expert; None if no adapter adds anything."""
        stack = self._stacks.get(name)
        if stack is None:
            return None
        slot = slots.clamp(min=0)  # a token without an adapter takes some slot, and nothing of it
        scales = stack.scales[slot].where(slots >= 0, 0.0)[:, None].repeat(1, top_k_index.shape[1])
        chosen = slot[:, None] * stack.a.shape[1] + top_k_index
        low = expert_product(x, stack.a.flatten(0, 1), None, chosen)
        scales = scales if shares is None else scales * shares
        high: Tensor = expert_product(low, stack.b.flatten(0, 1), None, chosen, scales)
        return high


class RouterProduct(TorchFunctionMode):
    """While it is open, `start` gets the inputs of products with a weight, and what it returns gets their outputs."""

    def __init__(self, weight: Tensor, start: Callable[[Tensor], Callable[[Tensor], None]]) -> None:
        super().__init__()
        self._weight = weight
        self._start = start

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not linear or len(args) < 2 or args[1] is not self._weight:
            return func(*args, **kwargs)
        finish = self._start(args[0].reshape(-1, args[0].shape[-1]))
        out = func(*args, **kwargs)
        finish(out.view(-1, out.shape[-1]))
        return out
