"""Modules that keep a state: those that call `update_conv_state` or `update_recurrent_state` of transformers' cache.

A `StateModule` stands in place of the forward of such a module. While a step is open (`keeping_states`), it hands the call to
that step (`StateStep`), which calls the module for sequences that belong together and gives it their states in a cache that
looks like transformers' own. All else in a model treats tokens one by one, and attention has a hook of its own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from kvpool.config import StatePart, StateSpec
from kvpool.errors import UnsupportedModelError
from kvpool.kernels.layout import SlotStates
from kvpool.model.adapter_steps import adapting_some
from kvpool.model.slot_functions import forward_on_slots, take_inputs

_UPDATES = frozenset({"update_conv_state", "update_recurrent_state"})
_CACHE_ARGUMENTS = ("cache_params", "past_key_values")
_FIELDS = {"conv": "conv_states", "recurrent": "recurrent_states"}  # of transformers' layer, by the name of a part

Outputs: TypeAlias = "Tensor | tuple[Tensor | None, ...]"  # [sequence, token, ...] each
Arguments: TypeAlias = dict[str, Any]


class Computes(Protocol):
    """Whoever computes the calls of modules with a state."""

    def run(self, module: StateModule, hidden: Tensor, arguments: Arguments) -> Outputs: ...


STEP: ContextVar[Computes | None] = ContextVar("kvpool_state_step", default=None)


class StateModule:
    """A module that keeps a state, in whose place `forward` stands.

    `parts` is what it keeps. `continues` says whether it can go on from a state with several tokens at once: the Mamba of
    transformers cannot, its scan begins at zero. It then computes them one by one. `on_slots` says whether it computes a
    token where states lie, and `packs` whether it computes there several sequences in one row; otherwise states are copied
    for it.
    """

    def __init__(self, module: Any, number_of_states: int = 1) -> None:
        self.module = module
        self._number_of_states = number_of_states
        self.layer = int(module.layer_idx)
        self.parts: tuple[StatePart, ...] = ()
        self.continues = True
        self._own = module.forward
        self._own_on_slots = forward_on_slots(module)
        self.on_slots = self.packs = self._own_on_slots is not None
        self._signature = inspect.signature(module.forward)
        names = list(self._signature.parameters)
        cache = [name for name in _CACHE_ARGUMENTS if name in names]
        if not cache:
            raise UnsupportedModelError(
                f"{type(module).__name__} keeps a state, but its forward() takes none of {', '.join(_CACHE_ARGUMENTS)}"
            )
        self._hidden_name, self._cache_name = names[0], cache[0]

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # compiled layers stop here and go on behind it
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the model calls."""
        step = STEP.get()
        if step is None:
            return self._own(*args, **kwargs)
        given = self._signature.bind(*args, **kwargs).arguments
        hidden = given.pop(self._hidden_name)
        given.pop(self._cache_name, None)
        # What a module does not name itself describes the whole row: whoever reads it would look at other sequences.
        named = {
            k: v for k, v in given.items() if self._signature.parameters[k].kind is not inspect.Parameter.VAR_KEYWORD
        }
        for name, value in named.items():
            if isinstance(value, Tensor):
                raise UnsupportedModelError(
                    f"{type(self.module).__name__} of layer {self.layer} takes {name} of the whole step, which cannot be "
                    "cut into its sequences"
                )
        return step.run(self, hidden, named)

    def new_layer(self) -> Any:
        """Transformers' own cache of one layer, without a state."""
        from transformers.cache_utils import LinearAttentionLayer

        return LinearAttentionLayer(number_of_states=self._number_of_states)

    @staticmethod
    def fill(layer: Any, states: Mapping[str, Tensor | SlotStates]) -> None:
        """Puts states [sequence, *shape] into a new layer, as if it had computed them."""
        for name, state in states.items():
            field, index = _place(name)
            getattr(layer, field)[index] = state
            getattr(layer, f"is_{field}_initialized")[index] = True
            if field == "conv_states":
                layer.conv_kernel_size[index] = state.shape[-1]
                layer.dtype, layer.device = state.dtype, state.device
        layer.has_previous_state = dict.fromkeys(layer.has_previous_state, True)

    @staticmethod
    def state_in(layer: Any, name: str) -> Tensor:
        """A part of the states that a layer holds, [sequence, *shape]."""
        field, index = _place(name)
        state: Tensor = getattr(layer, field)[index]
        return state

    def compute(self, layer: Any, tokens: Tensor, arguments: Arguments) -> Outputs:
        """What the module itself makes of `tokens`, [sequence, token, ...]; `layer` has the states behind them afterwards."""
        if self.continues or tokens.shape[1] == 1 or not any(layer.has_previous_state.values()):
            return self._call(layer, tokens, arguments)
        return in_turn(tokens, [1] * tokens.shape[1], lambda token: self._call(layer, token, arguments))

    def compute_on_slots(self, states: Mapping[str, SlotStates], tokens: Tensor, arguments: Arguments) -> Outputs:
        """The same where the states lie, for one token of every sequence or for packed ones."""
        layer = self.new_layer()
        self.fill(layer, states)
        layer.update_conv_state = take_inputs(layer)
        return self._call(layer, tokens, arguments, self._own_on_slots)

    def _call(
        self, layer: Any, tokens: Tensor, arguments: Arguments, forward: Callable[..., Any] | None = None
    ) -> Outputs:
        from transformers.cache_utils import Cache

        # The same layer under every number: some modules ask whether there is a state without saying of which layer.
        cache = Cache(layers=[layer] * (self.layer + 1))
        given = {self._hidden_name: tokens, self._cache_name: cache}
        outputs: Outputs = (forward or self._own)(**given, **arguments)
        return outputs


