"""The S3 tier on moto's server: the contract, objects that are not what they were, and a store that fails."""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from servers import MotoServer, eventually, running

from kvpool.errors import InvalidArgumentError
from kvpool.testing import TierContract, key, load, store, value
from kvpool.tiers import KeyedTier, KeyPattern, Outcome, Purged
from kvpool.tiers.envelope import HEADER_BYTES
from kvpool.tiers.remote.remote_tier import NodeError
from kvpool.tiers.remote.s3 import LoopThread, S3Tier

HANGS = 20.0
_buckets = itertools.count()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MotoServer]:
    made = MotoServer(tmp_path_factory.mktemp("moto"))
    with running(made):
        yield made


def fresh(server: MotoServer, **options: object) -> S3Tier:
    """A tier on a bucket that nobody used before."""
    url = server.make_bucket(f"bucket-{next(_buckets)}")
    return S3Tier(url + "".join(f"&{name}={word}" for name, word in {"timeout": 30, **options}.items()))


def name_of(tier: S3Tier) -> str:
    return tier.name.split("/")[2]


def path_of(number: int) -> str:
    return "some/where/" + "/".join(key(number)[a:b].hex() for a, b in ((0, 8), (8, 10), (10, 12), (12, 32)))


class TestS3(TierContract):
    @pytest.fixture(autouse=True)
    def _server(self, server: MotoServer) -> None:
        self.server = server

    def make_tier(self, tmp_path: Path) -> KeyedTier:
        return fresh(self.server)


def test_given_a_stored_value_then_it_is_one_object_below_the_prefix_of_its_model(server: MotoServer) -> None:
    with fresh(server) as tier:
        store(tier, [1])
        bucket = server.bucket(name_of(tier))
        (path,) = (found["path"] for found in bucket.list().collect())
        assert path == path_of(1)
        assert bytes(bucket.get(path).bytes())[HEADER_BYTES:] == value(1)


def test_given_a_purge_of_everything_then_objects_that_are_not_kvpools_stay(server: MotoServer) -> None:
    with fresh(server) as tier:
        store(tier, [1, 2])
        bucket = server.bucket(name_of(tier))
        older = f"some/where/{key(3)[:8].hex()}/{key(3)[8:].hex()}"  # as values lay before tenants had folders
        others = ["some/where/photos/2026/cat.jpg", f"some/where/{key(1)[:8].hex()}/notes.txt", "some/where/file"]
        for path in (older, *others):
            bucket.put(path, b"mine")
        assert tier.purge(KeyPattern()) == Purged(3, is_complete=True)
        assert {found["path"] for found in bucket.list().collect()} == set(others)


@pytest.mark.parametrize("what", ["flipped", "shorter", "empty", "header only", "of another key"])
def test_given_an_object_that_is_not_what_it_was_then_it_failed_and_storing_it_again_heals(
    server: MotoServer, what: str
) -> None:
    with fresh(server) as tier:
        store(tier, [1, 2])
        bucket = server.bucket(name_of(tier))
        whole, other = (bytes(bucket.get(path_of(number)).bytes()) for number in (1, 2))
        spoilt = {
            "flipped": whole[:-1] + bytes([whole[-1] ^ 1]),
            "shorter": whole[:-1],
            "empty": b"",
            "header only": whole[:HEADER_BYTES],
            "of another key": other,
        }
        bucket.put(path_of(1), spoilt[what])
        assert load(tier, [1, 2])[0] == [Outcome.FAILED, Outcome.OK]
        assert tier.contains([key(1)]) == [False]
        assert store(tier, [1]) == [Outcome.OK]
        assert load(tier, [1]) == ([Outcome.OK], [value(1)])


def test_given_a_long_prefix_then_its_length_is_found_across_parts_and_nothing_is_asked_far_behind_the_gap(
    server: MotoServer,
) -> None:
    with fresh(server, connections=2) as tier:
        store(tier, [0, 1, 2, 3, 4, 6])
        keys = [key(number) for number in range(9)]
        assert tier.contains_prefix(keys) == 5
        assert tier.contains_prefix(keys[:4]) == 4
        assert tier.contains_prefix(keys[5:]) == 0
        asked: list[int] = []
        contains = tier._contains
        tier._contains = lambda part, deadline: asked.append(len(part)) or contains(part, deadline)  # type: ignore[method-assign,func-returns-value]
        tier.contains_prefix(keys[5:])
        assert asked == [2]


def test_given_no_bucket_then_everything_is_a_miss_and_the_statistics_say_why(server: MotoServer) -> None:
    url = server.make_bucket(f"bucket-{next(_buckets)}").replace("bucket-", "nowhere-")
    with S3Tier(f"{url}&timeout=30&pause=3600") as tier:
        assert "there is no such bucket" in tier.stats().problem
        assert store(tier, [1]) == [Outcome.FAILED]
        assert load(tier, [1])[0] == [Outcome.FAILED]


