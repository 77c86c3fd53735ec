"""An OpenAI-compatible HTTP server over engines. Needs `pip install 'kvpool[server]'`; start it with `kvpool serve`."""

from kvpool.server.answering.tracing import RequestTrace, Tracing
from kvpool.server.app import create_app
from kvpool.server.asking.access import Access, Caller
from kvpool.server.asking.limits import Limits
from kvpool.server.asking.served import LiveRequest, ServedModel

__all__ = ["create_app", "ServedModel", "Access", "Caller", "Limits", "LiveRequest", "RequestTrace", "Tracing"]
