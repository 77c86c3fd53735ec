"""MooncakeTier: values in the memory that the machines of a Mooncake Store lend each other, over TCP or RDMA.

Each value is one object: the header (`tiers/envelope.py`), then the bytes. Mooncake's calls take no deadline and may block
for seconds. So they run in threads that a caller need not wait for, and use memory of the tier (`CallBuffers`): a call that
ends too late does not touch the caller's memory.
"""

from __future__ import annotations

import queue
import re
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from concurrent.futures import TimeoutError as NotDone
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvpool.errors import ConfigError, InvalidArgumentError
from kvpool.tiers.contract import CALL_TIMEOUT, Outcome
from kvpool.tiers.envelope import HEADER_BYTES, is_whole, seal
from kvpool.tiers.keys import SPACE_BYTES
from kvpool.tiers.options import ANY_TEXT, NAMESPACE, SECONDS, TierURL, option, read_options, size, text
from kvpool.tiers.remote.breaker import FIRST_PAUSE, Breaker
from kvpool.tiers.remote.remote_tier import SHARE_BYTES, SHARE_KEYS, NodeError, Purging, RemoteTier, Share, StoreNode

NUM_BUFFERS = 4
MIN_BUFFER_BYTES = NUM_BUFFERS * (SHARE_BYTES + SHARE_KEYS * HEADER_BYTES)  # a buffer holds any share
MAX_BUFFER_BYTES = 1 << 40

# What Mooncake's calls return.
_FULL = -200
_TOO_SMALL = -600
_NOT_FOUND = -704
_NO_MASTER = -900


class CallBuffers:
    """Memory for `NUM_BUFFERS` calls at once. Each call has a buffer of its own while it runs."""

    def __init__(self, num_bytes: int) -> None:
        self.memory = np.zeros(num_bytes, np.uint8)
        self.buffer_bytes = num_bytes // NUM_BUFFERS
        self._free: queue.SimpleQueue[np.ndarray[Any, Any]] = queue.SimpleQueue()
        for number in range(NUM_BUFFERS):
            self._free.put(self.memory[number * self.buffer_bytes : (number + 1) * self.buffer_bytes])

    @contextmanager
    def buffer(self, seconds: float) -> Iterator[CallBuffer]:
        """A buffer; raises TimeoutError if none gets free in time."""
        try:
            memory = self._free.get(timeout=seconds)
        except queue.Empty:
            raise TimeoutError from None
        buffer = CallBuffer(memory)
        try:
            yield buffer
        finally:
            buffer.when_unused(lambda: self._free.put(memory))


class CallBuffer:
    """Places for the values of one call, one after the other."""

    def __init__(self, memory: np.ndarray[Any, Any]) -> None:
        self._memory = memory
        self._view = memory.data
        self._used = 0
        self._call: Future[Any] | None = None

    def place(self, num_bytes: int) -> tuple[int, memoryview]:
        """Address and view of the next place, with room for a seal before the bytes."""
        start, self._used = self._used, self._used + HEADER_BYTES + num_bytes
        assert self._used <= self._memory.nbytes
        return int(self._memory.ctypes.data) + start, self._view[start : self._used]

    def used_by(self, call: Future[Any]) -> None:
        """The buffer is not free before this call has ended."""
        self._call = call

    def when_unused(self, give_back: Callable[[], None]) -> None:
        """Gives the buffer back when no call uses it any more, which may be now."""
        if self._call is None or self._call.cancel():
            give_back()
        else:
            self._call.add_done_callback(lambda _: give_back())


@dataclass(frozen=True)
class MooncakeOptions:
    """The options of `mooncake://master:port?option=value`."""

    timeout: float = option(SECONDS, CALL_TIMEOUT)
    pause: float = option(SECONDS, FIRST_PAUSE)
    namespace: str = option(NAMESPACE, "default")
    buffer: int = option(size(MIN_BUFFER_BYTES, MAX_BUFFER_BYTES), MIN_BUFFER_BYTES)
    protocol: str = option(text("be tcp or rdma", lambda name: name in ("tcp", "rdma")), "tcp")
    hostname: str | None = option(ANY_TEXT, None)
    metadata: str = option(ANY_TEXT, "P2PHANDSHAKE")
    segment: int = option(size(0, MAX_BUFFER_BYTES), 0)
    devices: str = option(ANY_TEXT, "")


