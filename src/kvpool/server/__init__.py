"""An OpenAI-compatible HTTP server over engines. Needs `pip install '.[server]'`; start it with `kvpool serve`."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvpool.server.app import create_app
    from kvpool.server.auth import Access, Caller
    from kvpool.server.limits import Limits
    from kvpool.server.served_model import LiveRequest, ServedModel
    from kvpool.server.tracing import RequestTrace, Tracing

# Where each public name lives: what `kvpool serve` checks first must not import FastAPI, torch and transformers.
_HOMES = {
    "create_app": ".app",
    "ServedModel": ".served_model",
    "Access": ".auth",
    "Caller": ".auth",
    "Limits": ".limits",
    "LiveRequest": ".served_model",
    "RequestTrace": ".tracing",
    "Tracing": ".tracing",
}

__all__ = ["create_app", "ServedModel", "Access", "Caller", "Limits", "LiveRequest", "RequestTrace", "Tracing"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name], __name__), name)
