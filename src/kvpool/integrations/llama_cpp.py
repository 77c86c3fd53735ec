"""A cache for `llama_cpp.Llama` on kvpool's tiers: prompts reuse what was stored before a restart, or by other processes.

    llm = Llama("model.gguf", n_ctx=8192)
    llm.set_cache(KVPoolCache(llm, disk="/var/cache/kvpool", disk_bytes="50GB"))

Importing this needs llama-cpp-python. docs/llama-cpp.md says how to use it, and why it does not use the states that
llama-cpp-python passes to a cache.
"""

from __future__ import annotations

import ctypes
import logging
import os
import weakref
from collections.abc import Sequence
from typing import Any

import llama_cpp
import numpy as np
from llama_cpp.llama_cache import BaseLlamaCache

from kvpool.checks import check_int
from kvpool.config.layers import MAX_BYTES
from kvpool.errors import ConfigError
from kvpool.integrations.connector.settings import ConnectorSettings
from kvpool.integrations.llama_identity import check_served, check_version, fingerprint_of
from kvpool.integrations.llama_states import BLOCK_TOKENS, StateBlob, StateStats, StateStore, Tokens, num_common
from kvpool.quiet import QuietLog
from kvpool.terminal import parse_bytes
from kvpool.tiers.transport.staging import Bytes

_SEQUENCE = 0  # the only one that Llama uses
_log = logging.getLogger("kvpool")


