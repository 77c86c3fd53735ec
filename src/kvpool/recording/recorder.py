"""Records the operations of a manager for a replay. Nobody can read prompts from the file."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any

import numpy as np

from kvpool.core.handle import KVCacheHandle, SequenceBatch
from kvpool.errors import InvalidArgumentError
from kvpool.eviction.policy import MOMENTS_PER_SECOND, moment_of
from kvpool.manager import KVCacheManager
from kvpool.pools.arrays import Int64Array
from kvpool.recording.lines import open_bytes
from kvpool.recording.playback import header_of
from kvpool.recording.writer import Items, RecordingWriter, finite

log = logging.getLogger("kvpool")
DEFAULT_MAX_BYTES = 2**30
MAX_PENDING = 2**17  # operations that may wait for the writer
_WAKE_AT = 256  # so many waiting operations wake the writer; it writes fewer when it looks by itself
_LOOK_EVERY = 0.25  # seconds

Operation = tuple[Any, ...]


class TraceRecorder:
    """Follows a manager from `attach` to `close` and writes a recording. `.gz` and `.zst` paths are compressed.

    The calling thread only puts references and small copies into a queue. A thread of the recorder hashes and writes. The
    file ends cleanly when it reaches `max_bytes` (before compression) or when the writer falls too far behind;
    `stopped_because` says so. Operations are written in the order in which the manager did them.

    >>> from kvpool import KVCacheConfig, KVCacheManager, LayerSpec
    >>> from kvpool.recording import replay_recording
    >>> import tempfile, pathlib
    >>> manager = KVCacheManager(KVCacheConfig([LayerSpec(1, 16)], block_size=4, gpu_blocks=64))
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "chat.kvtrace.gz"
    >>> with TraceRecorder(path).attach(manager):
    ...     for name in ("first", "again"):
    ...         handle = manager.allocate(name, list(range(12)))
    ...         manager.commit(handle)
    ...         manager.free(handle)
    >>> replay_recording(path).hit_blocks == manager.stats().hit_blocks
    True
    """

    def __init__(self, path: str | Path, *, max_bytes: int = DEFAULT_MAX_BYTES) -> None:
        if max_bytes < 1:
            raise InvalidArgumentError(f"max_bytes is {max_bytes}; a recording needs room")
        self.path = Path(path)
        self.stopped_because: str | None = None
        self._max_bytes = max_bytes
        self._pending: deque[Operation] = deque()
        self._wake = threading.Event()
        self._closing = False
        self._is_told = False
        self._manager: KVCacheManager | None = None
        self._thread: threading.Thread | None = None

    def attach(self, manager: KVCacheManager) -> TraceRecorder:
        """Starts to follow a manager, which must have no live requests.

        It does not record what is cached already, so attach to a new manager for an exact replay.
        """
        if self._manager is not None:
            raise InvalidArgumentError("this recorder follows a manager already; make another one")
        if live := len(manager.handles):
            raise InvalidArgumentError(f"{live} requests are live and their prompts unknown: attach when none is")
        writer = RecordingWriter(open_bytes(self.path, "wb"), header_of(manager), self._max_bytes)
        self._manager = manager
        self._thread = threading.Thread(target=self._run, args=(writer,), name="kvpool-recorder", daemon=True)
        self._thread.start()
        self._started = moment_of(manager.inspect.now)
        self._stop_observing = manager.observe(self)
        return self

    def close(self) -> None:
        """Stops following the manager, writes what waits and ends the file."""
        if self._thread is None:
            return
        self._stop_observing()
        self._closing = True
        self._wake.set()
        self._thread.join()
        self._thread = None

    def __enter__(self) -> TraceRecorder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- in the threads that use the manager -------------------------------------------------------------------------

    def done(self, verb: str, now: float, result: Any, arguments: tuple[Any, ...]) -> None:
        """Queues an operation, with copies of what its caller may change later."""
        if self.stopped_because is not None:
            return
        noted = _NOTED[verb](result, *arguments)
        pending = self._pending
        when = (moment_of(now) - self._started) / MOMENTS_PER_SECOND  # rounded as policies round the time
        pending.append((noted[0], when, *noted[1:]))
        if len(pending) >= _WAKE_AT:
            self._wake.set()
            if len(pending) > MAX_PENDING:
                self.stopped_because = f"the writer is {MAX_PENDING} operations behind"

    # --- in the recorder's thread ------------------------------------------------------------------------------------

    def _run(self, writer: RecordingWriter) -> None:
        try:
            while not self._closing:
                self._wake.wait(_LOOK_EVERY)
                self._wake.clear()
                self._write_pending(writer)
                self._tell()
            self._write_pending(writer)
            writer.end(self.stopped_because)
        except OSError as error:
            self._give_up(writer, f"cannot write {self.path}: {error.strerror or error}")
        except Exception as error:
            self._give_up(writer, f"an operation cannot be written: {error!r}")
        self._tell()

    def _tell(self) -> None:
        """Logs once that the recording ended before its manager did, and why."""
        if self.stopped_because is not None and not self._is_told:
            self._is_told = True
            log.warning("the recording %s ended early: %s", self.path, self.stopped_because)

    def _give_up(self, writer: RecordingWriter, reason: str) -> None:
        self.stopped_because = reason
        self._pending.clear()
        writer.abandon()

    def _write_pending(self, writer: RecordingWriter) -> None:
        while self._pending:
            operation = self._pending.popleft()
            if self.stopped_because is None:
                self.stopped_because = writer.write(operation)


_UNSAID = {
    "lookahead": 0,
    "cross_tokens": 0,
    "lease": False,
    "multimodal": (),
}  # what `allocate` takes if it is not told


def _allocated(handle: KVCacheHandle, _: Hashable, tokens: Any, options: dict[str, Any]) -> Operation:
    more = {
        name: value for name, value in options.items() if name != "scope" and value not in (None, _UNSAID.get(name))
    }
    if "ttl" in more:
        more["ttl"] = finite(more["ttl"])
    return "a", handle.serial, _copied(tokens), handle.scope, more


def _committed(_: None, batch: SequenceBatch, tokens: Any, counts: Int64Array | None, items: Items) -> Operation:
    before = None if tokens is None else batch.num_committed - (1 if counts is None else counts)
    return "c", batch.handles, before, _copied(tokens), counts, items


def _copied(values: Any) -> Any:
    """A copy of tokens or counts, because the caller may change them later."""
    if values is None or isinstance(values, (int, np.integer)):
        return values
    return values.copy() if isinstance(values, np.ndarray) else list(values)


# What is queued for each verb: its letter, then what `RecordingWriter` needs of its result and arguments.
_NOTED: dict[str, Callable[..., Operation]] = {
    "allocate": _allocated,
    "commit_batch": _committed,
    "extend_batch": lambda _, batch, counts, lookahead: ("e", batch.handles, counts, lookahead),
    "commit": lambda _, handle: ("p", handle.serial),
    "mark_written": lambda _, batch, counts: ("w", batch.handles, counts),
    "slot_mapping": lambda _, batch, start, stop: ("s", batch.handles, _copied(start), _copied(stop)),
    "rewind": lambda _, handle, num_tokens: ("r", handle.serial, num_tokens),
    "narrow": lambda _, handle, position: ("n", handle.serial, position),
    "fork": lambda children, handle, *_: ("k", handle.serial, [child.serial for child in children]),
    "hint": lambda _, handle, hint: ("y", handle.serial, hint.stop, finite(hint.expected_seconds)),
    "free": lambda _, handle, keep: ("f", (handle,), keep),
    "free_batch": lambda _, handles, keep: ("f", handles, keep),
    "store_last_logits": lambda _, handle, logits, num_tokens: ("l", handle.serial, num_tokens),
    "swap_out": lambda _, *handles: ("o", handles),
    "swap_in": lambda _, *handles: ("i", handles),
    "pin": lambda pin, tokens, scope, ttl, items: (
        "t",
        pin.pin_id,
        tokens if isinstance(tokens, KVCacheHandle) else _copied(tokens),
        scope,
        finite(ttl),
        items,
    ),
    "unpin": lambda _, pin: ("u", pin.pin_id),
    "set_quota": lambda _, tenant, guaranteed, maximum: ("q", tenant, guaranteed, maximum),
    "evict": lambda _, num_blocks, pool, tier: ("v", num_blocks, pool, int(tier)),
    "offload": lambda _, num_blocks, pool, tier: ("d", num_blocks, pool, int(tier)),
    "onboard": lambda _, tokens, scope, items: ("b", _copied(tokens), scope, items),
    "invalidate": lambda _, prefix, scope, session, items, tenant: (
        ("m", tenant) if tenant is not None else ("x", _copied(prefix), scope, session, items)
    ),
    "resize": lambda _, num_blocks, pool, tier: ("h", num_blocks, pool, int(tier)),
    "defragment": lambda _, tier: ("g", int(tier)),
    "reset_prefix_cache": lambda _: ("z",),
    "session": lambda _, verb, tenant, name, seconds, child: ("j", verb, tenant, name, finite(seconds), child),
}
