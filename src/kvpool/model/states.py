"""Modules that keep a state: each sequence of a flattened step goes on from its own slot.

Such a module (it calls `update_conv_state` or `update_recurrent_state` of transformers' cache) mixes the tokens of a row, and
the row of a flattened step holds many sequences. While a step is open, the module is therefore called once for all
sequences that have equally many tokens, and finds in its cache the states of their slots. All else in a model treats tokens
one by one, and attention has a hook of its own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor

from kvpool.config import StatePart, StateSpec
from kvpool.errors import ConfigError, InvalidArgumentError, UnsupportedModelError
from kvpool.kernels.layout import SlotStates
from kvpool.model.slot_functions import forward_on_slots
from kvpool.storage import StateSlots
from kvpool.storage.moving import upload

_UPDATES = frozenset({"update_conv_state", "update_recurrent_state"})
_CACHE_ARGUMENTS = ("cache_params", "past_key_values")
_FIELDS = {"conv": "conv_states", "recurrent": "recurrent_states"}  # of transformers' layer, by the name of a part

Outputs: TypeAlias = "Tensor | tuple[Tensor | None, ...]"  # [sequence, token, ...] each
Arguments: TypeAlias = dict[str, Any]


class _Step(Protocol):
    """Whoever computes the calls of modules with a state."""

    def run(self, module: StateModule, hidden: Tensor, arguments: Arguments) -> Outputs: ...


_STEP: ContextVar[_Step | None] = ContextVar("kvpool_state_step", default=None)


class _EqualSequences(NamedTuple):
    """Sequences that are computed in one call: they have equally many tokens, and all of them a state or none."""

    num_sequences: int
    num_tokens: int  # of each
    sources: Tensor | None  # None: they begin
    targets: Tensor


class StateStep:
    """The sequences of one flattened step, as modules with a state see them.

    Sequence i has `num_tokens[i]` tokens in the step, one sequence after another. It goes on from the state in slot
    `sources[i]`, or begins (-1); the state behind its tokens goes to slot `targets[i]`. Where both are the same slot, the
    state is replaced. Otherwise the old one stays as it is: a checkpoint, or what another sequence was forked from.
    """

    def __init__(
        self,
        slots: StateSlots,
        runs: Sequence[_EqualSequences],
        order: Tensor | None = None,
        back: Tensor | None = None,
    ) -> None:
        self.slots = slots
        self._runs = runs  # one after another
        self._order = order  # of the step's tokens, as the runs have them; None: as they are
        self._back = back

    @classmethod
    def of(
        cls, slots: StateSlots, num_tokens: Sequence[int], sources: Sequence[int], targets: Sequence[int]
    ) -> StateStep:
        """A step as it is planned on the host."""
        counts, reads, writes = (np.asarray(array, np.int32) for array in (num_tokens, sources, targets))
        if not len(counts) == len(reads) == len(writes) or (len(counts) and int(counts.min()) < 1):
            raise InvalidArgumentError(
                f"a step needs a source, a target and at least one token for each sequence: {len(reads)} sources and "
                f"{len(writes)} targets are given for tokens {counts.tolist()[:8]}"
            )
        slots.check(reads, writes)
        groups: dict[tuple[int, bool], list[int]] = {}
        for i, (count, source) in enumerate(zip(counts.tolist(), reads.tolist(), strict=True)):
            groups.setdefault((count, source < 0), []).append(i)
        rows = np.array([row for group in groups.values() for row in group], np.int64)
        at = upload(np.stack([reads[rows], writes[rows]]).astype(np.int64), slots.device)
        runs, start = [], 0
        for (count, begins), group in groups.items():
            part = at[:, start : start + len(group)]
            runs.append(_EqualSequences(len(group), count, None if begins else part[0], part[1]))
            start += len(group)
        starts = np.cumsum(counts) - counts
        places = [(starts[group][:, None] + np.arange(count)).ravel() for (count, _), group in groups.items()]
        order = np.concatenate(places) if places else np.empty(0, np.int64)
        if not (order[1:] < order[:-1]).any():
            return cls(slots, runs)
        return cls(slots, runs, *upload(np.stack([order, np.argsort(order)]), slots.device))

    @classmethod
    def decoding(cls, slots: StateSlots, sources: Tensor, targets: Tensor) -> StateStep:
        """A step with one token of each sequence, of which none begins: for a CUDA graph.

        The slots are int64 on the device and trusted; a graph that is replayed finds those that they hold then. Rows
        that only fill a graph up all name one slot that nobody uses.
        """
        return cls(slots, [_EqualSequences(len(targets), 1, sources, targets)])

    def run(self, module: StateModule, hidden: Tensor, arguments: Arguments) -> Outputs:
        """What a module makes of the packed tokens `hidden`, [1, token, ...]; the states are in their slots afterwards."""
        ordered = hidden[0] if self._order is None else hidden[0].index_select(0, self._order)
        outputs, start = [], 0
        for run in self._runs:
            stop = start + run.num_sequences * run.num_tokens
            tokens = ordered[start:stop].reshape(run.num_sequences, run.num_tokens, *ordered.shape[1:])
            one_by_one = run.sources is not None and (run.num_tokens == 1 or not module.continues)
            compute = self._in_place if module.on_slots is not None and one_by_one else self._copied
            outputs.append(compute(module, run, tokens, arguments))
            start = stop
        return _joined(outputs, self._back)

    def _in_place(self, module: StateModule, run: _EqualSequences, tokens: Tensor, arguments: Arguments) -> Outputs:
        """One token of every sequence after the other; their states are read and written where they lie."""
        sources, outputs = run.sources, []
        assert sources is not None
        for token in torch.split(tokens, 1, dim=1):
            layer = module.new_layer()
            module.fill(
                layer, {p.name: self.slots.at(module.layer, p.name, sources, run.targets) for p in module.parts}
            )
            outputs.append(module.compute_on_slots(layer, token, arguments))
            sources = run.targets
        return _each(outputs, lambda tensors: torch.cat(tensors, dim=1))

    def _copied(self, module: StateModule, run: _EqualSequences, tokens: Tensor, arguments: Arguments) -> Outputs:
        """All tokens of every sequence; their states are copied for the module, and back from it."""
        layer = module.new_layer()
        if run.sources is not None:
            module.fill(layer, {p.name: self.slots.gather(module.layer, p.name, run.sources) for p in module.parts})
        outputs = module.compute(layer, tokens, arguments)
        for part in module.parts:
            self.slots.scatter(module.layer, part.name, run.targets, _tensor(layer, part.name))
        return outputs


@contextmanager
def keeping_states(step: _Step) -> Iterator[None]:
    """While it is open, modules with a state compute this step, in this thread or task; otherwise they are as they were."""
    token = _STEP.set(step)
    try:
        yield
    finally:
        _STEP.reset(token)


class StateModule:
    """A module that keeps a state, in whose place `forward` stands.

    `parts` is what it keeps. `continues` says whether it can go on from a state with several tokens at once: the Mamba of
    transformers cannot, its scan begins at zero. It then computes them one by one. `on_slots` is its forward for one token
    that works in the slots where states lie; None: states are copied for it.
    """

    def __init__(self, module: Any, number_of_states: int = 1) -> None:
        self.module = module
        self._number_of_states = number_of_states
        self.layer = int(module.layer_idx)
        self.parts: tuple[StatePart, ...] = ()
        self.continues = True
        self._own = module.forward
        self.on_slots = forward_on_slots(module)
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
        step = _STEP.get()
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

    def fill(self, layer: Any, states: Mapping[str, Tensor | SlotStates]) -> None:
        """Puts states [sequence, *shape] into a new layer, as if it had computed them."""
        for name, state in states.items():
            field, index = _place(name)
            getattr(layer, field)[index] = state
            getattr(layer, f"is_{field}_initialized")[index] = True
            if field == "conv_states":
                layer.conv_kernel_size[index] = state.shape[-1]
                layer.dtype, layer.device = state.dtype, state.device
        layer.has_previous_state = dict.fromkeys(layer.has_previous_state, True)

    def compute(self, layer: Any, tokens: Tensor, arguments: Arguments) -> Outputs:
        """What the module itself makes of `tokens`, [sequence, token, ...]; `layer` has the states behind them afterwards."""
        if self.continues or tokens.shape[1] == 1 or not any(layer.has_previous_state.values()):
            return self._call(layer, tokens, arguments)
        singly = [self._call(layer, token, arguments) for token in torch.split(tokens, 1, dim=1)]
        return _each(singly, lambda tensors: torch.cat(tensors, dim=1))

    def compute_on_slots(self, layer: Any, tokens: Tensor, arguments: Arguments) -> Outputs:
        """The same for one token of every sequence, [sequence, 1, ...]; `layer` has their slots."""
        assert self.on_slots is not None
        return self._call(layer, tokens, arguments, self.on_slots)

    def _call(
        self, layer: Any, tokens: Tensor, arguments: Arguments, forward: Callable[..., Any] | None = None
    ) -> Outputs:
        from transformers.cache_utils import Cache

        # The same layer under every number: some modules ask whether there is a state without saying of which layer.
        cache = Cache(layers=[layer] * (self.layer + 1))
        given = {self._hidden_name: tokens, self._cache_name: cache}
        outputs: Outputs = (forward or self._own)(**given, **arguments)
        return outputs


class _Learning:
    """Computes the tokens of a step as one sequence that begins, and notes what modules keep of it."""

    def __init__(self) -> None:
        self.calls: dict[type, tuple[StateModule, Tensor, Arguments]] = {}  # the first of each class

    def run(self, module: StateModule, hidden: Tensor, arguments: Arguments) -> Outputs:
        layer = module.new_layer()
        self.calls.setdefault(type(module.module), (module, hidden, arguments))
        outputs = module.compute(layer, hidden, arguments)
        module.parts = tuple(_parts(layer))
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
            continues, works_on_slots = (
                _continues(module, hidden, arguments),
                _works_on_slots(module, hidden, arguments),
            )
            for other in modules:
                if type(other.module) is type(module.module):
                    other.continues = continues
                    other.on_slots = other.on_slots if works_on_slots else None
    except ConfigError as error:
        own_states(model)
        raise UnsupportedModelError(f"{type(model).__name__} keeps a state that no cache can: {error}") from error
    except BaseException:
        own_states(model)
        raise
    return modules


def own_states(model: Any) -> None:
    """Gives the modules that keep a state their own forward back."""
    for module in model.modules():
        if isinstance(getattr(vars(module).get("forward"), "__self__", None), StateModule):
            del module.forward


def state_specs(modules: Sequence[StateModule]) -> dict[int, StateSpec]:
    """What each layer of the model keeps: the parts of all its modules."""
    parts: dict[int, list[StatePart]] = {}
    for module in modules:
        parts.setdefault(module.layer, []).extend(module.parts)
    return {layer: StateSpec(tuple(sorted(kept, key=lambda part: part.name))) for layer, kept in sorted(parts.items())}


def modules_with_state(model: Any) -> list[Any]:
    """The modules that keep a state in transformers' cache."""
    return [module for module in model.modules() if _calls(module, _UPDATES)]


