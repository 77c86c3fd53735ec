"""A web application behind a real socket, in a thread, for tests anywhere in this folder."""

from __future__ import annotations

import threading
from typing import Any

import uvicorn

PATIENCE = 30  # seconds


class Live:
    """An application that runs in a thread of its own, in this process."""

    def __init__(self, app: Any, log_level: str = "error") -> None:
        self.app = app
        self._server = uvicorn.Server(uvicorn.Config(app, "127.0.0.1", 0, log_level=log_level, lifespan="on"))
        started = threading.Event()
        startup = self._server.startup

        async def announced(sockets: Any = None) -> None:
            await startup(sockets)
            started.set()

        self._server.startup = announced  # type: ignore[method-assign]
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._thread.start()
        assert started.wait(PATIENCE)
        self.port = self._server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def stop(self, *, waits: bool = True) -> None:
        """Ends it, when those who are connected have left, or at once."""
        self._server.should_exit = True
        self._server.force_exit = not waits
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()
