"""The Mooncake tier on a real store; run by test_mooncake.py where there is no network but loopback."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from servers import MooncakeMaster, MooncakeNode, eventually, running

from kvpool.testing import TierContract, key, load, store, value
from kvpool.tiers import KeyedTier, MooncakeTier, Outcome
from kvpool.tiers.remote.mooncake import NUM_BUFFERS

HANGS = 30.0
_namespaces = itertools.count()


@contextmanager
def bounded() -> Iterator[None]:
    """The block ends, if not at its deadline then long before something hangs."""
    started = time.monotonic()
    yield
    assert time.monotonic() - started < HANGS


def fresh(master: MooncakeMaster, **options: object) -> MooncakeTier:
    """A tier whose namespace nobody used before."""
    settings = {"hostname": "127.0.0.1", "namespace": f"n{next(_namespaces)}", "timeout": 20, **options}
    words = "&".join(f"{name}={word}" for name, word in settings.items())
    return MooncakeTier(f"mooncake://127.0.0.1:{master.port}?{words}")


def is_up(tier: MooncakeTier) -> bool:
    tier.contains([key(0)])
    return tier.stats().problem == ""


@pytest.fixture(scope="module")
def master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MooncakeMaster]:
    made = MooncakeMaster(tmp_path_factory.mktemp("master"))
    node = MooncakeNode(tmp_path_factory.mktemp("node"), made, 256 << 20)
    with running(made), running(node):
        yield made


class TestMooncake(TierContract):
    @pytest.fixture(autouse=True)
    def _master(self, master: MooncakeMaster) -> None:
        self.master = master

    def make_tier(self, tmp_path: Path) -> KeyedTier:
        return fresh(self.master)


def test_given_two_tiers_then_they_share_values_and_namespaces_do_not(master: MooncakeMaster) -> None:
    with fresh(master, namespace="shared") as one, fresh(master, namespace="shared") as two, fresh(master) as other:
        assert store(one, [1]) == [Outcome.OK]
        assert load(two, [1]) == ([Outcome.OK], [value(1)])
        assert load(other, [1])[0] == [Outcome.MISS]


def test_given_values_up_to_the_size_of_a_slab_then_they_come_back_and_larger_ones_are_refused(
    master: MooncakeMaster,
) -> None:
    with fresh(master) as tier:
        size = tier.max_value_bytes
        numbers = list(range(NUM_BUFFERS + 2))
        assert store(tier, numbers, 5 << 20) == [Outcome.OK] * len(numbers)
        assert load(tier, numbers, 5 << 20)[0] == [Outcome.OK] * len(numbers)
        assert store(tier, [99, 100], size) == [Outcome.OK] * 2
        assert load(tier, [99], size) == ([Outcome.OK], [value(99, size)])
        assert tier.store([key(101)], [bytes(size + 1)]) == [Outcome.REFUSED]


@pytest.mark.parametrize("what", ["noise", "shorter than a seal", "of another key"])
def test_given_a_spoilt_value_then_it_failed_and_storing_it_again_heals(master: MooncakeMaster, what: str) -> None:
    with fresh(master) as tier:
        store(tier, [1, 2])
        client: Any = tier._client
        one, two = tier._names([key(1), key(2)])
        content = {"noise": bytes(5064), "shorter than a seal": b"x", "of another key": client.get(two)}[what]
        assert client.remove(one, True) == 0
        assert client.put(one, content) == 0
        assert load(tier, [1, 2])[0] == [Outcome.FAILED, Outcome.OK]
        assert tier.contains([key(1)]) == [False]
        assert store(tier, [1]) == [Outcome.OK]
        assert load(tier, [1]) == ([Outcome.OK], [value(1)])


def test_given_more_values_than_memory_then_some_leave_or_are_refused_and_none_is_wrong(tmp_path: Path) -> None:
    master = MooncakeMaster(tmp_path / "master")
    node = MooncakeNode(tmp_path / "node", master, 32 << 20)
    with running(master), running(node), fresh(master) as tier:
        size, numbers = 1 << 20, list(range(60))
        outcomes = [store(tier, [number], size)[0] for number in numbers]
        assert set(outcomes) <= {Outcome.OK, Outcome.REFUSED}
        assert outcomes[0] == Outcome.OK
        found, contents = load(tier, numbers, size)
        assert Outcome.OK in found
        for number, outcome, content in zip(numbers, found, contents, strict=True):
            assert outcome in (Outcome.OK, Outcome.MISS)
            assert outcome != Outcome.OK or content == value(number, size)


def test_given_no_master_at_the_start_then_the_tier_opens_and_finds_it_later(tmp_path: Path) -> None:
    master = MooncakeMaster(tmp_path / "master")
    with bounded(), fresh(master, pause=0.05) as tier:
        assert load(tier, [1])[0] == [Outcome.FAILED]
        assert "no master" in tier.stats().problem
        with running(master), running(MooncakeNode(tmp_path / "node", master, 64 << 20)):
            eventually(lambda: is_up(tier), "the master is found")
            assert store(tier, [1]) == [Outcome.OK]
            assert load(tier, [1]) == ([Outcome.OK], [value(1)])


def test_given_a_killed_master_then_calls_end_and_a_new_one_is_found(tmp_path: Path) -> None:
    master = MooncakeMaster(tmp_path / "master")
    node = MooncakeNode(tmp_path / "node", master, 64 << 20)
    with running(master), running(node), fresh(master, pause=0.05, timeout=2) as tier:
        eventually(lambda: is_up(tier), "the master is up")
        assert store(tier, [1]) == [Outcome.OK]
        master.kill()
        with bounded():
            assert store(tier, [2])[0] in (Outcome.FAILED, Outcome.LATE)
            for _ in range(50):
                assert load(tier, [1])[0][0] in (Outcome.FAILED, Outcome.LATE)
        master.start()
        eventually(lambda: store(tier, [3]) == [Outcome.OK], "the new master is found, and the node's memory")
        assert load(tier, [3]) == ([Outcome.OK], [value(3)])


def test_given_a_paused_master_then_the_call_ends_at_its_deadline_and_nothing_is_written_later(tmp_path: Path) -> None:
    master = MooncakeMaster(tmp_path / "master")
    node = MooncakeNode(tmp_path / "node", master, 64 << 20)
    with running(master), running(node), fresh(master, pause=0.05) as tier:
        assert store(tier, [1]) == [Outcome.OK]
        master.pause()
        out = bytearray(len(value(1)))
        with bounded():
            assert tier.load([key(1)], [out], timeout=0.5) == [Outcome.LATE]
            for _ in range(50):
                assert tier.load([key(1)], [out], timeout=0.5) == [Outcome.FAILED]
        out[:] = b"\x5a" * len(out)
        master.resume()
        eventually(lambda: load(tier, [1]) == ([Outcome.OK], [value(1)]), "the master answers again")
        assert out == b"\x5a" * len(out)


def test_given_a_killed_node_then_its_values_are_lost_nothing_is_wrong_and_others_take_new_ones(tmp_path: Path) -> None:
    master = MooncakeMaster(tmp_path / "master")
    nodes = [MooncakeNode(tmp_path / f"node-{number}", master, 64 << 20) for number in range(2)]
    numbers = list(range(20))
    with running(master), running(nodes[0]), running(nodes[1]), fresh(master, pause=0.05) as tier:
        assert store(tier, numbers) == [Outcome.OK] * 20
        nodes[0].kill()
        with bounded():
            outcomes, contents = load(tier, numbers)
        for number, outcome, content in zip(numbers, outcomes, contents, strict=True):
            assert outcome != Outcome.OK or content == value(number)
        eventually(lambda: is_up(tier), "the tier works")
        fresh_numbers = list(range(100, 110))
        eventually(lambda: store(tier, fresh_numbers) == [Outcome.OK] * 10, "the other node takes values")
        outcomes, contents = load(tier, fresh_numbers)
        assert all(
            content == value(number)
            for number, outcome, content in zip(fresh_numbers, outcomes, contents, strict=True)
            if outcome == Outcome.OK
        )
