"""The few kernels, each beside a torch reference with the same signature."""

from __future__ import annotations

from types import ModuleType


def compiled_attention() -> ModuleType | None:
    """The C code of attention on CPUs; None where it was not compiled."""
    try:
        from kvpool.kernels import _paged_attention  # type: ignore[attr-defined]
    except ImportError:
        return None
    module: ModuleType = _paged_attention
    return module
