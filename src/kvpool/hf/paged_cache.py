"""PagedCache: a `past_key_values` for models of transformers that keeps keys and values in the blocks of a pool."""

from __future__ import annotations

import time
import weakref
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, LinearAttentionLayer

from kvpool.checks import show
from kvpool.core.handle import KVCacheHandle
from kvpool.core.kind import StatePlaces
from kvpool.errors import InvalidArgumentError, SequenceStateError
from kvpool.hf.cache_pool import CachePool
from kvpool.hf.pool_tiers import PoolTiers
from kvpool.kernels.write import read_values
from kvpool.model.states import StateModule
from kvpool.pools.arrays import BoolArray
from kvpool.scope import ReuseScope
from kvpool.storage.data_plane import StepSlots
from kvpool.storage.moving import upload
from kvpool.tiers.transport.cache_blocks import OfferProgress


class PagedCache(Cache):  # type: ignore[misc]
    """A `past_key_values` for one call of `generate` (or a conversation of several), in the blocks of a pool.

    It finds prompts by their token ids. Rows without padding, at the usual positions, reuse what earlier calls computed. A
    batch is a rectangle, so all rows reuse equally many tokens. Reused tokens have no logits and no hidden states. A model
    that is called directly still returns the logits of the last token, or of as many as `logits_to_keep` or `labels` need.
    `scope` isolates tenants. Closing or deleting the cache returns its blocks; what it computed stays cached. Beam search
    and assisted decoding fork and rewind the sequences; only blocks that are written are copied.
    """

    def __init__(self, pool: CachePool, scope: ReuseScope | None = None) -> None:
        if not isinstance(pool, CachePool):
            raise InvalidArgumentError(f"a PagedCache lives in a CachePool, got {show(pool)}")
        if scope is not None and not isinstance(scope, ReuseScope):
            raise InvalidArgumentError(f"scope must be a ReuseScope, got {show(scope)}")
        if pool.is_closed:
            raise SequenceStateError("this CachePool is closed; make a new one")
        layers = _layers(self, pool)
        super().__init__(layers=layers)
        self.pool = pool
        # Of layers that keep a state: between checkpoints, transformers' own layers have it.
        self._state_layers = {} if pool.states is None else {number: layers[number] for number in pool.states.specs}
        self._state_targets: Tensor | None = None  # where this pass leaves checkpoints
        self._is_open = False  # a pass has begun and not ended
        self.scope = ReuseScope() if scope is None else scope
        self.handles: list[KVCacheHandle] = []
        self.length = 0  # tokens of each row that the model may look back at
        self.num_cached_tokens = 0  # of the first prompt, per row
        self._irregular: BoolArray = np.zeros(0, np.bool_)  # rows of this pass that must not be published
        self._offered: dict[Hashable, OfferProgress] = {}  # how much of each sequence was offered to tiers
        self._began = 0.0
        self._step: StepSlots | None = None
        self._places: Tensor | None = None  # slots of every token of every row, flat
        self._written: set[int] = set()  # layers that gave their keys and values in this pass
        self._closer = weakref.finalize(self, pool.let_go, self.handles)

    # --- a forward pass ----------------------------------------------------------------------------------------------

    def enter(self, token_ids: Tensor, irregular: BoolArray, num_needed: int = 1) -> list[int]:
        """Where the next tokens [row, token] are to be divided into passes: after the cached ones, and at checkpoints.

        The last number is where the pass begins that `begin` prepares. Without layers that keep a state it is 0.
        """
        if not self._state_layers:
            return [0]
        if self._is_open:
            raise SequenceStateError("a pass of this PagedCache failed, and the states behind it are lost: reset() it")
        num_tokens = token_ids.shape[1]
        is_new = not self.handles
        if is_new:
            self._check_open()
            self._allocate(_on_host(token_ids), irregular)
            self.num_cached_tokens = self._common_state(num_tokens - num_needed)
        start = self.num_cached_tokens if is_new else 0
        ends, last = [start], num_tokens - num_needed
        self.length += start
        while not irregular.any():
            at = self.length - start + ends[-1]
            stop = min(self.pool.manager.step_end(handle, at, at + num_tokens) for handle in self.handles)
            if stop - self.length + start > last or stop - at == num_tokens:
                break
            ends.append(stop - self.length + start)
        return ends

    def _common_state(self, most: int) -> int:
        """The tokens behind which every row goes on from a state; rows that have more are rewound. 0 if there is none."""
        manager = self.pool.manager
        common = min(handle.num_written for handle in self.handles)
        try:
            if common > most:
                raise SequenceStateError(f"the last {common - most} tokens are wanted")
            for handle in self.handles:
                manager.rewind(handle, handle.num_reserved - common)
        except SequenceStateError:
            common = 0
            for handle in self.handles:
                manager.rewind(handle, handle.num_reserved)
        return common

    def _check_open(self) -> None:
        if not self._closer.alive:
            raise SequenceStateError("this PagedCache is closed; make a new one for the next call")
        self.pool.free_gone()

    def begin(self, token_ids: Tensor, irregular: BoolArray, num_needed: int = 1) -> int:
        """Makes room for the next tokens [row, token]; returns how many of them are cached and need no computing.

        The last `num_needed` are always computed, because the caller wants their logits. `irregular` rows are padded or have
        unusual positions. They reuse nothing, and what they compute from here on is not published.
        """
        self._check_open()
        num_rows, num_tokens = token_ids.shape
        cached = 0
        self._irregular = irregular
        if not self.handles:
            self._allocate(_on_host(token_ids), irregular)
            cached = min(handle.num_written for handle in self.handles)
            cached = self.num_cached_tokens = max(0, min(cached, num_tokens - num_needed))
            self.length = cached
        else:
            if num_rows != len(self.handles):
                raise InvalidArgumentError(f"the cache holds {len(self.handles)} sequences, the batch has {num_rows}")
            self._cut(self.length)  # a failed pass may have left reserved places
            self.pool.manager.extend_batch(self.handles, num_tokens)
        self._prepare(num_tokens - cached)
        self._written.clear()
        self._is_open = True
        self._began = time.monotonic()
        return cached

    def _allocate(self, tokens: Any, irregular: BoolArray) -> None:
        manager, tiers = self.pool.manager, None if irregular.any() else self.pool.tiers
        latest = 0.0 if tiers is None else time.monotonic() + tiers.transport.timeout
        places = 0 if self._state_layers else None  # passes that end at checkpoints get theirs one by one
        try:
            for row, ids in enumerate(tokens):
                known = {"num_tokens": len(ids)} if irregular[row] else {"tokens": ids}
                request_id = self.pool.next_id()
                lease, media = (None, {}) if tiers is None else tiers.load_prefix(request_id, ids, self.scope, latest)
                try:
                    handle = manager.allocate(request_id, scope=self.scope, reserve=places, **known)
                    self.handles.append(handle)
                    manager.cache.count_loaded(handle, media)
                finally:
                    if lease is not None:
                        manager.free(lease)
                if not self.handles[-1].num_written:
                    tiers = None  # one row reuses nothing, so no row of the rectangle can
        except Exception:
            self.pool.release(self.handles)
            raise

    def _prepare(self, num_new: int) -> None:
        """Slots to write in this pass (-1 where a row has the data already), and slots to read."""
        manager = self.pool.manager
        stop = self.length + num_new
        starts = np.minimum([handle.num_written for handle in self.handles], stop)
        fresh = manager.slot_mapping(self.handles, starts, stop)
        slots = np.full((len(fresh), len(self.handles), num_new), -1, np.int32)
        offset = 0
        for row, start in enumerate(starts.tolist()):
            slots[:, row, start - self.length :] = fresh[:, offset : offset + stop - start]
            offset += stop - start
        plane, states = self.pool.plane, None
        if self._state_layers:
            states = manager.state_places(self.handles, self.length, stop)
        self._step = plane.prepare(slots.reshape(len(fresh), -1), states=states)
        if states is not None:
            self._restore(states, stop)
        # All layers keep all tokens, and layers of one shape form one group: every group has tables of its own.
        places = [
            np.concatenate([plane.slots_of(handle, handle.block_ids(group), group, 0, stop) for handle in self.handles])
            for group in range(len(fresh) - bool(self._state_layers))  # states come last
        ]
        self._places = upload(np.stack(places), plane.device)

    def _restore(self, states: StatePlaces, stop: int) -> None:
        """Fills the layers of transformers from a checkpoint, if they begin there; keeps where this pass leaves one."""
        slots = self.pool.states
        assert slots is not None
        if self.length and self.length == self.num_cached_tokens and not self._has_state:
            sources = upload(states.sources.astype(np.int64), slots.device)
            for number, layer in self._state_layers.items():
                parts = slots.specs[number].parts
                StateModule.fill(layer, {part.name: slots.gather(number, part.name, sources) for part in parts})
        is_whole = stop % self.pool.manager.config.block_size == 0
        self._state_targets = upload(states.targets.astype(np.int64), slots.device) if is_whole else None

    @property
    def _has_state(self) -> bool:
        return any(any(layer.has_previous_state.values()) for layer in self._state_layers.values())

    def _keep_states(self) -> None:
        """The pass ended with a block: its states are a checkpoint."""
        slots, targets = self.pool.states, self._state_targets
        if slots is not None and targets is not None:
            for number, layer in self._state_layers.items():
                for part in slots.specs[number].parts:
                    slots.scatter(number, part.name, targets, StateModule.state_in(layer, part.name))

    def end(self, token_ids: Tensor) -> None:
        """The pass is over: commits its tokens."""
        if len(self._written) < len(self.pool.attending):
            raise SequenceStateError(
                f"{len(self._written)} of {len(self.pool.attending)} layers gave this PagedCache their keys and values, so "
                "nothing of this pass is kept. In training mode, gradient checkpointing leaves caches out: call model.eval()"
            )
        self._keep_states()
        num_new = token_ids.shape[1]
        stop = self.length + num_new
        manager = self.pool.manager
        tokens = _on_host(token_ids)
        for row, handle in enumerate(self.handles):
            done = handle.num_committed
            if done < stop:
                known = handle.publishes and not self._irregular[row]  # without their ids, tokens are not cached
                manager.commit(handle, tokens[row, done - self.length :] if known else stop - done)
        if self.pool.tiers is not None:
            if num_new > 1:
                self.pool.tiers.observe(num_new * len(self.handles), time.monotonic() - self._began)
            self._offer(self.pool.tiers)
        self.length = stop
        self._is_open = False
        self._step = self._places = self._state_targets = None

    def _offer(self, tiers: PoolTiers) -> None:
        """Offers the blocks that this pass has filled to tiers."""
        before, self._offered = self._offered, {}
        for handle in self.handles:
            progress = before.get(handle.request_id)
            if progress is None:
                progress = tiers.begin_offers(self.scope)
            tiers.offer(handle, progress)
            self._offered[handle.request_id] = progress

    def write_and_gather(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Stores this pass's K and V of a layer; returns all of it, [row, head, token, element]."""
        plane = self.pool.plane
        if self._step is None or self._places is None:
            raise SequenceStateError(
                "the CachePool of this PagedCache did not see the call: it watches the model that it was made for, until it "
                "is closed, when that is called with input_ids and past_key_values=..."
            )
        plane.write(self._step, _by_token(keys), _by_token(values), layer)
        self._written.add(layer)
        cache = plane.layer_cache(layer)
        group = plane.config.group_of_layer[layer]
        k, v = (read_values(cache[name], self._places[group]) for name in "kv")
        num_rows = len(self.handles)
        gathered = _by_row(k.to(keys.dtype), num_rows), _by_row(v.to(keys.dtype), num_rows)
        if keys.requires_grad or values.requires_grad:
            gathered = _WithoutGradients.apply(*gathered, keys, values)  # type: ignore[no-untyped-call]
        return gathered

    # --- what generation asks of a cache --------------------------------------------------------------------------------

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.length

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i becomes a fork of row `beam_idx[i]`; forks share every block."""
        self._choose(beam_idx.tolist())

    def batch_select_indices(self, indices: Tensor) -> None:
        self._choose(torch.arange(len(self.handles))[indices.cpu()].tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._choose([row for row in range(len(self.handles)) for _ in range(repeats)])

    def _choose(self, rows: Sequence[int]) -> None:
        manager = self.pool.manager
        unused = dict(enumerate(self.handles))
        chosen = []
        for row in rows:
            handle = unused.pop(row, None)
            chosen.append(handle if handle is not None else manager.fork(self.handles[row], self.pool.next_id())[0])
        manager.free_batch(list(unused.values()))
        self.handles[:] = chosen
        for layer in self._state_layers.values():
            LinearAttentionLayer.reorder_cache(layer, torch.tensor(rows))

    def crop(self, tokens_to_remove: int | Tensor) -> None:
        """Forgets the last tokens. As in transformers, a positive number is the remaining length (deprecated there)."""
        number = int(tokens_to_remove)
        self._cut(max(0, self.length + number) if number <= 0 else min(number, self.length))

    def _cut(self, length: int) -> None:
        """Only the first `length` tokens of each row keep their places."""
        if self._state_layers and length < self.length:
            raise SequenceStateError(
                f"{self.length} tokens cannot be cut to {length}: layers of this model keep a state, and only that behind "
                "the last token is there; reset() the cache and give it all tokens again"
            )
        for handle in self.handles:
            if handle.num_reserved > length:
                self.pool.manager.rewind(handle, handle.num_reserved - length)
                progress = self._offered.get(handle.request_id)
                if progress is not None and progress.num_blocks * self.pool.manager.config.block_size > length:
                    del self._offered[handle.request_id]  # other tokens may follow here
        self.length = length

    def reset(self) -> None:
        """Ends its sequences; the next call starts afresh."""
        self.pool.release(self.handles)
        self.length = self.num_cached_tokens = 0
        self._is_open = False
        for layer in self._state_layers.values():
            LinearAttentionLayer.__init__(layer, number_of_states=layer.number_of_states)

    def close(self) -> None:
        """Returns its blocks to the pool; what they hold stays cached."""
        self._closer()
        self.pool.free_gone()
        self.length = 0

    def __enter__(self) -> PagedCache:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class _WithoutGradients(torch.autograd.Function):
    """Keys and values that were gathered, of which some are being trained. A backward pass would miss their gradients."""

    @staticmethod
    def forward(ctx: Any, k: Tensor, v: Tensor, *computed: Tensor) -> tuple[Tensor, Tensor]:
        return k.view_as(k), v.view_as(v)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise SequenceStateError(
            "no gradients pass through the blocks of a PagedCache: train without one, with use_cache=False"
        )


class _PagedLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer of a PagedCache, with the interface of transformers."""

    is_sliding = False
    is_croppable = True

    def __init__(self, cache: PagedCache, layer: int) -> None:
        super().__init__()
        self._cache = weakref.proxy(cache)
        self._layer = layer
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: the pool has the memory already."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        both: tuple[Tensor, Tensor] = self._cache.write_and_gather(self._layer, key_states, value_states)
        return both

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._cache.length + query_length, 0

    def get_seq_length(self) -> int:
        return int(self._cache.length)

    def get_max_length(self) -> int:
        return -1


class _PagedStateLayer(LinearAttentionLayer, _PagedLayer):  # type: ignore[misc]
    """A layer that attends and keeps a state."""

    is_compileable = False

    def __init__(self, cache: PagedCache, layer: int, number_of_states: int) -> None:
        _PagedLayer.__init__(self, cache, layer)
        LinearAttentionLayer.__init__(self, number_of_states=number_of_states)


def _layers(cache: PagedCache, pool: CachePool) -> list[Any]:
    """The layers of a cache by their number in the model. Transformers' own cache knows which of them keep a state."""
    if pool.states is None:
        return [_PagedLayer(cache, index) for index in pool.attending.values()]
    layers: list[Any] = list(DynamicCache(config=pool.model_config).layers)
    for number, index in pool.attending.items():
        if isinstance(own := layers[number], LinearAttentionLayer):
            layers[number] = _PagedStateLayer(cache, index, own.number_of_states)
        else:
            layers[number] = _PagedLayer(cache, index)
    return layers


def _on_host(token_ids: Tensor) -> Any:
    return token_ids.cpu().numpy().astype(np.int32)


def _by_token(states: Tensor) -> Tensor:
    """[row, head, token, element] as [row * token, head, element]."""
    return states.transpose(1, 2).flatten(0, 1)


def _by_row(values: Tensor, num_rows: int) -> Tensor:
    return values.view(num_rows, -1, *values.shape[1:]).transpose(1, 2)