def state_modules(model: Any) -> list[StateModule]:
    """What stands in place of the forward of modules that keep a state."""
    standing = (getattr(vars(module).get("forward"), "__self__", None) for module in model.modules())
    return [module for module in standing if isinstance(module, StateModule)]


def own_states(model: Any) -> None:
    """Gives the modules that keep a state their own forward back."""
    for module in state_modules(model):
        del module.module.forward


def state_specs(modules: Sequence[StateModule]) -> dict[int, StateSpec]:
    """What each layer of the model keeps: the parts of all its modules."""
    parts: dict[int, list[StatePart]] = {}
    for module in modules:
        parts.setdefault(module.layer, []).extend(module.parts)
    return {layer: StateSpec(tuple(sorted(kept, key=lambda part: part.name))) for layer, kept in sorted(parts.items())}


def modules_with_state(model: Any) -> list[Any]:
    """The modules that keep a state in transformers' cache."""
    return calling(model, _UPDATES)


def calling(model: Any, names: frozenset[str]) -> list[Any]:
    """The modules whose code uses one of these names."""
    kinds = {kind for kind in set(map(type, model.modules())) if _uses(kind, names)}
    return [module for module in model.modules() if type(module) in kinds]


def _uses(kind: type, names: frozenset[str]) -> bool:
    functions = [f for base in kind.__mro__ for f in vars(base).values() if inspect.isfunction(f)]
    return any(names.intersection(inspect.unwrap(function).__code__.co_names) for function in functions)


def parts_of(layer: Any) -> Iterator[StatePart]:
    """The parts that a layer of transformers holds."""
    for kind, field in _FIELDS.items():
        for index, tensor in getattr(layer, field).items():
            if tensor is not None:
                yield StatePart(f"{kind}{index or ''}", tuple(tensor.shape[1:]), str(tensor.dtype))  # type: ignore[arg-type]


def _place(name: str) -> tuple[str, int]:
    """Where transformers' layer has a part."""
    kind = name.rstrip("0123456789")
    return _FIELDS[kind], int(name[len(kind) :] or 0)


def in_turn(tokens: Tensor, counts: Sequence[int], compute: Callable[[Tensor], Outputs]) -> Outputs:
    """Computes so many tokens of every sequence after the other, of `tokens`, [sequence, token, ...]."""
    if len(counts) == 1:
        return compute(tokens)
    outputs, (num_sequences, length), stop = list[Outputs](), tokens.shape[:2], 0
    for part in torch.split(tokens, list(counts), dim=1):
        start, stop = stop, stop + part.shape[1]
        with adapting_some(num_sequences * length, partial(_columns, length, start, stop)):
            outputs.append(compute(part))
    return joined_calls(outputs, lambda tensors: torch.cat(tensors, dim=1))


def _columns(length: int, start: int, stop: int, places: Tensor) -> Tensor:
    """Of the places of sequences with `length` tokens each, those of the tokens `start..stop` of every sequence."""
    return places.view(-1, length)[:, start:stop].flatten()


def joined_calls(outputs: Sequence[Outputs], join: Callable[[list[Tensor]], Tensor]) -> Outputs:
    """Joins what a module returned in several calls: a tensor, or several."""
    first = outputs[0]
    if isinstance(first, Tensor):
        return join([output for output in outputs if isinstance(output, Tensor)])
    columns = zip(*outputs, strict=True)
    return tuple(None if column[0] is None else join(list(column)) for column in columns)
