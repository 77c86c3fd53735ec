"""The few kernels, each beside a torch reference with the same signature."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType


def compiled_attention() -> ModuleType | None:
    """The C code of attention on CPUs; None where it was not compiled."""
    return _compiled("_paged_attention")


def compiled_products() -> ModuleType | None:
    """The C code of matrix products on CPUs; None where it was not compiled."""
    return _compiled("_products")


def compiled_split_products() -> ModuleType | None:
    """The C code of matrix products by AMX; None where it was not compiled, or the processor has no AMX."""
    module = _compiled("_split_products")
    return module if module is not None and module.available() else None


def compiled_rows() -> ModuleType | None:
    """The C code of norms and activations on CPUs; None where it was not compiled."""
    return _compiled("_rows")


def _compiled(name: str) -> ModuleType | None:
    try:
        return import_module(f"kvpool.kernels.{name}")
    except ImportError:
        return None
