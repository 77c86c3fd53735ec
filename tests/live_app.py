"""A web application behind a real socket, in a thread, for tests anywhere in this folder."""

from __future__ import annotations

import asyncio
import contextlib
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

        async def until_told() -> None:
            """uvicorn looks ten times a second whether it shall end, which is most of what a server in a test takes."""
            await self._server.on_tick(0)
            self._told, self._loop = asyncio.Event(), asyncio.get_running_loop()
            started.set()
            await self._told.wait()

        self._server.main_loop = until_told  # type: ignore[method-assign]
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._thread.start()
        assert started.wait(PATIENCE)
        self.port = self._server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def stop(self, *, waits: bool = True) -> None:
        """Ends it, when those who are connected have left, or at once."""
        self._server.should_exit = True
        self._server.force_exit = not waits
        with contextlib.suppress(RuntimeError):  # its loop is gone: somebody stopped it before
            self._loop.call_soon_threadsafe(self._told.set)
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()
