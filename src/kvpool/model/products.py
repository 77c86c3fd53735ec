"""Matrix products on a CPU, each in the way that is best for its shape and number of rows.

The library that torch uses for a product, and its speed, depend on the processor, the type and the order of the factors. For
sixteen rows the plain order can take 1.4 times as long as the other one, and for many rows the other way round. 16-bit types
without instructions for them can take two hundred times as long as float32.

One way is expected to be the best (`_expected`). A short measurement at the start finds another one only if that is clearly
faster. The measurement alone would choose by chance: while another program has the other thread of a core, everything takes
twice as long, and AMX four times.

Each of these libraries copies the weight into the order of its loops, in every call. For few rows that takes longer than the
product. `packed` has a copy in that order, and code in C (`kernels/_products.c`) that reads it. `split` has a copy of which
every number is the sum of up to three in bfloat16, and multiplies these by AMX (`kernels/_split_products.c`). Weights in
float32 are copied where all copies together take at most a quarter of the memory that is free.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from operator import truediv
from types import ModuleType
from typing import Any, TypeAlias, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from kvpool.kernels import compiled_products, compiled_split_products
from kvpool.kernels.layout import dense_rows
from kvpool.storage.memory import free_bytes

log = logging.getLogger("kvpool")

Way: TypeAlias = Callable[[Tensor, Any], Tensor]  # x [rows, in] and a weight [out, in], maybe packed, give [rows, out]

# Rows of x that are measured, with so many bytes of weights. With few rows, weights come from memory as in a step, not from a
# cache of the core. Other numbers of rows use the way of the next one here, more that of the last.
_BYTES = {1: 2**23, 4: 2**23, 16: 2**23, 64: 2**22, 256: 2**22}
_ROWS = tuple(_BYTES)
_PIECE_BYTES = 2**22  # of a large weight; AMX splits x once for all columns of a piece
_SMALLEST = 2**16  # elements of a weight; with fewer, the call costs more than the product
_TURNS = 5  # in which all ways are measured, one after the other
_GAIN = 0.8  # another way is used if it takes at most this share of the expected one's time, in every turn
_SLOW = 3.0  # a way that takes so many times as long as the best is not tried with more rows
_PART = 2**18  # elements of a weight that are converted at a time, so that they stay in a core's cache
_COPIES = 0.25  # of the free memory, for packed weights


def is_hooked(module: nn.Module) -> bool:
    """Whether calls of a module do something else than its class says."""
    return bool("forward" in vars(module) or module._forward_hooks or module._forward_pre_hooks)


def is_unchanged(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether a module is a `Linear` as torch has it: without hooks, and with a weight that is an ordinary tensor.

    torchao keeps quantised weights in a `Linear`, as tensors of classes that know few operations.
    """
    return type(module) is nn.Linear and not is_hooked(module) and type(module.weight) is nn.Parameter


def plain(x: Tensor, weight: Tensor) -> Tensor:
    """The plain product of torch."""
    return linear(x, weight)


def swapped(x: Tensor, weight: Tensor) -> Tensor:
    """The weight as the first factor: torch uses oneDNN for some orders and BLAS for others."""
    return torch.mm(weight, x.t()).t().contiguous()


