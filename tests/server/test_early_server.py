"""`kvpool serve` answers before what takes seconds is imported, and the application takes over on the same connections."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from kvpool.errors import ConfigError
from kvpool.server.early_server import EarlyServer, bound
from kvpool.server.serve_settings import ServeSettings

SRC = str(Path(__file__).resolve().parents[2] / "src")

# Stops at the first import of a heavy package, and says which of them are there at that moment.
STOPS = """
import builtins, sys, threading
from kvpool.cli import main
from kvpool.server.early_server import EarlyServer

HEAVY = ("torch", "transformers", "fastapi", "prometheus_client", "zmq")
find = builtins.__import__
opened = EarlyServer.__enter__

def late(name, *others, **named):
    if name.partition(".")[0] in HEAVY:
        print("stopped", [each for each in HEAVY if each in sys.modules], flush=True)
        threading.Event().wait()
    return find(name, *others, **named)

def enter(server):
    opened(server)
    print(server._sockets[0].getsockname()[1], flush=True)
    return server

builtins.__import__, EarlyServer.__enter__ = late, enter
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("options", [[], ["--data-parallel", "2"]])
def test_given_a_process_then_it_answers_before_torch_is_imported_and_ends_when_it_is_told(options: list[str]) -> None:
    command = [sys.executable, "-c", STOPS, "serve", "--port", "0", *options]
    environment = {**os.environ, "PYTHONPATH": SRC}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stdout is not None
        url = f"http://127.0.0.1:{int(process.stdout.readline())}"
        assert process.stdout.readline() == "stopped []\n"
        with urllib.request.urlopen(f"{url}/health", timeout=60) as answer:
            assert json.load(answer) == {"status": "ok"}
        for path, sent in (("/ready", None), ("/v1/chat/completions", b"{}")):
            headers, text = unavailable(f"{url}{path}", sent)
            assert headers["retry-after"] == "5"
            body = json.loads(text)
            assert (body["type"], body["error"]["code"]) == ("error", "loading")
            assert body["error"]["message"].startswith("the server starts: it ")
        headers, text = unavailable(f"{url}/")
        assert (headers["content-type"], headers["refresh"]) == ("text/html", "2")
        assert "the server starts: it " in text
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
        assert process.returncode == 0
    finally:
        process.kill()
        process.communicate()


def unavailable(url: str, sent: bytes | None = None) -> tuple[Any, str]:
    """The headers and the body of an answer that must have status 503."""
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(url, sent, timeout=60)
    with refused.value as answer:
        assert answer.code == 503
        return answer.headers, answer.read().decode()


# Calls the command line again and again where nothing heavy can be imported.
REFUSED = """
import builtins, json, sys
from kvpool.cli import main

find = builtins.__import__

def light(name, *others, **named):
    assert name.partition(".")[0] not in ("torch", "transformers", "fastapi"), name
    return find(name, *others, **named)

builtins.__import__ = light
for words in json.loads(sys.argv[1]):
    print(main(words), file=sys.stderr)
"""


def test_given_what_is_wrong_then_it_is_said_without_torch() -> None:
    calls = {
        "there is no file or directory /no/such/model": ["serve", "--port", "0", "/no/such/model"],
        "--draft left in 0.3": ["serve", "--port", "0", "--draft", "eagle"],
        "--record is for one engine": ["serve", "--port", "0", "--data-parallel", "2", "--record", "x"],
        "no directory with an adapter_config.json": ["serve", "--port", "0", "--adapter", "a=/no/such"],
        "draft-tokens=-1 must be at least 0": ["generate", "--draft-tokens=-1", "Hello"],
        "there is no file or directory ./no": ["chat", "--model", "./no"],
    }
    done = subprocess.run(
        [sys.executable, "-c", REFUSED, json.dumps([*calls.values(), ["chat", "--help"], ["serve", "--help"]])],
        env={**os.environ, "PYTHONPATH": SRC},
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    for said in calls:
        assert re.search(rf"kvpool: .*{re.escape(said)}.*\n2\n", done.stderr), done.stderr
    assert done.stderr.endswith("0\n0\n")


@pytest.fixture
def server() -> Any:
    """One that answers, with nothing behind it."""
    with EarlyServer(ServeSettings(port=0), 1) as opened:
        yield opened


def port_of(server: EarlyServer) -> int:
    return int(server._sockets[0].getsockname()[1])


def get(connection: http.client.HTTPConnection, path: str) -> tuple[int, bytes]:
    connection.request("GET", path)
    answer = connection.getresponse()
    return answer.status, answer.read()


class Application:
    """Answers with its own words, and notes its life."""

    def __init__(self, fails: bool = False) -> None:
        self.life: list[str] = []
        self._fails = fails

    async def __call__(self, scope: Any, receive: Callable[[], Any], send: Callable[[Any], Any]) -> None:
        if scope["type"] == "lifespan":
            for part in ("startup", "shutdown"):
                await receive()
                self.life.append(part)
                await send({"type": f"lifespan.{part}.{'failed' if self._fails else 'complete'}"})
                if self._fails:
                    return
            return
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"3")]})
        await send({"type": "http.response.body", "body": b"own"})


def test_given_a_connection_when_the_application_takes_over_then_it_is_the_one_that_answers(
    server: EarlyServer,
) -> None:
    app, is_over = Application(), threading.Event()
    options: Any = {"drain": lambda: app.life.append("drain"), "is_over": is_over.is_set}
    thread = threading.Thread(target=server.hand_over, args=(app, "name", True), kwargs=options)
    with closing(http.client.HTTPConnection("127.0.0.1", port_of(server), timeout=60)) as connection:
        assert get(connection, "/ready")[0] == 503
        own = connection.sock
        thread.start()
        while (found := get(connection, "/ready"))[0] == 503:
            pass
        assert found == (200, b"own")
        assert connection.sock is own
    is_over.set()
    thread.join(60)
    assert app.life == ["startup", "drain", "shutdown"]


def test_given_an_application_that_cannot_start_then_it_does_not_take_over(server: EarlyServer) -> None:
    with pytest.raises(RuntimeError, match="the application could not start"):
        server.hand_over(Application(fails=True), "name", True, drain=bool, is_over=bool)


def test_given_two_servers_that_start_at_once_then_the_second_is_told_that_the_port_is_taken(
    server: EarlyServer,
) -> None:
    with pytest.raises(ConfigError, match="another program listens there"):
        bound("127.0.0.1", port_of(server))
    (one,) = bound("127.0.0.1", 0)
    with one, pytest.raises(ConfigError, match="another program listens there"):
        bound("127.0.0.1", one.getsockname()[1])


def test_given_an_error_while_it_loads_then_nobody_listens_any_more() -> None:
    def load(port: list[int]) -> None:
        with EarlyServer(ServeSettings(port=0), 30) as server:
            port.append(port_of(server))
            raise ValueError("wrong")

    port: list[int] = []
    with pytest.raises(ValueError, match="wrong"):
        load(port)
    (free,) = bound("127.0.0.1", *port)
    free.close()
