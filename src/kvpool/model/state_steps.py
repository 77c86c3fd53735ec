"""One flattened step as modules with a state compute it: which sequences go into one call, and which slots they use.

Such a module mixes the tokens of a row, and the row of a flattened step holds many sequences. The module is therefore called
for sequences that belong together. Where it can, it reads and writes states in their slots; otherwise it gets copies.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvpool.errors import InvalidArgumentError
from kvpool.kernels.layout import PackedStates, SteppedStates
from kvpool.model.adapter_steps import adapting_some
from kvpool.model.states import STEP, Arguments, Computes, Outputs, StateModule, in_turn, joined_calls
from kvpool.pools.arrays import Int32Array
from kvpool.storage import StateSlots
from kvpool.storage.moving import upload

_Key = tuple[int, int, bool]  # tokens of a sequence, how many of them its state covers afterwards, whether it begins
_DECODING: _Key = (1, 1, False)


@contextmanager
def keeping_states(step: Computes) -> Iterator[None]:
    """While it is open, modules with a state compute this step, in this thread or task; otherwise they are as they were."""
    token = STEP.set(step)
    try:
        yield
    finally:
        STEP.reset(token)


class _EqualSequences(NamedTuple):
    """Sequences that are computed in one call: they have equally many tokens, and all of them a state or none."""

    num_sequences: int
    num_tokens: int  # of each
    num_kept: int  # of these tokens: the state is left behind them; those that follow are drafts
    sources: Tensor | None  # None: they begin
    targets: Tensor


class _PackedSequences(NamedTuple):
    """Sequences that are computed in one call as one row, one after another."""

    lengths: tuple[int, ...]
    starts: Tensor
    sources: Tensor  # -1: it begins
    targets: Tensor


class _SteppedSequences(NamedTuple):
    """The same in a graph: what these tensors hold when it is replayed counts. See `SteppedStates`."""

    starts: Tensor
    ends: Tensor
    sources: Tensor
    targets: Tensor


class StateStep:
    """The sequences of one flattened step, as modules with a state see them.

    Sequence i has `num_tokens[i]` tokens in the step, one sequence after another. It goes on from the state in slot
    `sources[i]`, or begins (-1). The state behind its first `num_kept[i]` tokens (all, if not given) goes to slot
    `targets[i]`; the tokens that follow are drafts. Where source and target are the same slot, the state is replaced.
    Otherwise the old one stays as it is: a checkpoint, or what another sequence was forked from.
    """

    def __init__(
        self,
        slots: StateSlots,
        runs: Sequence[_EqualSequences] = (),
        packed: _PackedSequences | None = None,
        stepped: _SteppedSequences | None = None,
        order: npt.NDArray[np.int64] | None = None,
    ) -> None:
        self.slots = slots
        self._runs = runs  # one after another; those that may be packed come last
        self._packed = packed  # the last runs as one
        self._stepped = stepped  # all sequences of a graph
        self._order = self._back = None  # of the step's tokens, as the runs have them; None: as they are
        if order is not None:
            self._order, self._back = upload(np.stack([order, np.argsort(order)]), slots.device)

    @classmethod
    def of(
        cls,
        slots: StateSlots,
        num_tokens: npt.ArrayLike,
        sources: npt.ArrayLike,
        targets: npt.ArrayLike,
        num_kept: npt.ArrayLike | None = None,
    ) -> StateStep:
        """A step as it is planned on the host."""
        counts, reads, writes = (np.asarray(array, np.int32) for array in (num_tokens, sources, targets))
        kept = counts if num_kept is None else np.asarray(num_kept, np.int32)
        _check(counts, reads, writes, kept)
        slots.check(reads, writes)
        groups = _grouped(counts, kept, reads)
        rows = np.array([row for group in groups.values() for row in group], np.int64)
        num_apart = sum(len(group) for key, group in groups.items() if not _is_packed(key))
        lengths = counts[rows][num_apart:]
        starts = np.concatenate([[0], np.cumsum(lengths)])
        at = upload(np.concatenate([reads[rows], writes[rows], starts]).astype(np.int64), slots.device)
        read, write, begin = torch.split(at, [len(rows), len(rows), len(starts)])
        runs, start = [], 0
        for (count, num, begins), group in groups.items():
            part = slice(start, start + len(group))
            runs.append(_EqualSequences(len(group), count, num, None if begins else read[part], write[part]))
            start += len(group)
        packed = None
        if starts[-1] > 1:  # a single token would look like decoding to a module
            packed = _PackedSequences(tuple(lengths.tolist()), begin, read[num_apart:], write[num_apart:])
        firsts = np.cumsum(counts) - counts
        places = [(firsts[group][:, None] + np.arange(key[0])).ravel() for key, group in groups.items()]
        order = np.concatenate([np.empty(0, np.int64), *places])
        return cls(slots, runs, packed, order=order if (order[1:] < order[:-1]).any() else None)

    @classmethod
    def decoding(cls, slots: StateSlots, sources: Tensor, targets: Tensor) -> StateStep:
        """A step with one token of each sequence, of which none begins: for a CUDA graph.

        The slots are int64 on the device and trusted; a graph that is replayed finds those that they hold then. Rows
        that only fill a graph up all name one slot that nobody uses.
        """
        return cls(slots, [_EqualSequences(len(targets), 1, 1, sources, targets)])

    @classmethod
    def stepping(cls, slots: StateSlots, sources: Tensor, targets: Tensor, starts: Tensor, ends: Tensor) -> StateStep:
        """A step with a few tokens of each sequence, for a CUDA graph: all tensors are int64 on the device and trusted.

        Sequence i has the tokens `starts[i]..starts[i + 1]` and leaves its state behind those before `ends[i]`. Every
        module must be able to compute sequences in one row (`StateModule.packs`).
        """
        return cls(slots, stepped=_SteppedSequences(starts, ends, sources, targets))

    def run(self, module: StateModule, hidden: Tensor, arguments: Arguments) -> Outputs:
        """What a module makes of the packed tokens `hidden`, [1, token, ...]; the states are in their slots afterwards."""
        if self._stepped is not None:
            return self._step_by_step(module, self._stepped, hidden, arguments)
        ordered = hidden[0] if self._order is None else hidden[0].index_select(0, self._order)
        outputs, start = list[Outputs](), 0
        for run in self._runs:
            is_packed = _is_packed((run.num_tokens, run.num_kept, run.sources is None))
            if is_packed and module.packs and self._packed is not None:
                with self._adapting(start, len(ordered), len(ordered)):
                    outputs.append(self._in_a_row(module, self._packed, ordered[start:], arguments))
                break
            stop = start + run.num_sequences * run.num_tokens
            tokens = ordered[start:stop].reshape(run.num_sequences, run.num_tokens, *ordered.shape[1:])
            one_by_one = run.sources is not None and (run.num_tokens == 1 or not module.continues)
            in_place = module.on_slots and one_by_one and run.num_kept == run.num_tokens
            compute = self._in_place if in_place else self._copied
            with self._adapting(start, stop, len(ordered)):
                outputs.append(compute(module, run, tokens, arguments))
            start = stop
        return _joined(outputs, self._back)

    def _adapting(self, start: int, stop: int, num_tokens: int) -> AbstractContextManager[None]:
        """While it is open, projections compute the tokens `start..stop` of the runs, each with its adapter."""
        order = self._order
        if order is None and stop - start == num_tokens:
            return nullcontext()
        return adapting_some(num_tokens, lambda places: (places if order is None else order)[start:stop])

    def _step_by_step(
        self, module: StateModule, run: _SteppedSequences, hidden: Tensor, arguments: Arguments
    ) -> Outputs:
        """All tokens of a graph in one row; kernels find the borders of sequences on the device."""
        parts = {part.name: self.slots.tensors[module.layer, part.name] for part in module.parts}
        states = {
            name: SteppedStates(part, run.sources, run.targets, run.starts, run.ends) for name, part in parts.items()
        }
        return module.compute_on_slots(states, hidden, arguments)

    def _in_a_row(self, module: StateModule, run: _PackedSequences, tokens: Tensor, arguments: Arguments) -> Outputs:
        """All tokens of all sequences in one row."""
        parts = {part.name: self.slots.tensors[module.layer, part.name] for part in module.parts}
        slots = run.sources, run.targets, run.starts, run.lengths
        states = {name: PackedStates(part, *slots) for name, part in parts.items()}
        return module.compute_on_slots(states, tokens.unsqueeze(0), arguments)

    def _in_place(self, module: StateModule, run: _EqualSequences, tokens: Tensor, arguments: Arguments) -> Outputs:
        """One token of every sequence after the other; their states are read and written where they lie."""
        assert run.sources is not None
        sources: Tensor = run.sources

        def compute(token: Tensor) -> Outputs:
            nonlocal sources
            states = {p.name: self.slots.at(module.layer, p.name, sources, run.targets) for p in module.parts}
            sources = run.targets
            return module.compute_on_slots(states, token, arguments)

        return in_turn(tokens, [1] * run.num_tokens, compute)

    def _copied(self, module: StateModule, run: _EqualSequences, tokens: Tensor, arguments: Arguments) -> Outputs:
        """All tokens of every sequence; their states are copied for the module, and back from it before the drafts."""
        layer = module.new_layer()
        if run.sources is not None:
            module.fill(layer, {p.name: self.slots.gather(module.layer, p.name, run.sources) for p in module.parts})
        is_kept = True

        def compute(some: Tensor) -> Outputs:
            nonlocal is_kept
            outputs = module.compute(layer, some, arguments)
            if is_kept:
                for part in module.parts:
                    self.slots.scatter(module.layer, part.name, run.targets, module.state_in(layer, part.name))
            is_kept = False
            return outputs

        drafts = run.num_tokens - run.num_kept
        return in_turn(tokens, [run.num_kept, drafts] if drafts else [run.num_kept], compute)


def _check(counts: Int32Array, reads: Int32Array, writes: Int32Array, kept: Int32Array) -> None:
    """Refuses a step in which a sequence has no slot, no token, or a state behind tokens that it does not have."""
    if not len(counts) == len(reads) == len(writes) == len(kept) or (len(counts) and int(counts.min()) < 1):
        raise InvalidArgumentError(
            f"a step needs a source, a target and at least one token for each sequence: {len(reads)} sources and "
            f"{len(writes)} targets are given for tokens {counts.tolist()[:8]}"
        )
    if ((kept < 1) | (kept > counts)).any():
        raise InvalidArgumentError(
            f"states cannot be left behind {kept.tolist()[:8]} of {counts.tolist()[:8]} tokens: a sequence leaves its state "
            "behind its first token at least, and behind its last at most"
        )


def _grouped(counts: Int32Array, kept: Int32Array, sources: Int32Array) -> dict[_Key, list[int]]:
    """The sequences by what they have in common: those that decode first, then those with drafts, then all others."""
    groups: dict[_Key, list[int]] = {}
    for row, (count, num, source) in enumerate(zip(counts.tolist(), kept.tolist(), sources.tolist(), strict=True)):
        groups.setdefault((count, num, source < 0), []).append(row)
    return dict(sorted(groups.items(), key=lambda item: (_is_packed(item[0]), item[0] != _DECODING)))


def _is_packed(key: _Key) -> bool:
    """Whether sequences may stand in one row with others: they have several tokens or begin, and have no drafts."""
    num_tokens, num_kept, _ = key
    return key != _DECODING and num_kept == num_tokens


def _joined(outputs: Sequence[Outputs], back: Tensor | None) -> Outputs:
    """The outputs of all runs as one row, in the order of the step's tokens."""

    def join(tensors: list[Tensor]) -> Tensor:
        flat = torch.cat([tensor.flatten(0, 1) for tensor in tensors])
        return (flat if back is None else flat.index_select(0, back)).unsqueeze(0)

    return joined_calls(outputs, join)
