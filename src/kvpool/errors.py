"""Every error that kvpool raises on purpose. Each says which value was wrong and what would help."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class KVPoolError(Exception):
    """Base class: `except KVPoolError` catches everything kvpool raises on purpose."""

    results: Sequence[
        Any
    ] = ()  # of `Engine.generate`, where some prompts failed: what became of each, a result or an error


class ConfigError(KVPoolError, ValueError):
    """A configuration contradicts itself or holds a value that cannot work."""


class InvalidArgumentError(KVPoolError, ValueError):
    """An argument has the wrong type, shape or range. Nothing was changed."""


class TraceError(InvalidArgumentError):
    """A trace or a recording cannot be read, or too many of its lines are broken. Says which lines and why."""


class UnknownRequestError(KVPoolError, KeyError):
    """No live request has this id, or the handle was freed, or it belongs to another manager."""

    def __str__(self) -> str:  # KeyError would print the repr of the message
        return str(self.args[0]) if self.args else ""


class DuplicateRequestError(KVPoolError, ValueError):
    """A request with this id is already live."""


class OutOfBlocksError(KVPoolError, ValueError):
    """The pool cannot serve the operation now. Nothing was changed; try again after other requests are freed."""


class NeverFitsError(OutOfBlocksError):
    """The pool could not serve the operation even if it were empty."""


class SequenceStateError(KVPoolError):
    """The operation does not fit the state of the sequence (swapped out, shorter than asked, past its window...)."""


class UnknownSessionError(KVPoolError):
    """No session of that name is known: it has not begun, or is forgotten."""


class PinBudgetError(KVPoolError):
    """Pinning would exceed `max_pinned_tokens`."""


class UnsupportedAttentionError(KVPoolError):
    """An attention backend cannot compute this kind of attention, or cannot run here. Raised before anything runs."""


class ModelLoadError(KVPoolError):
    """A model could not be loaded: it was not found or is incomplete, or a package that it needs is missing."""


class UnsupportedModelError(KVPoolError):
    """A model that kvpool would run wrongly, or not at all; the message names what is missing. Nothing was allocated."""


class StepError(KVPoolError):
    """A step of the engine could not run; the requests in it end with this, others go on. The cause is `__cause__`."""


class NoNodeError(KVPoolError):
    """No node of a cluster can take a request: none is ready, or all that are were tried."""


class EndpointError(KVPoolError):
    """An endpoint that `kvpool prove` asks does not answer, or not as OpenAI's API does, or not enough to prove anything."""


class InvariantError(KVPoolError, AssertionError):
    """`check()` found a broken invariant. This is a bug in kvpool; please report it with the message."""


class StorageError(KVPoolError):
    """Base class of what goes wrong with bytes rather than with ids."""


class StorageMemoryError(StorageError, MemoryError):
    """A device, the host or a disk has no room for a store. Nothing was allocated; the message says what would fit."""


class SharedBlockError(StorageError):
    """A write would reach a block that is published, that a second sequence reads, or that nobody holds."""


class TransferError(StorageError):
    """Moving blocks failed. Their sources are unchanged, and `remaining` can be run again."""

    def __init__(self, message: str, remaining: Sequence[Any] = ()) -> None:
        super().__init__(message)
        self.remaining = list(remaining)  # the operations that were not carried out, the failed one first


class ChecksumError(TransferError):
    """Blocks came back with other bytes than they left with."""
