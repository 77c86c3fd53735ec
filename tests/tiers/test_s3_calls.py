"""The S3 tier over a bucket in memory: how it is made, and each request failing or hanging in turn."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from kvpool.errors import ConfigError, InvalidArgumentError
from kvpool.testing import key, load, store, value
from kvpool.tiers import KeyPattern, Outcome, Purged
from kvpool.tiers.envelope import HEADER_BYTES
from kvpool.tiers.remote import s3
from kvpool.tiers.remote.s3 import S3Tier, object_path

OK, MISS, FAILED, LATE = Outcome.OK, Outcome.MISS, Outcome.FAILED, Outcome.LATE
SPACE = key(1)[:8]


class Base(Exception):  # as obstore's
    """What obstore raises."""


class Obstore:
    """Stands for the package obstore, with one bucket. `fault` is awaited before each request, with its name."""

    exceptions = SimpleNamespace(BaseError=Base)

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.made: list[tuple[Any, dict[str, Any]]] = []
        self.calls: list[str] = []
        self.fault: Any = None
        self.store = SimpleNamespace(S3Store=lambda host, **options: self.made.append((host, options)) or host)

    async def _begin(self, name: str) -> None:
        self.calls.append(name)
        if self.fault is not None:
            await self.fault(name)

    async def head_async(self, bucket: str, path: str) -> dict[str, int]:
        await self._begin("head")
        if path not in self.objects:
            raise FileNotFoundError(f"no {path}")
        return {"size": len(self.objects[path])}

    async def get_async(self, bucket: str, path: str) -> Any:
        await self._begin("get")
        if path not in self.objects:
            raise FileNotFoundError(f"no {path}")
        content = self.objects[path]

        async def bytes_async() -> bytes:
            await self._begin("bytes")
            return content

        return SimpleNamespace(meta={"size": len(content)}, bytes_async=bytes_async)

    async def put_async(self, bucket: str, path: str, content: list[Any], *, use_multipart: bool) -> None:
        assert not use_multipart
        await self._begin("put")
        self.objects[path] = b"".join(bytes(part) for part in content)

    async def delete_async(self, bucket: str, paths: str | list[str]) -> None:
        await self._begin("delete")
        for path in [paths] if isinstance(paths, str) else paths:
            del self.objects[path]

    async def list(self, bucket: str, prefix: str = "", *, chunk_size: int) -> AsyncIterator[Any]:
        assert chunk_size == 1000
        found = [{"path": path, "size": len(self.objects[path])} for path in sorted(self.objects)]
        chosen = [each for each in found if not prefix or str(each["path"]).startswith(f"{prefix}/")]
        for at in range(0, len(chosen), 2):
            await self._begin("list")
            yield chosen[at : at + 2]

    async def list_with_delimiter_async(self, bucket: str) -> dict[str, Any]:
        await self._begin("folders")
        return {"common_prefixes": sorted({path.partition("/")[0] for path in self.objects})}


@pytest.fixture
def obstore(monkeypatch: pytest.MonkeyPatch) -> Obstore:
    made = Obstore()
    monkeypatch.setattr(s3, "_import_obstore", lambda: made)
    return made


@contextmanager
def tier_over(url: str = "s3://bucket?timeout=30&pause=3600") -> Iterator[S3Tier]:
    with S3Tier(url) as tier:
        assert tier.stats().problem == ""
        yield tier


def failing(name: str, error: Exception) -> Any:
    async def fault(call: str) -> None:
        if call == name:
            raise error

    return fault


@pytest.mark.parametrize(
    ("url", "host", "options", "client"),
    [
        (
            "s3://bucket?timeout=0.001",
            "bucket",
            {"region": "us-east-1", "prefix": None},
            {"allow_http": False, "connect_timeout": "1ms", "timeout": "1ms"},
        ),
        (
            "s3://us%2Fer:pass@b/some/where/?endpoint=http://h:9&region=x&timeout=2.5",
            "b",
            {
                "region": "x",
                "endpoint": "http://h:9",
                "access_key_id": "us/er",
                "secret_access_key": "pass",
                "prefix": "some/where",
            },
            {"allow_http": True, "connect_timeout": "2500ms", "timeout": "2500ms"},
        ),
        (
            "s3://b?endpoint=https://h&anonymous=1&timeout=1",
            "b",
            {"region": "us-east-1", "endpoint": "https://h", "skip_signature": True, "prefix": None},
            {"allow_http": False, "connect_timeout": "1000ms", "timeout": "1000ms"},
        ),
    ],
)
def test_given_an_address_then_the_client_is_made_with_what_it_says(
    obstore: Obstore, url: str, host: str, options: dict[str, Any], client: dict[str, Any]
) -> None:
    S3Tier(url).close()
    assert obstore.made == [(host, {**options, "client_options": client, "retry_config": {"max_retries": 0}})]


def test_given_a_client_that_cannot_be_made_or_no_package_then_the_error_says_so(
    obstore: Obstore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise Base("no region\nmany lines for debugging")

    obstore.store.S3Store = fails
    with pytest.raises(InvalidArgumentError, match=r"^s3://bucket/p cannot be used: no region$"):
        S3Tier("s3://a:secret@bucket/p")
    monkeypatch.undo()
    monkeypatch.setitem(__import__("sys").modules, "obstore", None)
    with pytest.raises(ConfigError, match=r"s3:// tiers need obstore: pip install '\.\[s3\]' in a checkout"):
        S3Tier("s3://bucket")


def test_given_values_then_they_are_objects_that_are_found_listed_purged_and_removed(obstore: Obstore) -> None:
    with tier_over() as tier:
        assert store(tier, [1, 2, 3]) == [OK] * 3
        assert sorted(obstore.objects) == sorted(object_path(key(number)) for number in (1, 2, 3))
        assert object_path(bytes(range(32))) == ("0001020304050607/0809/0a0b/0c0d0e0f101112131415161718191a1b1c1d1e1f")
        obstore.calls.clear()
        assert store(tier, [1]) == [OK]
        assert obstore.calls == ["head"]  # what is there is not sent again
        assert load(tier, [1, 9]) == ([OK, MISS], [value(1), bytes(5000)])
        assert tier.remove([key(3), key(9)]) == [OK, MISS]
        obstore.objects["notes.txt"] = b"mine"
        obstore.objects[object_path(key(7))] = bytes(HEADER_BYTES - 1)  # no value could be so short
        obstore.objects[f"{key(8)[:8].hex()}/{key(8)[8:].hex()}"] = bytes(5000)  # as before tenants had folders
        assert tier.listed() == ({key(1): 5000, key(2): 5000}, "")
        assert tier.contains([key(7)]) == [False]
        assert store(tier, [10], 0) == [OK]
        assert tier.contains([key(10)]) == [True]
        assert tier.remove([key(10)]) == [OK]
        assert tier.purge(KeyPattern(SPACE, key(1)[8:12])) == Purged(1, is_complete=True)
        assert tier.purge(KeyPattern()) == Purged(3, is_complete=True)
        assert list(obstore.objects) == ["notes.txt"]


@pytest.mark.parametrize("error", [Base("503 slow down\ndebug"), FileNotFoundError("NoSuchBucket: bucket")])
@pytest.mark.parametrize("name", ["head", "get", "bytes", "put", "delete", "list", "folders"])
def test_given_a_request_that_fails_then_the_outcome_says_so_and_the_statistics_say_why(
    obstore: Obstore, name: str, error: Exception
) -> None:
    reason = "there is no such bucket" if isinstance(error, FileNotFoundError) else "503 slow down"
    with tier_over() as tier:
        assert store(tier, [1]) == [OK]
        obstore.fault = failing(name, error)
        if name == "head":
            assert tier.contains([key(1)]) == [False]
        elif name in ("get", "bytes"):
            assert load(tier, [1])[0] == [FAILED]
        elif name == "put":
            assert store(tier, [2]) == [FAILED]
        elif name == "delete":
            assert tier.remove([key(1)]) == [FAILED]
            reason = str(error).splitlines()[0]
        else:
            assert tier.purge(KeyPattern(SPACE if name == "list" else None)) == Purged(0, is_complete=False)
            if name == "list":
                listed = tier.listed()
                assert (listed.sizes, listed.problem) == ({}, str(error).splitlines()[0])
            return  # nobody waits for a purge: it does not count as a failure of the store
        assert tier.stats().problem.startswith(reason)
        assert "debug" not in tier.stats().problem


@pytest.mark.parametrize(
    ("message", "shown"), [("", "Base"), ("  \n", "Base"), ("\n why\ndebug", "why"), ("x" * 301, "x" * 300)]
)
def test_given_an_error_then_the_beginning_of_its_first_line_is_shown_or_its_kind(
    obstore: Obstore, message: str, shown: str
) -> None:
    with tier_over() as tier:
        store(tier, [1])
        obstore.fault = failing("list", Base(message))
        assert tier.listed().problem == shown


@pytest.mark.parametrize("name", ["head", "get", "bytes", "put", "delete", "list", "folders"])
def test_given_a_request_that_hangs_then_its_call_ends_at_the_deadline_and_writes_nothing_later(
    obstore: Obstore, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def hangs(call: str) -> None:
        if call == name:
            await asyncio.Event().wait()

    async def wait(tasks: Any, *, timeout: float) -> Any:
        assert obstore.fault is None or timeout <= 0.02
        return await waiting(tasks, timeout=timeout)

    waiting = asyncio.wait
    monkeypatch.setattr(asyncio, "wait", wait)
    with tier_over() as tier:
        assert store(tier, [1]) == [OK]
        obstore.fault = hangs
        out = bytearray(5000)
        if name == "head":
            assert tier.contains([key(1)], timeout=0.02) == [False]
        elif name in ("get", "bytes"):
            assert tier.load([key(1)], [out], timeout=0.02) == [LATE]
        elif name == "put":
            assert tier.store([key(2)], [value(2)], timeout=0.02) == [LATE]
        elif name == "delete":
            assert tier.remove([key(1)], timeout=0.02) == [LATE]
        else:
            assert tier.purge(KeyPattern(SPACE if name == "list" else None), timeout=0.02) == Purged(0)
            if name == "list":
                assert tier.listed(timeout=0.02) == ({}, "no answer in time")
        obstore.fault = None
        assert not any(out)


def test_given_a_store_that_hangs_from_the_beginning_then_a_tier_is_made_all_the_same(obstore: Obstore) -> None:
    async def hangs(call: str) -> None:
        await asyncio.Event().wait()

    obstore.fault = hangs
    with S3Tier("s3://bucket?timeout=0.02&pause=3600") as tier:
        assert tier.stats().problem.startswith(("no answer", "not asked yet"))
        assert load(tier, [1])[0] == [FAILED]


def test_given_a_value_larger_than_its_buffer_then_its_bytes_are_not_fetched(obstore: Obstore) -> None:
    with tier_over() as tier:
        store(tier, [1], 300)
        obstore.calls.clear()
        for size, outcome in ((299, FAILED), (300, OK), (301, OK)):
            assert load(tier, [1], size)[0] == [outcome]
        assert obstore.calls.count("bytes") == 2
        assert tier.stats().bytes_loaded == 600


def test_given_many_keys_then_only_so_many_requests_run_at_once(obstore: Obstore) -> None:
    running, most = [0], [0]

    async def counted(call: str) -> None:
        running[0] += 1
        most[0] = max(most[0], running[0])
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        running[0] -= 1

    obstore.fault = counted
    with tier_over("s3://bucket?timeout=30&connections=3") as tier:
        assert load(tier, list(range(20)))[0] == [MISS] * 20
    assert most == [3]


def test_given_a_tier_that_is_closed_then_its_thread_has_ended(obstore: Obstore) -> None:
    with tier_over() as tier:
        thread = tier._loop._thread
        assert (thread.name, thread.daemon) == ("kvpool bucket", True)
    assert not thread.is_alive()
    assert tier._loop._loop.is_closed()
    assert threading.current_thread().is_alive()


@pytest.mark.parametrize(("timeout", "asked"), [(None, [16, 4]), (30.0, [16, 4])])
def test_given_a_long_prefix_then_it_is_asked_in_parts_until_the_gap(
    obstore: Obstore, timeout: float | None, asked: list[int]
) -> None:
    with tier_over() as tier:
        store(tier, list(range(18)))
        parts: list[tuple[int, float]] = []
        contains = tier._contains
        tier._contains = lambda part, due: parts.append((len(part), due)) or contains(part, due)  # type: ignore[method-assign,func-returns-value]
        assert tier.contains_prefix([key(number) for number in range(20)], timeout=timeout) == 18
        assert [count for count, _ in parts] == asked
        assert parts[1][1] == pytest.approx(parts[0][1], abs=1.0)  # one deadline for all


def test_given_one_request_of_several_that_hangs_then_the_store_is_not_down(obstore: Obstore) -> None:
    hung: list[str] = []

    async def first_hangs(call: str) -> None:
        hung.append(call)
        if len(hung) == 1:
            await asyncio.Event().wait()

    with tier_over() as tier:
        store(tier, [1, 2])
        obstore.fault = first_hangs
        assert sorted(tier.contains([key(1), key(2)], timeout=0.05)) == [False, True]
        assert tier.stats().problem == ""


def test_given_a_value_that_was_broken_when_it_is_removed_then_nothing_of_it_is_remembered(obstore: Obstore) -> None:
    with tier_over() as tier:
        store(tier, [1])
        tier.stale.add(key(1))
        assert tier.remove([key(1)]) == [OK]
        assert key(1) not in tier.stale
