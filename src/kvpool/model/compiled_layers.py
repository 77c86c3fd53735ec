"""Layers through torch.compile, and the model as it is for those who look at it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from kvpool.errors import UnsupportedModelError


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
