"""SGLang's HiCache storage on kvpool's tiers, loaded by SGLang itself:

    --hicache-storage-backend dynamic --hicache-storage-backend-extra-config '{"backend_name": "kvpool",
      "module_path": "kvpool.integrations.sglang", "class_name": "KVPoolStorage", "interface_v1": 1,
      "kvpool": {"disk": "/var/cache/kvpool", "disk_bytes": "50GB"}}'

Importing this needs SGLang 0.5.17 to 0.5.23; the first of them ran with it on a GPU: docs/sglang.md.
"""

from __future__ import annotations

import hashlib
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage
from torch import Tensor

from kvpool.errors import ConfigError
from kvpool.integrations.connector.orders import Introduction
from kvpool.integrations.connector.settings import ConnectorSettings, open_worker_tiers
from kvpool.tiers import Fingerprint, KeySpace, Outcome, Shard
from kvpool.tiers.identity import files_id, settings_id
from kvpool.tiers.transport.chain import TierChain
from kvpool.tiers.transport.staging import Bytes, page_aligned


class PageStore:
    """The tiers of one worker. An error is a miss; nothing here raises for what a tier does."""

    def __init__(self, settings: ConnectorSettings, worker: Introduction, *, is_reader: bool = False) -> None:
        self.is_reader = is_reader or settings.read_only
        self._timeout = settings.timeout
        self._space = KeySpace(worker.fingerprint)
        self._tiers = TierChain(open_worker_tiers(settings, worker, is_reader=is_reader))
        self._epoch = ""

    def num_found(self, names: Sequence[str]) -> int:
        """How many of the first pages some tier has."""
        return len(self._tiers.find_prefix(self._keys(names), time.monotonic() + self._timeout))

    def load(self, names: Sequence[str], pages: Sequence[Bytes]) -> int:
        """Fills pages; returns how many of the first ones arrived intact. The content of the others is undefined."""
        return self._tiers.load_prefix(self._keys(names), pages, time.monotonic() + self._timeout)

    def store(self, names: Sequence[str], pages: Sequence[Bytes]) -> list[bool]:
        """Which pages are in some tier now."""
        if self.is_reader:
            return [False] * len(names)
        keys, stored = self._keys(names), [False] * len(names)
        for watched in self._tiers.watched:
            if not watched.num_hung:
                outcomes = watched.store(keys, pages, self._timeout)
                stored = [had or outcome == Outcome.OK for had, outcome in zip(stored, outcomes, strict=True)]
        return stored

    def forget(self) -> None:
        """Makes this process find nothing that was stored before."""
        self._epoch = uuid.uuid4().hex

    def close(self) -> None:
        """Lets go of the tiers."""
        self._tiers.close()

    def _keys(self, names: Sequence[str]) -> list[bytes]:
        return self._space.keys(hashlib.sha256(f"{self._epoch}\0{name}".encode()).digest() for name in names)


IRRELEVANT = frozenset(
    {
        # Namespaces of SGLang about scheduling and logging. The shard says which part a rank holds.
        *("device", "disagg", "memory", "observability", "parallel", "schedule", "serving"),
        # Names: the content of files counts, not their names.
        *("model.model_path", "model.revision", "model.download_dir", "model.model_checksum"),
        # Settings of the storage: the name of a rank and its options.
        *(
            f"storage.{name}"
            for name in (
                *("tp_rank", "pp_rank", "dp_rank", "attn_cp_rank", "dcp_rank", "tp_size", "pp_size"),
                *("model_name", "extra_config", "enable_storage_metrics"),
            )
        ),
    }
)
"""Settings of SGLang that reach no key or value; any other makes another fingerprint."""

_CHANGING = frozenset({"forward_hooks"})  # settings in these namespaces that change what modules compute

PIECE_BYTES = 2**26
"""SGLang hands over 128 pages at a time: a gigabyte of an 8B model. They go to the tiers in pieces of this size, so that the
timeout ends a wait for a tier that hangs, and not the work of one that is busy; and so that little memory waits between."""

_OF_THE_HOST = ("host_bytes", "host_blocks", "policy", "ttl", "quotas")


