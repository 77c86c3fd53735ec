"""Matrix products on a CPU, each done in the way that a short measurement found fastest for its shape and number of rows.

Which library torch hands a product to, and how fast that is, depends on the processor, the type and the order of the
factors: for sixteen rows the plain order can take 1.4 times as long as the other one, and 16-bit types without
instructions for them two hundred times as long as float32. Weights stay where and as they are: no way keeps a copy.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

Way: TypeAlias = Callable[[Tensor, Tensor], Tensor]  # x [rows, in] and a weight [out, in] give [rows, out]

_ROWS = (1, 4, 16, 64)  # of x; other numbers are done as the nearest of these
_SMALLEST = 2**16  # elements of a weight: below that, calling costs more than multiplying
_COLD_BYTES = 2**24  # of different weights: those of a step come from memory, not from a cache
_MOST_SECONDS = 0.75  # of CPU time, for one shape
_GAIN = 0.93  # of the plain product's time, from which on another way is worth it
_SLOW = 3.0  # times the best: not tried with more rows
_PART = 2**18  # elements of a weight that are converted at a time: they stay in a core's cache


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