def test_given_a_bucket_that_vanishes_then_nothing_is_stored_and_the_statistics_say_why(server: MotoServer) -> None:
    with fresh(server, pause=3600) as tier:
        where = f"http://127.0.0.1:{server.port}/{name_of(tier)}"
        with urllib.request.urlopen(urllib.request.Request(where, method="DELETE"), timeout=HANGS):
            pass
        assert store(tier, [1]) == [Outcome.FAILED]
        assert "there is no such bucket" in tier.stats().problem


@pytest.mark.slow
def test_given_a_store_that_is_killed_then_calls_end_and_it_is_found_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = MotoServer(tmp_path)
    with running(server), caplog.at_level(logging.DEBUG), fresh(server, pause=0.05, timeout=2) as tier:
        eventually(lambda: store(tier, [1]) == [Outcome.OK], "the store is up")
        server.kill()
        started = time.monotonic()
        for _ in range(100):
            assert load(tier, [1])[0][0] in (Outcome.FAILED, Outcome.LATE)
        assert time.monotonic() - started < HANGS
        assert tier.stats().problem
        shown = [repr(tier), str(tier.stats()), caplog.text]
        assert all("secret" not in text for text in shown)
        server.start()
        server.make_bucket(name_of(tier))
        eventually(lambda: store(tier, [1]) == [Outcome.OK], "the store is found again")
        assert load(tier, [1]) == ([Outcome.OK], [value(1)])


@pytest.mark.slow
def test_given_a_paused_store_then_the_call_ends_at_its_deadline_and_later_ones_cost_nothing(tmp_path: Path) -> None:
    server = MotoServer(tmp_path)
    with running(server), fresh(server, pause=3600) as tier:
        assert store(tier, [1, 2]) == [Outcome.OK] * 2
        server.pause()
        try:
            started = time.monotonic()
            out = [bytearray(len(value(1))) for _ in range(2)]
            assert tier.load([key(1), key(2)], out, timeout=0.1) == [Outcome.LATE] * 2
            for _ in range(100):
                assert load(tier, [1, 2])[0] == [Outcome.FAILED] * 2
            assert time.monotonic() - started < HANGS
        finally:
            server.resume()
        assert "no answer" in tier.stats().problem


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("http://bucket", "s3://bucket/prefix"),
        ("s3://bucket:9000", "s3://bucket/prefix"),
        ("s3://bucket?endpoint=host:9000", "must begin with https://"),
        ("s3://bucket?ttl=60", "no option 'ttl'; it has timeout"),
        ("s3://access@bucket", "needs its secret key"),
    ],
)
def test_given_a_wrong_address_then_the_wrong_part_is_named(url: str, says: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        S3Tier(url)
    assert says in str(caught.value)


def test_given_a_loop_that_closes_then_who_waits_is_told_and_nobody_waits_for_ever() -> None:
    loop, begun, told = LoopThread("test"), threading.Event(), []

    async def never() -> None:
        begun.set()
        await asyncio.Event().wait()

    def wait() -> None:
        try:
            loop.wait_for(never())
        except NodeError as error:
            told.append(str(error))

    waiting = threading.Thread(target=wait)
    waiting.start()
    begun.wait()
    loop.close()
    loop.close()
    waiting.join(HANGS)
    assert told == ["closed"]
    with pytest.raises(NodeError, match="closed"):
        loop.wait_for(never())


@pytest.mark.parametrize("word", ["QuotaExceeded", "StorageFull", "InsufficientStorage", "507 "])
def test_given_a_store_without_room_then_values_are_refused_and_it_is_not_asked_again_for_a_moment(
    server: MotoServer, word: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("kvpool.tiers.remote.remote_tier.FULL_SECONDS", 1e9)
    with fresh(server) as tier:
        asked = []

        async def put_async(*_: object, **__: object) -> None:
            asked.append(1)
            raise tier._obstore.exceptions.BaseError(f"a reason: {word}")

        with monkeypatch.context() as patch:
            patch.setattr(tier._obstore, "put_async", put_async)
            assert store(tier, [1]) == [Outcome.REFUSED]
            assert store(tier, [2]) == [Outcome.REFUSED]
        assert asked == [1]
        assert tier.stats().problem == ""
        assert f"stores nothing: a reason: {word.strip()}" in caplog.text


@pytest.mark.slow
def test_given_an_empty_value_then_it_is_listed_with_the_others(server: MotoServer) -> None:
    with fresh(server) as tier:
        assert store(tier, [1], 0) == store(tier, [2], 100) == [Outcome.OK]
        assert tier.listed() == ({key(1): 0, key(2): 100}, "")
