"""Modules that keep a state: each sequence of a flattened step goes on from its own slot.

Such a module (it calls `update_conv_state` or `update_recurrent_state` of transformers' cache) mixes the tokens of a row, and
the row of a flattened step holds many sequences. While a step is open, the module is therefore called for sequences that
belong together, and finds in its cache the states of their slots, or copies of them. All else in a model treats tokens one by
one, and attention has a hook of its own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvpool.config import StatePart, StateSpec
from kvpool.errors import InvalidArgumentError, UnsupportedModelError
from kvpool.kernels.layout import PackedStates, SlotStates
from kvpool.model.slot_functions import forward_on_slots, take_inputs
from kvpool.storage import StateSlots
from kvpool.storage.moving import upload

_UPDATES = frozenset({"update_conv_state", "update_recurrent_state"})
_CACHE_ARGUMENTS = ("cache_params", "past_key_values")
_DECODING = (1, False)  # tokens of a sequence, and whether it begins
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


class _PackedSequences(NamedTuple):
    """Sequences that are computed in one call as one row, one after another."""

    lengths: tuple[int, ...]
    starts: Tensor
    sources: Tensor  # -1: it begins
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
        packed: _PackedSequences | None = None,
        order: Tensor | None = None,
        back: Tensor | None = None,
    ) -> None:
        self.slots = slots
        self._runs = runs  # one after another; those with one token and a state come first
        self._packed = packed  # all but those
        self._order = order  # of the step's tokens, as the runs have them; None: as they are
        self._back = back

    @classmethod
    def of(
        cls, slots: StateSlots, num_tokens: npt.ArrayLike, sources: npt.ArrayLike, targets: npt.ArrayLike
    ) -> StateStep:
        """A step as it is planned on the host."""
        counts, reads, writes = (np.asarray(array, np.int32) for array in (num_tokens, sources, targets))
        if not len(counts) == len(reads) == len(writes) or (len(counts) and int(counts.min()) < 1):
            raise InvalidArgumentError(
                f"a step needs a source, a target and at least one token for each sequence: {len(reads)} sources and "
                f"{len(writes)} targets are given for tokens {counts.tolist()[:8]}"
            )
        slots.check(reads, writes)
        groups: dict[tuple[int, bool], list[int]] = {_DECODING: []}
        for i, (count, source) in enumerate(zip(counts.tolist(), reads.tolist(), strict=True)):
            groups.setdefault((count, source < 0), []).append(i)
        decoding = len(groups[_DECODING]) or len(groups.pop(_DECODING))
        rows = np.array([row for group in groups.values() for row in group], np.int64)
        lengths = counts[rows][decoding:]
        starts = np.concatenate([[0], np.cumsum(lengths)])
        at = upload(np.concatenate([reads[rows], writes[rows], starts]).astype(np.int64), slots.device)
        read, write, begin = torch.split(at, [len(rows), len(rows), len(starts)])
        runs, start = [], 0
        for (count, begins), group in groups.items():
            part = slice(start, start + len(group))
            runs.append(_EqualSequences(len(group), count, None if begins else read[part], write[part]))
            start += len(group)
        packed = None
        if starts[-1] > 1:  # a single token would look like decoding to a module
            packed = _PackedSequences(tuple(lengths.tolist()), begin, read[decoding:], write[decoding:])
        firsts = np.cumsum(counts) - counts
        places = [(firsts[group][:, None] + np.arange(count)).ravel() for (count, _), group in groups.items()]
        order = np.concatenate(places) if places else np.empty(0, np.int64)
        if not (order[1:] < order[:-1]).any():
            return cls(slots, runs, packed)
        return cls(slots, runs, packed, *upload(np.stack([order, np.argsort(order)]), slots.device))

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
            if module.packs and self._packed is not None and (run.num_tokens > 1 or run.sources is None):
                outputs.append(self._in_a_row(module, self._packed, ordered[start:], arguments))
                break
            stop = start + run.num_sequences * run.num_tokens
            tokens = ordered[start:stop].reshape(run.num_sequences, run.num_tokens, *ordered.shape[1:])
            one_by_one = run.sources is not None and (run.num_tokens == 1 or not module.continues)
            compute = self._in_place if module.on_slots and one_by_one else self._copied
            outputs.append(compute(module, run, tokens, arguments))
            start = stop
        return _joined(outputs, self._back)

    def _in_a_row(self, module: StateModule, run: _PackedSequences, tokens: Tensor, arguments: Arguments) -> Outputs:
        """All tokens of all sequences in one row."""
        places = {part.name: self.slots.tensors[module.layer, part.name] for part in module.parts}
        slots = run.sources, run.targets, run.starts, run.lengths
        states = {name: PackedStates(place, *slots) for name, place in places.items()}
        return module.compute_on_slots(states, tokens.unsqueeze(0), arguments)

    def _in_place(self, module: StateModule, run: _EqualSequences, tokens: Tensor, arguments: Arguments) -> Outputs:
        """One token of every sequence after the other; their states are read and written where they lie."""
        sources, outputs = run.sources, []
        assert sources is not None
        for token in torch.split(tokens, 1, dim=1):
            states = {p.name: self.slots.at(module.layer, p.name, sources, run.targets) for p in module.parts}
            outputs.append(module.compute_on_slots(states, token, arguments))
            sources = run.targets
        return joined_calls(outputs, lambda tensors: torch.cat(tensors, dim=1))

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
        return joined_calls(singly, lambda tensors: torch.cat(tensors, dim=1))

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


def _tensor(layer: Any, name: str) -> Tensor:
    field, index = _place(name)
    tensor: Tensor = getattr(layer, field)[index]
    return tensor


def _joined(outputs: Sequence[Outputs], back: Tensor | None) -> Outputs:
    """The outputs of all runs as one row, in the order of the step's tokens."""

    def join(tensors: list[Tensor]) -> Tensor:
        flat = torch.cat([tensor.flatten(0, 1) for tensor in tensors])
        return (flat if back is None else flat.index_select(0, back)).unsqueeze(0)

    return joined_calls(outputs, join)


def joined_calls(outputs: Sequence[Outputs], join: Callable[[list[Tensor]], Tensor]) -> Outputs:
    """Joins what a module returned in several calls: a tensor, or several."""
    first = outputs[0]
    if isinstance(first, Tensor):
        return join([output for output in outputs if isinstance(output, Tensor)])
    columns = zip(*outputs, strict=True)
    return tuple(None if column[0] is None else join(list(column)) for column in columns)
