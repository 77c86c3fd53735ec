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
rule is in `manager/guard.py`). The manager itself has the verbs of requests. What concerns the cache as a whole (pins,
quotas, eviction, tiers, sizes) is `manager.cache`; whoever wants to look inside asks `manager.inspect`.
"""

from __future__ import annotations

import inspect
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any

import numpy as np

from kvpool.checks import as_count, as_duration, as_flag, show
from kvpool.config import KVCacheConfig
from kvpool.core.cache import Admission, Cache, make_pools
from kvpool.core.handle import KVCacheHandle, SequenceBatch, any_row_of, as_handles, is_among, row_of
from kvpool.core.kind import StatePlaces
from kvpool.core.prompt import DEFAULT_SCOPE, Items, Prompt, as_prompt, unknown_prompt
from kvpool.errors import (
    ConfigError,
    DuplicateRequestError,
    InvalidArgumentError,
    KVPoolError,
    SequenceStateError,
    UnknownRequestError,
)
from kvpool.events import Created, Event, EventLog, Subscription
from kvpool.eviction import EvictionPolicy, policy_factory
from kvpool.kinds import make_groups
from kvpool.kinds.by_block import slide
from kvpool.manager.guard import Guard, Observer, PressureChange
from kvpool.manager.inspection import Inspector
from kvpool.manager.sessions import Sessions
from kvpool.manager.upkeep import CacheUpkeep
from kvpool.pools.arrays import BoolArray, Int32Array, Int64Array, as_counts, as_token_array
from kvpool.pools.pool import CopyOp
from kvpool.pools.symbols import as_items
from kvpool.prefix.announcer import stored_now
from kvpool.prefix.tree import store_logits, tip_of
from kvpool.scope import Retention, ReuseHint, ReuseScope, check_hint
from kvpool.sequences.admit import PrefixMatch, allocate, can_allocate, fork, is_whole, query_prefix
from kvpool.sequences.release import free, free_batch, rewind
from kvpool.sequences.step import (
    blocks_needed,
    commit_prompt,
    commit_rows,
    commit_step,
    extend,
    mark_written,
    slot_mapping,
    state_places,
    writable_blocks,
)
from kvpool.sequences.swap import can_swap_in, can_swap_out, swap_in, swap_out
from kvpool.sequences.tokens import items_begun
from kvpool.stats import CacheStats

BatchLike = SequenceBatch | Sequence[KVCacheHandle]


class KVCacheManager:
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
        new_policy = policy_factory(config.eviction_policy if policy is None else policy)
        self.config = config
        self.events = EventLog(max(1, config.event_buffer_size), snapshot_source=self._event_snapshot)
        lock = threading.RLock()
        pools = make_pools(config)
        groups = make_groups(config.groups, config.block_size, pools)
        self._cache = Cache(config, pools, groups, new_policy, clock, self.events, lock)
        self._guard = Guard(self._cache, config.pressure_levels)
        self.cache = CacheUpkeep(self._cache, self._guard)
        self.inspect = Inspector(self._cache, self._guard)
        self.sessions = Sessions(self._cache, self._guard)

    # --- admission ---------------------------------------------------------------------------------------------------

    def match_prefix(
        self, tokens: Any, scope: ReuseScope = DEFAULT_SCOPE, multimodal: Items | None = None
    ) -> PrefixMatch:
        """What would a request for `tokens` reuse? Changes nothing, not even the order of eviction."""
        prompt = as_prompt(tokens, scope, multimodal)
        with self._guard.query:
            return query_prefix(self._cache, prompt)

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
            return can_allocate(self._cache, prompt, places, lookahead, wait_for_prefix)

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
        the encoder's, whose input `scope.encoder` must name if blocks are to be shared. Live requests with the same scope
        then have one set of blocks for it. The first of them fills these; its `num_cached_fixed_tokens` is 0.

        `retention` and `ttl` say how long what it computes should stay cached; `session` names it for `invalidate`. A `lease`
        is no request and not counted as one: it holds blocks for somebody else, as for bytes that come from a keyed tier.
        `multimodal` lists the images behind placeholder tokens as (position, length, key), see `MultimodalItem`: text before
        an image is shared, the image and what follows only with prompts that have the same one there. (A lease may end inside
        one.) A `hint` says when a continuation is expected, if that is known already; what `hint` or `free` are told later
        counts instead. Raises `OutOfBlocksError` (`NeverFitsError` if the pool is too small) and changes nothing.
        """
        if lease is not False:
            lease = as_flag(lease, "lease")
        prompt, places = self._request(tokens, num_tokens, scope, multimodal, cross_tokens, reserve, lease)
        cache, ids = self._cache, prompt._tokens
        if type(lookahead) is not int or lookahead:
            lookahead = as_count(lookahead, "lookahead")
        if ttl is not None:
            as_duration(ttl, "ttl")
        if retention is not None and not isinstance(retention, Retention):
            raise InvalidArgumentError(f"retention must be a Retention, got {retention!r}")
        if session is not None and not isinstance(session, str):
            raise InvalidArgumentError(f"session must be a string, got {session!r}")
        if hint is not None:
            check_hint(hint)
        if cache.max_seq_len is not None:
            longest = max(places + lookahead, 0 if ids is None else len(ids))
            if longest > cache.max_seq_len:
                raise InvalidArgumentError(f"a sequence of {longest} tokens is over max_seq_len={cache.max_seq_len}")
        with self._guard:
            if is_among(request_id, cache.requests):
                raise DuplicateRequestError(f"request {request_id!r} is already live; free it first or use another id")
            handle = KVCacheHandle(cache.rows, request_id, prompt._scope)
            handle.retention = retention
            handle.ttl = ttl if ttl is not None else cache.default_ttl
            handle.session = session
            handle.num_fixed_tokens = prompt._fixed_tokens
            handle.is_lease = lease
            handle.publishes = cache.caches_prefixes and prompt._is_named
            allocate(cache, handle, prompt, places, lookahead)
            if self._guard.observers:
                options = dict(
                    num_tokens=num_tokens,
                    scope=prompt._scope,
                    reserve=reserve,
                    lookahead=lookahead,
                    cross_tokens=prompt._fixed_tokens,
                    retention=retention,
                    ttl=ttl,
                    session=session,
                    lease=lease,
                    multimodal=prompt.items,
                )
                self._guard.tell("allocate", handle, request_id, ids, options)
            if hint is not None:
                self.hint(handle, hint)
            return handle

    def allocate_batch(self, requests: Iterable[Mapping[str, Any]]) -> list[KVCacheHandle | KVPoolError]:
        """`allocate` for several requests in one operation; returns what became of each: its handle, or its error.

        A request is a mapping of `allocate`'s arguments: `{"request_id": "a", "tokens": prompt}`. They are admitted in their
        order, nothing happens in between, and callbacks run once, afterwards. One that is refused stops none behind it.
        Observers are told of every admission.
        """
        try:
            given = list(requests)
        except Exception:
            raise InvalidArgumentError(f"allocate_batch takes a list of requests, got {show(requests)}") from None
        for request in given:
            if not isinstance(request, Mapping):
                raise InvalidArgumentError(f"a request is a mapping of allocate's arguments, got {show(request)}")
            if "request_id" not in request or not ALLOCATE_ARGUMENTS.issuperset(request):
                known = ", ".join(sorted(ALLOCATE_ARGUMENTS))
                raise InvalidArgumentError(
                    f"a request has a request_id and may have {known}; got {show(list(request))}"
                )
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
            prompt = as_prompt(tokens, scope, multimodal, cross_tokens, lease)
            total = 0 if prompt._tokens is None else len(prompt._tokens)
            if not total:
                raise InvalidArgumentError("a request needs at least one token")
        if prompt._fixed_tokens and not self._cache.fixed:
            raise InvalidArgumentError(
                f"cross_tokens={prompt.cross_tokens}, but no layer of this model is cross_attention"
            )
        if reserve is None:
            return prompt, total
        return prompt, as_count(reserve, "reserve", maximum=total)

    def get(self, request_id: Hashable) -> KVCacheHandle:
        """The handle of a live request."""
        with self._guard.lock:
            if not is_among(request_id, self._cache.requests):
                raise UnknownRequestError(f"no live request has the id {request_id!r}")
            return self._cache.requests[request_id]

    @property
    def handles(self) -> list[KVCacheHandle]:
        """All live requests, in order of admission."""
        with self._guard.lock:
            return sorted(self._cache.requests.values(), key=attrgetter("serial"))

    # --- steps -------------------------------------------------------------------------------------------------------

    def batch(self, handles: BatchLike) -> SequenceBatch:
        """A batch to use for many steps: rows are looked up once. Also exports tables for kernels."""
        if isinstance(handles, SequenceBatch):
            if handles._all_rows is not self._cache.rows:
                raise UnknownRequestError("this batch was made by another manager")
            return handles
        with self._guard.lock:
            return SequenceBatch(self._cache.rows, handles)

    def extend(self, handle: KVCacheHandle, num_tokens: int = 1, lookahead: int = 0) -> Int32Array:
        """Reserves places for `num_tokens` more tokens; returns their slots, [layer group, token]."""
        if type(num_tokens) is not int:
            num_tokens = as_count(num_tokens, "num_tokens")
        return self.extend_batch([handle], num_tokens, lookahead)

    def extend_batch(
        self,
        batch: BatchLike,
        num_tokens: int | Sequence[int] | Int64Array = 1,
        lookahead: int = 0,
        out: Int32Array | None = None,
    ) -> Int32Array:
        """Reserves places for more tokens of every sequence; returns their slots, [layer group, token].

        A slot is `block id * block size + offset`. `lookahead` makes room for draft tokens behind them, which a later
        `extend` claims. A block with another reader that is about to be written is copied first (see `take_copies`).
        """
        if type(lookahead) is not int or lookahead:
            lookahead = as_count(lookahead, "lookahead")
        with self._guard:
            chosen = self.batch(batch)
            counts = as_counts(num_tokens, len(chosen))
            slots = extend(self._cache, chosen, counts, lookahead, out)
            if self._guard.observers:
                self._guard.tell("extend_batch", slots, chosen, counts, lookahead)
            return slots

    def slot_mapping(self, batch: BatchLike, start: Any, stop: Any, out: Int32Array | None = None) -> Int32Array:
        """Slots of the positions `start..stop` (numbers or one per sequence), flat, [layer group, token].

        Asking for unwritten positions announces a write: shared blocks are copied first. -1 stands for places that need no
        write: blocks that were given up, or the last token of a fully cached prompt, whose data is there already.
        """
        with self._guard:
            chosen = self.batch(batch)
            slots = slot_mapping(self._cache, chosen, start, stop, out)
            self._guard.tell("slot_mapping", slots, chosen, start, stop)
            return slots

    def state_places(self, batch: BatchLike, start: Any, stop: Any) -> StatePlaces:
        """Where layers that keep a state read and leave it in a step that writes the positions `start..stop`.

        They are blocks of the group of these layers. Shared ones are copied first, as by `slot_mapping`. The step must write
        just these tokens, and one call of `commit` or `mark_written` must count them: where it ends, a checkpoint may stand.
        """
        with self._guard:
            chosen = self.batch(batch)
            step = state_places(self._cache, chosen, start, stop)
            self._guard.tell("slot_mapping", step, chosen, start, stop)
            return step

    def step_end(self, handle: KVCacheHandle, start: int, stop: int) -> int:
        """Where a step should end that begins at `start` and may go up to `stop`, so that it leaves a state worth keeping."""
        start, stop = as_count(start, "start"), as_count(stop, "stop")
        with self._guard.lock:
            any_row_of(self._cache.rows, handle)
            return min(group.step_end(self._cache, handle, start, stop) for group in self._cache.groups)

    def writable_blocks(self, group: int = 0) -> BoolArray:
        """For every GPU block of a layer group's pool, whether some sequence may write it: it alone holds it, unpublished."""
        with self._guard.lock:
            return writable_blocks(self._cache, group)

    def mark_written(self, batch: BatchLike | KVCacheHandle, num_tokens: int | Sequence[int] = 1) -> None:
        """The next tokens' keys and values are in their blocks, but not final (drafts): `commit` or `rewind` follows."""
        with self._guard:
            chosen = self.batch([batch] if isinstance(batch, KVCacheHandle) else batch)
            counts = as_counts(num_tokens, len(chosen))
            mark_written(self._cache, chosen, counts)
            self._guard.tell("mark_written", None, chosen, counts)

    def commit(self, handle: KVCacheHandle, tokens: Any = None, multimodal: Items | None = None) -> None:
        """The next tokens are written and final; blocks that are full become matchable.

        `tokens` are their ids, or a count: then they are the next tokens of the known prompt (None: the reserved rest of
        it). A count that goes past the known ids is allowed, but what follows cannot be cached. `multimodal` lists images
        that come only now, with positions in `tokens`; those of the prompt are known.
        """
        if tokens is not None and (not isinstance(tokens, (int, np.integer)) or isinstance(tokens, bool)):
            ids = as_token_array(tokens)
            self.commit_batch([handle], ids, [len(ids)], multimodal)
            return
        if multimodal is not None:
            raise InvalidArgumentError("multimodal items need the ids of the tokens that stand for them")
        count = None if tokens is None else as_count(tokens, "tokens")
        with self._guard:
            commit_prompt(self._cache, row_of(self._cache.rows, handle), count)
            if self._guard.observers and count is None:
                self._guard.tell("commit", None, handle)
            elif self._guard.observers:
                self._guard.tell("commit_batch", None, self.batch([handle]), None, np.array([count]), None)

    def commit_batch(
        self, batch: BatchLike, tokens: Any, counts: Sequence[int] | None = None, multimodal: Items | None = None
    ) -> None:
        """`commit` for a batch: one token each, or `counts[i]` tokens of sequence i one after the other in `tokens`."""
        ids = None if tokens is None else as_token_array(tokens)
        items = None if multimodal is None else as_items(multimodal, ids)
        with self._guard:
            chosen = self.batch(batch)
            if counts is None and items:
                counts = [1] * len(chosen)
            numbers = None if counts is None else as_counts(counts, len(chosen))
            if numbers is None:
                if ids is None:
                    raise InvalidArgumentError("commit_batch needs tokens, or counts for known prompts")
                commit_step(self._cache, chosen, ids)
            else:
                if not isinstance(numbers, np.ndarray):
                    raise InvalidArgumentError(f"counts must hold one count for every sequence, got {counts!r}")
                commit_rows(self._cache, chosen, ids, numbers, items or ())
            if self._guard.observers:
                begun = None if ids is None else items_begun(self._cache, chosen, numbers)
                self._guard.tell("commit_batch", None, chosen, ids, numbers, begun)

    def narrow(self, handle: KVCacheHandle, position: int) -> None:
        """Gives back the blocks that the query at `position`, and those behind it, do not read.

        Commits do this by themselves as the sequence grows. A sequence whose bytes come from elsewhere is narrowed before:
        what it gave back is not published, so only what it still holds must be written.
        """
        with self._guard:
            row = row_of(self._cache.rows, handle)
            longest = max(handle.num_prompt_tokens, self._cache.rows.reserved_of[row])
            position = as_count(position, "position", maximum=longest)
            slide(self._cache, row, position)
            self._guard.tell("narrow", None, handle, position)

    def rewind(self, handle: KVCacheHandle, num_tokens: int) -> None:
        """Forgets the last `num_tokens` reserved tokens (rejected drafts) and gives back the blocks behind them.

        Committed tokens may be rewound too: what was published stays cached, and a block cut in two is copied. Other tokens
        may follow where written ones were. A prompt is still known where its places were reserved only.
        """
        with self._guard:
            row = row_of(self._cache.rows, handle)
            limit = self._cache.rows.reserved_of[row]
            count = as_count(num_tokens, "num_tokens", maximum=limit)
            rewind(self._cache, handle, count)
            self._guard.tell("rewind", None, handle, count)

    def blocks_needed(self, handle: KVCacheHandle, num_tokens: int = 1, lookahead: int = 0) -> tuple[int, ...]:
        """Blocks per pool that `extend(handle, num_tokens, lookahead)` would take, copies of shared blocks included.

        To completion: `blocks_needed(handle, remaining_tokens)`. Blocks that are given up on the way are not counted.
        """
        total = as_count(num_tokens, "num_tokens") + as_count(lookahead, "lookahead")
        with self._guard.query:
            return blocks_needed(self._cache, row_of(self._cache.rows, handle), total)

    # --- forks and the end -------------------------------------------------------------------------------------------

    def fork(self, handle: KVCacheHandle, *request_ids: Hashable) -> list[KVCacheHandle]:
        """New sequences that share every block with `handle` (parallel samples, beams, tree search)."""
        if not request_ids:
            raise InvalidArgumentError("fork needs at least one new request id")
        with self._guard:
            for number, request_id in enumerate(request_ids):
                if is_among(request_id, self._cache.requests) or is_among(request_id, request_ids[:number]):
                    raise DuplicateRequestError(f"request {request_id!r} is already live; use another id")
            children = fork(self._cache, handle, request_ids)
            if self._guard.observers:
                self._guard.tell("fork", children, handle, *request_ids)
            return children

    def hint(self, handle: KVCacheHandle, hint: ReuseHint) -> None:
        """Tells the eviction policy why a request stops, or when its continuation is expected; say it before `free`."""
        check_hint(hint)
        with self._guard:
            any_row_of(self._cache.rows, handle)
            handle.hint = hint.code
            self._guard.tell("hint", None, handle, hint)

    def free(self, handle: KVCacheHandle, keep: bool = True, hint: ReuseHint | None = None) -> None:
        """Ends a request. What it published stays cached; with `keep=False` what only it used is dropped.

        A `hint` says something about its continuation, as `KVCacheManager.hint` does.
        """
        if keep is not True:
            keep = as_flag(keep, "keep")
        with self._guard:
            if hint is not None:
                self.hint(handle, hint)
            free(self._cache, handle, keep)
            if self._guard.observers:
                self._guard.tell("free", None, handle, keep)

    def free_batch(self, batch: BatchLike, keep: bool = True) -> None:
        """`free` for many requests at once."""
        keep = as_flag(keep, "keep")
        with self._guard:
            handles = batch.handles if isinstance(batch, SequenceBatch) else as_handles(batch)
            free_batch(self._cache, handles, keep)
            self._guard.tell("free_batch", None, handles, keep)

    def store_last_logits(self, handle: KVCacheHandle, logits: Any, num_tokens: int | None = None) -> bool:
        """Keeps the logits behind a prompt, so that the same prompt, fully cached, needs no forward pass at all.

        Call it when the whole prompt (or its first `num_tokens`, or with what was generated) is committed. A later
        `allocate` of the same tokens returns them as `handle.last_logits` if every token is still cached. Returns whether
        that is so now: tokens behind the last full block count once decoding has filled their block, or with
        `cache_unfilled_blocks` once the request is freed.
        """
        with self._guard:
            row = row_of(self._cache.rows, handle)
            length = handle.num_prompt_tokens if num_tokens is None else as_count(num_tokens, "num_tokens", minimum=1)
            if not length or self._cache.rows.committed_of[row] < length:
                raise SequenceStateError(f"request {handle.request_id!r}: commit the whole prompt before its logits")
            ids, tip = self._cache.rows.token_ids(row)[:length], tip_of(self._cache, row)
            kept = handle.publishes and store_logits(self._cache, tip, ids, logits, handle.sessions)
            stored = kept and is_whole(self._cache, ids, handle.scope)
            self._guard.tell("store_last_logits", stored, handle, logits, num_tokens)
            return stored

    # --- swapping and copies -----------------------------------------------------------------------------------------

    def can_swap_out(self, *handles: KVCacheHandle) -> Admission:
        """Whether the host can take these requests."""
        with self._guard.query:
            return can_swap_out(self._cache, handles)

    def swap_out(self, *handles: KVCacheHandle) -> int:
        """Moves requests to the host pool; returns the blocks to copy. Swap forks together: they stay shared."""
        with self._guard:
            moved = swap_out(self._cache, handles)
            self._guard.tell("swap_out", moved, *handles)
            return moved

    def can_swap_in(self, *handles: KVCacheHandle) -> Admission:
        """Whether the GPU can take these requests back."""
        with self._guard.query:
            return can_swap_in(self._cache, handles)

    def swap_in(self, *handles: KVCacheHandle) -> int:
        """Brings requests back to the GPU; returns the blocks to copy (what is still cached there is not copied)."""
        with self._guard:
            moved = swap_in(self._cache, handles)
            self._guard.tell("swap_in", moved, *handles)
            return moved

    @property
    def lock(self) -> threading.RLock:
        """Nothing changes while a thread holds it. Whoever does must be quick, and call nothing that changes the cache."""
        return self._guard.lock

    def take_copies(self) -> list[CopyOp]:
        """Hands over the planned copies, in the order in which they must run before the next forward pass."""
        with self._guard.lock:
            copies = self._cache.copies[:]
            self._cache.copies.clear()
            return copies

    # --- listening and looking ---------------------------------------------------------------------------------------

    def subscribe(self, snapshot: bool = True) -> Subscription:
        """Follows what the prefix cache holds; the first events describe what is cached already. See `kvpool.events`."""
        if not self._cache.config.event_buffer_size:
            raise InvalidArgumentError("events are off: event_buffer_size is 0; configure how many events to keep")
        return self.events.subscribe(as_flag(snapshot, "snapshot"))

    def _event_snapshot(self, mark: Callable[[], int]) -> list[Event]:
        """Created and Stored events for everything cached now, parents before children."""
        with self._guard:
            as_of = mark()
            cache = self._cache
            return [
                Created(as_of, self._cache.pool_sizes()),
                *stored_now(cache, cache.roots.values(), as_of),
            ]

    def observe(self, observer: Observer) -> Callable[[], None]:
        """Tells `observer` of every operation that succeeds; returns a function that ends it. See `manager/guard.py`."""
        if not callable(getattr(observer, "done", None)):
            raise InvalidArgumentError(f"observe takes an object with a method done, got {show(observer)}")
        return self._guard.listen("observers", observer)

    def on_memory_pressure(self, callback: Callable[[PressureChange], None]) -> Callable[[], None]:
        """Calls back whenever the pressure level changes; returns a function that stops it."""
        if not callable(callback):
            raise InvalidArgumentError(f"on_memory_pressure takes a callable, got {callback!r}")
        return self._guard.listen("pressure_callbacks", callback)

    def on_operation(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Calls back after every operation, when capacity may have changed; returns a function that stops it."""
        if not callable(callback):
            raise InvalidArgumentError(f"on_operation takes a callable, got {callback!r}")
        return self._guard.listen("capacity_callbacks", callback)

    def stats(self) -> CacheStats:
        """One consistent snapshot of everything counted."""
        return self.inspect.stats()

    def check(self) -> None:
        """Proves every invariant or raises `InvariantError` naming what is broken. Slow: for tests and doubts."""
        self.inspect.check()


# What a request of `allocate_batch` may say
ALLOCATE_ARGUMENTS = frozenset(inspect.signature(KVCacheManager.allocate).parameters) - {"self"}
