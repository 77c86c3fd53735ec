"""Makes the layers of a model faster, with the same results. The code of models does not change.

RMS norms become one operation. Models write them as six, each of which reads and writes everything. A module is recognised
by its results, not by its name: if they equal those of `torch.rms_norm` for numbers of all sizes, it becomes its forward. A
norm that does anything else, for instance adds 1 to its weight, stays as it is.

Projections of one input become one matrix product: Q, K and V of a layer, gate and up of its MLP. A decoding step multiplies
few rows by every weight. One wide product reads its weights faster than several narrow ones, of which the smallest do not
fill a GPU. The first of these modules computes the product, and each returns its part of it.

Matrix products on a CPU are done in the way that a short measurement finds fastest for their shape and number of rows. The
library that torch uses for a product, and its speed, depend on the processor, the type and the order of the factors. For
sixteen rows the plain order can take 1.4 times as long as the other one. 16-bit types without instructions for them can take
two hundred times as long as float32. No way keeps a copy of the weights.

None of this can be undone: it is done to a copy (`private_copy`).
"""

from __future__ import annotations

import inspect
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, TypeAlias, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, rms_norm

_SIZES = (1e-3, 1.0, 100.0)  # of inputs; small ones reveal the epsilon
Way: TypeAlias = Callable[[Tensor, Tensor], Tensor]  # x [rows, in] and a weight [out, in] give [rows, out]

_ROWS = (1, 4, 16, 64)  # rows of x that are measured; other numbers use the nearest of these
_SMALLEST = 2**16  # elements of a weight; with fewer, the call costs more than the product
_COLD_BYTES = 2**24  # of different weights, so that they come from memory as in a step, not from a cache
_MOST_SECONDS = 0.75  # of CPU time, for one shape
_GAIN = 0.93  # another way is used if it takes at most this share of the plain product's time
_SLOW = 3.0  # a way that takes so many times as long as the best is not tried with more rows
_PART = 2**18  # elements of a weight that are converted at a time, so that they stay in a core's cache


@torch.no_grad()
def fuse_norms(model: nn.Module) -> int:
    """Gives every module that is exactly an RMS norm with a weight a forward of one operation; returns how many there are.

    With 16-bit weights, their results are rounded once instead of twice.
    """
    norms = [(module, epsilon) for module in model.modules() if (epsilon := _epsilon(module)) is not None]
    for module, epsilon in norms:
        module.forward = partial(_fused, module, epsilon)
    return len(norms)


def _fused(module: Any, epsilon: float, hidden_states: Tensor) -> Tensor:
    weight = module.weight
    return rms_norm(hidden_states, weight.shape, weight.to(hidden_states.dtype), epsilon)


def _epsilon(module: nn.Module) -> float | None:
    """The epsilon of an RMS norm; None if a module is something else, is hooked, or has a replaced forward."""
    weight = getattr(module, "weight", None)
    hooked = "forward" in vars(module) or module._forward_hooks or module._forward_pre_hooks
    if not isinstance(weight, Tensor) or weight.ndim != 1 or hooked or not weight.is_floating_point():
        return None
    if len(list(module.parameters())) != 1 or any(module.children()) or any(module.buffers()):
        return None
    if len(inspect.signature(module.forward).parameters) != 1:  # it may be given a gate, too
        return None
    numbers = {value for value in vars(module).values() if isinstance(value, float) and 0.0 < value < 0.1}
    steps = torch.arange(len(weight), device=weight.device, dtype=torch.float32)
    inputs = torch.stack([size * torch.cos(steps * (1.0 + size)) for size in _SIZES])
    try:
        given = module(inputs)
    except Exception:  # it needs other arguments, so it is no norm
        return None
    for epsilon in numbers:
        wanted = rms_norm(inputs, weight.shape, weight.float(), epsilon)
        same_shape = isinstance(given, Tensor) and given.shape == wanted.shape
        if same_shape and torch.allclose(given.float(), wanted, rtol=1e-4, atol=0):
            return epsilon
    return None


class _Latest:
    """The last product. It is a separate object, because setting an attribute of a module is slow."""

    __slots__ = ("product",)

    def __init__(self) -> None:
        self.product: tuple[Tensor, Sequence[Tensor]] | None = (
            None  # an input and its product, set together for threads
        )


