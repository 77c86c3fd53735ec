"""`kvpool node` and `kvpool tier … node:`, as processes; the node's settings; its metrics."""

from __future__ import annotations

import json
import logging
import re
import signal
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from nodes import NodeProcess, needs_linux, node_folder
from servers import eventually

from kvpool.cli import main
from kvpool.errors import ConfigError
from kvpool.testing import load, store, value
from kvpool.tiers import MemoryTier, NodeTier, Outcome, TierConfig
from kvpool.tiers.keys import tenant_tag
from kvpool.tiers.node import node_command
from kvpool.tiers.node.server import NodeServer
from kvpool.tiers.node.settings import read_node
from ports import free_ports

pytestmark = needs_linux


@pytest.fixture
def folder() -> Iterator[Path]:
    with node_folder() as found:
        yield found


@pytest.fixture
def node(folder: Path) -> Iterator[NodeProcess]:
    disk = ["--disk", str(folder / "disk"), "--disk-bytes", "64MB"]
    made = NodeProcess(folder / "n", "--bytes", "16MB", "--metrics", f"127.0.0.1:{free_ports(1)[0]}", *disk)
    made.start()
    yield made
    made.kill()


class Ended(NamedTuple):
    """What a command wrote, and its exit status."""

    status: int
    out: str
    err: str


@pytest.fixture
def kvpool(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ended]:
    monkeypatch.setenv("COLUMNS", "200")

    def run(*words: str) -> Ended:
        capsys.readouterr()
        status = main(words)
        return Ended(status, *capsys.readouterr())

    return run


@pytest.mark.slow
def test_given_a_node_then_people_can_look_after_it_and_it_ends_and_begins_warm(
    node: NodeProcess, kvpool: Callable[..., Ended]
) -> None:
    address = f"node:{node.directory}"
    with NodeTier(f"{address}?engine=first&timeout=30") as tier:
        assert store(tier, list(range(20))) == [Outcome.OK] * 20
    figures = json.loads(kvpool("tier", "stat", address, "--json", "-").out)
    assert (figures["num_values"], figures["stored"], figures["problem"]) == (20, 20, "")
    assert figures["engines"].startswith("first: ")
    listed = json.loads(kvpool("tier", "ls", address, "--json", "-").out)
    assert sum(space["num_values"] for space in listed["spaces"]) == 20
    assert "20 of 20 values are whole" in kvpool("tier", "verify", address, "--quiet").out
    node.kill(signal.SIGTERM)
    assert kvpool("tier", "stat", address).status == 1
    node.start()
    with NodeTier(f"{address}?timeout=30") as tier:
        assert load(tier, list(range(20)))[1] == [value(number) for number in range(20)]
    assert "20 values removed" in kvpool("tier", "purge", address, "--all").out
    assert kvpool("tier", "compact", address).status == 2


def test_given_a_node_then_metrics_and_stats_tell_the_same(node: NodeProcess) -> None:
    url = f"http://{node._arguments[3]}"
    with NodeTier(f"node:{node.directory}?engine=a%22b&timeout=30") as tier:
        store(tier, [1, 2])
        load(tier, [1, 9])
        eventually(lambda: not tier.node_stats()["waiting_bytes"], "the disk has it")
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    with urllib.request.urlopen(f"{url}/stats", timeout=30) as answer:
        stats = json.loads(answer.read())
    found = dict(re.findall(r"^(kvpool_node_\w+) (\d+)$", text, re.MULTILINE))
    assert found["kvpool_node_values"] == "2" == str(stats["num_values"])
    assert (found["kvpool_node_hits_total"], found["kvpool_node_misses_total"]) == ("1", "1")
    assert 'kvpool_node_engine_bytes{engine="a\\"b"} 16384' in text
    assert 'kvpool_node_behind_stored_total{tier="disk"} 2' in text
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(f"{url}/", timeout=30)


def test_given_a_second_node_of_one_name_then_it_says_who_was_first(
    node: NodeProcess, kvpool: Callable[..., Ended]
) -> None:
    assert node.process is not None
    second = kvpool("node", str(node.directory), "--bytes", "16MB")
    assert second.status == 2
    assert f"process {node.process.pid} is the node" in second.err


