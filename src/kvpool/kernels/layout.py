"""What kernels see: the parts of a layer as views, rows of bytes, states and adapters in slots, the current GPU."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvpool.config.layers import DType

# Held while a graph is captured, and by whoever waits for all streams of a device: CUDA refuses that during a capture.
whole_device = threading.RLock()

MOST_CHOICES = 1024  # of experts, by all tokens of a step together, that one kernel looks at


def current(device: torch.device) -> AbstractContextManager[object]:
    """Makes a GPU that of this thread while it is open: events, graphs and kernels go there, whatever their tensors say."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():  # asking is a tenth of changing it twice
        return nullcontext()
    return torch.cuda.device(device)


def dense_rows(x: Tensor) -> Tensor:
    """A tensor, or a copy of it, in which the elements of each row lie side by side, as kernels read them."""
    return x if x.stride(-1) == 1 else x.contiguous()


class StoredPart(NamedTuple):
    """One part of what a layer stores of each token (keys, values, a latent), read and written in place.

    The index order of `data` is always [block, token in block, head, element]; how these lie in memory is in the strides, so
    a kernel that takes strides serves every layout. The last dimension is contiguous. Integer types carry float16 `scale`
    tensors [block, token, head]: an INT8 element is worth `q * scale`, an INT4 element (0..15) `q * scale + zero`; INT4
    packs elements 2i and 2i + 1 into the low and high half of byte i. fp8 elements are worth `q * factor`.
    """

    dtype: DType
    data: Tensor
    width: int  # elements of a head
    scale: Tensor | None = None
    zero: Tensor | None = None
    factor: float = 1.0


class LayerCache(dict[str, StoredPart]):
    """What one layer stores, as views: its parts by name, in the order of `LayerSpec.parts`."""

    __slots__ = ()

    @property
    def num_blocks(self) -> int:
        return next(iter(self.values())).data.shape[0]

    @property
    def block_size(self) -> int:
        return next(iter(self.values())).data.shape[1]


class Runs(NamedTuple):
    """Stretches of a block that hold one token after the other: `num_stretches` of them, `stride` bytes apart."""

    offset: int
    stride: int
    num_stretches: int
    token_bytes: int


@dataclass(frozen=True, slots=True)
class SlotStates:
    """The states of a batch's sequences where they lie: sequence i reads slot `sources[i]` and writes slot `targets[i]`.

    `stored` is [slot, *shape], and a slot is contiguous. The slots of a batch are int64 on the same device and are trusted; a
    sequence may read and write the same slot, but no slot that another one writes. A module of transformers takes it for the
    tensor [sequence, *shape] of its cache, as long as it only hands it to the functions of `kvpool.kernels.states`.
    """

    stored: Tensor
    sources: Tensor
    targets: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return len(self.sources), *self.stored.shape[1:]

    @property
    def dtype(self) -> torch.dtype:
        return self.stored.dtype

    @property
    def device(self) -> torch.device:
        return self.stored.device

    def __getitem__(self, index: Any) -> SlotStates:
        """A part of every state; `index` keeps the sequences."""
        return SlotStates(self.stored[index], self.sources, self.targets)

    def gather(self) -> Tensor:
        """A copy of the states that are read."""
        return self.stored.index_select(0, self.sources)

    def scatter(self, values: Tensor) -> None:
        """Writes the states."""
        self.stored.index_copy_(0, self.targets, values.to(self.dtype))

    def to(self, dtype: torch.dtype) -> SlotStates:
        """Itself: a module that converts a state which it computed finds it where it is stored."""
        return self

    def copy_(self, computed: SlotStates) -> None:
        """What a cache does with a state that a module computed: it lies in its slots already."""


@dataclass(frozen=True, slots=True)
class PackedStates(SlotStates):
    """The states of sequences that lie one after another: sequence i has the tokens from `starts[i]` to `starts[i + 1]`.

    A sequence whose source is -1 begins.
    """

    starts: Tensor  # int64 on the device
    lengths: tuple[int, ...]  # the same on the host; all are positive

    @property
    def ends(self) -> Tensor:
        """Each sequence leaves its state behind the tokens before this one: behind all that it has."""
        return self.starts[1:]

    def gather(self) -> Tensor:
        """A copy of the states that are read, and zeros for sequences that begin."""
        return _gather_or_zero(self)


@dataclass(frozen=True, slots=True)
class SteppedStates(SlotStates):
    """The same, where only the device knows how many tokens a sequence has: in a graph that is filled for every step.

    Kernels compute the tokens of a sequence one after another. The state is left behind the tokens before `ends[i]`; those
    after it (drafts) change no state. A sequence without tokens is skipped.
    """

    starts: Tensor
    ends: Tensor  # [sequence]

    def gather(self) -> Tensor:
        """A copy of the states that are read, and zeros for sequences that begin."""
        return _gather_or_zero(self)


def _gather_or_zero(states: SlotStates) -> Tensor:
    copies = states.stored.index_select(0, states.sources.clamp(min=0))
    return copies.masked_fill_((states.sources < 0).view(-1, *[1] * (copies.dim() - 1)), 0)


@dataclass(frozen=True, slots=True)
class Selection:
    """What a state space model makes of its tokens besides their values, as Mamba names it; expanded tensors are welcome."""

    dt: Tensor  # [sequence, head, channel]: the time step
    a: Tensor  # [head, channel, state]
    b: Tensor  # [sequence, group, state], of which each group serves equally many heads
    c: Tensor
    d: Tensor | None  # [head, channel]: what of a value goes by the state
    dt_bias: Tensor | None  # [head, channel]
    softplus: bool  # of the time step


class LoraWeights(NamedTuple):
    """What adapters add to one matrix product, each adapter in a slot of its own.

    The product may be joined of several projections of one input (Q, K and V); `sizes` are the outputs of each of these
    parts. An adapter may leave parts out, and its ranks may differ between parts. Rows and columns of `a` and `b` beyond its
    rank are zeros.
    """

    a: Tensor  # [slot, part, rank, in]
    b: Tensor  # [slot, out of all parts, rank]
    scales: Tensor  # [slot, part], float32
    ranks: Tensor  # [slot, part], int32; 0: the adapter leaves this part as it is
    sizes: tuple[int, ...]


def widest_view(data: Tensor) -> Tensor:
    """Rows of bytes as rows of the widest integers that divide them: copies of those are several times faster."""
    for dtype in (torch.int64, torch.int32, torch.int16):
        if data.shape[1] % dtype.itemsize == 0:
            return data.view(dtype)
    return data
