"""TrackedRequest: what the scheduler's side knows of one request of the engine.

Its options come as `kv_transfer_params={"kvpool": {"no_store": true}}` in vLLM. The files of an adapter identify it, as they
were when the engine began to use it.
"""

from __future__ import annotations

import difflib
import logging
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kvpool.checks import check_number, show
from kvpool.core.handle import KVCacheHandle
from kvpool.errors import ConfigError, KVPoolError
from kvpool.pools.arrays import Int32Array
from kvpool.prefix.digests import chain_digests, root_digest
from kvpool.quiet import QuietLog
from kvpool.scope import MultimodalItem, Retention, ReuseHint, ReuseScope, TokenRange
from kvpool.tiers.identity import files_id, read_files, settings_id
from kvpool.tiers.keys import scope_tag
from kvpool.tiers.transport.threads import Pending

_log = logging.getLogger("kvpool")

# The rest of a `LoRARequest` says how its files are read.
_OF_THIS_PROCESS = frozenset({"lora_int_id", "lora_path", "base_model_name", "load_inplace"})

_State = tuple[tuple[str, int, int], ...]


class _KnownAdapter(NamedTuple):
    directory: Path | None
    state: _State
    content: str


class Adapters:
    """The adapters of one engine. A number stands for the same adapter as long as the engine uses it."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, str], _KnownAdapter] = {}
        self._quiet = QuietLog(_log)

    def identity(self, adapter: Any) -> str | None:
        """Name and content of an adapter, by the attributes of vLLM's `LoRARequest`.

        Files that cannot be read here get an identity that no other process has. None means that the files have changed since
        the engine began to use them, so that nobody knows which ones it uses.
        """
        key = int(getattr(adapter, "lora_int_id", 0)), str(getattr(adapter, "lora_path", ""))
        known = self._known.get(key)
        if known is None:
            directory = _directory(key[1])
            known = self._known[key] = _KnownAdapter(directory, _state(directory), _content(directory))
        elif known.state != _state(known.directory):
            self._quiet.warning(
                "kvpool connector: the files of adapter %s in %s have changed while the engine uses them: its requests "
                "are computed and not kept; load it under another name",
                adapter.lora_name,
                key[1],
            )
            return None
        return f"{adapter.lora_name}\0{known.content} {settings_id(adapter, _OF_THIS_PROCESS)}"


def _directory(path: str) -> Path | None:
    """The directory of the files: the named one, or the engine's download of it."""
    if path and Path(path).is_dir():
        return Path(path)
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(path, local_files_only=True))
    except Exception:  # not installed, no name of a repository, or not downloaded
        return None


