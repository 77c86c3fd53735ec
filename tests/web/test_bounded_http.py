"""Heads of requests that never end, in size or in time."""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import Any

import pytest

pytest.importorskip("uvicorn")
pytest.importorskip("starlette")


@pytest.fixture(params=["httptools", "h11"])
def parser(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "h11":
        monkeypatch.setitem(__import__("sys").modules, "uvicorn.protocols.http.httptools_impl", None)
    else:
        pytest.importorskip("httptools")


def talked(given: list[bytes], *, head_seconds: float = 30.0, log_level: str = "critical") -> bytes:
    """What a server says to these parts of a request, one after the other, until it closes the connection."""
    import uvicorn
    from starlette.responses import PlainTextResponse

    from kvpool.web import bounded_http

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["method"] == "DELETE":
            raise RuntimeError("broken on purpose")
        await PlainTextResponse(scope["method"])(scope, receive, send)

    async def talk() -> bytes:
        config = uvicorn.Config(
            app, http=bounded_http(head_seconds), ws="none", lifespan="off", log_level=log_level, log_config=None
        )
        config.load()
        server = uvicorn.Server(config)
        with socket.create_server(("127.0.0.1", 0)) as listening:
            port = listening.getsockname()[1]
            serving = asyncio.ensure_future(server.serve([listening]))
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                for part in given:
                    writer.write(part)
                    await writer.drain()
                return await asyncio.wait_for(reader.read(), 30)
            except ConnectionError:
                return b""
            finally:
                writer.close()
                server.should_exit = True
                await serving

    return asyncio.run(talk())


@pytest.mark.usefixtures("parser")
def test_given_requests_with_usual_heads_then_they_are_answered_on_one_connection() -> None:
    usual = b"GET / HTTP/1.1\r\nhost: x\r\nx-large: " + b"a" * 30_000 + b"\r\n\r\n"
    last = b"POST / HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: 2\r\n\r\nab"
    said = talked([usual, usual, usual, last])
    assert said.count(b"HTTP/1.1 200") == 4


@pytest.mark.usefixtures("parser")
@pytest.mark.parametrize("part", [b"x-%d: 1\r\n", b"a%d"], ids=["many headers", "a long one"])
def test_given_a_head_that_goes_on_and_on_then_the_connection_is_closed(part: bytes) -> None:
    said = talked([b"GET / HTTP/1.1\r\nhost: x\r\n", *(part % at * 1000 for at in range(2000))])
    assert b"HTTP/1.1 200" not in said
    assert said[:12] in (b"HTTP/1.1 431", b"HTTP/1.1 400", b"")  # what was sent meanwhile may undo the answer


@pytest.mark.usefixtures("parser")
@pytest.mark.parametrize("half", [[], [b"GET / HTTP/1.1\r\nho"]], ids=["nothing", "half"])
def test_given_half_a_head_when_nothing_more_comes_then_the_connection_is_closed(half: list[bytes]) -> None:
    assert talked(half, head_seconds=0.05) == b""


@pytest.fixture
def fresh_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server's log, of which nothing was left out yet."""
    from kvpool import web as bounded_http

    monkeypatch.setattr(bounded_http, "_few_lines", bounded_http._LogLimit())
    log = logging.getLogger("uvicorn.error")
    monkeypatch.setattr(log, "filters", [])
    monkeypatch.setattr(log, "propagate", True)


@pytest.mark.usefixtures("parser", "fresh_log")
def test_given_many_requests_that_are_no_http_then_one_line_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(5):
        assert b"400 Bad Request" in talked([b"\0\1 no request\r\n\r\n"], log_level="warning")
    assert [record.getMessage() for record in caplog.records] == ["Invalid HTTP request received."]


@pytest.mark.usefixtures("parser", "fresh_log")
def test_given_many_answers_that_fail_then_one_traceback_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(5):
        failing = [b"DELETE / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"]
        assert b"500 Internal Server Error" in talked(failing, log_level="warning")
    assert [record.getMessage() for record in caplog.records] == ["Exception in ASGI application"]
    assert caplog.text.count("RuntimeError: broken on purpose") == 1
