"""Makes the layers of a model faster, with the same results. The code of models does not change.

RMS norms become one operation. Models write them as six, each of which reads and writes everything. A module is recognised
by its results, not by its name: if they equal those of `torch.rms_norm` for numbers of all sizes, it becomes its forward. A
norm that does anything else, for instance adds 1 to its weight, stays as it is.

Experts that transformers calls through its `ExpertsInterface` multiply steps of few tokens by a kernel, on a GPU.

Projections of one input become one matrix product: Q, K and V of a layer, gate and up of its MLP. A decoding step multiplies
few rows by every weight. One wide product reads its weights faster than several narrow ones, of which the smallest do not
fill a GPU. The first of these modules computes the product, and each returns its part of it.

None of this can be undone: it is done to a copy (`private_copy`).
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, TypeAlias, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, rms_norm

from kvpool.kernels.experts import expert_product
from kvpool.kernels.layout import MOST_CHOICES

_SIZES = (1e-3, 1.0, 100.0)  # of inputs; small ones reveal the epsilon
# By name of a product, its inputs and the shares of choices that scale it, if any: what is added to it
Added: TypeAlias = Callable[[str, Tensor, Tensor | None], Tensor | None]
_PLAIN_TYPES = (torch.float32, torch.bfloat16, torch.float16)  # others need scales


def is_hooked(module: nn.Module) -> bool:
    """Whether calls of a module do something else than its class says."""
    return bool("forward" in vars(module) or module._forward_hooks or module._forward_pre_hooks)


def is_unchanged(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether a module is a `Linear` as torch has it: without hooks, and with a weight that is an ordinary tensor.

    torchao keeps quantised weights in a `Linear`, as tensors of classes that know few operations.
    """
    return type(module) is nn.Linear and not is_hooked(module) and type(module.weight) is nn.Parameter


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
    return _rms_norm(hidden_states, module.weight, epsilon)


def _rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return rms_norm(x, weight.shape, weight.to(x.dtype), epsilon)


def _epsilon(module: nn.Module) -> float | None:
    """The epsilon of an RMS norm; None if a module is something else, is hooked, or has a replaced forward."""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or weight.ndim != 1 or is_hooked(module) or not weight.is_floating_point():
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
        wanted = _rms_norm(inputs, weight.float(), epsilon)
        same_shape = isinstance(given, Tensor) and given.shape == wanted.shape
        if same_shape and torch.allclose(given.float(), wanted, rtol=1e-4, atol=0):
            return epsilon
    return None


def _differ(one: Tensor, other: Tensor) -> float:
    """The largest difference of two rows, as a part of the row."""
    difference = (one.double() - other.double()).norm(dim=-1) / other.double().norm(dim=-1).clamp_min(1e-30)
    return float(difference.max())


@torch.no_grad()
def fuse_experts(model: nn.Module) -> int:
    """Gives experts a forward of two products for steps of few tokens, which a graph can capture; returns how many modules.

    Those are the modules that transformers has an `ExpertsInterface` for, if both forwards give the same. What is between
    their products stays as it is. Steps of more tokens are computed by their own forward.
    """
    found = [module for module in model.modules() if _is_experts(module)]
    for module in found:
        module.forward = partial(_experts, module, module.forward)
    return len(found)


def has_experts(model: nn.Module) -> bool:
    """Whether `fuse_experts` has found some."""
    return any(getattr(vars(module).get("forward"), "func", None) is _experts for module in model.modules())


