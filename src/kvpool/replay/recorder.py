"""Records what an engine asks of its manager, so that it can be replayed; prompts cannot be read back from the file."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Hashable
from functools import update_wrapper
from pathlib import Path
from typing import Any

import numpy as np

from kvpool.blocks.arrays import Int64Array
from kvpool.blocks.batch import SequenceBatch
from kvpool.blocks.handle import KVCacheHandle
from kvpool.blocks.node import Node
from kvpool.config import Tier
from kvpool.errors import InvalidArgumentError
from kvpool.maintenance import DEFAULT_SCOPE
from kvpool.manager import KVCacheManager
from kvpool.replay.lines import open_bytes
from kvpool.replay.recording import header_of
from kvpool.replay.recording_writer import Handles, RecordingWriter

DEFAULT_MAX_BYTES = 2**30
MAX_PENDING = 2**17  # operations that may wait for the writer
_WAKE_AT = 256  # waiting operations for which the writer is woken; fewer are written when it looks for itself
_LOOK_EVERY = 0.25  # seconds

Operation = tuple[Any, ...]


class TraceRecorder:
    """Follows a manager from `attach` to `close` and writes a recording. `.gz` and `.zst` paths are compressed.

    The calling thread only puts references and small copies into a queue; a thread of the recorder hashes and writes. The
    file ends cleanly when it reaches `max_bytes` (before compression) or the writer falls too far behind; `stopped_because`
    says so. Operations are written in the order in which calls return: drive the manager from one thread for an exact
    replay. Tokens are hidden together with their order, so where several cached blocks share equally many tokens with a
    prompt, the file names the one that partial matching took.

    >>> from kvpool import KVCacheConfig, KVCacheManager, LayerSpec
    >>> from kvpool.replay import replay_recording
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
        self._manager: KVCacheManager | None = None
        self._wrapped: list[str] = []  # names of the manager's verbs that are followed
        self._source: int | None = None  # the run that partial matching chose in the present operation
        self._thread: threading.Thread | None = None

    def attach(self, manager: KVCacheManager) -> TraceRecorder:
        """Starts to follow a manager, which must have no live requests.

        What is cached already is not recorded: attach to a fresh manager for an exact replay.
        """
        if self._manager is not None:
            raise InvalidArgumentError("this recorder follows a manager already; make another one")
        if live := len(manager.handles):
            raise InvalidArgumentError(f"{live} requests are live and their prompts unknown: attach when none is")
        writer = RecordingWriter(open_bytes(self.path, "wb"), header_of(manager), self._max_bytes)
        self._manager = manager
        self._cache = manager._state.cache
        self._started = self._cache.clock()
        self._thread = threading.Thread(target=self._run, args=(writer,), name="kvpool-recorder", daemon=True)
        self._thread.start()
        for name, observe in _OBSERVERS.items():
            self._replace(manager, name, self._following(getattr(manager, name), observe))
        self._replace(manager, "allocate", self._following_allocate(manager.allocate))
        self._replace(manager, "commit_batch", self._following_commits(manager.commit_batch))
        self._cache.choose_source = self._note_source
        return self

    def close(self) -> None:
        """Lets go of the manager, writes what is waiting and ends the file."""
        if self._thread is None:
            return
        for name in self._wrapped:
            delattr(self._manager, name)
        self._wrapped.clear()
        self._cache.choose_source = None
        self._closing = True
        self._wake.set()
        self._thread.join()
        self._thread = None

    def __enter__(self) -> TraceRecorder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- in the threads that use the manager -------------------------------------------------------------------------

    def _replace(self, manager: KVCacheManager, name: str, follow: Callable[..., Any]) -> None:
        setattr(manager, name, update_wrapper(follow, getattr(manager, name)))
        self._wrapped.append(name)

    def _following(self, original: Callable[..., Any], observe: Callable[..., Operation | None]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            if (operation := observe(result, *args, **kwargs)) is not None:
                self._note(operation[0], *operation[1:])
            return result

        return call

    def _following_allocate(self, original: Callable[..., KVCacheHandle]) -> Callable[..., KVCacheHandle]:
        def allocate(request_id: Hashable, tokens: Any = None, **options: Any) -> KVCacheHandle:
            self._source = None
            handle = original(request_id, tokens, **options)
            more = {name: value for name, value in options.items() if value is not None and name != "scope"}
            self._note("a", handle.serial, _copied(tokens), handle.scope, self._source, more)
            return handle

        return allocate

    def _following_commits(self, original: Callable[..., None]) -> Callable[..., None]:
        def commit_batch(batch: Any, tokens: Any, counts: Any = None) -> None:
            before = None if tokens is None else _num_committed(batch)
            original(batch, tokens, counts)
            self._note("c", _handles(batch), before, _copied(tokens), _copied(counts))

        return commit_batch

    def _note_source(self, chosen: Node) -> Node:
        self._source = chosen.created
        return chosen

    def _note(self, kind: str, *arguments: Any) -> None:
        if self.stopped_because is not None:
            return
        pending = self._pending
        pending.append((kind, self._cache.now - self._started, *arguments))
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
            self._write_pending(writer)
            writer.end(self.stopped_because)
        except OSError as error:
            self.stopped_because = f"cannot write {self.path}: {error.strerror or error}"
            self._pending.clear()
            writer.abandon()

    def _write_pending(self, writer: RecordingWriter) -> None:
        while self._pending:
            operation = self._pending.popleft()
            if self.stopped_because is None:
                self.stopped_because = writer.write(operation)


def _handles(batch: Any) -> Handles:
    return batch.handles if isinstance(batch, SequenceBatch) else tuple(batch)


def _num_committed(batch: Any) -> Int64Array:
    """Where each sequence stands before a commit."""
    if isinstance(batch, SequenceBatch):  # the hot path: one lookup for the whole batch
        return batch._state.rows.committed[batch.rows].astype(np.int64)
    return np.array([handle.num_committed for handle in batch], np.int64)


def _copied(values: Any) -> Any:
    """Tokens or counts as they are now, whatever the caller does with them later."""
    if values is None or isinstance(values, (int, np.integer)):
        return values
    return values.copy() if isinstance(values, np.ndarray) else list(values)


# What is noted of each verb: its letter, then what `RecordingWriter` needs; made of its result and its own arguments.
_OBSERVERS: dict[str, Callable[..., Operation | None]] = {
    "extend_batch": lambda result, batch, num_tokens=1, lookahead=0, out=None: (
        "e", _handles(batch), _copied(num_tokens), lookahead),
    "commit": lambda result, handle, tokens=None: ("p", handle.serial) if tokens is None else None,
    "mark_written": lambda result, batch, num_tokens=1: (
        "w", (batch,) if isinstance(batch, KVCacheHandle) else _handles(batch), _copied(num_tokens)),
    "slot_mapping": lambda result, batch, start, stop, out=None: ("s", _handles(batch), _copied(start), _copied(stop)),
    "rewind": lambda result, handle, num_tokens: ("r", handle.serial, int(num_tokens)),
    "fork": lambda result, handle, *request_ids: ("k", handle.serial, [child.serial for child in result]),
    "free": lambda result, handle, keep=True: ("f", (handle,), keep),
    "free_batch": lambda result, batch, keep=True: ("f", _handles(batch), keep),
    "store_last_logits": lambda result, handle, logits, num_tokens=None: ("l", handle.serial, num_tokens),
    "swap_out": lambda result, *handles: ("o", handles),
    "swap_in": lambda result, *handles: ("i", handles),
    "pin": lambda pin, tokens, scope=DEFAULT_SCOPE, ttl=None: (
        "t", pin.pin_id, tokens if isinstance(tokens, KVCacheHandle) else _copied(tokens), scope, ttl),
    "unpin": lambda result, pin: ("u", pin.pin_id),
    "set_quota": lambda result, tenant, guaranteed=0, maximum=None: ("q", tenant, guaranteed, maximum),
    "evict": lambda result, num_blocks, pool=0, tier=Tier.GPU: ("v", int(num_blocks), pool, int(tier)),
    "offload": lambda result, num_blocks, pool=0, tier=Tier.GPU: ("d", int(num_blocks), pool, int(tier)),
    "onboard": lambda result, tokens, scope=DEFAULT_SCOPE: ("b", _copied(tokens), scope),
    "prefetch": lambda result, tokens, scope=DEFAULT_SCOPE: ("b", _copied(tokens), scope),
    "invalidate": lambda result, prefix=None, scope=None, session=None: ("x", _copied(prefix), scope, session),
    "resize": lambda result, num_blocks, pool=0, tier=Tier.GPU: ("h", int(num_blocks), pool, int(tier)),
    "defragment": lambda result, tier=Tier.GPU: ("g", int(tier)),
    "reset_prefix_cache": lambda result: ("z",),
}  # fmt: skip
