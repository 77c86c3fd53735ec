"""An OpenAI-compatible HTTP server over engines. Needs `pip install 'kvpool[server]'`; start it with `kvpool serve`."""

from kvpool.server.app import create_app
from kvpool.server.auth import Access, Caller
from kvpool.server.limits import Limits
from kvpool.server.served_model import LiveRequest, ServedModel
from kvpool.server.tracing import RequestTrace, Tracing

__all__ = ["create_app", "ServedModel", "Access", "Caller", "Limits", "LiveRequest", "RequestTrace", "Tracing"]
