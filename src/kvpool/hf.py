"""For people who stay with transformers: `model.generate(..., past_key_values=PagedCache(pool))` reuses prefixes.

    pool = CachePool(model, num_bytes=2**30)
    model.generate(ids, past_key_values=PagedCache(pool))            # computes the whole prompt
    model.generate(longer_ids, past_key_values=PagedCache(pool))     # computes only what is new

The pool watches the model's forward passes: it sees the token ids, cuts off what is cached already, and makes what was
computed findable. A model wants its keys and values back as rectangles [batch, head, token, element], so each layer gathers
them from their blocks in every step; `kvpool.engine` reads them in place and is the faster way to serve.
"""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from kvpool.config import KVCacheConfig
from kvpool.config.layers import show
from kvpool.engine.model import rotary
from kvpool.engine.model.probing import inspect_model
from kvpool.errors import InvalidArgumentError, SequenceStateError
from kvpool.kernels.scattering.scatter import read_values
from kvpool.manager import KVCacheManager
from kvpool.pools.arrays import BoolArray
from kvpool.scope import ReuseScope
from kvpool.sequences.live.handle import KVCacheHandle
from kvpool.stats import CacheStats
from kvpool.storage.data_plane import DataPlane, StepSlots
from kvpool.storage.moving import upload

_Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class CachePool:
    """Paged memory for one model, shared by the `PagedCache`s of many calls.

    Give `num_blocks` or `num_bytes`; other fields of `KVCacheConfig` (`host_bytes`, `eviction_policy`, ...) may follow.
    Every layer keeps all tokens here, also those with a sliding window: the model's own masks apply the window. Sequences end
    where the model's positions do, unless `max_seq_len` says otherwise.
    """

    def __init__(
        self,
        model: Any,
        *,
        num_blocks: int | None = None,
        num_bytes: int | None = None,
        block_size: int = 16,
        dtype: Any = None,
        **config: Any,
    ) -> None:
        if (num_blocks is None) == (num_bytes is None):
            raise InvalidArgumentError("give the size of the pool once: num_blocks or num_bytes")
        own_attention = getattr(getattr(model, "config", None), "_attn_implementation", None)
        shape = inspect_model(model)
        model.set_attn_implementation(own_attention)
        rotary.thaw(model)  # `max_positions` ends where they change, and the model may run longer texts without a cache
        layers = [replace(spec, window=None, sink_tokens=0) for spec in shape.layer_specs(dtype)]
        fields: dict[str, Any] = {"max_seq_len": shape.max_positions, **config}
        self.manager = KVCacheManager(KVCacheConfig(layers, block_size, gpu_blocks=num_blocks, gpu_bytes=num_bytes, **fields))
        self.plane = DataPlane(self.manager, model.device)
        self.is_closed = False
        self._ids = itertools.count()
        self._gone: deque[list[KVCacheHandle]] = deque()  # sequences of caches that nobody has any more
        self_or_gone = weakref.ref(self)  # the model must not keep a pool that nobody uses
        self._hooks = (
            model.register_forward_pre_hook(partial(_before_forward, self_or_gone), with_kwargs=True),
            model.register_forward_hook(partial(_after_forward, self_or_gone), with_kwargs=True),
        )

    @property
    def num_layers(self) -> int:
        return len(self.manager.config.layers)

    def next_id(self) -> int:
        """A request id that no sequence of this pool has had."""
        return next(self._ids)

    def stats(self) -> CacheStats:
        """What is cached and how much was reused."""
        self.free_gone()
        return self.manager.stats()

    def let_go(self, handles: list[KVCacheHandle]) -> None:
        """Notes sequences to be freed later: garbage may be collected in the middle of an operation of the manager."""
        self._gone.append(handles)

    def free_gone(self) -> None:
        """Ends the sequences of caches that nobody has any more."""
        while self._gone:
            try:
                handles = self._gone.popleft()
            except IndexError:  # another thread was faster
                return
            _release(self, handles)

    def close(self) -> None:
        """Stops watching the model and gives the memory back."""
        self.free_gone()
        self.is_closed = True
        for hook in self._hooks:
            hook.remove()
        self.plane.close()