def _experts(module: Any, own: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    if top_k_index.numel() > MOST_CHOICES:
        return own(hidden_states, top_k_index, top_k_weights)  # type: ignore[no-any-return]
    return few_choices(module, hidden_states, top_k_index, top_k_weights)


def few_choices(
    module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, added: Added | None = None
) -> Tensor:
    """What a mixture of experts gives. `added` says what is added to its products for each choice, if anything is."""
    first = first_product(module)
    inner = expert_product(hidden_states, *expert_weights(module, first), top_k_index)
    if added is not None and (more := added(first, hidden_states, None)) is not None:
        inner = inner + more
    inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
    outer: Tensor = expert_product(inner, *expert_weights(module, "down_proj"), top_k_index, top_k_weights)
    if added is not None and (more := added("down_proj", inner, top_k_weights)) is not None:
        outer = outer + more
    return outer.view(*top_k_index.shape, -1).sum(dim=1)


def is_experts(module: nn.Module) -> bool:
    """Whether `few_choices` computes what a module does. On a GPU those modules do that `fuse_experts` has found."""
    if getattr(vars(module).get("forward"), "func", None) is _experts:
        return True
    return all(weight.device.type == "cpu" for weight in module.parameters()) and _is_experts(module)


def first_product(module: Any) -> str:
    """The name of the first of the two weights of experts."""
    return "gate_up_proj" if module.has_gate else "up_proj"


def expert_weights(module: Any, name: str) -> tuple[Tensor, Tensor | None]:
    """The weights [expert, out, in] and the biases of one product of experts."""
    weights = getattr(module, name)
    return weights.transpose(1, 2) if module.is_transposed else weights, getattr(module, f"{name}_bias", None)


def _is_experts(module: Any) -> bool:
    """Whether a module is a mixture of experts that `few_choices` computes as well."""
    names = ("has_gate", "is_transposed", "_apply_gate", "num_experts", "down_proj")
    if is_hooked(module) or not all(hasattr(module, name) for name in names):
        return False
    if not all(type(weight) is nn.Parameter and weight.dtype in _PLAIN_TYPES for weight in module.parameters()):
        return False
    _, num_outputs, _ = expert_weights(module, "down_proj")[0].shape
    chosen = torch.arange(2 * min(2, module.num_experts), device=module.down_proj.device).view(2, -1)
    chosen = chosen % module.num_experts
    steps = torch.arange(2 * num_outputs, device=chosen.device, dtype=torch.float32)
    inputs = torch.cos(1.7 * steps).view(2, -1).to(module.down_proj.dtype)
    shares = torch.softmax(chosen.float(), dim=-1).to(inputs.dtype)
    try:
        given = module(inputs, chosen, shares)
        wanted = few_choices(module, inputs, chosen, shares)
    except Exception:  # it needs other arguments
        return False
    same_shape = isinstance(given, Tensor) and given.shape == wanted.shape
    return same_shape and _differ(given, wanted) < 8 * torch.finfo(inputs.dtype).eps


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


class JoinedProduct(nn.Module):
    """The weights of several `Linear` modules as one matrix. Theirs become views of it, so it takes no more memory."""

    weight: Tensor
    bias: Tensor | None

    def __init__(self, members: Sequence[nn.Linear]) -> None:
        super().__init__()
        self.members = tuple(members)
        self.share_no_product()
        # Not parameters and not in the state dict: the model keeps the parameters of the members.
        self.register_buffer("weight", _joined([member.weight for member in members]), persistent=False)
        biases = [member.bias for member in members if member.bias is not None]
        self.register_buffer("bias", _joined(biases) if biases else None, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """The products of all members with `x`, one behind the other."""
        return linear(x, self.weight, self.bias)

    def share_no_product(self) -> None:
        """Keeps products of its own: a copy of a module has those of its original, which another thread may run."""
        self._shared = PartedProduct([member.out_features for member in self.members])

    def part(self, place: int, x: Tensor) -> Tensor:
        """The product of member number `place` with `x`."""
        return self._shared.part(place, x, self)


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
    groups = called_with_the_same_input(model, run)
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


@torch.no_grad()
def called_with_the_same_input(model: nn.Module, run: Callable[[], object]) -> list[list[nn.Linear]]:
    """The `Linear` modules that `run`, one forward pass of the model, calls in a row with the same tensor."""
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
        if is_unchanged(module) and all(owners[id(parameter)] == 1 for parameter in module.parameters())
    ]


def _alike(one: nn.Linear, other: nn.Linear) -> bool:
    """Whether both products may be joined: same types and devices, and both or none add a bias."""
    same = (one.weight.dtype, one.weight.device) == (other.weight.dtype, other.weight.device)
    return same and (one.bias is None) == (other.bias is None)
