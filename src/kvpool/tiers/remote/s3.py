"""S3Tier: values as objects in a bucket of S3, or of a store with the same API.

Each value is one object, the header (`tiers/envelope.py`) and then the bytes, under
`PREFIX/FINGERPRINT/TENANT/SCOPE/REST OF THE KEY`. A thread of the tier runs an event loop with many requests at once.
Requests that are not done at the deadline are cancelled.
"""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import CancelledError, wait
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeVar

from kvpool.errors import ConfigError, InvalidArgumentError
from kvpool.tiers.contract import CALL_TIMEOUT, KEY_BYTES, Outcome
from kvpool.tiers.envelope import HEADER_BYTES, is_whole, num_bytes, seal
from kvpool.tiers.keys import SPACE_BYTES, TAG_BYTES, TENANT_BYTES
from kvpool.tiers.options import ANY_TEXT, FLAG, SECONDS, TierURL, count, option, read_options, size, text
from kvpool.tiers.remote.breaker import FIRST_PAUSE, Breaker
from kvpool.tiers.remote.remote_tier import NodeError, Purging, RemoteTier, Share, StoreNode, seconds_left

MAX_VALUE_BYTES = (5 << 30) - HEADER_BYTES  # the largest object that one request may bring
MAX_CONNECTIONS = 256
NUM_THREADS = 4
PURGE_AT_ONCE = 1000
_PARTS = (0, SPACE_BYTES, SPACE_BYTES + TENANT_BYTES, SPACE_BYTES + TAG_BYTES, KEY_BYTES)
# The end of the path of a value, also of the first format. Other objects of a bucket are never removed.
_VALUE = re.compile("(?:^|/)(?:([0-9a-f]{16}/[0-9a-f]{4}/[0-9a-f]{4}/[0-9a-f]{40})|[0-9a-f]{16}/[0-9a-f]{48})$")
_FULL = ("QuotaExceeded", "StorageFull", "InsufficientStorage", "507 ")

Request = Callable[[Share[StoreNode], int], Awaitable[Outcome]]


@dataclass(frozen=True)
class S3Options:
    """The options of `s3://bucket/prefix?option=value`."""

    timeout: float = option(SECONDS, CALL_TIMEOUT)
    max_value_bytes: int = option(size(1, MAX_VALUE_BYTES), MAX_VALUE_BYTES)
    connections: int = option(count(1, MAX_CONNECTIONS), 16)
    pause: float = option(SECONDS, FIRST_PAUSE)
    endpoint: str = option(
        text("begin with https:// or http://", lambda url: not url or url.startswith(("http://", "https://"))), ""
    )
    region: str = option(ANY_TEXT, "us-east-1")
    anonymous: bool = option(FLAG, False)


