"""A server says what is wrong before it imports what takes seconds, listens when it can answer, and ends when it is told."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable
from pathlib import Path
from queue import Queue
from typing import Any

import pytest

from kvpool.engine.options import EngineOptions
from kvpool.errors import ConfigError
from kvpool.server.auth import Access
from kvpool.server.running import ModelServer, bound, serve_models
from kvpool.server.serve_settings import ModelSettings, ServeSettings

SRC = str(Path(__file__).resolve().parents[2] / "src")

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


@pytest.mark.slow
def test_given_what_is_wrong_then_it_is_said_without_torch() -> None:
    calls = {
        "there is no file or directory /no/such/model": ["serve", "--port", "0", "/no/such/model"],
        "--draft left in 0.3": ["serve", "--port", "0", "--draft", "eagle"],
        "--data-parallel left in 0.3": ["serve", "--port", "0", "--data-parallel", "2"],
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


def serving(app: Application, is_over: Callable[[], bool], told: Callable[[str], Any]) -> ModelServer:
    return ModelServer(app, ServeSettings(port=0), tell=told, drain=lambda: app.life.append("drain"), is_over=is_over)


def test_given_a_server_then_it_tells_its_address_answers_and_ends_when_it_is_over() -> None:
    app, is_over, told = Application(), threading.Event(), Queue[str]()
    sockets = bound("127.0.0.1", 0)
    thread = threading.Thread(target=serving(app, is_over.is_set, told.put).run, args=(sockets,))
    thread.start()
    try:
        url = told.get(timeout=60)
        assert url == f"http://127.0.0.1:{sockets[0].getsockname()[1]}"
        with urllib.request.urlopen(f"{url}/ready", timeout=60) as answer:
            assert answer.read() == b"own"
        with pytest.raises(ConfigError, match="another program listens there"):
            bound("127.0.0.1", int(url.rpartition(":")[2]))
    finally:
        is_over.set()
        thread.join(60)
    assert app.life == ["startup", "drain", "shutdown"]


def test_given_an_application_that_cannot_start_then_no_address_is_told() -> None:
    told: list[str] = []
    (one,) = bound("127.0.0.1", 0)
    with one, pytest.raises(SystemExit):
        serving(Application(fails=True), bool, told.append).run([one])
    assert told == []


def test_given_a_model_that_cannot_be_loaded_then_the_port_is_free_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(settings: ModelSettings) -> Any:
        raise ConfigError("wrong")

    monkeypatch.setattr(ModelSettings, "make_engine", fail)
    monkeypatch.setattr(EngineOptions, "check_model", bool)
    (one,) = bound("127.0.0.1", 0)
    port = one.getsockname()[1]
    one.close()
    model = ModelSettings("m", EngineOptions(), None, 1)
    with pytest.raises(ConfigError, match="wrong"):
        serve_models(ServeSettings(port=port), [model], Access(), quiet=True)
    (free,) = bound("127.0.0.1", port)
    free.close()


def test_given_a_file_that_is_no_certificate_then_it_is_refused_before_a_model_is_loaded(tmp_path: Path) -> None:
    (file := tmp_path / "a.pem").write_text("nothing")
    with pytest.raises(ConfigError, match=r"a\.pem is no certificate for TLS"):
        ServeSettings(tls_cert=str(file), tls_key=str(file))