class MooncakeTier(RemoteTier[StoreNode]):
    """Values in a Mooncake Store.

    `mooncake://master[:port]?option=value&…`. Options: `hostname` (of this machine, as the others reach it), `protocol`
    (`tcp` or `rdma`), `devices` (for RDMA), `metadata` (a metadata server; by default the peers ask each other), `segment`
    (memory that this process lends the store; none by default), `buffer` (memory for transfers), `namespace`, `timeout`,
    `pause`. Values leave when the store needs room. Mooncake listens on all interfaces and asks for no password: use it in a
    network that only your machines can reach.
    """

    can_list = False

    def __init__(self, url: str) -> None:
        parsed = TierURL.parse(url)
        if parsed.scheme != "mooncake" or parsed.password is not None or parsed.path.strip("/"):
            raise InvalidArgumentError(f"a Mooncake tier's address is mooncake://master:port?…, got {parsed.shown}")
        options = MooncakeOptions(**read_options(MooncakeOptions, parsed))
        self._prefix = f"kvpool:{options.namespace}:"
        self._master = (parsed.host, parsed.port or 50051)
        self._settings = _settings(options, self._master)
        self._mooncake = _import_mooncake()
        max_value_bytes = options.buffer // NUM_BUFFERS - HEADER_BYTES
        super().__init__(parsed.shown, timeout=options.timeout, max_value_bytes=max_value_bytes)
        self._buffers = CallBuffers(options.buffer)
        self._calls = ThreadPoolExecutor(NUM_BUFFERS, thread_name_prefix="kvpool mooncake")
        self._lock = threading.Lock()
        self._client: Any = None
        self._node = StoreNode(parsed.host, NUM_BUFFERS, Breaker(pause=options.pause, proven=False))
        first = self._probe_in_background(self._node)
        wait([first] if first else [], options.timeout)

    # --- the client --------------------------------------------------------------------------------------------------

    def _nodes(self) -> list[StoreNode]:
        return [self._node]

    def _node_of(self, key: bytes) -> StoreNode:
        return self._node

    def _probe(self, node: StoreNode) -> None:
        if self._client is None:
            self._connect()
        call = self._calls.submit(self._client.batch_is_exist, [self._prefix])
        try:
            (answer,) = call.result(self.timeout)
        except NotDone:
            raise TimeoutError from None
        if answer < 0:
            raise NodeError(_message(answer))

    def _connect(self) -> None:
        """Joins the store. It runs in the background and may take any time."""
        try:
            socket.create_connection(self._master, self.timeout).close()  # where nobody listens, setup tries for 90 s
        except OSError as error:
            raise NodeError(f"no master: {error.strerror or error}") from None
        client = self._mooncake.MooncakeDistributedStore()
        code = client.setup(self._settings)
        if code != 0:
            raise NodeError(f"Mooncake's setup failed ({code})")
        memory = self._buffers.memory
        code = client.register_buffer(memory.ctypes.data, memory.nbytes)
        with self._lock:
            if code == 0 and not self._closed:
                self._client = client
                return
        client.close()
        raise NodeError(f"Mooncake could not register {memory.nbytes:,} bytes ({code})" if code else "closed")

    def _call(self, share: Share[StoreNode], buffer: CallBuffer | None, function: str, *arguments: object) -> Any:
        """What a call of the client returns. At the deadline it raises; the call then goes on in the background."""
        with share.node.asking():
            call = self._calls.submit(getattr(self._client, function), *arguments)
            if buffer is not None:
                buffer.used_by(call)
            try:
                answer = call.result(share.seconds_left())
            except NotDone:
                call.cancel()
                raise TimeoutError from None
            if _NO_MASTER in answer:
                raise NodeError(_message(_NO_MASTER))
            return answer

    def _close(self) -> None:
        super()._close()
        self._calls.shutdown(wait=True, cancel_futures=True)
        with self._lock:
            client, self._client = self._client, None
        if client is not None:
            client.close()

    # --- shares ------------------------------------------------------------------------------------------------------

    def _names(self, keys: Sequence[bytes]) -> list[str]:
        return [f"{self._prefix}{key.hex()}" for key in keys]

    def _find_share(self, share: Share[StoreNode]) -> None:
        answers = self._call(share, None, "batch_is_exist", self._names(share.keys))
        share.outcomes = [Outcome.OK if answer == 1 else Outcome.MISS for answer in answers]

    def _remove_share(self, share: Share[StoreNode]) -> None:
        answers = self._call(share, None, "batch_remove", self._names(share.keys), True)
        for place, answer in enumerate(answers):
            share.outcomes[place] = {0: Outcome.OK, _NOT_FOUND: Outcome.MISS}.get(answer, Outcome.FAILED)
            self.stale.discard(share.keys[place])

    def _purge_share(self, purging: Purging[StoreNode]) -> None:
        pattern = purging.pattern
        space = f"[0-9a-f]{{{2 * SPACE_BYTES}}}" if pattern.space is None else pattern.space.hex()
        call = self._calls.submit(
            self._client.remove_by_regex, f"^{re.escape(self._prefix)}{space}{pattern.tag.hex()}", True
        )
        try:
            answer = call.result(purging.seconds_left())
        except NotDone:
            raise TimeoutError from None
        if answer < 0:
            raise NodeError(_message(answer))
        purging.removed += answer

    def _list_node(self, node: StoreNode, deadline: float) -> Iterator[dict[bytes, int]]:
        raise NodeError("Mooncake's client cannot list what the store holds")

    def _load_share(self, share: Share[StoreNode]) -> None:
        sizes: dict[bytes, int] = {}  # Mooncake loads a key once per call
        for key, view in zip(share.keys, share.views, strict=True):
            sizes[key] = max(view.nbytes, sizes.get(key, 0))
        with self._buffers.buffer(share.seconds_left()) as buffer:
            places = {key: buffer.place(size) for key, size in sizes.items()}
            addresses = [address for address, _ in places.values()]
            lengths = [memory.nbytes for _, memory in places.values()]
            answers = self._call(share, buffer, "batch_get_into", self._names([*places]), addresses, lengths)
            answered = dict(zip(places, answers, strict=True))
            for place, (key, view) in enumerate(zip(share.keys, share.views, strict=True)):
                share.outcomes[place] = self._take(key, answered[key], places[key][1], view)

    def _take(self, key: bytes, answer: int, place: memoryview, view: memoryview) -> Outcome:
        """Checks a value in the buffer and copies it to the caller."""
        if answer == _NOT_FOUND:
            return Outcome.MISS
        if answer == _TOO_SMALL or answer > HEADER_BYTES + view.nbytes:
            return Outcome.FAILED
        header, data = place[:HEADER_BYTES], place[HEADER_BYTES : max(HEADER_BYTES, answer)]
        if answer < HEADER_BYTES or not is_whole(header, key, data):
            self.stale.add(key)
            return Outcome.FAILED
        view[: data.nbytes] = data
        self.left_unfilled(view.nbytes - data.nbytes)
        return Outcome.OK

    def _store_share(self, share: Share[StoreNode]) -> None:
        names = self._names(share.keys)
        answers = self._call(share, None, "batch_is_exist", names)
        missing = []
        for place, answer in enumerate(answers):
            if answer == 1 and share.keys[place] not in self.stale:
                share.outcomes[place] = Outcome.OK
            elif share.node.is_full():
                share.outcomes[place] = Outcome.REFUSED
            else:
                missing.append(place)
        spoilt = [names[place] for place in missing if answers[place] == 1]
        if spoilt:
            self._call(share, None, "batch_remove", spoilt, True)
        if missing:
            self._store_missing(share, missing, names)

    def _store_missing(self, share: Share[StoreNode], missing: list[int], names: list[str]) -> None:
        with self._buffers.buffer(share.seconds_left()) as buffer:
            addresses, sizes = [], []
            for place in missing:
                key, view = share.keys[place], share.views[place]
                address, memory = buffer.place(view.nbytes)
                memory[:HEADER_BYTES] = seal(key, view)
                memory[HEADER_BYTES:] = view
                addresses.append(address)
                sizes.append(memory.nbytes)
            stored = [names[place] for place in missing]
            answers = self._call(share, buffer, "batch_put_from", stored, addresses, sizes)
        for place, answer in zip(missing, answers, strict=True):
            share.outcomes[place] = {0: Outcome.OK, _FULL: Outcome.REFUSED}.get(answer, Outcome.FAILED)
            if answer == 0:
                self.stale.discard(share.keys[place])
        if _FULL in answers:
            share.node.refused()


def _settings(options: MooncakeOptions, master: tuple[str, int]) -> dict[str, str]:
    """The arguments of Mooncake's setup; all of them are text."""
    return {
        "local_hostname": socket.gethostname() if options.hostname is None else options.hostname,
        "metadata_server": options.metadata,
        "global_segment_size": str(options.segment),
        "local_buffer_size": str(options.buffer),
        "protocol": options.protocol,
        "rdma_devices": options.devices,
        "master_server_addr": f"{master[0]}:{master[1]}",
    }


def _import_mooncake() -> Any:
    try:
        import mooncake.store
    except ImportError as error:
        remedy = (
            "apt-get install libibverbs1"
            if "libibverbs" in str(error)
            else "pip install '.[mooncake]' in a checkout of kvpool"
        )
        raise ConfigError(f"mooncake:// tiers need Mooncake's client ({error}): {remedy}") from None
    return mooncake.store


def _message(code: int) -> str:
    return "the master does not answer" if code == _NO_MASTER else f"Mooncake answered {code}"
