"""`kvpool serve` as a process: it says where it listens, answers, drains at SIGTERM, and refuses to be open to all."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvpool.cli import main
from kvpool.server import running
from kvpool.server.auth import Access
from kvpool.server.limits import Gate, Limits
from kvpool.server.running import ModelServer, _drain, bound
from kvpool.server.serve_settings import ModelSettings, ServeSettings, step_limits

SRC = str(Path(__file__).resolve().parents[2] / "src")


def test_given_a_cpu_then_a_step_has_room_for_all_that_decode_and_few_tokens_of_prompts() -> None:
    assert step_limits("cpu", 64).max_tokens_per_step == 64 + 256


def test_given_loaded_models_then_the_garbage_collector_looks_at_them_no_more(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    frozen: list[int] = []
    monkeypatch.setattr(ModelServer, "run", lambda *_: frozen.append(gc.get_freeze_count()))
    alive = len(gc.get_objects())
    serve_engine(engine, quiet=True)
    assert frozen[0] > alive / 2


def serve_engine(engine: Any, *, quiet: bool) -> None:
    """`kvpool serve` with an engine that is there already."""
    options = SimpleNamespace(check_model=bool, publish=None)
    told: Any = dict(options=options, tool_parser="", keep_varying_lines=False)
    model: Any = SimpleNamespace(name="tiny", make_engine=lambda: nullcontext(engine), **told)
    try:
        running.serve_models(ServeSettings(port=0), [model], Access(), quiet=quiet)
    finally:
        gc.unfreeze()


@pytest.mark.parametrize(
    ("template", "can"), [(None, True), ("{% for m in messages %}{{ m['content'] }}{% endfor %}", False)]
)
def test_given_a_model_that_cannot_use_tools_then_one_line_at_the_start_says_so(
    engine: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], template: str | None, can: bool
) -> None:
    monkeypatch.setattr(ModelServer, "run", lambda *_: None)
    monkeypatch.setattr(engine.tokenizer, "chat_template", template or engine.tokenizer.chat_template)
    serve_engine(engine, quiet=False)
    lines = [line for line in capsys.readouterr().err.splitlines() if "cannot use tools" in line]
    assert len(lines) == (not can)
    assert all("tiny" in line and "docs/agents.md" in line for line in lines)


@pytest.mark.slow
def test_given_a_process_when_it_is_told_to_end_then_the_answer_under_way_is_finished(tmp_path: Path) -> None:
    from live import save_model

    save_model(tmp_path)
    models = "".join(f'[[models]]\nname = "{name}"\nmodel = "{tmp_path}"\nmemory = "4MiB"\n' for name in ("one", "two"))
    config = tmp_path / "kvpool.toml"
    config.write_text(f"[server]\nport = 0\nmax_requests = 9\n{models}")
    command = [sys.executable, "-m", "kvpool", "serve", "--config", str(config)]
    environment = {**os.environ, "PYTHONPATH": SRC, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([*command, "--device", "cpu"], stderr=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stderr is not None
        lines = iter(process.stderr.readline, "")
        url = next(found[1] for line in lines if (found := re.search(r" at (http://127.0.0.1:\d+)/v1", line)))
        with urllib.request.urlopen(f"{url}/v1/models", timeout=60) as answer:
            assert [model["id"] for model in json.load(answer)["data"]] == ["one", "two"]
        body = json.dumps(
            {"model": "two", "prompt": "w5 w6", "max_tokens": 120, "ignore_eos": True, "stream": True}
        ).encode()
        request = urllib.request.Request(f"{url}/v1/completions", body, {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            answer.readline()
            process.send_signal(signal.SIGTERM)
            rest = answer.read().decode()
        assert rest.rstrip().endswith("data: [DONE]")
        process.communicate(timeout=60)
        assert process.returncode == 0
    finally:
        process.kill()
        process.communicate()


SLOW = """
import sys, time
from pathlib import Path
import kvpool.server.running as running
from kvpool.cli import main
from kvpool.server import serve_settings
running.GRACE_SECONDS = 3
load = serve_settings.ModelSettings.make_engine
def late(settings):
    Path(sys.argv[1]).touch()
    while not Path(sys.argv[2]).exists():
        time.sleep(0.02)
    return load(settings)
