"""An engine whose store breaks, with real servers: every answer is that of computing it, nobody waits past the deadline.

`assert_right` also has everything balance: nothing is held, lent or referenced, and engine and tiers count the same.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("xxhash")
pytest.importorskip("glide_sync")
sys.path.append(str(Path(__file__).resolve().parents[1] / "tiers"))

from servers import GARBAGE, FakeServer, RedisCluster, RedisServer, eventually, running  # noqa: E402
from test_mooncake import namespace_command  # noqa: E402
from tier_faults import (  # noqa: E402
    ALL_CACHED,
    MODULES_WITH_TIME,
    PARAMS,
    PROMPTS,
    Clock,
    SlowestAllowed,
    assert_balanced,
    assert_right,
    computed,
    make_engine,
)

from kvpool.engine import Engine  # noqa: E402
from kvpool.testing import key  # noqa: E402
from kvpool.tiers import TierStats, open_tier  # noqa: E402
from kvpool.tiers.transport.chain import GRACE_SECONDS  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_self_check")

DEADLINE = 0.5


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    made = RedisServer(tmp_path / "redis")
    with running(made):
        yield made


def filled(url: str) -> str:
    """The address of a server that holds all prompts."""
    address = f"{url}{'&' if '?' in url else '?'}timeout=2"
    with make_engine(remote=address) as engine:
        eventually(lambda: stores_everything(engine), "every block is stored")
    return address


def stores_everything(engine: Engine) -> bool:
    """Whether no block failed in this round: a server may need a moment to be found."""
    before = tier_stats(engine)
    engine.manager.cache.reset()
    assert_right(engine)
    after = tier_stats(engine)
    return (after.store_failures, after.late_stores) == (before.store_failures, before.late_stores)


def tier_stats(engine: Engine) -> TierStats:
    found = engine.stats().tiers
    assert found is not None
    return found.tiers[-1].stats


def test_given_a_server_then_another_engine_finds_what_the_first_one_stored(server: RedisServer) -> None:
    with make_engine(remote=filled(server.url), tier_timeout=60.0) as engine:
        assert assert_right(engine) >= ALL_CACHED


def test_given_a_server_that_is_killed_then_requests_are_answered(
    server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    address = filled(server.url)
    with make_engine(remote=address) as engine:
        server.kill()
        assert_right(engine)
    with make_engine(remote=address) as engine:
        assert_right(engine)


@pytest.mark.slow
def test_given_a_server_that_hangs_then_requests_are_answered_and_go_on_when_it_comes_back(
    server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    address = filled(server.url)
    with make_engine(remote=address, tier_timeout=0.5) as engine:
        server.pause()
        assert_right(engine)
        server.resume()
        engine.manager.cache.reset()
        assert_right(engine)


@pytest.mark.slow
def test_given_a_server_without_memory_then_it_is_read_from_and_what_it_refuses_is_counted(
    server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    address = filled(server.url)
    assert server.ask("CONFIG", "SET", "maxmemory-policy", "noeviction") == "+OK"
    assert server.ask("CONFIG", "SET", "maxmemory", "1") == "+OK"
    with make_engine(remote=address, tier_timeout=60.0) as engine:
        num_values = server.ask("DBSIZE")
        assert assert_right(engine) >= ALL_CACHED
        engine.generate([PROMPTS[0][::-1]], PARAMS)
        assert_balanced(engine)
        stats = tier_stats(engine)
        assert (stats.refused > 0, stats.problem) == (True, "")
        assert server.ask("DBSIZE") == num_values
        assert server.ask("CONFIG", "SET", "maxmemory", "0") == "+OK"

        def takes_values_again() -> bool:
            engine.manager.cache.reset()
            engine.generate([PROMPTS[0][::-1]], PARAMS)
            assert_balanced(engine)
            return server.ask("DBSIZE") != num_values

        eventually(takes_values_again, "the server has memory again")


def test_given_a_wrong_password_then_requests_are_answered_and_the_problem_is_told_without_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = RedisServer(tmp_path / "redis", password="right")
    with running(server):
        url = f"redis://:wr0ng@127.0.0.1:{server.port}?timeout=2"
        with make_engine(remote=url) as engine:
            assert assert_right(engine) == 0
            stats = tier_stats(engine)
            assert (stats.hits, stats.stored) == (0, 0)
            assert stats.store_failures + stats.refused > 0
            assert "password" in stats.problem.lower() or "auth" in stats.problem.lower()
            assert "wr0ng" not in stats.problem + caplog.text
        assert server.ask("DBSIZE") == ":0"


@pytest.mark.slow
def test_given_a_cluster_that_loses_a_master_then_requests_are_answered_and_the_others_still_help(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cluster = RedisCluster(tmp_path)
    with running(cluster):
        address = filled(cluster.url)
        with make_engine(remote=address, tier_timeout=60.0) as engine:
            assert assert_right(engine) >= ALL_CACHED
        with make_engine(remote=f"{address}&pause=3600") as engine:
            cluster.nodes[1].kill()
            for _ in range(3):
                engine.manager.cache.reset()
                assert assert_right(engine) < ALL_CACHED
            stats = tier_stats(engine)
            assert f":{cluster.nodes[1].port}:" in stats.problem
            assert f":{cluster.nodes[0].port}:" not in stats.problem
            assert stats.stored > 0  # on the nodes that are left
        with make_engine(remote=address) as engine:
            assert_right(engine)


@pytest.mark.quick("noise", "always two")
@pytest.mark.parametrize("says", GARBAGE.values(), ids=GARBAGE)
def test_given_a_server_that_is_replaced_by_one_that_answers_garbage_then_requests_are_answered(
    says: bytes, server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    address = filled(server.url)
    with make_engine(remote=address, tier_timeout=DEADLINE) as engine:
        server.kill()
        fake = FakeServer(says, port=server.port)
        try:
            for _ in range(2):
                assert_right(engine)
                engine.manager.cache.reset()
        finally:
            fake.close()


def test_given_values_that_were_overwritten_with_noise_then_none_of_them_is_used(
    server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    address = filled(server.url)
    script = """
        for _, name in ipairs(redis.call('KEYS', '*')) do
            redis.call('SETRANGE', name, redis.call('STRLEN', name) / 2, string.rep('?', 8))
        end"""
    server.ask("EVAL", script, "0")
    with make_engine(remote=address, tier_timeout=60.0) as engine:
        assert assert_right(engine) == 0
        stats = tier_stats(engine)
        assert (stats.hits, stats.load_failures > 0) == (0, True)


# --- deadlines ---------------------------------------------------------------------------------------------------------


def nothing(server: RedisServer) -> None:
    """The server works."""


FAULTS: dict[str, Callable[[RedisServer], object]] = {
    "none": nothing,
    "killed": RedisServer.kill,
    "paused": RedisServer.pause,
    "full": lambda server: server.ask("CONFIG", "SET", "maxmemory", "1"),
    "password": lambda server: server.ask("CONFIG", "SET", "requirepass", "another"),
}


@pytest.mark.quick("killed", "full")
@pytest.mark.parametrize("fault", FAULTS)
def test_given_a_store_that_takes_all_the_time_it_is_given_then_no_request_waits_past_the_deadline(
    fault: str, server: RedisServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Time is a clock that only the tier moves: each call by all that it was given, which is the worst it may do."""
    address = filled(server.url)
    clock = Clock()
    monkeypatch.setattr("kvpool.tiers.transport.storing.STORE_TIMEOUT", 1.0)  # closing waits for it, by the real clock
    for name in MODULES_WITH_TIME:
        monkeypatch.setattr(importlib.import_module(name), "time", clock)
    with open_tier(address) as inner:
        eventually(lambda: inner.contains([key(0)]) and not inner.stats().problem, "the store is up")
        tiers = [SlowestAllowed(inner, clock), SlowestAllowed(inner, clock)]
        with make_engine(tiers=tiers, tier_timeout=DEADLINE) as engine:
            FAULTS[fault](server)
            for prompt, expected in zip(PROMPTS, computed(), strict=True):
                began = clock.now
                (result,) = engine.generate([prompt], PARAMS)
                assert tuple(result.token_ids) == expected
                assert clock.now - began <= DEADLINE + GRACE_SECONDS
                assert_balanced(engine)
            server.resume() if fault == "paused" else None


# --- Mooncake ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_given_a_mooncake_node_that_is_killed_then_requests_are_answered() -> None:
    try:
        import mooncake.store  # noqa: F401
    except ImportError as error:
        pytest.skip(f"needs Mooncake's client ({error}): make test-mooncake")
    inside = Path(__file__).with_name("mooncake_engine_inside.py")
    tests = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(inside)]
    command = [*namespace_command(), *tests]
    found = subprocess.run(command, capture_output=True, text=True, timeout=600, env={**os.environ})
    assert found.returncode == 0, found.stdout[-6000:] + found.stderr[-2000:]
    assert " passed" in found.stdout