class S3Tier(RemoteTier[StoreNode]):
    """Values in a bucket.

    `s3://[access key:secret key@]bucket/prefix?option=value&…`. Options: `endpoint` (for other stores than Amazon's),
    `region`, `anonymous=1` (requests are not signed), `timeout`, `max_value_bytes`, `connections` (requests at once), `pause`
    (seconds before a store that failed is probed). Without keys in the address those of the environment or machine count.
    Objects live until somebody removes them; a lifecycle rule of the bucket can do that by age.
    """

    def __init__(self, url: str) -> None:
        parsed = TierURL.parse(url)
        if parsed.scheme != "s3" or parsed.port is not None:
            raise InvalidArgumentError(f"an S3 tier's address is s3://bucket/prefix?endpoint=…, got {parsed.shown}")
        options = S3Options(**read_options(S3Options, parsed))
        self._connections = options.connections
        super().__init__(parsed.shown, timeout=options.timeout, max_value_bytes=options.max_value_bytes)
        self._obstore = _import_obstore()
        self._bucket = _bucket(self._obstore, parsed, options)
        self._node = StoreNode(parsed.host, NUM_THREADS, Breaker(pause=options.pause, proven=False))
        self._loop = LoopThread(f"kvpool {parsed.host}")
        first = self._probe_in_background(self._node)
        wait([first] if first else [], options.timeout)

    def contains_prefix(self, keys: Sequence[bytes], *, timeout: float | None = None) -> int:
        """How many keys from the first on are there without a gap. Each costs a request, so it stops soon after the gap."""
        deadline = time.monotonic() + (self.timeout if timeout is None else timeout)
        found = 0
        for start in range(0, len(keys), self._connections):
            part = keys[start : start + self._connections]
            found += super().contains_prefix(part, timeout=timeout)
            timeout = deadline - time.monotonic()
            if found < start + len(part) or timeout <= 0:
                break
        return found

    # --- nodes -------------------------------------------------------------------------------------------------------

    def _nodes(self) -> list[StoreNode]:
        return [self._node]

    def _node_of(self, key: bytes) -> StoreNode:
        return self._node

    def _probe(self, node: StoreNode) -> None:
        """Asks for an object that does not exist: a store that answers so works."""
        share = Share(node, [0], [bytes(32)], [memoryview(bytearray())], time.monotonic() + self.timeout)
        self._loop.wait_for(self._all(share, self._load_one))
        if share.outcomes[0] == Outcome.LATE:
            raise TimeoutError

    def _close(self) -> None:
        super()._close()
        self._loop.close()

    # --- shares ------------------------------------------------------------------------------------------------------

    def _find_share(self, share: Share[StoreNode]) -> None:
        self._ask(share, self._find_one)

    def _load_share(self, share: Share[StoreNode]) -> None:
        self._ask(share, self._load_one)

    def _store_share(self, share: Share[StoreNode]) -> None:
        self._ask(share, self._store_one)

    def _remove_share(self, share: Share[StoreNode]) -> None:
        self._ask(share, self._remove_one)

    def _purge_share(self, purging: Purging[StoreNode]) -> None:
        try:
            self._loop.wait_for(asyncio.wait_for(self._purge_all(purging), purging.seconds_left()))
        except asyncio.TimeoutError:
            raise TimeoutError from None
        except (FileNotFoundError, self._obstore.exceptions.BaseError) as error:
            raise NodeError(_message(error)) from None

    def _list_node(self, node: StoreNode, deadline: float) -> Iterator[dict[bytes, int]]:
        try:
            yield self._loop.wait_for(asyncio.wait_for(self._sizes(), seconds_left(deadline)))
        except asyncio.TimeoutError:
            raise TimeoutError from None
        except (FileNotFoundError, self._obstore.exceptions.BaseError) as error:
            raise NodeError(_message(error)) from None

    async def _sizes(self) -> dict[bytes, int]:
        sizes = {}
        async for objects in self._obstore.list(self._bucket, chunk_size=PURGE_AT_ONCE):
            for found in objects:
                if (value := _VALUE.search(found["path"])) and value[1] and found["size"] >= HEADER_BYTES:
                    sizes[bytes.fromhex(value[1].replace("/", ""))] = found["size"] - HEADER_BYTES
        return sizes

    async def _purge_all(self, purging: Purging[StoreNode]) -> None:
        pattern = purging.pattern
        parts = [pattern.tag[:TENANT_BYTES].hex(), pattern.tag[TENANT_BYTES:].hex()]
        if pattern.space is None:
            listed = await self._obstore.list_with_delimiter_async(self._bucket)
            spaces = [str(path).rstrip("/").rpartition("/")[2] for path in listed["common_prefixes"]]
        else:
            spaces = [pattern.space.hex()]
        for space in spaces:
            folder = "/".join(part for part in (space, *parts) if part)
            async for objects in self._obstore.list(self._bucket, folder, chunk_size=PURGE_AT_ONCE):
                paths = [found["path"] for found in objects if _VALUE.search(found["path"])]
                await self._obstore.delete_async(self._bucket, paths)
                purging.removed += len(paths)

    def _ask(self, share: Share[StoreNode], request: Request) -> None:
        with share.node.asking():
            self._loop.wait_for(self._all(share, request))
            if Outcome.LATE in share.outcomes:
                raise TimeoutError

    async def _all(self, share: Share[StoreNode], request: Request) -> None:
        """Makes all requests of a share; after it returns, none of them touches the caller's memory."""
        free = asyncio.Semaphore(self._connections)
        tasks = [asyncio.create_task(self._one(share, place, request, free)) for place in range(len(share.keys))]
        done, late = await asyncio.wait(tasks, timeout=max(0.0, share.deadline - time.monotonic()))
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)
        problems = [error for task in done if (error := task.exception()) is not None]
        if problems:
            raise NodeError(_message(problems[0]))

    async def _one(self, share: Share[StoreNode], place: int, request: Request, free: asyncio.Semaphore) -> None:
        async with free:
            share.outcomes[place] = await request(share, place)
            share.node.breaker.succeeded()

    async def _find_one(self, share: Share[StoreNode], place: int) -> Outcome:
        try:
            found = await self._obstore.head_async(self._bucket, object_path(share.keys[place]))
        except FileNotFoundError as error:
            return _absent(error)
        return Outcome.OK if found["size"] >= HEADER_BYTES else Outcome.MISS

    async def _load_one(self, share: Share[StoreNode], place: int) -> Outcome:
        key, view = share.keys[place], share.views[place]
        try:
            found = await self._obstore.get_async(self._bucket, object_path(key))
            if found.meta["size"] > HEADER_BYTES + view.nbytes:
                return Outcome.FAILED
            content = memoryview(await found.bytes_async())
        except FileNotFoundError as error:
            return _absent(error)
        header, data = content[:HEADER_BYTES], content[HEADER_BYTES:]
        if num_bytes(header, key) != data.nbytes or not is_whole(header, key, data):
            self.stale.add(key)
            return Outcome.FAILED
        view[: data.nbytes] = data
        self.left_unfilled(view.nbytes - data.nbytes)
        return Outcome.OK

    async def _store_one(self, share: Share[StoreNode], place: int) -> Outcome:
        key, view = share.keys[place], share.views[place]
        if key not in self.stale and await self._find_one(share, place) == Outcome.OK:
            return Outcome.OK
        if share.node.is_full():
            return Outcome.REFUSED
        try:
            content = [seal(key, view), view]
            await self._obstore.put_async(self._bucket, object_path(key), content, use_multipart=False)
        except FileNotFoundError:
            raise NodeError("there is no such bucket") from None
        except self._obstore.exceptions.BaseError as error:
            if not any(word in str(error) for word in _FULL):
                raise
            share.node.refused()
            self.report(f"stores nothing: {_message(error)}")
            return Outcome.REFUSED
        self.stale.discard(key)
        return Outcome.OK

    async def _remove_one(self, share: Share[StoreNode], place: int) -> Outcome:
        self.stale.discard(share.keys[place])
        found = await self._find_one(share, place)
        if found == Outcome.OK:
            await self._obstore.delete_async(self._bucket, object_path(share.keys[place]))
        return found