class KVPoolCache(BaseLlamaCache):  # type: ignore[misc]  # llama-cpp-python is not seen by mypy
    """A cache for `llm.set_cache`, for this `llm` only. It loads what it finds straight into the memory of `llm`.

    `disk`, `disk_bytes`, `remote`, `timeout` and `model_id` are those of kvpool's other integrations. A prefix is stored or
    loaded if that saves at least `min_tokens`. No state may have more than `max_bytes`. With `read_only` nothing is stored,
    and another process may write to the directory.
    """

    def __init__(
        self,
        llama: Any,
        *,
        disk: str | os.PathLike[str] | None = None,
        disk_bytes: int | str | None = None,
        remote: str | None = None,
        timeout: float = 2.0,
        model_id: str | None = None,
        min_tokens: int = 256,
        max_bytes: int | str = 2 * 2**30,
        read_only: bool = False,
    ) -> None:
        directory = os.fspath(disk) if isinstance(disk, os.PathLike) else disk
        given = dict(disk=directory, disk_bytes=disk_bytes, remote=remote, timeout=timeout, model_id=model_id)
        given["read_only"] = read_only if directory or remote else None
        settings = ConnectorSettings.of({name: value for name, value in given.items() if value is not None})
        if not settings.has_tiers:
            raise ConfigError("KVPoolCache needs disk= or remote=: without them nothing would outlive the process")
        if not isinstance(llama, llama_cpp.Llama):
            raise ConfigError(f"KVPoolCache needs the Llama that it will be set on, got {type(llama).__name__}")
        limit = parse_bytes(max_bytes, "max_bytes") if isinstance(max_bytes, str) else max_bytes
        super().__init__(check_int(limit, "max_bytes", 1, MAX_BYTES))
        check_int(min_tokens, "min_tokens", BLOCK_TOKENS, 2**31 - 1)
        check_version(llama_cpp.__version__)
        check_served(llama_cpp, llama)
        self._quiet = QuietLog(_log)
        self._llama = weakref.ref(llama)  # so that `del llm` frees its memory
        fingerprint = fingerprint_of(llama_cpp, llama, settings.model_id)
        self._store = StateStore(settings, fingerprint, min_tokens=min_tokens, max_bytes=limit)
        # A cache that nobody can close must not keep its directory locked, as when a notebook runs a cell again.
        weakref.finalize(self, self._store.close).atexit = False

    def stats(self) -> StateStats:
        """What was found, loaded and stored since the start, and the counters of the tiers."""
        return self._store.stats()

    def close(self) -> None:
        """Closes the tiers. What was stored stays there; this cache finds nothing any more."""
        self._store.close()

    def __enter__(self) -> KVPoolCache:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    # --- what llama-cpp-python asks for ------------------------------------------------------------------------------

    @property
    def cache_size(self) -> int:
        """Bytes in the tiers that know how full they are."""
        return sum(tier.used_bytes or 0 for tier in self.stats().tiers)

    def __contains__(self, key: Sequence[int]) -> bool:
        return self._store.num_found(np.array(key, np.int32)) > 0

    def __getitem__(self, key: Sequence[int]) -> Any:
        """Loads the longest known prefix of a prompt into the Llama's memory; KeyError if it has as much already.

        llama-cpp-python calls it before it computes a prompt. The returned state only names the tokens that are there.
        """
        llama = self._llama()
        if llama is not None and self._brought(llama, np.array(key, np.int32)):
            return llama_cpp.LlamaState(
                input_ids=llama.input_ids[: llama.n_tokens].copy(),
                scores=np.empty((0, 0), np.single),
                n_tokens=llama.n_tokens,
                llama_state=b"",
                llama_state_size=0,
                seed=llama._seed,
            )
        raise KeyError("no tier has more of this prompt than the memory of this Llama")

    def __setitem__(self, key: Sequence[int], value: Any) -> None:
        """Stores what the Llama's memory holds after a completion. It does not use the state that is passed."""
        llama = self._llama()
        if llama is None:
            return
        try:
            self._keep(llama)
        except Exception as error:  # a finished completion must not fail because of its cache
            self._store.count(store_failures=1)
            self._warn(f"a state of llama.cpp was not stored: {type(error).__name__}: {error}")

    # --- to and from llama.cpp's memory ------------------------------------------------------------------------------

    def _brought(self, llama: Any, tokens: Tokens) -> bool:
        """Whether a state with more of the prompt was loaded. If llama.cpp refused one, the memory is empty."""

        def take(blob: StateBlob) -> int:
            return _restored(llama, blob, min(num_common(blob.tokens, tokens), len(tokens) - 1))

        try:
            return self._store.load(tokens, num_common(llama.input_ids[: llama.n_tokens], tokens), take) > 0
        except Exception as error:
            self._store.count(failed=1)
            self._warn(f"no state of llama.cpp was loaded: {type(error).__name__}: {error}; the prompt is computed")
            return False

    def _warn(self, what: str) -> None:
        self._quiet.warning("%s", what)

    def _keep(self, llama: Any) -> None:
        memory, num_tokens = llama_cpp.llama_get_memory(llama.ctx), int(llama.n_tokens)
        first = llama_cpp.llama_memory_seq_pos_min(memory, _SEQUENCE)
        last = llama_cpp.llama_memory_seq_pos_max(memory, _SEQUENCE)
        if (first, last) != (0, num_tokens - 1):  # positions were shifted: the memory does not belong to the tokens
            return
        num_bytes = int(llama_cpp.llama_state_seq_get_size(llama.ctx, _SEQUENCE))

        def fill(state: Bytes) -> bool:
            written = llama_cpp.llama_state_seq_get_data(llama.ctx, _as_array(state), num_bytes, _SEQUENCE)
            return int(written) == num_bytes > 0

        self._store.store(llama.input_ids[:num_tokens].astype(np.int32), num_bytes, fill)


def _restored(llama: Any, blob: StateBlob, num_tokens: int) -> int:
    """Loads the first tokens of a state into a Llama's memory; returns how many. If that fails, empties the memory."""
    _emptied(llama)
    size = len(blob.state)
    try:
        read = llama_cpp.llama_state_seq_set_data(llama.ctx, _as_array(blob.state), size, _SEQUENCE)
        memory = llama_cpp.llama_get_memory(llama.ctx)
        is_right = int(read) == size and llama_cpp.llama_memory_seq_rm(memory, _SEQUENCE, num_tokens, -1)
    except Exception:
        _emptied(llama)
        raise
    if not is_right:
        _emptied(llama)
        return 0
    llama.input_ids[:num_tokens] = blob.tokens[:num_tokens]
    llama.n_tokens = num_tokens
    return num_tokens


def _emptied(llama: Any) -> None:
    llama.reset()
    llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(llama.ctx), False)


def _as_array(state: Bytes) -> Any:
    """The same memory as a ctypes array."""
    return (ctypes.c_uint8 * len(state)).from_buffer(state.data)
