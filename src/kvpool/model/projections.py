"""Projections of one input as one matrix product: Q, K and V of a layer, gate and up of its MLP.

A decoding step multiplies few rows by every weight. One wide product then reads its weights faster than several narrow
ones, the smallest of which (K and V of few heads) do not fill a GPU. Models stay as they are written: the modules that
they call hand out parts of a product that the first of them computed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear


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
