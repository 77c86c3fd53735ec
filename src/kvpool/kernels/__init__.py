"""The few kernels, each beside a torch reference with the same signature."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType


def compiled_attention() -> ModuleType | None:
    """The C code of attention on CPUs; None where it was not compiled."""
    try:
        return import_module("kvpool.kernels._paged_attention")
    except ImportError:
        return None