class JoinedProduct(nn.Module):
    """The weights of several `Linear` modules as one matrix. Theirs become views of it, so it takes no more memory."""

    weight: Tensor
    bias: Tensor | None

    def __init__(self, members: Sequence[nn.Linear], *, with_bias: bool = True) -> None:
        super().__init__()
        self.sizes = [member.out_features for member in members]
        self.members = tuple(members)
        self._latest = _Latest()
        # Not parameters and not in the state dict: the model keeps the parameters of the members.
        self.register_buffer("weight", _joined([member.weight for member in members]), persistent=False)
        biases = [member.bias for member in members if member.bias is not None and with_bias]
        self.register_buffer("bias", _joined(biases) if biases else None, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """The products of all members with `x`, one behind the other."""
        return linear(x, self.weight, self.bias)

    def share_no_product(self) -> None:
        """Keeps products of its own: a copy of a module has those of its original, which another thread may run."""
        self._latest = _Latest()

    def part(self, place: int, x: Tensor) -> Tensor:
        """The product of member number `place` with `x`: that of the first member's call, if it was with the same tensor."""
        latest = self._latest.product
        if place == 0 or latest is None or latest[0] is not x:
            latest = self._latest.product = x, torch.split_with_sizes(self(x), self.sizes, dim=-1)
        if place == len(self.sizes) - 1:  # the last member frees the product
            self._latest.product = None
        return latest[1][place]


class ProjectionPart(nn.Linear):
    """A `Linear` whose product is computed together with others; alone if its weights are being trained."""

    joined: JoinedProduct
    place: int

    def forward(self, input: Tensor) -> Tensor:
        trained = torch.is_grad_enabled() and self.weight.requires_grad
        return linear(input, self.weight, self.bias) if trained else self.joined.part(self.place, input)


@torch.no_grad()
def join_projections(model: nn.Module, run: Callable[[], object]) -> int:
    """Joins the `Linear` modules that `run`, one forward pass of the model, calls in a row with the same tensor.

    Returns how many products became parts of others. Parameters keep their names and values. Modules stay as they are if
    they are called twice, quantised, hooked, or share their weights.
    """
    groups = _called_with_the_same_input(model, run)
    for members in groups:
        joined = JoinedProduct(members)
        for place, member in enumerate(members):
            member.__class__ = ProjectionPart
            assert isinstance(member, ProjectionPart)
            member.joined, member.place = joined, place
    return sum(len(members) - 1 for members in groups)


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    """One tensor with all rows. The given tensors become views of it one by one, so that little memory is used twice.

    Tensors that lie one after another, because an engine before this one has joined them, stay where they are.
    """
    first = tensors[0]
    sizes = [len(tensor) for tensor in tensors]
    if all(_follows(one, other) for one, other in pairwise(tensors)):
        return first.detach().as_strided((sum(sizes), *first.shape[1:]), first.stride())
    whole = first.new_empty(sum(sizes), *first.shape[1:])
    for tensor, rows in zip(tensors, torch.split(whole, sizes), strict=True):
        rows.copy_(tensor)
        tensor.data = rows
    return whole


def _follows(one: Tensor, other: Tensor) -> bool:
    """Whether the second tensor lies behind the first in the same memory."""
    same = one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
    return same and one.is_contiguous() and other.is_contiguous() and other.data_ptr() == one.data_ptr() + one.nbytes


def _called_with_the_same_input(model: nn.Module, run: Callable[[], object]) -> list[list[nn.Linear]]:
    calls: list[tuple[nn.Linear, Tensor]] = []

    def note(module: Any, args: tuple[Any, ...]) -> None:
        calls.append((module, args[0]))

    candidates = _plain_linears(model)
    hooks = [module.register_forward_pre_hook(note) for module in candidates]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    times = Counter(id(module) for module, _ in calls)
    groups: list[list[nn.Linear]] = [[calls[0][0]]] if calls else []
    for (before, seen), (module, x) in pairwise(calls):
        once = times[id(before)] == times[id(module)] == 1
        if once and x is seen and _alike(before, module):
            groups[-1].append(module)
        else:
            groups.append([module])
    return [group for group in groups if len(group) > 1]


def _plain_linears(model: nn.Module) -> list[nn.Linear]:
    owners = Counter(id(p) for module in model.modules() for p in module.parameters(recurse=False))
    return [
        module
        for module in model.modules()
        if _is_unchanged(module) and all(owners[id(parameter)] == 1 for parameter in module.parameters())
    ]


def _is_unchanged(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether a module is a `Linear` as torch has it: without hooks, and with a weight that is an ordinary tensor.

    torchao keeps quantised weights in a `Linear`, as tensors of classes that know few operations.
    """
    hooked = "forward" in vars(module) or module._forward_hooks or module._forward_pre_hooks
    return type(module) is nn.Linear and not hooked and type(module.weight) is nn.Parameter


def _alike(one: nn.Linear, other: nn.Linear) -> bool:
    """Whether both products may be joined: same types and devices, and both or none add a bias."""
    same = (one.weight.dtype, one.weight.device) == (other.weight.dtype, other.weight.device)
    return same and (one.bias is None) == (other.bias is None)


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


class ChosenLinear(nn.Linear):
    """A `Linear` whose product is done in the chosen ways; with gradients, as torch does it."""

    ways: Sequence[Way]  # for each of `_ROWS`

    def forward(self, input: Tensor) -> Tensor:
        if torch.is_grad_enabled() or not input.numel():
            return linear(input, self.weight, self.bias)
        x = input.reshape(-1, self.in_features)
        way = self.ways[_place(len(x))]
        if way is plain:
            return linear(input, self.weight, self.bias)
        product = way(x, self.weight)
        if self.bias is not None:
            product += self.bias
        return product.view(*input.shape[:-1], self.out_features)


_measured: dict[tuple[Any, ...], tuple[Way, ...]] = {}  # by shape, type and threads, for all engines of the process


@torch.inference_mode()
def choose_products(model: nn.Module) -> int:
    """Chooses the fastest way for each `Linear` module of a model on a CPU; returns how many are not plain in all cases.

    Parameters stay as they are, and so do modules that are small, hooked or derived. Takes some tenths of a second for each
    shape that is new to the process.
    """
    alike: dict[tuple[Any, ...], list[nn.Linear]] = {}
    for module in model.modules():
        if isinstance(module, nn.Linear) and _is_plain(module):
            key = (*module.weight.shape, module.weight.dtype, torch.get_num_threads())
            alike.setdefault(key, []).append(module)
    changed = 0
    for key, modules in alike.items():
        if key not in _measured:
            _measured[key] = _fastest([module.weight for module in modules])
        if any(way is not plain for way in _measured[key]):
            changed += len(modules)
            for module in modules:
                module.__class__ = ChosenLinear
                assert isinstance(module, ChosenLinear)
                module.ways = _measured[key]
    return changed


def _is_plain(module: nn.Linear) -> bool:
    weight = module.weight
    return (
        _is_unchanged(module)
        and weight.device.type == "cpu"
        and weight.is_floating_point()
        and weight.numel() >= _SMALLEST
    )


def _place(num_rows: int) -> int:
    """The index of the nearest number in `_ROWS`, by ratio."""
    return min((max(num_rows, 1) * 2 - 1).bit_length() // 2, len(_ROWS) - 1)


def _fastest(weights: Sequence[Tensor]) -> tuple[Way, ...]:
    """The fastest way for each number of rows. When the time is up, larger numbers use the way of the last measured one."""
    first = weights[0]
    cold = weights[: max(1, _COLD_BYTES // (first.numel() * first.element_size()))]
    ways = [plain, swapped] if first.dtype == torch.float32 else [plain, swapped, in_float32]
    chosen: list[Way] = []
    began = time.process_time()
    took = 0.0
    for rows in _ROWS:
        start = time.process_time()
        if chosen and start - began + 4 * took > _MOST_SECONDS:
            chosen.append(chosen[-1])
            continue
        x = torch.ones(rows, first.shape[1], dtype=first.dtype)
        seconds = [min(times) for times in _interleaved(x, cold, ways)]
        took = time.process_time() - start
        best = min(range(len(ways)), key=seconds.__getitem__)
        keeps_plain = plain in ways and seconds[best] >= _GAIN * seconds[ways.index(plain)]
        chosen.append(plain if keeps_plain else ways[best])
        ways = [way for way, each in zip(ways, seconds, strict=True) if each <= _SLOW * seconds[best]]
    return tuple(chosen)


def _interleaved(x: Tensor, weights: Sequence[Tensor], ways: Sequence[Way]) -> list[list[float]]:
    """The seconds of each way for all weights, measured several times in turns; CPU time if there is one thread."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    times: list[list[float]] = [[] for _ in ways]
    for turn in range(3):
        for way, list_of_times in zip(ways, times, strict=True):
            start = clock()
            for weight in weights if turn else weights[:1]:  # the first call of a shape initialises things
                way(x, weight)
            if turn:
                list_of_times.append(clock() - start)
    return times
