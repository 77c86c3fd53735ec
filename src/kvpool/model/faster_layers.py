"""Layers of a model done faster, with the results that they had. Models stay as they are written.

RMS norms become one operation; models write them as six, each of which reads and writes everything. Which modules are such
norms is not read off their names but tried: a module whose results are those of `torch.rms_norm` for numbers of all sizes
gets it as its forward. A norm that does anything else, for instance add 1 to its weight, is left alone.

Projections of one input become one matrix product: Q, K and V of a layer, gate and up of its MLP. A decoding step multiplies
few rows by every weight, and one wide product reads its weights faster than several narrow ones, the smallest of which do
not fill a GPU. The modules that the model calls hand out parts of a product that the first of them computed.

Matrix products on a CPU are each done in the way that a short measurement found fastest for its shape and number of rows.
Which library torch hands a product to, and how fast that is, depends on the processor, the type and the order of the
factors: for sixteen rows the plain order can take 1.4 times as long as the other one, and 16-bit types without instructions
for them two hundred times as long as float32. No way keeps a copy of the weights.

On GPUs, layers can go through torch.compile; `uncompiled` is the model as it was, for those who look at it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, rms_norm

from kvpool.errors import UnsupportedModelError

_SIZES = (1e-3, 1.0, 100.0)  # of inputs: small ones show the epsilon
Way: TypeAlias = Callable[[Tensor, Tensor], Tensor]  # x [rows, in] and a weight [out, in] give [rows, out]

_ROWS = (1, 4, 16, 64)  # of x; other numbers are done as the nearest of these
_SMALLEST = 2**16  # elements of a weight: below that, calling costs more than multiplying
_COLD_BYTES = 2**24  # of different weights: those of a step come from memory, not from a cache
_MOST_SECONDS = 0.75  # of CPU time, for one shape
_GAIN = 0.93  # of the plain product's time, from which on another way is worth it
_SLOW = 3.0  # times the best: not tried with more rows
_PART = 2**18  # elements of a weight that are converted at a time: they stay in a core's cache


@torch.no_grad()
def fuse_norms(model: nn.Module) -> int:
    """Gives every module that is exactly an RMS norm with a weight a forward of one operation; how many there are.

    Their results are rounded once instead of twice where weights have 16 bits.
    """
    norms = [(module, epsilon) for module in model.modules() if (epsilon := _epsilon(module)) is not None]
    for module, epsilon in norms:
        module.forward = partial(_fused, module, epsilon)
    return len(norms)


def separate_norms(model: nn.Module) -> None:
    """Undoes `fuse_norms`, for whoever reads the model's own code: torch.compile fuses more than the norms."""
    for module in model.modules():
        given = vars(module).get("forward")
        if isinstance(given, partial) and given.func is _fused:
            del module.forward


def _fused(module: Any, epsilon: float, hidden_states: Tensor) -> Tensor:
    weight = module.weight
    return rms_norm(hidden_states, weight.shape, weight.to(hidden_states.dtype), epsilon)


def _epsilon(module: nn.Module) -> float | None:
    """The epsilon of an RMS norm; None if a module is anything else, hooked, or has a forward of its own."""
    weight = getattr(module, "weight", None)
    hooked = "forward" in vars(module) or module._forward_hooks or module._forward_pre_hooks
    if not isinstance(weight, Tensor) or weight.ndim != 1 or hooked or not weight.is_floating_point():
        return None
    if len(list(module.parameters())) != 1 or any(module.children()) or any(module.buffers()):
        return None
    numbers = {value for value in vars(module).values() if isinstance(value, float) and 0.0 < value < 0.1}
    steps = torch.arange(len(weight), device=weight.device)
    inputs = torch.stack([size * torch.cos(steps * (1.0 + size)) for size in _SIZES])
    try:
        given = module(inputs)
    except Exception:  # it wants something else: it is no norm
        return None
    for epsilon in numbers:
        wanted = rms_norm(inputs, weight.shape, weight.float(), epsilon)
        same_shape = isinstance(given, Tensor) and given.shape == wanted.shape
        if same_shape and torch.allclose(given.float(), wanted, rtol=1e-4, atol=0):
            return epsilon
    return None


class _Latest:
    """What was computed last. An object of its own: setting an attribute of a module takes several calls."""

    __slots__ = ("product",)

    def __init__(self) -> None:
        self.product: tuple[Tensor, Sequence[Tensor]] | None = None  # an input and its product: one value, for threads


class JoinedProduct(nn.Module):
    """The weights of several `Linear` modules as one matrix, of which theirs become views: no memory is added."""

    weight: Tensor
    bias: Tensor | None

    def __init__(self, members: Sequence[nn.Linear]) -> None:
        super().__init__()
        self.sizes = [member.out_features for member in members]
        self._members = tuple(members)
        self._latest = _Latest()
        self.join()

    @torch.no_grad()
    def join(self) -> None:
        """Puts the weights of the members, wherever they are, into one matrix."""
        # Not parameters, and in no state dict: those of the members are the model's.
        self.register_buffer("weight", _joined([member.weight for member in self._members]), persistent=False)
        biases = [member.bias for member in self._members if member.bias is not None]
        self.register_buffer("bias", _joined(biases) if biases else None, persistent=False)

    def join_again(self) -> None:
        """Members have moved or were converted, perhaps: once all of them have, their new weights become views again."""
        alike = all(_alike(self._members[0], member) for member in self._members)
        rows = torch.split(self.weight, self.sizes)
        if alike and any(m.weight.data_ptr() != part.data_ptr() for m, part in zip(self._members, rows, strict=True)):
            self.join()

    def part(self, place: int, x: Tensor) -> Tensor | None:
        """What member number `place` makes of `x`; None if the first member was not asked about the same tensor before."""
        latest = self._latest.product
        if place == 0:
            product = linear(x, self.weight, self.bias)
            latest = self._latest.product = x, torch.split_with_sizes(product, self.sizes, dim=-1)
        elif latest is None or latest[0] is not x:
            return None
        if place == len(self.sizes) - 1:  # nothing outlives the layer
            self._latest.product = None
        return latest[1][place]


