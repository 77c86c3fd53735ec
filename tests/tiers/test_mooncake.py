"""The Mooncake tier: on a stand-in for Mooncake's client, and on a real store in a network namespace of its own.

Mooncake listens on all interfaces and asks nobody for a password. So the tests with a real one are in `mooncake_inside.py`.
The last test runs them where only loopback exists, and says why where it cannot.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_mooncake import FULL, NO_MASTER, FakeStore, fake_mooncake
from servers import eventually

from kvpool.errors import ConfigError, InvalidArgumentError
from kvpool.testing import TierContract, key, load, store, value
from kvpool.tiers import KeyedTier, KeyPattern, MooncakeTier, Outcome
from kvpool.tiers.remote import remote_tier
from kvpool.tiers.remote.mooncake import MIN_BUFFER_BYTES, NUM_BUFFERS, CallBuffers

INSIDE = Path(__file__).with_name("mooncake_inside.py")
CALLS = ["batch_is_exist", "batch_get_into", "batch_put_from", "batch_remove", "remove_by_regex"]


@pytest.fixture
def mooncake(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[FakeStore, int]]:
    with fake_mooncake(monkeypatch) as made:
        yield made


def opened(port: int, options: str = "timeout=20&pause=0.01") -> MooncakeTier:
    return MooncakeTier(f"mooncake://127.0.0.1:{port}?{options}")


class TestMooncakeTier(TierContract):
    @pytest.fixture(autouse=True)
    def _port(self, mooncake: tuple[FakeStore, int]) -> None:
        self.port = mooncake[1]

    def make_tier(self, tmp_path: Path) -> KeyedTier:
        return opened(self.port)


def test_given_options_then_the_client_is_set_up_with_them_and_all_of_the_buffer_is_registered(
    mooncake: tuple[FakeStore, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake, port = mooncake
    monkeypatch.setattr("socket.gethostname", lambda: "this-machine")
    usual = {
        "local_hostname": "this-machine",
        "metadata_server": "P2PHANDSHAKE",
        "global_segment_size": "0",
        "local_buffer_size": str(MIN_BUFFER_BYTES),
        "protocol": "tcp",
        "rdma_devices": "",
        "master_server_addr": f"127.0.0.1:{port}",
    }
    chosen = {"protocol": "rdma", "rdma_devices": "mlx5", "local_hostname": "h", "metadata_server": "m"}
    options = "protocol=rdma&devices=mlx5&hostname=h&metadata=m&segment=1MB&buffer=128MB&timeout=20"
    with opened(port) as one, opened(port, options) as two:
        assert fake.clients[0].settings == usual
        sizes = {"global_segment_size": str(2**20), "local_buffer_size": str(2**27)}
        assert fake.clients[1].settings == usual | chosen | sizes
        assert [len(client.memory) for client in fake.clients] == [MIN_BUFFER_BYTES, 2**27]
        assert two.max_value_bytes > one.max_value_bytes
        assert MooncakeTier("mooncake://127.0.0.1?timeout=0.1")._master == ("127.0.0.1", 50051)
    assert all(client.is_closed for client in fake.clients)


def test_given_two_namespaces_then_they_share_a_store_and_no_values(mooncake: tuple[FakeStore, int]) -> None:
    fake, port = mooncake
    with opened(port, "timeout=20&namespace=a.b") as one, opened(port, "timeout=20&namespace=acb&segment=0") as other:
        assert store(one, [1]) == store(other, [1]) == [Outcome.OK]
        assert sorted(fake.values) == [f"kvpool:{name}:{key(1).hex()}" for name in ("a.b", "acb")]
        assert one.purge(KeyPattern(None)).removed == 1
        assert other.contains([key(1)]) == [True]
        assert other.listed().problem == "Mooncake's client cannot list what the store holds"


def test_given_the_largest_value_then_it_comes_back_and_one_byte_more_is_refused(
    mooncake: tuple[FakeStore, int],
) -> None:
    with opened(mooncake[1]) as tier:
        size = tier.max_value_bytes
        assert store(tier, [1], size) == [Outcome.OK]
        assert load(tier, [1], size) == ([Outcome.OK], [value(1, size)])
        assert tier.store([key(2)], [bytes(size + 1)]) == [Outcome.REFUSED]


@pytest.mark.parametrize("content", [b"", b"x", bytes(5064), None], ids=["nothing", "short", "noise", "another's"])
def test_given_a_spoilt_value_then_it_failed_and_storing_it_again_heals(
    mooncake: tuple[FakeStore, int], content: bytes | None
) -> None:
    fake, port = mooncake
    with opened(port) as tier:
        store(tier, [1, 2])
        one, two = tier._names([key(1), key(2)])
        fake.values[one] = fake.values[two] if content is None else content
        assert load(tier, [1, 2])[0] == [Outcome.FAILED, Outcome.OK]
        assert tier.contains([key(1), key(2)]) == [False, True]
        assert store(tier, [1]) == [Outcome.OK]
        assert load(tier, [1]) == ([Outcome.OK], [value(1)])
        fake.values[one] = b"x"
        assert load(tier, [1])[0] == [Outcome.FAILED]
        assert tier.remove([key(1)]) == [Outcome.OK]
        fake.values[one] = fake.values[two]
        assert tier.contains([key(1)]) == [True]  # what was removed is no longer held against the key


def test_given_a_short_value_that_is_loaded_twice_then_both_buffers_are_filled_and_bytes_are_counted(
    mooncake: tuple[FakeStore, int],
) -> None:
    with opened(mooncake[1]) as tier:
        store(tier, [1], 100)
        out = [bytearray(300), bytearray(50), bytearray(100)]
        assert tier.load([key(1)] * 3, out) == [Outcome.OK, Outcome.FAILED, Outcome.OK]
        assert [bytes(buffer[:100]) for buffer in (out[0], out[2])] == [value(1, 100)] * 2
        assert tier.stats().bytes_loaded == 200
        assert load(tier, [1], 99)[0] == [Outcome.FAILED]
        assert tier.contains([key(1)]) == [True]  # it is whole: the buffer was too small
        assert store(tier, [2], 0) == [Outcome.OK]
        assert load(tier, [2], 0)[0] == [Outcome.OK]


def test_given_a_store_without_room_then_values_are_refused_and_it_is_not_asked_again_for_a_moment(
    mooncake: tuple[FakeStore, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake, port = mooncake
    monkeypatch.setattr(remote_tier, "FULL_SECONDS", 1e9)
    with opened(port) as tier:
        store(tier, [1])
        fake.codes["batch_put_from"] = FULL
        assert store(tier, [1, 2, 3]) == [Outcome.OK, Outcome.REFUSED, Outcome.REFUSED]
        fake.codes.clear()
        assert store(tier, [1, 2]) == [Outcome.OK, Outcome.REFUSED]
        assert fake.calls.count("batch_put_from") == 2
        tier._node.full_until = 0.0
        assert store(tier, [2]) == [Outcome.OK]


@pytest.mark.parametrize(("call", "problem"), [*((call, NO_MASTER) for call in CALLS), *((call, -1) for call in CALLS)])
def test_given_a_call_that_fails_then_only_a_lost_master_stops_the_next_one_until_it_is_back(
    mooncake: tuple[FakeStore, int], call: str, problem: int
) -> None:
    fake, port = mooncake
    with opened(port) as tier:
        store(tier, [1])
        fake.codes[call] = problem
        outcomes = {
            "batch_is_exist": lambda: tier.contains([key(1)]),
            "batch_get_into": lambda: load(tier, [1])[0],
            "batch_put_from": lambda: store(tier, [2]),
            "batch_remove": lambda: tier.remove([key(1)]),
            "remove_by_regex": lambda: [tier.purge(KeyPattern(None)).is_complete],
        }[call]()
        assert outcomes[0] in (Outcome.FAILED, False)
        is_lost = problem == NO_MASTER and call != "remove_by_regex"
        assert ("the master does not answer" in tier.stats().problem) == is_lost
        fake.codes.clear()
        eventually(lambda: tier.contains([key(7)]) == [False] and not tier.stats().problem, "it is asked again")
        assert store(tier, [3]) == [Outcome.OK]


@pytest.mark.parametrize("call", CALLS)
def test_given_a_call_that_hangs_then_its_caller_goes_on_at_the_deadline_and_its_memory_is_not_reused(
    mooncake: tuple[FakeStore, int], call: str, caplog: pytest.LogCaptureFixture
) -> None:
    fake, port = mooncake
    with opened(port) as tier:
        store(tier, [1])
        gate = fake.gates[call] = threading.Event()
        out = bytearray(5000)
        late: object = {
            "batch_is_exist": lambda: tier.contains([key(1)], timeout=0.05) == [False],
            "batch_get_into": lambda: tier.load([key(1)], [out], timeout=0.05) == [Outcome.LATE],
            "batch_put_from": lambda: tier.store([key(2)], [value(2)], timeout=0.05) == [Outcome.LATE],
            "batch_remove": lambda: tier.remove([key(1)], timeout=0.05) == [Outcome.LATE],
            "remove_by_regex": lambda: not tier.purge(KeyPattern(None), timeout=0.05).is_complete,
        }[call]()
        assert late is True
        assert "no answer in" in caplog.text or "late" in caplog.text
        is_used = call in ("batch_get_into", "batch_put_from")
        assert tier._buffers._free.qsize() == NUM_BUFFERS - is_used
        gate.set()
        eventually(lambda: tier._buffers._free.qsize() == NUM_BUFFERS, "the call has ended")
        assert out == bytes(5000)


def test_given_calls_that_use_all_buffers_then_the_next_is_late() -> None:
    buffers = CallBuffers(NUM_BUFFERS * 4096)
    taken = [buffers.buffer(1.0) for _ in range(NUM_BUFFERS)]
    memories = [each.__enter__()._memory for each in taken]
    starts = sorted(memory.ctypes.data - buffers.memory.ctypes.data for memory in memories)
    assert starts == [4096 * number for number in range(NUM_BUFFERS)]
    assert {memory.nbytes for memory in memories} == {4096}
    with pytest.raises(TimeoutError), buffers.buffer(0.01):
        raise AssertionError
    taken[0].__exit__(None, None, None)
    with buffers.buffer(0.01) as again:
        assert again._memory is memories[0]
        places = [again.place(100) for _ in range(2)]
        assert places[1][0] - places[0][0] == len(places[0][1]) == len(places[1][1])


@pytest.mark.parametrize(
    ("call", "code", "problem"),
    [
        ("setup", -3, "Mooncake's setup failed (-3)"),
        ("register_buffer", -5, f"Mooncake could not register {MIN_BUFFER_BYTES:,} bytes (-5)"),
        ("batch_is_exist", NO_MASTER, "the master does not answer"),
        ("batch_is_exist", -9, "Mooncake answered -9"),
    ],
)
def test_given_a_store_that_cannot_be_joined_then_the_tier_opens_says_why_and_joins_later(
    mooncake: tuple[FakeStore, int], call: str, code: int, problem: str
) -> None:
    fake, port = mooncake
    fake.codes[call] = code
    with opened(port) as tier:
        assert tier.stats().problem.startswith(problem)
        assert store(tier, [1]) == [Outcome.FAILED]
        fake.codes.clear()
        eventually(lambda: store(tier, [1]) == [Outcome.OK], "the store is joined")
        joined = [client.is_closed for client in fake.clients]
        assert joined[-1] is False
        assert call != "register_buffer" or all(joined[:-1])


def test_given_a_store_that_does_not_answer_then_the_tier_opens_and_says_so(mooncake: tuple[FakeStore, int]) -> None:
    fake, port = mooncake
    gate = fake.gates["batch_is_exist"] = threading.Event()
    with opened(port, "timeout=0.05&pause=3600") as tier:
        eventually(lambda: tier.stats().problem.startswith("no answer"), "it says so")
        gate.set()


def test_given_no_master_then_the_tier_opens_and_says_so(mooncake: tuple[FakeStore, int]) -> None:
    with opened(1) as tier:
        assert tier.stats().problem.startswith("no master: ")
        assert load(tier, [1])[0] == [Outcome.FAILED]
    assert mooncake[0].clients == []


def test_given_a_tier_that_is_closed_while_it_joins_then_its_client_is_closed(mooncake: tuple[FakeStore, int]) -> None:
    fake, port = mooncake
    gate = fake.gates["setup"] = threading.Event()
    tier = opened(port, "timeout=0.05")
    closing = threading.Thread(target=tier.close)
    closing.start()
    eventually(lambda: tier._closed, "it is being closed")
    gate.set()
    closing.join(30)
    eventually(lambda: fake.clients[0].is_closed, "the client is closed")
    assert tier._client is None


def test_given_a_tier_that_is_closed_while_calls_wait_for_a_thread_then_they_are_not_made(
    mooncake: tuple[FakeStore, int],
) -> None:
    gate, made, tier = threading.Event(), [], opened(mooncake[1])
    for _ in range(NUM_BUFFERS):
        tier._calls.submit(gate.wait, 30)
    waiting = tier._calls.submit(made.append, "too late")
    closing = threading.Thread(target=tier.close)
    closing.start()
    eventually(waiting.cancelled, "the call that waits is cancelled")
    gate.set()
    closing.join(30)
    assert made == []


def test_given_a_call_under_way_when_its_tier_is_closed_then_its_client_is_closed_after_it(
    mooncake: tuple[FakeStore, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake, port = mooncake
    gate, tier, ended = threading.Event(), opened(port), []
    call = tier._calls.submit(gate.wait, 30)
    monkeypatch.setattr(fake.clients[0], "close", lambda: ended.append(call.done()))
    closing = threading.Thread(target=tier.close)
    closing.start()
    eventually(lambda: tier._calls._shutdown, "it is being closed")
    gate.set()
    closing.join(30)
    assert ended == [True]
    with pytest.raises(RuntimeError, match="after shutdown"):
        tier._node.threads.submit(print)


@pytest.mark.parametrize("url", ["mooncake://:secret@host", "mooncake://host/path", "redis://host"])
def test_given_what_is_no_address_of_a_master_then_it_is_refused_without_its_password(url: str) -> None:
    with pytest.raises(InvalidArgumentError, match="a Mooncake tier's address is mooncake://master:port") as refused:
        MooncakeTier(url)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    ("missing", "remedy"),
    [
        ("libibverbs.so.1: cannot open", "apt-get install libibverbs1"),
        ("No module", "pip install '\\.\\[mooncake\\]' in a checkout"),
    ],
)
def test_given_no_client_of_mooncake_then_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, missing: str, remedy: str
) -> None:
    class Finder:
        def find_spec(self, name: str, *_: object) -> None:
            if name == "mooncake" or name.startswith("mooncake."):
                raise ImportError(missing)

    for name in ("mooncake", "mooncake.store"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(sys, "meta_path", [Finder(), *sys.meta_path])
    with pytest.raises(ConfigError, match=remedy):
        MooncakeTier("mooncake://127.0.0.1")


def namespace_command() -> list[str]:
    """What a command begins with to run with a loopback and no other network."""
    if missing := [program for program in ("unshare", "ip") if shutil.which(program) is None]:
        pytest.skip(f"needs a network namespace, and there is no program {missing[0]}")
    as_root = [] if os.geteuid() == 0 else ["--map-root-user"]
    command = ["unshare", *as_root, "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
    tried = subprocess.run([*command, "true"], capture_output=True, text=True)
    if tried.returncode != 0:
        pytest.skip(f"needs a network namespace, which this machine refuses: {tried.stderr.strip()}")
    return command


@pytest.mark.slow
def test_given_a_namespace_of_its_own_then_the_mooncake_tier_keeps_the_contract_and_survives_faults() -> None:
    try:
        import mooncake.store  # noqa: F401
    except ImportError as error:
        pytest.skip(f"needs Mooncake's client ({error}): pip install 'kvpool[mooncake]', apt-get install libibverbs1")
    tests = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(INSIDE)]
    found = subprocess.run([*namespace_command(), *tests], capture_output=True, text=True, timeout=600)
    assert found.returncode == 0, found.stdout[-6000:] + found.stderr[-2000:]
    assert " passed" in found.stdout