def test_given_a_file_and_options_then_options_win(tmp_path: Path) -> None:
    file = tmp_path / "kvpool.toml"
    file.write_text(
        '[node]\nbytes = "1GB"\npolicy = "priority"\nengine_share = 0.5\ntenants = { acme = 0.25 }\n'
        'disk = "cache"\ndisk_bytes = "2GB"\nremote = "redis://host"\nmetrics = "127.0.0.1:9"\n'
    )
    found = read_node(file, {"bytes": "2GB", "policy": None})
    assert (found.bytes, found.policy, found.metrics) == (2 * 2**30, "priority", ("127.0.0.1", 9))
    assert found.quotas.tenants == {tenant_tag("acme"): 0.25}
    assert found.tiers.disk_address == f"disk:cache?bytes={2 * 2**30}"
    assert found.tiers.remote_address == "redis://host"
    assert "redis" not in repr(found)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("bytes = 5", "node.bytes"),
        ('bytes = "1GB"\nother = 1', "no key 'other'"),
        ('policy = "lru"', "say how much memory"),
        ('bytes = "1GB"\npolicy = "newest"', "node.policy = 'newest' must be one of"),
        ('bytes = "1GB"\nengine_share = 1.5', "must be a share"),
        ('bytes = "1GB"\ntenants = { a = 0 }', "share each"),
        ('bytes = "1GB"\nmetrics = "9464"', "HOST:PORT"),
        ('bytes = "1GB"\ndisk_bytes = "1GB"', "needs a disk"),
        ('bytes = "1GB"\nremote = "node:"', "cannot be its own store"),
        ('bytes = "some"', "node.bytes"),
        ('bytes = "1GB"\ndisk = "d"\ndisk_bytes = 0', "node.disk_bytes = 0 must be a size above 0"),
    ],
)
def test_given_wrong_settings_then_they_are_refused_by_name(tmp_path: Path, text: str, problem: str) -> None:
    file = tmp_path / "kvpool.toml"
    file.write_text(f"[node]\n{text}\n")
    with pytest.raises(ConfigError, match=re.escape(problem)):
        read_node(file, {})


def test_given_an_address_that_is_none_then_the_error_does_not_repeat_its_password(tmp_path: Path) -> None:
    file = tmp_path / "kvpool.toml"
    file.write_text('[node]\nbytes = "1GB"\nremote = ["redis://user:hush@host"]\n')
    with pytest.raises(ConfigError, match=r"node\.remote must be an address") as caught:
        read_node(file, {})
    assert "hush" not in str(caught.value)


def test_given_a_file_without_a_section_for_the_node_then_it_says_so(tmp_path: Path) -> None:
    file = tmp_path / "kvpool.toml"
    file.write_text("[tiers]\n")
    with pytest.raises(ConfigError, match=r"no section \[node\]"):
        read_node(file, {})


def test_given_settings_of_an_engine_then_a_node_is_an_address_like_others() -> None:
    assert TierConfig.of(remote="node:", remote_timeout=3.0).remote_address == "node:?timeout=3.0"
    with pytest.raises(ConfigError, match="remote_ttl"):
        TierConfig.of(remote="node:", remote_ttl=3.0)


class Closed(MemoryTier):
    """Notes its name when it is closed."""

    def __init__(self, address: str, closed: list[str]) -> None:
        super().__init__(2**20)
        self._address, self._noted = address, closed

    def _close(self) -> None:
        self._noted.append(self._address)


@pytest.mark.parametrize("fails", [False, True])
def test_given_a_node_that_ends_or_cannot_begin_then_all_that_it_opened_is_closed_and_a_line_said_what_it_has(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], fails: bool
) -> None:
    closed: list[str] = []
    handlers: dict[int, Any] = {}
    monkeypatch.setattr(node_command, "open_tier", lambda address: Closed(address, closed))
    monkeypatch.setattr(node_command.signal, "signal", handlers.__setitem__)
    served: list[NodeServer] = []
    monkeypatch.setattr(NodeServer, "serve", lambda server: served.append(server) or handlers[signal.SIGTERM]())
    options = {"bytes": "1MB", "disk": str(folder / "disk"), "disk_bytes": "1MB", "remote": "redis://host"}
    settings = read_node(None, options)
    if fails:
        monkeypatch.setattr(NodeServer, "__init__", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            node_command.run(folder / "n", settings, quiet=False)
    else:
        node_command.run(folder / "n", settings, quiet=False)
        node_command.run(folder / "n", settings, quiet=True)
        node_command.run(folder / "n", read_node(None, {"bytes": "1MB", "metrics": "127.0.0.1:0"}), quiet=False)
        first, second = capsys.readouterr().err.splitlines()
        memory = f"node:{folder / 'n'} owns 1.0 MiB"
        assert first == f"{memory}, empty"
        assert re.fullmatch(rf"{memory}, 0 values of an earlier node, http://127.0.0.1:\d+/metrics", second)
        assert set(handlers) == {signal.SIGTERM, signal.SIGINT}
        assert [server._is_stopping for server in served] == [True] * 3
    assert {address.partition(":")[0] for address in closed} == {"disk", "redis"}


@pytest.mark.parametrize("quiet", [False, True])
def test_given_words_of_a_command_then_the_node_gets_them_and_its_warnings_are_shown_unless_it_is_quiet(
    monkeypatch: pytest.MonkeyPatch, kvpool: Callable[..., Ended], quiet: bool
) -> None:
    called: list[Any] = []
    monkeypatch.setattr(node_command, "run", lambda *given: called.append(given))
    monkeypatch.setattr(node_command.logging, "basicConfig", lambda **options: called.append(options))
    words = ["--bytes", "2MB", "--policy", "priority", "--engine-share", "0.5", "--tenant-share", "0.25"]
    assert kvpool("node", "/x/y", *words, *["--quiet"] * quiet).status == 0
    *shown, (directory, settings, was_quiet) = called
    assert shown == [] if quiet else [{"level": logging.WARNING, "format": "%(message)s"}]
    assert (directory, was_quiet, settings.bytes, settings.policy) == (Path("/x/y"), quiet, 2**21, "priority")
    assert (settings.quotas.engine, settings.quotas.tenant, settings.metrics) == (0.5, 0.25, None)
