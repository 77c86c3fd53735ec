"""What layers do to each row between matrix products: norms, gated activations, rotary positions. In C where it was compiled.

Wheels have `_rows.c` compiled where a C compiler was found; `tools/compile_c.py` does it in a checkout. It takes float32 and
bfloat16 on a CPU, without gradients, and rounds results once. Everything else is done by torch, which is its reference.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from kvpool.kernels import compiled_rows

_KINDS = {torch.float32: 0, torch.bfloat16: 1}


class Activation(NamedTuple):
    """x / (1 + 2 ** -(a * x + b * x ** 3)): two functions that models have, in one form."""

    reference: Callable[[Tensor], Tensor]
    a: float
    b: float = 0.0


_GELU = 2.0 * math.sqrt(2.0 / math.pi) * math.log2(math.e)


def gelu_tanh(x: Tensor) -> Tensor:
    """GELU as tanh approximates it."""
    return functional.gelu(x, approximate="tanh")


ACTIVATIONS = (Activation(functional.silu, math.log2(math.e)), Activation(gelu_tanh, _GELU, 0.044715 * _GELU))


class CompiledRows:
    """The C code with one of its instruction sets."""

    def __init__(self, module: Any, instructions: str | None = None) -> None:
        self._module = module
        self._instructions = instructions or module.instructions()[0]

    def norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """An RMS norm of each row."""
        x, out = _rows(x), torch.empty(x.shape, dtype=x.dtype)
        self._module.norm(*self._work(x), _address(x), weight.data_ptr(), _address(out), epsilon)
        return out

    def gate(self, gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
        """Writes the activation of the gate, times `up`, into the gate."""
        x = _rows(gate)
        address = _address(x)
        self._module.gate(*self._work(x), address, _address(_rows(up)), address, activation.a, activation.b)
        return x.view(gate.shape)

    def rotate(self, x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        """Rotates x [1, heads, tokens, size] by angles [1, tokens, size]."""
        _, heads, tokens, size = x.shape
        out = torch.empty((1, tokens, heads, size), dtype=x.dtype)
        _, head, token, _ = x.stride()
        each = x.element_size()
        work = self._instructions, _KINDS[x.dtype], tokens, size, torch.get_num_threads()
        angles = [(part.data_ptr(), part.stride(1) * each) for part in (cosines, sines)]
        rotated_to = out.data_ptr(), heads * size * each
        self._module.rotate(*work, (x.data_ptr(), token * each), head * each, *angles, rotated_to, heads)
        return out.transpose(1, 2)

    def put(self, rows: Tensor, slots: Tensor, target: Tensor) -> None:
        """Copies row i [head, element], or [head], into `target[block, token]` of slot `slots[i]`; skips slots below 0."""
        rows = rows if rows.ndim == 2 or rows.stride(2) == 1 else rows.contiguous()
        slots = slots.long().contiguous()
        each = target.element_size()
        size = each * rows.shape[2:].numel()
        given = rows.data_ptr(), *(each * stride for stride in rows.stride()[:2])
        blocks = target.data_ptr(), *target.shape[:2], *(each * stride for stride in target.stride()[:3])
        self._module.put(given, rows.shape[1], size, (slots.data_ptr(), slots.numel()), blocks)

    def _work(self, x: Tensor) -> tuple[str, int, int, int, int]:
        size = x.shape[-1]
        return self._instructions, _KINDS[x.dtype], x.numel() // size, size, torch.get_num_threads()


@cache
def code() -> CompiledRows | None:
    """The C code with the best instructions; None where it was not compiled."""
    module = compiled_rows()
    return None if module is None else CompiledRows(module)


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """An RMS norm of each row of x [..., size]."""
    compiled = code()
    if compiled is None or not _takes(x, weight):
        return functional.rms_norm(x, weight.shape, weight.to(x.dtype), epsilon)
    return compiled.norm(x, weight, epsilon)


def gated(gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
    """The activation of `gate` [..., size], times `up`. What is in `gate` may be lost."""
    compiled = code()
    if compiled is None or gate.shape != up.shape or not _takes(gate, up):
        return activation.reference(gate) * up
    return compiled.gate(gate, up, activation)


def rotated(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Turns both halves of each head of x [batch, heads, tokens, size] by angles [batch, tokens, size]."""
    compiled = code()
    if compiled is None or x.shape[0] > 1 or not _takes(x, cosines) or not _takes(x, sines):
        first, second = x.chunk(2, -1)
        return x * cosines.unsqueeze(1) + torch.cat((-second, first), -1) * sines.unsqueeze(1)
    return compiled.rotate(x, cosines, sines)


def _takes(x: Tensor, y: Tensor) -> bool:
    """Whether the C code can compute with both tensors."""
    return (
        x.dtype in _KINDS
        and y.dtype == x.dtype
        and x.is_cpu
        and y.is_cpu
        and not torch.is_grad_enabled()
        and x.stride(-1) == y.stride(-1) == 1
        and x.numel() > 0
    )


def _rows(x: Tensor) -> Tensor:
    """x as it is if its rows lie one after another, otherwise as rows with one distance between them."""
    return x if x.is_contiguous() else x.reshape(-1, x.shape[-1])


def _address(rows: Tensor) -> tuple[int, int]:
    stride = rows.shape[-1] if rows.is_contiguous() else rows.stride(0)
    return rows.data_ptr(), stride * rows.element_size()
