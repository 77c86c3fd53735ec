"""An endpoint that reads needles as a model would, for what no tiny random model does. It has no cache of its own bytes:
faults of caches are planted in a real one (`faults.py`)."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Stub:
    """What it does, which tests change: the fields that it refuses, what it says of its cache, whom it confuses."""

    def __init__(self) -> None:
        self.refused: set[str] = set()
        self.is_chat = False
        self.reports = True
        self.caches = True
        self.restarted = 0
        self.seen: set[tuple[Any, ...]] = set()
        self.told: list[str] = []  # all codes, in order
        self.leaks_every = 0
        self.flips_every = 0
        self.count = 0

    def answer(self, body: dict[str, Any]) -> dict[str, Any]:
        """A completion: the code that the prompt says of the thing that it asks for."""
        prompt = body["messages"][0]["content"] if self.is_chat else body["prompt"]
        key = (body.get("cache_salt"), str(prompt))
        is_hit, length = key in self.seen and self.caches, len(str(prompt).split())
        self.seen.add(key)
        text = self._found(str(prompt), is_hit)
        usage: dict[str, Any] = {"prompt_tokens": length}
        if self.reports:
            usage["prompt_tokens_details"] = {"cached_tokens": length - 1 if is_hit else 0}
        choice = {"message": {"content": text}} if self.is_chat else {"text": text}
        return {"choices": [choice], "usage": usage}

    def _found(self, prompt: str, is_hit: bool) -> str:
        asked = re.findall(r"The code of the (.*) is$", prompt)
        codes = dict(re.findall(r"The code of the (.*) is (\d+)\.", prompt))
        code = codes.get(asked[0], "nowhere") if asked else "hello"
        if code.isdigit() and code not in self.told:
            self.told.append(code)
        self.count += is_hit
        if is_hit and self.leaks_every and self.count % self.leaks_every == 0:
            return next(other for other in reversed(self.told) if other != code)
        return "nothing" if is_hit and self.flips_every and self.count % self.flips_every == 0 else code


@contextmanager
def stubbed() -> Iterator[tuple[Stub, str]]:
    """A stub behind a socket, and its address."""
    stub = Stub()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def _send(self, status: int, body: Any) -> None:
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self) -> None:
            is_list = self.path == "/v1/models"
            self._send(200 if is_list else 404, {"data": [{"id": "stub", "owned_by": "vllm"}]} if is_list else {})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers.get("content-length") or 0)) or b"{}")
            path = "/v1/chat/completions" if stub.is_chat else "/v1/completions"
            if self.path != path:
                self._send(404, {})
            elif stub.refused & body.keys() or isinstance(body.get("prompt"), list):
                self._send(400, {"error": "refused"})
            else:
                self._send(200, stub.answer(body))

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield stub, f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
