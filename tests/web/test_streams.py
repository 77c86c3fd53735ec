"""Streams by themselves: a client that does not read, one that leaves, one that hears everything."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from kvpool.web import EventStream


async def parts(number: int) -> AsyncIterator[bytes]:
    for at in range(number):
        yield b"%d" % at


def streamed(send: Any, receive: Any, number: int = 3) -> list[str]:
    """What happened to a stream whose sends may take a moment."""
    told: list[str] = []
    stream = EventStream(parts(number), lambda: told.append("left"), 0.02)
    asyncio.run(asyncio.wait_for(stream({"type": "http"}, receive, send), 30))
    return told


async def stays() -> Any:
    await asyncio.Event().wait()


def test_given_a_client_that_reads_then_it_hears_every_part_and_the_end() -> None:
    heard: list[bytes] = []

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            heard.append(message["body"])

    assert streamed(send, stays) == ["left"]
    assert heard == [b"0", b"1", b"2", b""]


def test_given_a_client_that_does_not_read_then_its_request_ends() -> None:
    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            await asyncio.Event().wait()

    assert streamed(send, stays) == ["left"]


def test_given_a_client_that_leaves_then_its_request_ends() -> None:
    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            await asyncio.Event().wait()

    async def leaves() -> Any:
        return {"type": "http.disconnect"}

    assert streamed(send, leaves) == ["left"]
