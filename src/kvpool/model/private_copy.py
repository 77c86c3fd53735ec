"""The engine's own copy of a model: the same weights in modules that nobody else has, so that a model stays its owner's.

An engine sets attention, replaces forwards, joins matrix products and compiles layers. It does so in its copy. The owner may
meanwhile train the model, run it in another thread, change its attention or give it to a second engine. Only the weights are
shared; `SharedWeights` notices when they change.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from kvpool.checks import show
from kvpool.errors import InvalidArgumentError, SequenceStateError

_SAMPLES = 8  # numbers of each weight that are compared


def private_copy(model: Any, convert: Callable[[Tensor], Tensor] | None = None) -> Any:
    """A copy of a model in eval mode. It has the same parameters and buffers, or those that `convert` makes of them.

    Bound methods and partial functions in modules are bound to the copy. Code that torch.compile made stays with the owner,
    and so does the autocast that Accelerator.prepare puts around a forward.
    """
    check_model(model)
    rebound = _Rebound(model)
    for module in model.modules():
        twin = rebound.modules[id(module)]
        vars(twin).update({name: rebound(value) for name, value in vars(module).items()})
        vars(twin).pop("_compiled_call_impl", None)
        if "_original_forward" in vars(twin):  # of Accelerator.prepare
            vars(twin)["forward"] = vars(twin)["_original_forward"]
    twin = rebound(model)
    if convert is not None:
        _replace_tensors(twin, convert)
    return twin.eval()


def check_model(model: object) -> None:
    """Refuses what is no model of transformers."""
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        raise InvalidArgumentError(f"{show(model)} is no model of transformers (PreTrainedModel)")


class _Rebound:
    """Gives values of the original's attributes the copies of its modules and configurations."""

    def __init__(self, model: Any) -> None:
        self.modules = {id(module): object.__new__(type(module)) for module in model.modules()}
        self._configs: dict[int, Any] = {}  # of copy.deepcopy: nested configurations stay the same objects

    def __call__(self, value: Any) -> Any:
        from transformers import PretrainedConfig

        if isinstance(value, nn.Module):
            return self.modules.get(id(value), value)
        if isinstance(value, PretrainedConfig):
            return copy.deepcopy(value, self._configs)
        if isinstance(value, MethodType):
            return MethodType(self(value.__func__), self(value.__self__))
        if isinstance(value, partial):
            bound = partial(self(value.func), *map(self, value.args), **self(value.keywords))
            vars(bound).update(self(vars(value)))
            return bound
        if type(value) in (list, tuple, set):
            return type(value)(map(self, value))
        if type(value) in (dict, OrderedDict):
            return type(value)((key, self(each)) for key, each in value.items())
        return value


def _replace_tensors(model: nn.Module, convert: Callable[[Tensor], Tensor]) -> None:
    made: dict[int, Any] = {}  # tied weights stay tied
    for module in model.modules():
        for kept in (module._parameters, module._buffers):
            for name, tensor in kept.items():
                if tensor is not None and id(tensor) not in made:
                    new = convert(tensor.detach())
                    made[id(tensor)] = nn.Parameter(new, requires_grad=False) if kept is module._parameters else new
                if tensor is not None:
                    kept[name] = made[id(tensor)]


@contextmanager
def without_callers_state(device: torch.device) -> Iterator[None]:
    """Runs without the autocast, default device and inference mode of the calling thread."""
    elsewhere = torch.get_default_device().type != "cpu"
    with torch.autocast(device.type, enabled=False), torch.inference_mode(False):
        if elsewhere:
            with torch.device("cpu"):
                yield
        else:
            yield


class SharedWeights:
    """Notices that the owner of a model changed its weights or buffers.

    Numbers that change in place are seen by the engine, too: it must forget what it has cached. torch counts such
    changes, but not those through `.data` and in inference mode, so some numbers of each weight are compared as well. Weights
    that are replaced or moved are not followed, because CUDA graphs and joined products have the old ones. A buffer that is
    replaced is none of the engine's any more: models do that themselves while they run.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model_name = type(model).__name__
        modules = [(name, module) for name, module in model.named_modules() if module._modules or module._parameters]
        self._names = [name for name, _ in modules]
        self._places = [(module._modules, module._parameters) for _, module in modules]
        self._members = self._identities()
        # Also what is no parameter: packed weights and buffers, those that are not saved too
        others = *model.state_dict(keep_vars=True).values(), *model.buffers()
        self._weights = list({id(tensor): tensor for tensor in (*model.parameters(), *others)}.values())
        self._weights = [tensor for tensor in self._weights if type(tensor) in (Tensor, nn.Parameter)]
        self._kept = [tensor.detach() for tensor in self._weights]  # graphs may read them until the engine closes
        self._counted = [tensor for tensor in self._weights if not tensor.is_inference()]
        self._views = _sampled(self._kept)
        self._addresses = self._find()
        self._versions = self._count()
        self._samples = self._sample()

    def changed(self, *, compare: bool = True) -> bool:
        """Whether numbers have changed since the last call. Raises SequenceStateError if weights or modules were replaced.

        It waits for the device if it has to `compare` numbers.
        """
        if (members := self._identities()) != self._members:
            different = next(i for i, pair in enumerate(zip(members, self._members, strict=True)) if pair[0] != pair[1])
            raise self._replaced(f"weights or modules in {self._names[different] or 'it'}")
        if self._find() != self._addresses:
            raise self._replaced("weights")
        versions = self._count()
        samples = self._sample() if compare else self._samples
        changed = versions != self._versions or samples != self._samples
        self._versions, self._samples = versions, samples
        return changed

    def _replaced(self, what: str) -> SequenceStateError:
        return SequenceStateError(
            f"{what} of the {self._model_name} were replaced or moved after this engine or pool was made; close it and make "
            "a new one"
        )

    def _identities(self) -> list[tuple[int, ...]]:
        return [(*map(id, modules.values()), *map(id, weights.values())) for modules, weights in self._places]

    def _find(self) -> list[int]:
        return list(map(Tensor.data_ptr, self._weights))

    def _count(self) -> list[int]:
        return [tensor._version for tensor in self._counted]

    def _sample(self) -> list[bytes]:
        with torch.inference_mode():
            return [torch.cat(views).cpu().view(torch.uint8).numpy().tobytes() for views in self._views]


def _sampled(tensors: list[Tensor]) -> list[list[Tensor]]:
    """Views of some numbers of each tensor, those of one type and device together."""
    views: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        if tensor.numel() and tensor.is_contiguous():
            step = max(1, tensor.numel() // _SAMPLES)
            views.setdefault((tensor.dtype, tensor.device), []).append(tensor.view(-1)[::step][:_SAMPLES])
    return list(views.values())