class PagedCache(Cache):  # type: ignore[misc]
    """A `past_key_values` for one call of `generate` (or a conversation of several), in the blocks of a pool.

    Prompts are found by their token ids: rows without padding, at the usual positions, reuse what earlier calls computed, as
    far as all rows of the batch can (a batch is a rectangle). Reused tokens have no logits (nor hidden states): a model that
    is called directly gives those of the last token at least, as many as `logits_to_keep` says, or all that `labels` are
    given for. `scope` isolates tenants. Close it, or let it go, to return its
    blocks; what it computed stays cached. Beam search and assisted decoding fork and rewind the sequences: nothing is copied
    but the blocks that are written.
    """

    def __init__(self, pool: CachePool, scope: ReuseScope | None = None) -> None:
        if not isinstance(pool, CachePool):
            raise InvalidArgumentError(f"a PagedCache lives in a CachePool, got {show(pool)}")
        if scope is not None and not isinstance(scope, ReuseScope):
            raise InvalidArgumentError(f"scope must be a ReuseScope, got {show(scope)}")
        if pool.is_closed:
            raise SequenceStateError("this CachePool is closed; make a new one")
        super().__init__(layers=[_PagedLayer(self, layer) for layer in range(pool.num_layers)])
        self.pool = pool
        self.scope = ReuseScope() if scope is None else scope
        self.handles: list[KVCacheHandle] = []
        self.length = 0  # tokens of each row that the model may look back at
        self.num_cached_tokens = 0  # of the first prompt, per row
        self._irregular: BoolArray = np.zeros(0, np.bool_)  # rows of this pass that others must not find
        self._step: StepSlots | None = None
        self._places: Tensor | None = None  # slots of every token of every row, flat
        self._closer = weakref.finalize(self, pool.let_go, self.handles)

    # --- a forward pass ----------------------------------------------------------------------------------------------

    def begin(self, token_ids: Tensor, irregular: BoolArray, num_needed: int = 1) -> int:
        """Makes room for the next tokens [row, token]; returns how many of them are cached and need no computing.

        The last `num_needed` are computed in any case: somebody wants their logits. `irregular` rows are padded or lie at
        unusual positions: they reuse nothing, and nobody finds what they compute from here on.
        """
        if not self._closer.alive:
            raise SequenceStateError("this PagedCache is closed; make a new one for the next call")
        self.pool.free_gone()
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
            self._cut(self.length)  # a pass that failed left places behind
            self.pool.manager.extend_batch(self.handles, num_tokens)
        self._prepare(num_tokens - cached)
        return cached

    def _allocate(self, tokens: Any, irregular: BoolArray) -> None:
        manager = self.pool.manager
        try:
            for row, ids in enumerate(tokens):
                known = {"num_tokens": len(ids)} if irregular[row] else {"tokens": ids}
                self.handles.append(manager.allocate(self.pool.next_id(), scope=self.scope, **known))
        except Exception:
            _release(self.pool, self.handles)
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
        self._step = self.pool.plane.prepare(slots.reshape(len(fresh), -1))
        # All layers keep all tokens, and layers of one shape form one group: every group has tables of its own.
        plane = self.pool.plane
        places = [
            np.concatenate([plane.slots_of(handle, handle.block_ids(group), group, 0, stop) for handle in self.handles])
            for group in range(len(manager.config.groups))
        ]
        self._places = upload(np.stack(places), plane.device)

    def end(self, token_ids: Tensor) -> None:
        """The pass is over: its tokens are written and final."""
        num_new = token_ids.shape[1]
        stop = self.length + num_new
        manager = self.pool.manager
        tokens = _on_host(token_ids)
        for row, handle in enumerate(self.handles):
            done = handle.num_committed
            if done < stop:
                known = handle.publishes and not self._irregular[row]  # without their ids, tokens are not cached
                manager.commit(handle, tokens[row, done - self.length :] if known else stop - done)
        self.length = stop
        self._step = self._places = None

    def write_and_gather(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Stores this pass's K and V of a layer; returns all of it, [row, head, token, element]."""
        plane = self.pool.plane
        if self._step is None or self._places is None:
            raise SequenceStateError(
                "the CachePool of this PagedCache did not see the call: it watches the model that it was made for, until it "
                "is closed, when that is called with input_ids and past_key_values=..."
            )
        plane.write(self._step, _by_token(keys), _by_token(values), layer)
        cache = plane.layer_cache(layer)
        group = plane.config.group_of_layer[layer]
        spec = plane.config.groups[group].spec
        k, v = read_values(cache, self._places[group], spec.head_dim, spec.value_dim)
        assert v is not None
        num_rows = len(self.handles)
        return _by_row(k.to(keys.dtype), num_rows), _by_row(v.to(keys.dtype), num_rows)

    # --- what generation asks of a cache --------------------------------------------------------------------------------

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.length

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i goes on from what row `beam_idx[i]` was: by forks, which share every block."""
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

    def crop(self, tokens_to_remove: int | Tensor) -> None:
        """Forgets the last tokens; as in transformers, a positive number is the length that remains (deprecated there)."""
        number = int(tokens_to_remove)
        self._cut(max(0, self.length + number) if number <= 0 else min(number, self.length))

    def _cut(self, length: int) -> None:
        """Only the first `length` tokens of each row keep their places."""
        for handle in self.handles:
            if handle.num_reserved > length:
                self.pool.manager.rewind(handle, handle.num_reserved - length)
        self.length = length

    def reset(self) -> None:
        """Ends its sequences; the next call starts afresh."""
        _release(self.pool, self.handles)
        self.length = self.num_cached_tokens = 0

    def close(self) -> None:
        """Returns its blocks to the pool; what they hold stays cached."""
        self._closer()
        self.pool.free_gone()
        self.length = 0

    def __enter__(self) -> PagedCache:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class _PagedLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer of a PagedCache, as transformers wants to see it."""

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


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _before_forward(
    pool: weakref.ref[CachePool], module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> _Arguments | None:
    """The pool's look at a forward pass of its model: room for the new tokens, without those that are cached already."""
    cache = _cache_of(pool, kwargs)
    if cache is None:
        return None
    if kwargs.get("use_cache") is False:
        raise InvalidArgumentError("use_cache=False sends all tokens in every step; a PagedCache takes them for new ones")
    token_ids = _input_ids(args, kwargs)
    if not token_ids.numel():
        raise InvalidArgumentError(
            f"input_ids of shape {tuple(token_ids.shape)} hold no new token: this PagedCache has {cache.length} of each row "
            "already; give it longer rows, or reset() it for others"
        )
    irregular = _irregular_rows(kwargs, cache.length, *token_ids.shape)
    skip = cache.begin(token_ids, irregular, _num_logits(kwargs, token_ids.shape[1]))
    if not skip:
        return None
    for name in ("input_ids", "position_ids", "cache_position", "token_type_ids"):
        if kwargs.get(name) is not None:
            kwargs[name] = kwargs[name][..., skip:]
    return (args[0][:, skip:], *args[1:]) if args else args, kwargs


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _after_forward(
    pool: weakref.ref[CachePool], module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
) -> None:
    cache = _cache_of(pool, kwargs)
    if cache is not None:
        cache.end(_input_ids(args, kwargs))


def _cache_of(pool: weakref.ref[CachePool], kwargs: dict[str, Any]) -> PagedCache | None:
    """The cache of a pass, if it belongs to this pool: a model may have several."""
    cache = kwargs.get("past_key_values")
    return cache if isinstance(cache, PagedCache) and cache.pool is pool() else None


def _num_logits(kwargs: dict[str, Any], num_tokens: int) -> int:
    """How many of the last tokens need logits."""
    wanted = kwargs.get("logits_to_keep")
    if isinstance(wanted, Tensor) or kwargs.get("labels") is not None:  # of which tokens: counted from the first one
        return num_tokens
    return wanted or 1  # a caller that does not say so wants the next token


def _irregular_rows(kwargs: dict[str, Any], start: int, num_rows: int, num_tokens: int) -> BoolArray:
    """Rows whose keys depend on more than the ids up to them: some tokens are masked, or lie at unusual positions."""
    irregular = torch.zeros(num_rows, dtype=torch.bool)
    mask, positions = kwargs.get("attention_mask"), kwargs.get("position_ids")
    if isinstance(mask, Tensor) and mask.ndim == 2:
        irregular = (mask == 0).any(-1)
    elif mask is not None:  # a mask of the caller's own making, which may say anything
        irregular.fill_(True)
    if positions is not None:
        usual = torch.arange(start, start + num_tokens, device=positions.device)
        unusual = (positions != usual).any(-1).reshape(-1, positions.shape[-2]).any(0)
        irregular = irregular.to(unusual.device) | unusual
    return irregular.cpu().numpy()  # at once, at the end: a GPU is waited for


def _input_ids(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    token_ids = kwargs.get("input_ids", args[0] if args else None)
    if not isinstance(token_ids, Tensor):
        raise InvalidArgumentError("a PagedCache finds prompts by their token ids: pass input_ids, not inputs_embeds")
    if token_ids.ndim != 2:
        raise InvalidArgumentError(f"input_ids must be [row, token], got shape {tuple(token_ids.shape)}")
    return token_ids


def _release(pool: CachePool, handles: list[KVCacheHandle]) -> None:
    """Ends sequences and empties the list."""
    pool.manager.free_batch([handle for handle in handles if handle.is_live])
    handles.clear()


def _on_host(token_ids: Tensor) -> Any:
    return token_ids.cpu().numpy().astype(np.int32)


def _by_token(states: Tensor) -> Tensor:
    """[row, head, token, element] as [row * token, head, element]."""
    return states.transpose(1, 2).flatten(0, 1)


def _by_row(values: Tensor, num_rows: int) -> Tensor:
    return values.view(num_rows, -1, *values.shape[1:]).transpose(1, 2)
