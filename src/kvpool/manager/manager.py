"""The facade: one manager for the KV cache of one model. Read this first.

A request's life, as an engine drives it:

    if manager.can_allocate(prompt):                 # OK / LATER / NEVER
        handle = manager.allocate("r1", prompt)      # reuses the longest cached prefix: handle.num_cached_tokens
    ...                                              # run manager.take_copies(), then the forward pass
    manager.commit(handle, num_tokens)               # keys and values of these prompt tokens are written: matchable now
    batch = manager.batch([handle, ...])
    slots = manager.extend_batch(batch)              # a place for one more token each, for the whole batch at once
    ...                                              # forward pass; sample
    manager.commit_batch(batch, sampled_tokens)
    manager.free(handle)                             # what it computed stays cached

Every operation either happens completely or raises and changes nothing. Methods may be called from several threads (the
rule is in `manager/guard.py`). The manager inherits the verbs of a step (extend, commit, rewind) from `Steps`, and what
concerns the cache as a whole (pins, quotas, tiers, resizing, statistics, events) from `Maintenance`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable, Mapping
from operator import attrgetter
from typing import Any

from kvpool.compiling import mypyc_attr
from kvpool.config import KVCacheConfig
from kvpool.errors import (
    ConfigError,
    DuplicateRequestError,
    InvalidArgumentError,
    KVPoolError,
    SequenceStateError,
    UnknownRequestError,
)
from kvpool.events import EventLog
from kvpool.eviction import EvictionPolicy
from kvpool.eviction.hints import ReuseHint, check_hint
from kvpool.manager.arguments import as_policy_factory, check_keeping, check_requests, is_among
from kvpool.manager.compaction import Compaction
from kvpool.manager.guard import Guard, Observer
from kvpool.manager.invalidation import Invalidation
from kvpool.manager.pins import Pins
from kvpool.manager.steps import BatchLike, Steps
from kvpool.pools.arrays import as_count, as_flag
from kvpool.pools.pool import CopyOp
from kvpool.prefix.retention import Retention
from kvpool.prefix.tenants import TenantQuotas
from kvpool.scope import ReuseScope
from kvpool.sequences.admission import AdmissionPlanner, InFlight, PrefixMatch
from kvpool.sequences.allocate import Lifecycle
from kvpool.sequences.batch import SequenceBatch, as_handles
from kvpool.sequences.handle import KVCacheHandle
from kvpool.sequences.prompt import DEFAULT_SCOPE, Items, Prompt, as_prompt, unknown_prompt
from kvpool.sequences.release import Ending
from kvpool.sequences.rewind import Rewinding
from kvpool.sequences.state import Admission, CacheState
from kvpool.sequences.step import Stepping
from kvpool.sequences.swap import Onboarding, Swapping
from kvpool.sequences.windows import RowWindows

ALLOCATE_ARGUMENTS = frozenset(
    {
        *("request_id", "tokens", "num_tokens", "scope", "reserve", "lookahead", "cross_tokens"),
        *("retention", "ttl", "session", "lease", "multimodal", "hint"),
    }
)


@mypyc_attr(allow_interpreted_subclasses=True)
class KVCacheManager(Steps):
    """Paged KV cache for one model: blocks, tables, prefix reuse, forks, swapping.

    `policy` overrides `config.eviction_policy`: a registered name, a class, or a function that makes
    one. `clock` returns seconds (tests pass their own).

    >>> from kvpool import KVCacheConfig, KVCacheManager, LayerSpec
    >>> manager = KVCacheManager(KVCacheConfig([LayerSpec(kv_heads=8, head_dim=128)] * 2, block_size=4, gpu_blocks=8))
    >>> first = manager.allocate("a", [1, 2, 3, 4, 5])
    >>> manager.commit(first, 5)
    >>> manager.allocate("b", [1, 2, 3, 4, 9]).num_cached_tokens
    4
    """

    def __init__(
        self,
        config: KVCacheConfig,
        *,
        policy: str | Callable[[], EvictionPolicy] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not isinstance(config, KVCacheConfig):
            raise ConfigError(f"KVCacheManager takes a KVCacheConfig, got {type(config).__name__}")
        new_policy = as_policy_factory(config.eviction_policy if policy is None else policy)
        self.config = config
        self.events = EventLog(max(1, config.event_buffer_size), snapshot_source=self._event_snapshot)
        self._state = CacheState(config, new_policy, clock, self.events)
        self._guard = Guard(self._state, config.pressure_levels)
        self._in_flight = InFlight(self._state)
        self._admissions = AdmissionPlanner(self._state, self._in_flight)
        self._windows = RowWindows(self._state)
        self._sequences = Lifecycle(self._state, self._admissions, self._in_flight, self._windows)
        self._stepping = Stepping(self._state, self._in_flight, self._windows)
        self._rewinding = Rewinding(self._state, self._in_flight, self._windows)
        self._ending = Ending(self._state, self._in_flight, self._windows)
        self._swapping = Swapping(self._state, self._sequences, self._ending, self._in_flight)
        self._compaction = Compaction(self._state)
        self._pins = Pins(self._state)
        self._quotas = TenantQuotas(self._state.cache)
        self._onboarding = Onboarding(self._state, self._admissions)
        self._observers: tuple[Observer, ...] = ()
        self._invalidation = Invalidation(self._state, self._in_flight, self._pins)

    # --- admission ---------------------------------------------------------------------------------------------------

    def match_prefix(
        self, tokens: Any, scope: ReuseScope = DEFAULT_SCOPE, multimodal: Items | None = None
    ) -> PrefixMatch:
        """What would a request for `tokens` reuse? Changes nothing, not even the order of eviction."""
        prompt = as_prompt(tokens, scope, multimodal)
        with self._guard.query:
            return self._admissions.query(prompt)

    def can_allocate(
        self,
        tokens: Any = None,
        *,
        num_tokens: int | None = None,
        scope: ReuseScope = DEFAULT_SCOPE,
        reserve: int | None = None,
        lookahead: int = 0,
        cross_tokens: int = 0,
        multimodal: Items | None = None,
        wait_for_prefix: bool = False,
    ) -> Admission:
        """Whether `allocate` with the same arguments would fit: OK, LATER or NEVER, with a watermark kept free.

        Blocks shared with live requests reduce the need, unreferenced cached blocks are supply, and every layer group must
        fit. With `wait_for_prefix` the answer is LATER while another request computes the next block of this prompt.
        """
        prompt, places = self._request(tokens, num_tokens, scope, multimodal, cross_tokens, reserve)
        lookahead = as_count(lookahead, "lookahead")
        if wait_for_prefix is not False:
            wait_for_prefix = as_flag(wait_for_prefix, "wait_for_prefix")
        with self._guard.query:
            return self._admissions.can_allocate(prompt, places, lookahead, wait_for_prefix)

    def allocate(
        self,
        request_id: Hashable,
        tokens: Any = None,
        *,
        num_tokens: int | None = None,
        scope: ReuseScope = DEFAULT_SCOPE,
        reserve: int | None = None,
        lookahead: int = 0,
        cross_tokens: int = 0,
        retention: Retention | None = None,
        ttl: float | None = None,
        session: str | None = None,
        lease: bool = False,
        multimodal: Items | None = None,
        hint: ReuseHint | None = None,
    ) -> KVCacheHandle:
        """Admits a request and gives it blocks for its prompt, reusing the longest cached prefix.

        Give the prompt's `tokens`, or only `num_tokens` when reuse is not wanted. `reserve` limits the places taken now, down
        to none (chunked prefill: `extend` before each chunk); `lookahead` adds places for draft tokens; `cross_tokens` are
        the encoder's, whose input `scope.encoder` must name if blocks are to be shared. `retention` and `ttl` say how long
        what it computes should stay cached; `session` names it for `invalidate`. A `lease` is no request and not counted as
        one: it holds blocks for somebody else, as for bytes that come from a keyed tier. `multimodal` lists the images
        behind placeholder tokens as (position, length, key), see `MultimodalItem`: text before an image is shared, the image
        and what follows only with prompts that have the same one there. (A lease may end inside one.) A `hint` says when a
        continuation is expected, if that is known already; what `hint` or `free` are told later counts instead. Raises
        `OutOfBlocksError` (`NeverFitsError` if the pool is too small) and changes nothing.
        """
        if lease is not False:
            lease = as_flag(lease, "lease")
        prompt, places = self._request(tokens, num_tokens, scope, multimodal, cross_tokens, reserve, lease)
        if type(lookahead) is not int or lookahead:
            lookahead = as_count(lookahead, "lookahead")
        if ttl is not None or retention is not None or session is not None:
            check_keeping(ttl, retention, session)
        if hint is not None:
            check_hint(hint)
        state, ids, scope, cross_tokens = self._state, prompt.tokens, prompt.scope, prompt.cross_tokens
        limit = state.max_seq_len
        if limit is not None:
            longest = max(places + lookahead, 0 if ids is None else len(ids))
            if longest > limit:
                raise InvalidArgumentError(f"a sequence of {longest} tokens is over max_seq_len={limit}")
        with (
            self._guard.query
        ):  # what was found for the prompt before holds until the admission itself changes the cache
            if is_among(request_id, state.requests):
                raise DuplicateRequestError(f"request {request_id!r} is already live; free it first or use another id")
            handle = KVCacheHandle(state.rows, request_id, scope)
            handle.retention = retention
            handle.ttl = ttl if ttl is not None else state.default_ttl
            handle.session = session
            handle.encoder_tokens = cross_tokens
            handle.is_lease = lease
            handle.publishes = state.caches_prefixes and (not cross_tokens or scope.encoder != "")
            self._sequences.allocate(handle, prompt, places, lookahead)
            if self._observers:
                options = dict(
                    num_tokens=num_tokens,
                    scope=scope,
                    reserve=reserve,
                    lookahead=lookahead,
                    cross_tokens=cross_tokens,
                    retention=retention,
                    ttl=ttl,
                    session=session,
                    lease=lease,
                    multimodal=prompt.items,
                )
                self._tell("allocate", handle, request_id, ids, options)
            if hint is not None:
                self.hint(handle, hint)
            return handle

    def allocate_batch(self, requests: Iterable[Mapping[str, Any]]) -> list[KVCacheHandle | KVPoolError]:
        """`allocate` for several requests in one operation; returns what became of each: its handle, or its error.

        A request is a mapping of `allocate`'s arguments: `{"request_id": "a", "tokens": prompt}`. They are admitted in their
        order, nothing happens in between, and callbacks run once, afterwards. One that is refused stops none behind it.
        Observers are told of every admission.
        """
        given = check_requests(requests, ALLOCATE_ARGUMENTS)
        results: list[KVCacheHandle | KVPoolError] = []
        with self._guard:
            for request in given:
                try:
                    results.append(self.allocate(**request))
                except KVPoolError as error:
                    results.append(error)
        return results

    def _request(
        self,
        tokens: Any,
        num_tokens: int | None,
        scope: ReuseScope,
        multimodal: Items | None,
        cross_tokens: int,
        reserve: int | None,
        lease: bool = False,
    ) -> tuple[Prompt, int]:
        """The prompt of a request, checked, and how many places to reserve for it."""
        if (tokens is None) == (num_tokens is None):
            raise InvalidArgumentError("give either the prompt's tokens or num_tokens")
        if tokens is None:
            total = as_count(num_tokens, "num_tokens", minimum=1)
            prompt = unknown_prompt(scope, multimodal, cross_tokens)
        else:
            prompt = as_prompt(tokens, scope, multimodal, cross_tokens, may_be_cut=lease)
            total = 0 if prompt.tokens is None else len(prompt.tokens)
            if not total:
                raise InvalidArgumentError("a request needs at least one token")
        if prompt.cross_tokens and not self._state.fixed:
            raise InvalidArgumentError(
                f"cross_tokens={prompt.cross_tokens}, but no layer of this model is cross_attention"
            )
        if reserve is None:
            return prompt, total
        return prompt, as_count(reserve, "reserve", maximum=total)

    def _is_live(self, request_id: Hashable) -> bool:
        return is_among(request_id, self._state.requests)

    def get(self, request_id: Hashable) -> KVCacheHandle:
        """The handle of a live request."""
        with self._guard.lock:
            if not self._is_live(request_id):
                raise UnknownRequestError(f"no live request has the id {request_id!r}")
            return self._state.requests[request_id]

    @property
    def handles(self) -> list[KVCacheHandle]:
        """All live requests, in order of admission."""
        with self._guard.lock:
            return sorted(self._state.requests.values(), key=attrgetter("serial"))

    # --- forks and the end -------------------------------------------------------------------------------------------

    def fork(self, handle: KVCacheHandle, *request_ids: Hashable) -> list[KVCacheHandle]:
        """New sequences that share every block with `handle` (parallel samples, beams, tree search)."""
        if not request_ids:
            raise InvalidArgumentError("fork needs at least one new request id")
        with self._guard:
            for number, request_id in enumerate(request_ids):
                if self._is_live(request_id) or is_among(request_id, request_ids[:number]):
                    raise DuplicateRequestError(f"request {request_id!r} is already live; use another id")
            children = self._sequences.fork(handle, request_ids)
            if self._observers:
                self._tell("fork", children, handle, *request_ids)
            return children

    def hint(self, handle: KVCacheHandle, hint: ReuseHint) -> None:
        """Tells the eviction policy why a request stops, or when its continuation is expected; say it before `free`."""
        check_hint(hint)
        with self._guard:
            self._state.any_row_of(handle)
            handle.hint = hint.code
            if self._observers:
                self._tell("hint", None, handle, hint)

    def free(self, handle: KVCacheHandle, keep: bool = True, hint: ReuseHint | None = None) -> None:
        """Ends a request. What it published stays cached; with `keep=False` what only it used is dropped.

        A `hint` says something about its continuation, as `KVCacheManager.hint` does.
        """
        if keep is not True:
            keep = as_flag(keep, "keep")
        with self._guard:
            if hint is not None:
                self.hint(handle, hint)
            self._ending.free(handle, keep)
            if self._observers:
                self._tell("free", None, handle, keep)

    def free_batch(self, batch: BatchLike, keep: bool = True) -> None:
        """`free` for many requests at once."""
        keep = as_flag(keep, "keep")
        with self._guard:
            handles = batch.handles if isinstance(batch, SequenceBatch) else as_handles(batch)
            self._ending.free_batch(handles, keep)
            if self._observers:
                self._tell("free_batch", None, handles, keep)

    def store_last_logits(self, handle: KVCacheHandle, logits: Any, num_tokens: int | None = None) -> bool:
        """Keeps the logits behind a prompt, so that the same prompt, fully cached, needs no forward pass at all.

        Call it when the whole prompt (or its first `num_tokens`, or with what was generated) is committed. A later
        `allocate` of the same tokens returns them as `handle.last_logits` if every token is still cached. Returns whether
        that is so now: tokens behind the last full block count once decoding has filled their block, or with
        `cache_unfilled_blocks` once the request is freed.
        """
        with self._guard:
            row = self._state.row_of(handle)
            length = handle.num_prompt_tokens if num_tokens is None else as_count(num_tokens, "num_tokens", minimum=1)
            if not length or int(self._state.rows.committed[row]) < length:
                raise SequenceStateError(f"request {handle.request_id!r}: commit the whole prompt before its logits")
            ids, tip = self._state.rows.token_ids(row)[:length], self._state.rows.tips[row]
            assert tip is not None
            kept = handle.publishes and self._state.cache.logits.store(tip, ids, logits, handle.sessions)
            stored = kept and self._admissions.is_whole(ids, handle.scope)
            if self._observers:
                self._tell("store_last_logits", stored, handle, logits, num_tokens)
            return stored

    # --- swapping and copies -----------------------------------------------------------------------------------------

    def can_swap_out(self, *handles: KVCacheHandle) -> Admission:
        """Whether the host can take these requests."""
        with self._guard.query:
            return self._swapping.can_swap_out(handles)

    def swap_out(self, *handles: KVCacheHandle) -> int:
        """Moves requests to the host pool; returns the blocks to copy. Swap forks together: they stay shared."""
        with self._guard:
            moved = self._swapping.swap_out(handles)
            if self._observers:
                self._tell("swap_out", moved, *handles)
            return moved

    def can_swap_in(self, *handles: KVCacheHandle) -> Admission:
        """Whether the GPU can take these requests back."""
        with self._guard.query:
            return self._swapping.can_swap_in(handles)

    def swap_in(self, *handles: KVCacheHandle) -> int:
        """Brings requests back to the GPU; returns the blocks to copy (what is still cached there is not copied)."""
        with self._guard:
            moved = self._swapping.swap_in(handles)
            if self._observers:
                self._tell("swap_in", moved, *handles)
            return moved

    def take_copies(self) -> list[CopyOp]:
        """Hands over the planned copies, in the order in which they must run before the next forward pass."""
        with self._guard.lock:
            copies = self._state.copies[:]
            self._state.copies.clear()
            return copies