def _state(directory: Path | None) -> _State:
    """What changes when files are written."""
    try:
        files = [] if directory is None else read_files(directory)
        return tuple((str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files)
    except OSError:
        return ()


def _content(directory: Path | None) -> str:
    try:
        return uuid.uuid4().hex if directory is None else files_id(directory)
    except (OSError, ConfigError):
        return uuid.uuid4().hex


KEY = "kvpool"


@dataclass(frozen=True)
class RequestOptions:
    """How the blocks of one request are kept.

    >>> RequestOptions.of({"kvpool": {"ttl": 60, "priority": 80}}).ttl
    60
    """

    no_store: bool = False
    """Nothing of it is kept; it may use what others left."""
    ttl: float | None = None
    """Seconds without use after which the host forgets its blocks. They do not go to tiers, where they would stay."""
    priority: int | None = None
    """0 (leaves the host first) to 100; 35 is usual."""
    pin: float | None = None
    """Seconds that the whole blocks of its prompt cannot be evicted from the host, from its end on. 0 ends such a pin."""
    expected_seconds: float | None = None
    """Seconds from its end on after which a request that continues it is expected."""

    @classmethod
    def of(cls, params: Any) -> RequestOptions:
        """From what an engine passes with a request; raises `ConfigError` for wrong values."""
        if params is None:
            return NO_OPTIONS
        names = [each.name for each in fields(cls)]
        if not isinstance(params, Mapping):
            raise ConfigError(f"kv_transfer_params must be a mapping, as {{{KEY!r}: {{…}}}}; got {show(params)}")
        if KEY not in params:
            _check_others(params, names)
            return NO_OPTIONS
        given = params[KEY]
        if not isinstance(given, Mapping) or not set(given) <= set(names):
            raise ConfigError(f"kv_transfer_params[{KEY!r}] may hold {', '.join(names)}; got {show(given)}")
        return cls(**given)

    def __post_init__(self) -> None:
        if type(self.no_store) is not bool:
            raise ConfigError(f"no_store must be true or false, got {show(self.no_store)}")
        if self.ttl is not None and check_number(self.ttl, "ttl", "seconds above 0") <= 0:
            raise ConfigError(f"ttl={self.ttl} must be seconds above 0")
        if self.pin is not None and check_number(self.pin, "pin", "seconds, or 0 to end a pin") < 0:
            raise ConfigError(f"pin={self.pin} must be seconds, or 0 to end a pin")
        self.retention()
        self.hint()

    def retention(self) -> Retention | None:
        """The priority as a `Retention` of the manager."""
        if self.priority is None:
            return None
        try:
            return Retention([TokenRange(0, None, self.priority)], decode_priority=self.priority)
        except KVPoolError as error:
            raise ConfigError(str(error)) from None

    def hint(self) -> ReuseHint | None:
        """What the policy of the host is told about a continuation."""
        if self.expected_seconds is None:
            return None
        try:
            return ReuseHint(expected_seconds=self.expected_seconds)
        except KVPoolError as error:
            raise ConfigError(str(error)) from None


def _check_others(params: Mapping[Any, Any], names: list[str]) -> None:
    """Refuses our options in a wrong place. Other keys are allowed, because they may belong to other connectors."""
    for key in params:
        if key in names:
            raise ConfigError(f"{key} belongs into {{{KEY!r}: {{…}}}} in kv_transfer_params")
        if difflib.get_close_matches(str(key).lower(), [KEY], cutoff=0.8):
            raise ConfigError(f"kv_transfer_params has {show(key)}; did you mean {KEY!r}?")


NO_OPTIONS = RequestOptions()


_ROOM = 256  # spare tokens of the array of ids when it grows


def scope_of(request: Any, epoch: str, adapter: str) -> ReuseScope:
    """The reuse scope of a request: `cache_salt` is the tenant, and `epoch` changes with every reset."""
    return ReuseScope(tenant=request.cache_salt or "", adapter=adapter, weights=epoch)


def items_of(request: Any) -> tuple[MultimodalItem, ...]:
    """Images and other inputs that placeholder tokens stand for."""
    return tuple(
        MultimodalItem(each.mm_position.offset, each.mm_position.length, each.identifier)
        for each in sorted(request.mm_features or (), key=lambda each: each.mm_position.offset)
    )


@dataclass
class Saving:
    """The rows of one request. Equal rows may have replaced the first `num_published`; the handle has the current ones."""

    owner: TrackedRequest
    handle: KVCacheHandle
    num_ordered: int  # first blocks that are there or were ordered
    num_published: int  # those of them that can be found
    rows: list[int] = field(default_factory=list)
    num_jobs: int = 0  # in flight
    is_spoiled: bool = False  # something failed: blocks in flight are not published


@dataclass
class TrackedRequest:
    """A request as the scheduler's side sees it. Counts are blocks unless they say tokens."""

    request: Any
    block_size: int
    scope: ReuseScope
    items: tuple[MultimodalItem, ...]
    options: RequestOptions = NO_OPTIONS
    is_cached: bool = True  # False: what it computes depends on more than its tokens
    was_looked_up: bool = False
    num_local: int = 0  # blocks that the engine's own cache had at the last look-up
    lookup: Pending[list[int]] | None = None  # which tier has each block from `asked_from` on; None: not asked
    asked_from: int = 0
    uses_tiers: bool = False  # the last look-up promised blocks that tiers bring
    # (first, last, end): of the blocks first..last that tiers have, those before `end` are worth a load
    worth: tuple[int, int, int] | None = None
    began: float | None = None  # when its first step was planned
    num_loading: int = 0  # loads that no worker has reported yet
    has_lost: bool = False  # a load failed: tiers are not asked again
    hits: tuple[int, int, int] = (0, 0, 0)  # of the last load: from the host, the first tier, others
    pages: list[list[int]] = field(default_factory=list)  # of each layer group
    # Of each group that keeps states, behind the blocks to be stored
    state_pages: list[int] = field(default_factory=list)
    num_seen: int = 0  # whole blocks that were considered for storing
    saving: Saving | None = None
    is_over: bool = False  # the engine is done with it
    hint: ReuseHint | None = None  # what its end says about a continuation
    _ids: Int32Array = field(default_factory=lambda: np.empty(0, np.int32))
    _num_ids: int = 0
    _digests: list[bytes] = field(default_factory=list)
    _tag: bytes = b""

    @property
    def is_known(self) -> bool:
        """Whether its tokens and items determine what it computes. A session may have got further images meanwhile."""
        return self.is_cached and len(self.request.mm_features or ()) == len(self.items)

    @property
    def is_asking(self) -> bool:
        """Whether tiers have not answered yet."""
        return self.lookup is not None and not self.lookup.has_ended

    @property
    def num_ids(self) -> int:
        """Tokens whose ids the engine knows."""
        return len(self.request.all_token_ids)

    @property
    def num_prompt(self) -> int:
        """Tokens of its prompt."""
        return int(self.request.num_prompt_tokens)

    def tokens(self, upto: int | None = None) -> Int32Array:
        """The first `upto` ids, or all of them, as a view that is valid until the next call.

        Ids that were returned once count as final, except for the last one: an engine may discard a sampled token.
        """
        given = self.request.all_token_ids
        total, known = len(given) if upto is None else upto, self._num_ids
        if known > len(given) or (known and given[known - 1] != self._ids[known - 1]):
            self._num_ids = known = 0
            self._digests.clear()
        if total > known:
            if total > len(self._ids):
                grown = np.empty(total + max(_ROOM, total // 4), np.int32)
                grown[:known] = self._ids[:known]
                self._ids = grown
            self._ids[known:total] = given[known:total]
            self._num_ids = total
        return self._ids[:total]

    def items_within(self, num_tokens: int) -> tuple[MultimodalItem, ...] | None:
        """The items that begin within the first so many tokens."""
        return tuple(item for item in self.items if item.position < num_tokens) or None

    def digests(self, first: int, last: int) -> list[bytes]:
        """The digests of blocks, as in the manager's events; each is computed once."""
        done = len(self._digests)
        if done < last:
            size = self.block_size
            parent = self._digests[-1] if done else root_digest(self.scope)
            items = [item._replace(position=item.position - done * size) for item in self.items]
            self._digests += chain_digests(parent, self.tokens(last * size)[done * size :], size, items)
        return self._digests[first:last]

    def tier_digests(self, first: int, last: int) -> list[bytes]:
        """The same with the tag of their scope, for the keys of tiers."""
        if not self._tag:
            self._tag = scope_tag(self.scope)
        return [self._tag + digest for digest in self.digests(first, last)]
