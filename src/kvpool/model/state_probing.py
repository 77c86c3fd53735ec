"""How the modules of a model keep their states, found out by running them on a few tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvpool.config import StateSpec
from kvpool.errors import ConfigError, UnsupportedModelError
from kvpool.model.state_steps import StateStep, keeping_states
from kvpool.model.states import (
    Arguments,
    Outputs,
    StateModule,
    joined_calls,
    modules_with_state,
    own_states,
    parts_of,
)
from kvpool.storage import StateSlots


class _Learning:
    """Computes the tokens of a step as one sequence that begins, and notes what modules keep of it."""

    def __init__(self) -> None:
        self.calls: dict[type, tuple[StateModule, Tensor, Arguments]] = {}  # the first of each class

    def run(self, module: StateModule, hidden: Tensor, arguments: Arguments) -> Outputs:
        layer = module.new_layer()
        self.calls.setdefault(type(module.module), (module, hidden, arguments))
        outputs = module.compute(layer, hidden, arguments)
        module.parts = tuple(parts_of(layer))
        return outputs


def use_kvpool_states(model: Any, run_probe: Callable[[], object]) -> list[StateModule]:
    """Lets the modules of a model that keep a state compute flattened steps, inside `keeping_states` only.

    `run_probe` runs the model on a few tokens of one sequence; what its modules keep is read off their tensors. Empty for a
    model without states. `own_states(model)` undoes it.
    """
    own_states(model)
    number = getattr(model.config.get_text_config(), "number_of_conv_states", 1)  # that a layer may have
    modules = [StateModule(module, number) for module in modules_with_state(model)]
    learning = _Learning()
    try:
        for module in modules:
            module.module.forward = module.forward
        with keeping_states(learning):
            run_probe()
        for module, hidden, arguments in learning.calls.values():
            _choose_ways(module, hidden, arguments)
            for other in modules:
                if type(other.module) is type(module.module):
                    other.continues = module.continues
                    other.on_slots &= module.on_slots
                    other.packs &= module.packs
    except ConfigError as error:
        own_states(model)
        raise UnsupportedModelError(f"{type(model).__name__} keeps a state that no cache can: {error}") from error
    except BaseException:
        own_states(model)
        raise
    return modules


def _choose_ways(module: StateModule, hidden: Tensor, arguments: Arguments) -> None:
    module.continues = _continues(module, hidden, arguments)
    module.packs &= module.continues
    module.on_slots = _same(module, "on_slots", [1, 1], [0, 1], hidden, arguments)
    packed = [hidden.shape[1] - 1, 1], [0, -1]
    module.packs = _same(module, "packs", *packed, hidden, arguments)
    module.packs = _same(module, "packs", *packed, hidden, arguments, in_graph=True)


@torch.no_grad()
def _continues(module: StateModule, hidden: Tensor, arguments: Arguments) -> bool:
    """Whether tokens together, behind a state, give what they give one by one: tried for each part of the state alone."""
    generator = torch.Generator().manual_seed(0)
    for chosen in module.parts:
        states = {part.name: hidden.new_zeros((1, *part.shape)).float() for part in module.parts}
        without = _last(module, states, hidden, arguments, 1)
        states[chosen.name] = torch.randn(1, *chosen.shape, generator=generator, dtype=torch.float32).to(hidden.device)
        singly = _last(module, states, hidden, arguments, 1)
        together = _last(module, states, hidden, arguments, hidden.shape[1] - 1)
        # A state that is ignored is off by all that it does. Rounding in 16 bits is far from half of it.
        if (together - singly).norm() > 0.5 * (singly - without).norm():
            return False
    return True


@torch.no_grad()
def _same(
    module: StateModule,
    way: str,
    lengths: Sequence[int],
    sources: Sequence[int],
    hidden: Tensor,
    arguments: Arguments,
    *,
    in_graph: bool = False,
) -> bool:
    """Whether a module gives with a way what it gives without it, tried with random states in the first two slots."""
    if not getattr(module, way):
        return False
    found = []
    try:
        for chosen in (True, False):
            setattr(module, way, chosen)
            slots = StateSlots.allocate({module.layer: StateSpec(module.parts)}, 3, hidden.device)
            generator = torch.Generator().manual_seed(0)
            for states in slots.store.views(0).values():
                states.copy_(torch.randn(states.shape, generator=generator, dtype=torch.float32))
            step = StateStep.of(slots, lengths, sources, [2, 1])
            if chosen and in_graph:
                borders = np.cumsum([0, *lengths])
                given = (torch.tensor(array, device=hidden.device) for array in (sources, [2, 1], borders, borders[1:]))
                step = StateStep.stepping(slots, *given)
            outputs = step.run(module, hidden[:, : sum(lengths)], arguments)
            found.append([_flat(outputs), *(states.float() for states in slots.store.views(0).values())])
    except (AttributeError, TypeError):  # it does something else with a state than calling the functions
        return False
    # Copies in 16 bits are rounded more often.
    return all(bool((a - b).norm() <= 0.05 * b.norm()) for a, b in zip(*found, strict=True))


def _flat(outputs: Outputs) -> Tensor:
    tensors = outputs if isinstance(outputs, tuple) else (outputs,)
    return torch.cat([tensor.float().flatten() for tensor in tensors if tensor is not None])


def _last(module: StateModule, states: dict[str, Tensor], hidden: Tensor, arguments: Arguments, chunk: int) -> Tensor:
    """The outputs behind a state, of so many tokens at a time."""
    layer = module.new_layer()
    dtypes = {part.name: part.dtype.value for part in module.parts}
    module.fill(layer, {name: state.to(getattr(torch, dtypes[name]), copy=True) for name, state in states.items()})
    outputs = [module.compute(layer, tokens, arguments) for tokens in torch.split(hidden, chunk, dim=1)]
    return _flat(joined_calls(outputs, lambda tensors: torch.cat(tensors, dim=1)))