def keeps_indexer(model: Any) -> bool:
    """Whether some attention chooses its tokens by an indexer, which keeps keys of its own for every token."""
    return any(_calls(module, {"update_indexer"}) for module in model.modules())


def _calls(module: Any, names: frozenset[str] | set[str]) -> bool:
    """Whether the code of a module's class uses one of these names."""
    functions = [f for base in type(module).__mro__ for f in vars(base).values() if inspect.isfunction(f)]
    return any(names.intersection(inspect.unwrap(function).__code__.co_names) for function in functions)


@torch.no_grad()
def _continues(module: StateModule, hidden: Tensor, arguments: Arguments) -> bool:
    """Whether tokens together, behind a state, give what they give one by one: tried for each part of the state alone."""
    generator = torch.Generator().manual_seed(0)
    for chosen in module.parts:
        states = {part.name: hidden.new_zeros((1, *part.shape)).float() for part in module.parts}
        without = _last(module, states, hidden, arguments, 1)
        states[chosen.name] = torch.randn(1, *chosen.shape, generator=generator).to(hidden.device)
        singly = _last(module, states, hidden, arguments, 1)
        together = _last(module, states, hidden, arguments, hidden.shape[1] - 1)
        # A state that is ignored is off by all that it does. Rounding in 16 bits is far from half of it.
        if (together - singly).norm() > 0.5 * (singly - without).norm():
            return False
    return True


