"""uvicorn's protocol with bounds for the head of a request: neither its size nor its sending may go on for ever."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from kvpool.quiet import QuietLog

HEAD_BYTES = 64 << 10
HEAD_SECONDS = 30.0
_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


class _OneInvalid(logging.Filter):
    """Of uvicorn's lines about requests that are no HTTP, one a minute: anybody who can connect can cause them."""

    def __init__(self) -> None:
        super().__init__()
        self._quiet = QuietLog(logging.getLogger("uvicorn.error"))

    def filter(self, record: logging.LogRecord) -> bool:
        if not str(record.msg).startswith("Invalid HTTP"):
            return True
        added = self._quiet.added()
        record.msg = f"{record.msg}{added or ''}"
        return added is not None


_one_invalid = _OneInvalid()


def bounded_http(head_seconds: float = HEAD_SECONDS) -> type[asyncio.Protocol]:
    """For `uvicorn.Config(http=...)`. A connection that asks nothing whole within `head_seconds` is closed; so is one whose
    head is over `HEAD_BYTES`, by more than what is read at once. Requests that are no HTTP are logged once a minute.
    """
    base = _base()
    logging.getLogger("uvicorn.error").addFilter(_one_invalid)  # the same object is added once

    class Bounded(base):  # type: ignore[misc, valid-type]
        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._head_bytes = 0
            self._overdue: asyncio.TimerHandle | None = self.loop.call_later(head_seconds, transport.close)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.cycle is not None and not self.cycle.response_complete:  # the head was whole
                self._head_bytes = 0
                self._in_time()
                return
            self._head_bytes += len(data)
            if self._head_bytes > HEAD_BYTES:
                if self.cycle is None and not self.transport.is_closing():
                    self.transport.write(_TOO_LARGE)
                self.transport.close()
            elif self._overdue is None:
                self._overdue = self.loop.call_later(head_seconds, self.transport.close)

        def connection_lost(self, exc: Exception | None) -> None:
            self._in_time()
            super().connection_lost(exc)

        def _in_time(self) -> None:
            if self._overdue is not None:
                self._overdue.cancel()
                self._overdue = None

    return Bounded


def _base() -> Any:
    try:
        from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
    except ModuleNotFoundError:  # httptools is faster, and need not be there
        from uvicorn.protocols.http.h11_impl import H11Protocol

        return H11Protocol
    return HttpToolsProtocol