serve_settings.ModelSettings.make_engine = late
sys.exit(main(sys.argv[3:]))
"""


@pytest.mark.slow
def test_given_a_process_then_it_listens_when_it_is_ready_and_its_cut_streams_end_with_a_word(tmp_path: Path) -> None:
    from live import word_tokenizer
    from models import tiny_model

    word_tokenizer().save_pretrained(tmp_path)
    tiny_model("llama", max_position_embeddings=2**17).save_pretrained(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    url, loads, go = f"http://127.0.0.1:{port}", tmp_path / "loads", tmp_path / "go"
    options = ["serve", str(tmp_path), "--port", str(port), "--device", "cpu", "--memory", "64MiB"]
    environment = {**os.environ, "PYTHONPATH": SRC, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([sys.executable, "-c", SLOW, str(loads), str(go), *options], env=environment)
    try:
        until(lambda: loads.exists() or process.poll() is not None)
        assert status(f"{url}/health") == 0
        go.touch()
        until(lambda: status(f"{url}/health") == 200)
        assert status(f"{url}/ready") == 200
        body = {"prompt": "w5 w6", "max_tokens": 100_000, "ignore_eos": True, "stream": True}
        request = urllib.request.Request(
            f"{url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            answer.readline()
            process.send_signal(signal.SIGTERM)
            *_, told, done = answer.read().decode().strip().split("\n\n")
        assert json.loads(told.removeprefix("data: "))["error"]["code"] == "draining"
        assert done == "data: [DONE]"
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()


def status(url: str) -> int:
    """The status of an answer; 0 if nobody answers."""
    try:
        with urllib.request.urlopen(url, timeout=60) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as refused:
        return refused.code
    except OSError:
        return 0


def until(condition: Callable[[], bool]) -> None:
    """Waits for something that must come: a process that loads torch and a model on a busy machine."""
    deadline = time.monotonic() + 240
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_given_an_open_address_without_keys_then_it_is_refused_before_a_model_is_loaded(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KVPOOL_API_KEYS", raising=False)
    assert main(["serve", "--host", "0.0.0.0", "--model", "nowhere"]) == 2
    assert "there are no keys: give --keys FILE" in capsys.readouterr().err


def test_given_new_key_then_a_key_and_its_line_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--new-key", "acme"]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"kv-\S{40,}", printed)
    assert re.search(r"acme [0-9a-f]{64}", printed)
    assert main(["serve", "--new-key", "two words"]) == 2


def test_given_a_port_in_use_then_it_is_said_before_a_model_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert main(["serve", "--port", str(port), "nowhere"]) == 2
    assert f"cannot listen at 127.0.0.1, port {port}: another program listens there" in capsys.readouterr().err
    assert main(["serve", "--host", "no.such.host.invalid", "--insecure", "nowhere"]) == 2
    assert "cannot listen at no.such.host.invalid, port 8000" in capsys.readouterr().err


def test_given_a_port_of_events_in_use_then_both_are_said_before_a_model_is_loaded(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("zmq", reason="pip install 'kvpool[cluster]'")
    monkeypatch.setattr(ModelSettings, "make_engine", lambda _: pytest.fail("a model is loaded"))
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert main(["serve", "--port", "0", "--publish", f"tcp://127.0.0.1:{port - 1}"]) == 2
    said = capsys.readouterr().err
    assert f"127.0.0.1:{port - 1}'" in said
    assert f"127.0.0.1:{port}'" in said


def test_given_models_that_publish_at_neighbouring_ports_then_they_are_refused_before_a_model_is_loaded(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("zmq", reason="pip install 'kvpool[cluster]'")
    monkeypatch.setattr(ModelSettings, "make_engine", lambda _: pytest.fail("a model is loaded"))
    (tmp_path / "config.json").write_text("{}")
    tables = [
        f"[[models]]\nname = '{port}'\nmodel = '{tmp_path}'\npublish = 'tcp://127.0.0.1:{port}'\n"
        for port in (20_557, 20_558)
    ]
    file = tmp_path / "kvpool.toml"
    file.write_text("[server]\nport = 0\n" + "".join(tables))
    assert main(["serve", "--config", str(file)]) == 2
    assert "where both ports are free" in capsys.readouterr().err


def test_given_localhost_then_all_of_its_addresses_have_the_same_port() -> None:
    sockets = bound("localhost", 0)
    try:
        assert len({one.getsockname()[1] for one in sockets}) == 1
    finally:
        for one in sockets:
            one.close()


def test_given_the_model_as_an_argument_then_it_is_the_model_and_is_named_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["serve", "--port", "0", "/no/such/model"]) == 2
    assert "there is no file or directory /no/such/model" in capsys.readouterr().err
    assert main(["serve", "--port", "0", "--model", "one", "two"]) == 2
    assert "the model is two or --model one: name it once" in capsys.readouterr().err


def test_given_help_then_what_stands_in_brackets_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    main(["serve", "--help"])
    words = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "[admin]" in words
    assert "section [tiers]" in words


@pytest.mark.parametrize("address", ["collector", "http://["])
def test_given_an_address_for_traces_that_is_none_then_it_is_refused(
    capsys: pytest.CaptureFixture[str], address: str
) -> None:
    assert main(["serve", "--traces", address, "nowhere"]) == 2
    assert f"--traces is '{address}'; write an address" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("under_way", "said"), [(2, "finishing 2 requests, for up to 30 s; Ctrl-C ends them\n"), (0, "")]
)
def test_given_requests_under_way_when_it_ends_then_it_says_what_it_waits_for(
    capsys: pytest.CaptureFixture[str], under_way: int, said: str
) -> None:
    gate = Gate(Limits())

    async def end() -> None:
        with gate.passed("", under_way) if under_way else nullcontext():
            _drain(gate, False)

    asyncio.run(end())
    assert gate.is_draining
    assert capsys.readouterr().err == said