class KVPoolStorage(HiCacheStorage):  # type: ignore[misc]  # SGLang is untyped
    """The third level of HiCache: a disk that survives a restart, and stores that many machines share."""

    def __init__(self, storage_config: Any, kwargs: Any = None) -> None:
        given = (storage_config.extra_config or {}).get("kvpool", {})
        self._settings = ConnectorSettings.of(given, '"kvpool" in the extra config')
        idle = ", ".join(name for name in _OF_THE_HOST if name in given)
        if idle:
            raise ConfigError(f"{idle}: memory of the host is SGLang's own here (--hicache-size); leave that out")
        if not self._settings.has_tiers:
            raise ConfigError('KVPoolStorage needs "kvpool": {"disk": …} or {"remote": …} in the extra config')
        parallel, _, _ = _runtime()  # the storage configuration of 0.5.17 does not say all of this
        if storage_config.attn_cp_size > 1 or parallel.attn_dcp_size > 1:
            raise ConfigError("KVPoolStorage does not serve context parallelism: pages are divided between ranks there")
        if parallel.attn_dp_rank and self._settings.disk is not None:  # two replicas must not write to one directory
            directory = str(Path(self._settings.disk) / f"dp-{parallel.attn_dp_rank}")
            self._settings = replace(self._settings, disk=directory)
        self._config = storage_config
        self._store: PageStore | None = None

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """SGLang has made its host pool. The size of a page is known now, so this opens the tiers."""
        super().register_mem_pool_host(mem_pool_host)
        page, config = mem_pool_host.get_dummy_flat_data_page(), self._config
        self._page_bytes, self._dtype = page.numel() * page.element_size(), page.dtype
        shard = Shard(0, 1)
        if not config.is_mla_model:  # every rank of such a model has the same bytes
            shard = Shard(config.pp_rank * config.tp_size + config.tp_rank, config.pp_size * config.tp_size)
        elif config.pp_size > 1:
            shard = Shard(config.pp_rank, config.pp_size)
        fingerprint = Fingerprint(
            model=f"{config.model_name} {page.dtype} {settings_id({**_settings(), 'storage': config}, IRRELEVANT)}",
            weights=self._weights(),
            block_size=int(mem_pool_host.page_size),
            groups=(f"{self._page_bytes} bytes",),
            layout=f"sglang {_version()} {getattr(mem_pool_host, 'layout', '')} {type(mem_pool_host).__name__}",
            shard=shard,
        )
        worker = Introduction(shard.rank, shard.of, 0, fingerprint)
        self._store = PageStore(self._settings, worker, is_reader=config.is_mla_model and config.tp_rank > 0)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """SGLang names each pool of its tree, once, at its start. All but one would go through its `batch_…_v2`."""
        if (name := getattr(host_pool_name, "value", host_pool_name)) != "kv":
            raise ConfigError(
                f"KVPoolStorage does not serve this model: SGLang keeps a pool {name!r} beside its keys and values "
                "(windows, states, an indexer, a draft model); leave out --hicache-storage-backend"
            )
        super().register_mem_host_pool_v2(host_pool, host_pool_name)

    def _weights(self) -> str:
        name = self._config.model_name
        if self._settings.model_id is not None:
            return self._settings.model_id
        if name and Path(name).is_dir():
            return files_id(name)
        raise ConfigError(f'the files of {name} were not found; name the weights with "model_id" in "kvpool"')

    # --- pages in SGLang's host pool ---------------------------------------------------------------------------------

    def batch_get_v1(self, keys: list[str], host_indices: Tensor, extra_info: Any = None) -> list[bool]:
        """Fills pages of the host pool."""
        pool = self.mem_pool_host

        def load(some: list[str], start: int) -> list[bool]:
            pages = self._new_pages(len(some))
            found = self._ready.load(some, [_as_bytes(page) for page in pages])
            for number, page in enumerate(pages[:found], start):
                pool.set_from_flat_data_page(int(host_indices[number * pool.page_size]), page)
            return _first(found, len(some))

        return self._in_pieces(keys, load)

    def batch_set_v1(self, keys: list[str], host_indices: Tensor, extra_info: Any = None) -> list[bool]:
        """Stores pages of the host pool."""
        pool = self.mem_pool_host

        def store(some: list[str], start: int) -> list[bool]:
            places = range(start, start + len(some))
            pages = [pool.get_data_page(int(host_indices[n * pool.page_size]), flat=True) for n in places]
            return self._ready.store(some, [_as_bytes(page) for page in pages])

        return self._in_pieces(keys, store)

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """How many of the first pages are there."""
        return self._ready.num_found(keys)

    def _in_pieces(self, keys: list[str], call: Callable[[list[str], int], list[bool]]) -> list[bool]:
        """What `call` answers for some of the keys at a time, and the place of the first; False after those that failed."""
        step, done = max(1, PIECE_BYTES // self._page_bytes), list[bool]()
        for start in range(0, len(keys), step):
            done += call(keys[start : start + step], start)
            if not all(done):
                break
        return done + [False] * (len(keys) - len(done))

    # --- single pages, and lists of them -----------------------------------------------------------------------------

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Tensor | None:
        """One page, or None."""
        return self.batch_get([key], None if target_location is None else [target_location])[0]

    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> list[Tensor | None]:
        """The pages; None for the first missing page and all after it."""
        pages = target_locations or self._new_pages(len(keys))

        def load(some: list[str], start: int) -> list[bool]:
            targets = pages[start : start + len(some)]
            rows = [page.contiguous() for page in targets]  # itself, unless its values lie apart
            found = self._ready.load(some, [_as_bytes(row) for row in rows])
            for page, row in zip(targets[:found], rows, strict=False):
                if row is not page:
                    page.copy_(row)
            return _first(found, len(some))

        found = self._in_pieces(keys, load)
        return [page if is_there else None for page, is_there in zip(pages, found, strict=True)]

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """Stores one page."""
        return self.batch_set([key], [value])

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        """Stores pages; returns whether all of them are there."""

        def store(some: list[str], start: int) -> list[bool]:
            return self._ready.store(some, [_as_bytes(value) for value in values[start : start + len(some)]])

        return all(self._in_pieces(keys, store))

    def exists(self, key: str) -> bool:
        """Whether a page is there."""
        return self._ready.num_found([key]) == 1

    def clear(self) -> None:
        """Makes this process find nothing that was stored before."""
        self._ready.forget()

    def close(self) -> None:
        """Lets go of the tiers."""
        if self._store is not None:
            self._store.close()

    def _new_pages(self, number: int) -> list[Tensor]:
        """Flat pages with undefined content, in one piece of memory: SGLang's own are zeros, and pinned one by one.

        A tier may still write to them after its timeout, so they are neither kept nor part of the host pool.
        """
        memory = page_aligned(number * self._page_bytes).reshape(number, self._page_bytes)
        return list(torch.from_numpy(memory).view(self._dtype))

    @property
    def _ready(self) -> PageStore:
        assert self._store is not None, "SGLang registers its host pool first"
        return self._store


def _runtime() -> tuple[Any, Any, dict[str, str]]:
    """The place of this process among the ranks of SGLang, its settings, and the namespaces of these."""
    try:
        from sglang.srt.arg_groups.arg_utils import namespace_of
        from sglang.srt.runtime_context import get_parallel, get_server_args
    except ImportError:
        raise ConfigError(
            f"KVPoolStorage does not know SGLang {_version()}: it cannot tell which settings its pages depend on; "
            "use SGLang 0.5.17 to 0.5.23"
        ) from None
    given = get_server_args()
    return get_parallel(), given, namespace_of(type(given))


def _settings() -> dict[str, dict[str, Any]]:
    """The settings of SGLang, by its namespaces."""
    _, given, places = _runtime()
    settings = dict[str, dict[str, Any]]()
    for name in getattr(given, "__struct_fields__", None) or vars(given):
        place = "" if name in _CHANGING else places.get(name, "")
        settings.setdefault(place.partition(".")[0], {})[name] = getattr(given, name)
    return settings


def _first(found: int, number: int) -> list[bool]:
    """True for the first ones."""
    return [True] * found + [False] * (number - found)


def _as_bytes(page: Tensor) -> Bytes:
    """A flat page as bytes, the same memory."""
    array: Bytes = page.contiguous().view(torch.uint8).numpy()
    return array


def _version() -> str:
    try:
        return metadata.version("sglang")
    except metadata.PackageNotFoundError:
        return "unknown"
