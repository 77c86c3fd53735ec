"""An endpoint that answers every request with words at a pace of its own; nothing behind it computes anything."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any


class TrivialServer:
    """Streams as OpenAI does: a role, words, a reason, the usage. `refuse_from` is the first request that gets status 429."""

    def __init__(self, gap: float = 0.0, refuse_from: int = 10**9, split: int = 0) -> None:
        self.gap = gap
        self.refuse_from = refuse_from
        self.split = split  # bytes after which each event is cut in two
        self.bodies: list[dict[str, Any]] = []
        self.at_once = 0
        self.most_at_once = 0
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> TrivialServer:
        self._thread.start()
        assert self._ready.wait(30)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(30)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(asyncio.start_server(self._serve, "127.0.0.1", 0, backlog=1024))
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self._ready.set()
        self._loop.run_forever()
        server.close()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(asyncio.sleep(0))
        self._loop.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        fields = dict(line.lower().split(": ", 1) for line in head.split("\r\n")[1:] if ": " in line)
        text = await reader.readexactly(int(fields.get("content-length", 0)))
        if len(self.bodies) >= self.refuse_from:
            self._whole(writer, 429, {"error": {"message": "too many"}})
        else:
            self.bodies.append(json.loads(text))
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
            await self._stream(writer, self.bodies[-1])
            self.at_once -= 1
        await writer.drain()
        writer.close()

    def _whole(self, writer: asyncio.StreamWriter, status: int, body: Any) -> None:
        data = json.dumps(body).encode()
        writer.write(f"HTTP/1.1 {status} X\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)

    async def _stream(self, writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        self._event(writer, {"choices": [{"delta": {"role": "assistant", "content": ""}, "finish_reason": None}]})
        for _ in range(body["max_tokens"]):
            if self.gap:
                await asyncio.sleep(self.gap)
            self._event(writer, {"choices": [{"delta": {"content": "word "}, "finish_reason": None}]})
        self._event(writer, {"choices": [{"delta": {}, "finish_reason": "length"}]})
        usage = {
            "prompt_tokens": 10,
            "completion_tokens": body["max_tokens"],
            "prompt_tokens_details": {"cached_tokens": 5},
        }
        self._event(writer, {"choices": [], "usage": usage})
        self._chunk(writer, b"data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")

    def _event(self, writer: asyncio.StreamWriter, event: Any) -> None:
        data = b"data: " + json.dumps(event, separators=(",", ":")).encode() + b"\n\n"
        for part in (data[: self.split], data[self.split :]) if self.split else (data,):
            self._chunk(writer, part)

    def _chunk(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        writer.write(b"%x\r\n%s\r\n" % (len(data), data))