@torch.no_grad()
def _works_on_slots(module: StateModule, hidden: Tensor, arguments: Arguments) -> bool:
    """Whether a token gives in slots what it gives with copied states, tried with random states."""
    if module.on_slots is None:
        return False
    tokens = hidden[0, :2].unsqueeze(1)
    slots = StateSlots.allocate({module.layer: StateSpec(module.parts)}, 4, hidden.device)
    sources, targets = torch.tensor([[0, 1], [2, 1]], device=hidden.device)
    generator = torch.Generator().manual_seed(0)
    for part in module.parts:
        values = torch.randn(2, *part.shape, generator=generator).to(hidden.device)
        slots.scatter(module.layer, part.name, sources, values)
    step, run = StateStep.decoding(slots, sources, targets), _EqualSequences(2, 1, sources, targets)
    found = []
    for compute in (step._in_place, step._copied):
        kept = slots.store.data.clone()
        try:
            outputs = compute(module, run, tokens, arguments)
        except (AttributeError, TypeError):  # it does something else with a state than calling the functions
            return False
        states = [slots.gather(module.layer, part.name, targets).float().flatten() for part in module.parts]
        found.append(torch.cat([_flat(outputs), *states]))
        slots.store.data.copy_(kept)
    return bool((found[0] - found[1]).norm() <= 0.02 * found[1].norm())  # 16 bits are rounded more often in copies