class ProjectionPart(nn.Linear):
    """A `Linear` whose product is computed together with others'; by itself where its weights are trained."""

    joined: JoinedProduct
    place: int

    def forward(self, input: Tensor) -> Tensor:
        trained = torch.is_grad_enabled() and self.weight.requires_grad
        part = None if trained else self.joined.part(self.place, input)
        return linear(input, self.weight, self.bias) if part is None else part

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ProjectionPart:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.joined.join_again()
        return self


@torch.no_grad()
def join_projections(model: nn.Module, run: Callable[[], object]) -> int:
    """Joins the `Linear` modules that `run`, one forward pass of the model, calls in a row with the same tensor.

    Returns how many products became parts of others. Parameters keep their names and values. Modules are left alone that
    are anything but plain: called twice, quantised, hooked, or sharing their weights.
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
    """One tensor of all rows; the given ones become views of it, one by one, so that little is there twice."""
    whole = tensors[0].new_empty(sum(len(tensor) for tensor in tensors), *tensors[0].shape[1:])
    for tensor, rows in zip(tensors, torch.split(whole, [len(tensor) for tensor in tensors]), strict=True):
        rows.copy_(tensor)
        tensor.data = rows
    return whole


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
        if type(module) is nn.Linear
        and "forward" not in vars(module)
        and not module._forward_hooks
        and not module._forward_pre_hooks
        and all(owners[id(parameter)] == 1 for parameter in module.parameters())
    ]


def _alike(one: nn.Linear, other: nn.Linear) -> bool:
    """Whether both products may be one: equal types and places, and either both or none add a bias."""
    same = (one.weight.dtype, one.weight.device) == (other.weight.dtype, other.weight.device)
    return same and (one.bias is None) == (other.bias is None)


def plain(x: Tensor, weight: Tensor) -> Tensor:
    """As torch does it."""
    return linear(x, weight)


def swapped(x: Tensor, weight: Tensor) -> Tensor:
    """The weight first: torch sends some orders to oneDNN and others to BLAS."""
    return torch.mm(weight, x.t()).t().contiguous()


def in_float32(x: Tensor, weight: Tensor) -> Tensor:
    """Part by part converted to float32, which every CPU multiplies fast; the result is rounded once."""
    columns = x.float().t()
    product = torch.empty(len(weight), len(x))
    step = max(1, _PART // weight.shape[1])
    for first in range(0, len(weight), step):
        torch.mm(weight[first : first + step].float(), columns, out=product[first : first + step])
    return product.t().to(x.dtype).contiguous()


class ChosenLinear(nn.Linear):
    """A `Linear` whose product is done in chosen ways; as torch does it where gradients are wanted."""

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
    """Gives the `Linear` modules of a model on a CPU the fastest way for every number of rows; how many are not all plain.

    Parameters stay as they are. Modules are left alone that are small, hooked, or anything but plain. Takes some tenths of
    a second for each shape that the process has not met.
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


def plain_products(model: nn.Module) -> None:
    """Undoes `choose_products`."""
    for module in [each for each in model.modules() if isinstance(each, ChosenLinear)]:
        del module.ways
        object.__setattr__(module, "__class__", nn.Linear)


def _is_plain(module: nn.Linear) -> bool:
    hooked = "forward" in vars(module) or module._forward_hooks or module._forward_pre_hooks
    if type(module) is not nn.Linear or hooked:
        return False
    weight = module.weight
    return weight.device.type == "cpu" and weight.is_floating_point() and weight.numel() >= _SMALLEST


def _place(num_rows: int) -> int:
    """Which of `_ROWS` stands for so many: the nearest by ratio."""
    return min((max(num_rows, 1) * 2 - 1).bit_length() // 2, len(_ROWS) - 1)


def _fastest(weights: Sequence[Tensor]) -> tuple[Way, ...]:
    """The way for each number of rows, measured as long as there is time; larger numbers are then done like the last."""
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
    """How long each way takes for all weights, several times, in turns: CPU time where one thread does it all."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    times: list[list[float]] = [[] for _ in ways]
    for turn in range(3):
        for way, list_of_times in zip(ways, times, strict=True):
            start = clock()
            for weight in weights if turn else weights[:1]:  # the first call of a shape makes what it needs
                way(x, weight)
            if turn:
                list_of_times.append(clock() - start)
    return times


def compile_each_layer(model: Any, num_layers: int) -> None:
    """Compiles every decoder layer, for any number of tokens; attention stays as it is (see `hook`)."""
    lists = [m for m in model.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == num_layers]
    if not lists:
        raise UnsupportedModelError(f"{type(model).__name__} has no list of {num_layers} layers; use compile=False")
    for layer in lists[0]:
        if layer._compiled_call_impl is None:  # an engine before this one may have done so
            layer.compile(dynamic=True)


@contextmanager
def uncompiled(model: Any) -> Iterator[None]:
    """Runs modules that were compiled as they are.

    Probes pass arguments and classes that no step does. Compiled layers would be compiled again for each, until torch.compile
    gives them up, for the steps too.
    """
    compiled = [(module, module._compiled_call_impl) for module in model.modules() if module._compiled_call_impl]
    for module, _ in compiled:
        module._compiled_call_impl = None
    try:
        yield
    finally:
        for module, call in compiled:
            module._compiled_call_impl = call
