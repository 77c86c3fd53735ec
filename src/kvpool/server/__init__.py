"""An OpenAI-compatible HTTP server over engines. Needs `pip install 'kvpool[server]'`; start it with `kvpool serve`."""

from kvpool.server.access import Access, Caller
from kvpool.server.app import create_app
from kvpool.server.limits import Limits
from kvpool.server.served import ServedModel

__all__ = ["create_app", "ServedModel", "Access", "Caller", "Limits"]