def _flat(outputs: Outputs) -> Tensor:
    tensors = outputs if isinstance(outputs, tuple) else (outputs,)
    return torch.cat([tensor.float().flatten() for tensor in tensors if tensor is not None])


def _last(module: StateModule, states: dict[str, Tensor], hidden: Tensor, arguments: Arguments, chunk: int) -> Tensor:
    """The outputs behind a state, of so many tokens at a time."""
    layer = module.new_layer()
    dtypes = {part.name: part.dtype.value for part in module.parts}
    module.fill(layer, {name: state.to(getattr(torch, dtypes[name]), copy=True) for name, state in states.items()})
    outputs = [module.compute(layer, tokens, arguments) for tokens in torch.split(hidden, chunk, dim=1)]
    return _flat(_each(outputs, lambda tensors: torch.cat(tensors, dim=1)))


def _parts(layer: Any) -> Iterator[StatePart]:
    """The parts that a layer of transformers holds."""
    for kind, field in _FIELDS.items():
        for index, tensor in getattr(layer, field).items():
            if tensor is not None:
                yield StatePart(f"{kind}{index or ''}", tuple(tensor.shape[1:]), str(tensor.dtype))  # type: ignore[arg-type]


def _place(name: str) -> tuple[str, int]:
    """Where transformers' layer has a part."""
    kind = name.rstrip("0123456789")
    return _FIELDS[kind], int(name[len(kind) :] or 0)


def _tensor(layer: Any, name: str) -> Tensor:
    field, index = _place(name)
    tensor: Tensor = getattr(layer, field)[index]
    return tensor


def _joined(outputs: Sequence[Outputs], back: Tensor | None) -> Outputs:
    """The outputs of all runs as one row, in the order of the step's tokens."""

    def join(tensors: list[Tensor]) -> Tensor:
        flat = torch.cat([tensor.flatten(0, 1) for tensor in tensors])
        return (flat if back is None else flat.index_select(0, back)).unsqueeze(0)

    return _each(outputs, join)


def _each(outputs: Sequence[Outputs], join: Callable[[list[Tensor]], Tensor]) -> Outputs:
    """Joins what a module returned in several calls: a tensor, or several."""
    first = outputs[0]
    if isinstance(first, Tensor):
        return join([output for output in outputs if isinstance(output, Tensor)])
    columns = zip(*outputs, strict=True)
    return tuple(None if column[0] is None else join(list(column)) for column in columns)
