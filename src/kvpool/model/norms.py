"""RMS norms as one operation: models write them as six, each of which reads and writes everything.

Which modules are such norms is not read off their names but tried: one whose results are those of `torch.rms_norm` for
numbers of all sizes gets it as its forward. A norm that does anything else, for instance add 1 to its weight, is left alone.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm

_SIZES = (1e-3, 1.0, 100.0)  # of inputs: small ones show the epsilon


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
