"""Images in messages: as data URLs, or at addresses of hosts that the server was told to ask."""

from __future__ import annotations

import asyncio
import base64
import binascii
import http.client
import time
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import unquote_to_bytes, urlsplit

from kvpool.checks import show
from kvpool.errors import ConfigError
from kvpool.server.errors import Problem

MAX_BYTES = 16 << 20  # of one image that is fetched
MAX_SECONDS = 10.0  # for fetching one
_CHUNK = 1 << 16
_TEXTS = ("text", "input_text", "output_text")


class ImageSource:
    """Reads the images of messages. `hosts` may be asked over HTTP, all others are refused; redirects are not followed.

    A host may be asked at ports 80 and 443. One that is written `HOST:PORT` may be asked at that port only.
    """

    def __init__(self, hosts: Sequence[str] = ()) -> None:
        self._places = image_places(hosts)

    async def content(self, content: str | list[dict[str, Any]] | None, number: int) -> str | list[dict[str, Any]]:
        """What a message says: a text, whose parts are joined, or parts of text and images as chat templates read them."""
        if content is None or isinstance(content, str):
            return content or ""
        parts = [await self._part(part, number) for part in content]
        if any("image" in part for part in parts):
            return parts
        return "".join(part["text"] for part in parts)

    async def _part(self, part: Mapping[str, Any], number: int) -> dict[str, Any]:
        kind = part.get("type")
        if kind in _TEXTS and isinstance(part.get("text"), str):
            return {"type": "text", "text": part["text"]}
        given = part.get("image_url")
        url = given.get("url") if isinstance(given, Mapping) else given
        if kind in ("image_url", "input_image") and isinstance(url, str):
            return {"type": "image", "image": await self._read(url, f"messages.{number}.content")}
        raise Problem(
            400,
            f"message {number} has a part of type {show(kind)} that holds no text and no image; the model reads no other",
            code="unsupported",
            param=f"messages.{number}.content",
        )

    async def _read(self, url: str, param: str) -> bytes:
        """The bytes of an image."""
        try:
            if url[:5].lower() == "data:":
                return _of_data_url(url)
            return await asyncio.to_thread(self._fetch, url)
        except (ValueError, OSError, http.client.HTTPException) as error:
            told = f"the image at {show(url)} cannot be read: {str(error) or type(error).__name__}"
            raise Problem(400, told, code="invalid_image", param=param) from error

    def _fetch(self, url: str) -> bytes:
        """The bytes at an address, of limited size, within limited time."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or parts.hostname is None:
            raise ValueError("images come as data:image/png;base64,...")
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        if (parts.hostname, parts.port or kind.default_port) not in self._places:
            raise ValueError(
                "this server fetches no image from that host and port; send it as data:image/png;base64,..."
            )
        deadline = time.monotonic() + MAX_SECONDS
        connection = kind(parts.hostname, parts.port, timeout=MAX_SECONDS)
        try:
            connection.request("GET", f"{parts.path or '/'}?{parts.query}" if parts.query else parts.path or "/")
            with connection.getresponse() as answer:  # an answer that ends with its connection owns the socket
                if answer.status != 200:
                    raise ValueError(f"its host answered with status {answer.status}")
                found = bytearray()
                while chunk := answer.read1(_CHUNK):
                    found += chunk
                    if len(found) > MAX_BYTES:
                        raise ValueError(f"it is over {MAX_BYTES} bytes")
                    if time.monotonic() > deadline:
                        raise ValueError(f"its host took over {MAX_SECONDS:g} seconds")
                return bytes(found)
        finally:
            connection.close()


def image_places(hosts: Sequence[str]) -> frozenset[tuple[str, int]]:
    """The hosts and ports that may be asked for images.

    >>> sorted(image_places(["example.com", "127.0.0.1:8080"]))
    [('127.0.0.1', 8080), ('example.com', 80), ('example.com', 443)]
    """
    places: set[tuple[str, int]] = set()
    for host in hosts:
        try:
            parts = urlsplit(f"//{host.strip()}")
            name, port = parts.hostname, parts.port
        except ValueError:
            name, port = None, None
        if name is None or parts.netloc != host.strip() or "@" in host:
            raise ConfigError(f"image_hosts are names of hosts, or HOST:PORT, got {show(host)}")
        places |= {(name, each) for each in ((80, 443) if port is None else (port,))}
    return frozenset(places)


def _of_data_url(url: str) -> bytes:
    """The bytes in a data URL.

    >>> _of_data_url("data:image/png;base64,aGk=")
    b'hi'
    """
    head, comma, data = url.partition(",")
    if not comma:
        raise ValueError("a data URL has a comma before its data")
    if not head.lower().endswith(";base64"):
        return unquote_to_bytes(data)
    try:
        return base64.b64decode(data, validate=True)
    except binascii.Error as error:
        raise ValueError(f"it is no base64: {error}") from None


def image_part(source: object) -> dict[str, Any]:
    """Anthropic's source of an image as a part in OpenAI's form; an empty part if it is none."""
    if not isinstance(source, Mapping):
        return {"type": "image"}
    if source.get("type") == "base64" and isinstance(source.get("data"), str):
        return {"type": "image_url", "image_url": f"data:{source.get('media_type')};base64,{source['data']}"}
    return {"type": "image_url", "image_url": source.get("url")}
