"""uvicorn's protocol with bounds for the head of a request: neither its size nor its sending may go on for ever."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from kvpool.quiet import QuietErrors, QuietLog

HEAD_BYTES = 64 << 10
HEAD_SECONDS = 30.0
_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


class _FewLines(logging.Filter):
    """Of uvicorn's lines that a client can cause, one a minute: requests that are no HTTP, and each error in our answers."""

    def __init__(self) -> None:
        super().__init__()
        log = logging.getLogger("uvicorn.error")
        self._invalid, self._errors = QuietLog(log), QuietErrors(log)

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if error is not None:
            added = self._errors.added(error)
        elif str(record.msg).startswith("Invalid HTTP"):
            added = self._invalid.added()
        else:
            return True
        record.msg = f"{str(record.msg).rstrip()}{added or ''}"
        return added is not None


_few_lines = _FewLines()


def bounded_http(head_seconds: float = HEAD_SECONDS) -> type[asyncio.Protocol]:
    """For `uvicorn.Config(http=...)`. A connection that asks nothing whole within `head_seconds` is closed; so is one whose
    head is over `HEAD_BYTES`, by more than what is read at once. Requests that are no HTTP are logged once a minute,
    and so is the traceback of an answer that fails.
    """
    base = _base()
    logging.getLogger("uvicorn.error").addFilter(_few_lines)  # the same object is added once

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