def object_path(key: bytes) -> str:
    """The path of a value. It groups values by model, then by tenant, then by scope."""
    return "/".join(key[start:end].hex() for start, end in pairwise(_PARTS))


def _absent(error: FileNotFoundError) -> Outcome:
    """The outcome for a missing object: a miss. Raises if the bucket is missing."""
    if "NoSuchBucket" in str(error):
        raise NodeError("there is no such bucket") from None
    return Outcome.MISS


def _bucket(obstore: Any, url: TierURL, options: S3Options) -> Any:
    """The client of a bucket. It makes no request yet."""
    settings: dict[str, Any] = {"region": options.region}
    if options.endpoint:
        settings["endpoint"] = options.endpoint
    if options.anonymous:
        settings["skip_signature"] = True
    if (url.user is None) != (url.password is None):
        raise InvalidArgumentError(f"{url.shown}: an access key needs its secret key, s3://access:secret@bucket")
    if url.user is not None:
        settings |= {"access_key_id": url.user, "secret_access_key": url.password}
    limit = f"{max(1, int(options.timeout * 1000))}ms"
    client = {"allow_http": options.endpoint.startswith("http://"), "connect_timeout": limit, "timeout": limit}
    try:
        return obstore.store.S3Store(
            url.host,
            prefix=url.path.strip("/") or None,
            client_options=client,
            retry_config={"max_retries": 0},
            **settings,
        )
    except Exception as error:
        raise InvalidArgumentError(f"{url.shown} cannot be used: {_message(error)}") from None


def _import_obstore() -> Any:
    try:
        import obstore
        import obstore.store
    except ImportError:
        raise ConfigError("s3:// tiers need obstore: pip install '.[s3]' in a checkout of kvpool") from None
    return obstore


def _message(error: BaseException) -> str:
    """The first line of a message, which names the object and the answer; the other lines are for debugging."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


# --- an event loop ---------------------------------------------------------------------------------------------------


_T = TypeVar("_T")


class LoopThread:
    """Runs coroutines for threads that wait for them. `close` cancels those that run, so that nobody waits for ever."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._lock = threading.Lock()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self._loop.run_forever()
        self._loop.close()

    def wait_for(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        """What the coroutine returns or raises; `NodeError` if the loop is closed before it ends."""
        with self._lock:
            if self._closing:
                coroutine.close()
                raise NodeError("closed")
            future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except CancelledError:
            raise NodeError("closed") from None

    def close(self) -> None:
        """Cancels running coroutines, and ends the thread. May be called twice."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
        self._loop.call_soon_threadsafe(lambda: self._loop.create_task(self._end()))
        self._thread.join()

    async def _end(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        self._loop.stop()