def in_float32(x: Tensor, weight: Tensor) -> Tensor:
    """Converts the weight to float32 part by part, because every CPU multiplies that fast. Rounds the result once."""
    columns = x.float().t()
    product = torch.empty(len(weight), len(x), dtype=torch.float32, device=weight.device)
    step = max(1, _PART // weight.shape[1])
    for first in range(0, len(weight), step):
        torch.mm(weight[first : first + step].float(), columns, out=product[first : first + step])
    return product.t().to(x.dtype).contiguous()


class PackedWeight:
    """A copy of weights in the order in which C code reads it, one behind the other; `pack` makes it again from them."""

    def __init__(self, weights: Sequence[Tensor], code: Any) -> None:
        self._weights = [weight.detach() for weight in weights]
        self._code = code
        self.num_columns, self.depth = sum(map(len, weights)), weights[0].shape[1]
        self._copy = torch.empty(0, dtype=torch.uint8)
        self.pack()

    def pack(self) -> None:
        """Copies the numbers that the weights have now."""
        weight = _whole(self._weights).contiguous()
        size = _copy_bytes(weight, self._code)
        if size != len(self._copy):  # other numbers may have other parts
            self._copy = torch.empty(size, dtype=torch.uint8)
        self._code.pack(weight.data_ptr(), self.num_columns, self.depth, self._copy.data_ptr(), size)

    def multiplied(self, x: Tensor) -> Tensor:
        """The product with each row of x [..., in]."""
        product = torch.empty((*x.shape[:-1], self.num_columns), dtype=x.dtype)
        stride = self.depth
        if not x.is_contiguous():
            x = dense_rows(x.reshape(-1, stride))
            stride = x.stride(0)
        addresses = x.data_ptr(), stride, self._copy.data_ptr(), product.data_ptr()
        num_rows = x.numel() // self.depth
        self._code.multiply(*addresses, num_rows, self.num_columns, self.depth, torch.get_num_threads())
        return product


def packed(x: Tensor, weight: PackedWeight) -> Tensor:
    """By kvpool's own code, with a copy of the weight."""
    return weight.multiplied(x)


def split(x: Tensor, weight: PackedWeight) -> Tensor:
    """By kvpool's own code for AMX, with a copy of the weight in parts."""
    return weight.multiplied(x)


def _code(way: Way) -> ModuleType | None:
    """The C code of a way that has copies of weights; None where there is none."""
    return compiled_products() if way is packed else compiled_split_products()


def _copy_bytes(weight: Tensor, code: Any) -> int:
    """The size of the copy of a weight that C code reads. It depends on its numbers, too."""
    size: int = code.num_bytes(weight.contiguous().data_ptr(), *weight.shape)
    return size


def _whole(weights: Sequence[Tensor]) -> Tensor:
    """The weights as one, whose columns of the product stand side by side."""
    return weights[0] if len(weights) == 1 else torch.cat(list(weights))


def _copies(weights: Sequence[Tensor], ways: Iterable[Way]) -> dict[Way, PackedWeight]:
    """The copies that these ways have of some weights together."""
    return {way: PackedWeight(weights, _code(way)) for way in (packed, split) if way in ways}


class PartedProduct:
    """One product for several modules that are called with the same tensor, one after another. The first computes it."""

    __slots__ = ("_latest", "_sizes")

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = list(sizes)
        # An input and what is left of its product, set together for threads
        self._latest: tuple[Tensor, dict[int, Tensor]] | None = None

    def part(self, place: int, x: Tensor, multiply: Callable[[Tensor], Tensor]) -> Tensor:
        """The part of module number `place`: of the product that the first one computed, if that was with the same tensor.

        Each part is given once, since its module may add to it in place.
        """
        latest = self._latest
        if place == 0 or latest is None or latest[0] is not x or place not in latest[1]:
            latest = self._latest = x, dict(enumerate(multiply(x).split_with_sizes(self._sizes, -1)))
        if place == len(self._sizes) - 1:  # the last module frees the product
            self._latest = None
        return latest[1].pop(place)


class ChosenLinear(nn.Linear):
    """A `Linear` whose product is done in the chosen ways; with gradients, as torch does it.

    Ways that have copies of weights may have one for several modules, which then share a product.
    """

    dtype: torch.dtype
    ways: Sequence[Way]  # for each of `_ROWS`
    copies: Mapping[Way, PackedWeight]
    shared: PartedProduct | None  # None: the copies are of this module's weight alone
    place: int

    def forward(self, input: Tensor) -> Tensor:
        num_rows = input.numel() // self.in_features
        if not num_rows or input.dtype != self.dtype or torch.is_grad_enabled():
            return linear(input, self.weight, self.bias)
        way = self.ways[_place(num_rows)]
        if way is plain:
            return linear(input, self.weight, self.bias)
        copy = self.copies.get(way)
        if copy is None:
            product = way(input.reshape(-1, self.in_features), self.weight).view(*input.shape[:-1], self.out_features)
        elif self.shared is None:
            product = copy.multiplied(input)
        else:
            product = self.shared.part(self.place, input, copy.multiplied)
        bias = self._parameters["bias"]  # a module finds its parameters slowly
        if bias is not None:
            product += bias
        return product


_measured: dict[tuple[Any, ...], tuple[Way, ...]] = {}  # by shape, type and threads, for all engines of the process


@torch.inference_mode()
def choose_products(model: nn.Module, same_inputs: Iterable[Sequence[nn.Linear]] = ()) -> int:
    """Chooses the fastest way for each `Linear` module of a model on a CPU; returns how many are not plain in all cases.

    Parameters stay as they are, and so do modules that are small, hooked or derived. Takes some tenths of a second for each
    shape that is new to the process, and memory for packed weights where these are faster. Modules that are called one after
    another with the same tensor, `same_inputs`, have one copy of their weights and one product.
    """
    modules = [module for module in model.modules() if isinstance(module, nn.Linear) and _is_plain(module)]
    copied = _that_fit([module.weight for module in modules if module.weight.dtype == torch.float32])
    single = {id(module): module for module in modules}
    sets: list[Sequence[nn.Linear]] = []
    for members in same_inputs:
        if copied and all(id(member) in single for member in members):
            sets.append(members)
            for member in members:
                del single[id(member)]
    alike: dict[tuple[Any, ...], list[Sequence[nn.Linear]]] = {}
    for members in (*sets, *([module] for module in single.values())):
        sizes = tuple(member.out_features for member in members)
        alike.setdefault((sizes, members[0].in_features, members[0].weight.dtype), []).append(members)
    changed = 0
    for (sizes, depth, dtype), found in alike.items():
        key = (sizes, depth, dtype, torch.get_num_threads(), copied)
        if key not in _measured:
            _measured[key] = _fastest([[member.weight for member in members] for members in found], copied)
        ways = _measured[key]
        names = " ".join(f"{rows}:{way.__name__}" for rows, way in zip(_ROWS, ways, strict=True))
        log.debug("%d products with [%d, %d] in %s, by rows: %s", len(found), sum(sizes), depth, dtype, names)
        if any(way is not plain for way in ways):
            changed += len(found) * len(sizes)
            for members in found:
                _change(members, ways)
    return changed


def _change(members: Sequence[nn.Linear], ways: Sequence[Way]) -> None:
    """Lets modules that are called with the same tensor, or one module, compute in these ways."""
    copies = _copies([member.weight for member in members], ways)
    shared = PartedProduct([member.out_features for member in members]) if len(members) > 1 else None
    for place, module in enumerate(members):
        module.__class__ = ChosenLinear
        assert isinstance(module, ChosenLinear)
        module.dtype, module.ways, module.copies = module.weight.dtype, ways, copies
        module.shared, module.place = shared, place


def _that_fit(weights: Sequence[Tensor]) -> tuple[Way, ...]:
    """The ways whose copies of all weights fit into the memory for them."""
    left = _COPIES * free_bytes("cpu")
    fitting: list[Way] = []
    for way in (packed, split):
        code = _code(way)
        size = 0 if code is None else sum(_copy_bytes(weight, code) for weight in weights)
        if code is not None and size <= left:
            fitting.append(way)
            left -= size
    return tuple(fitting)


def packed_weights(model: nn.Module) -> list[PackedWeight]:
    """The copies that `choose_products` made for a model."""
    chosen = [module for module in model.modules() if isinstance(module, ChosenLinear)]
    return list(dict.fromkeys(packed_weight for module in chosen for packed_weight in module.copies.values()))


def _is_plain(module: nn.Linear) -> bool:
    weight = module.weight
    return (
        is_unchanged(module)
        and weight.device.type == "cpu"
        and weight.is_floating_point()
        and weight.numel() >= _SMALLEST
    )


@cache
def _place(num_rows: int) -> int:
    """The index of the first number in `_ROWS` that is not smaller, or of the last."""
    return min((max(num_rows, 1) * 2 - 1).bit_length() // 2, len(_ROWS) - 1)


def _expected(rows: int, ways: Sequence[Way]) -> Way:
    """The best way as far as is known. AMX multiplies 32 rows at a time. One row takes as long as reading the weight.

    With many rows, copying the weight is a small part of a plain product, and libraries are faster than `packed`.
    """
    best = split if rows > 64 else packed if rows > 1 else plain
    return next(way for way in (best, plain, *ways) if way in ways)


def _fastest(found: Sequence[Sequence[Tensor]], copied: Sequence[Way]) -> tuple[Way, ...]:
    """The way for each number of rows: the expected one, or another if that is clearly faster; with weights of one shape."""
    first = _whole(found[0])
    # Columns of the product cost the same, so a part of a weight stands for all of it
    height = min(len(first), max(1, _PIECE_BYTES // first[0].nbytes))
    counts = {rows: max(1, size // (height * first[0].nbytes)) for rows, size in _BYTES.items()}
    most = max(counts.values())
    pieces = [piece for weights in found[:most] for piece in torch.split(_whole(weights), height)][:most]
    ways: list[Way] = [plain, swapped, *(copied if first.dtype == torch.float32 else [in_float32])]
    operands = {way: [_copies([piece], [way]).get(way, piece) for piece in pieces] for way in ways}
    chosen: list[Way] = []
    for rows in _ROWS:
        expected = _expected(rows, ways)
        tried = [way for way in ways if way is not split or way is expected]
        x = torch.ones(rows, first.shape[1], dtype=first.dtype)
        seconds = _interleaved(x, {way: operands[way][: counts[rows]] for way in tried})
        shares = {way: max(map(truediv, seconds[way], seconds[expected])) for way in tried}
        best = min(shares, key=shares.__getitem__)
        chosen.append(best if shares[best] <= _GAIN else expected)
        least = min(map(min, seconds.values()))
        ways = [way for way in ways if min(seconds.get(way, [0.0])) <= _SLOW * least]
    return tuple(chosen)


def _interleaved(x: Tensor, operands: Mapping[Way, Sequence[Any]]) -> dict[Way, list[float]]:
    """The seconds of each way for all its operands, measured several times in turns; CPU time if there is one thread."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    times: dict[Way, list[float]] = {way: [] for way in operands}
    for turn in range(_TURNS + 1):
        for way, given in operands.items():
            start = clock()
            for operand in given if turn else given[:1]:  # the first call of a shape initialises things
                way(x, operand)
            if turn:
                times[way].append(clock() - start)
    return times
