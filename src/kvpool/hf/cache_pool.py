"""CachePool: paged memory for one model of transformers. It hooks into the model's forward passes."""

from __future__ import annotations

import itertools
import os
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from kvpool.config import KVCacheConfig, LayerSpec, StateSpec
from kvpool.core.handle import KVCacheHandle
from kvpool.errors import InvalidArgumentError, UnsupportedModelError
from kvpool.hf.pool_tiers import PoolTiers
from kvpool.manager import KVCacheManager
from kvpool.model.private_copy import SharedWeights, private_copy, without_callers_state
from kvpool.model.probing import ModelShape, inspect_model
from kvpool.model.states import state_modules
from kvpool.pools.arrays import BoolArray, as_token_array
from kvpool.scope import ReuseScope
from kvpool.stats import CacheStats
from kvpool.storage.data_plane import DataPlane
from kvpool.tiers import KeyedTier
from kvpool.tiers.model_code import foreign_forwards
from kvpool.tiers.model_tiers import ModelTiers
from kvpool.tiers.settings import REQUEST_TIMEOUT
from kvpool.tiers.transport.tier_transport import TieringStats

_Arguments = tuple[tuple[Any, ...], dict[str, Any]]
_TYPES = ("token_type_ids", "mm_token_type_ids")  # of tokens; 0 is text
_CUT = ("input_ids", "position_ids", "cache_position", *_TYPES)
# What changes no key, or is looked at by itself. Anything else that a pass takes beside its ids may change keys: images,
# sound, what an encoder made, adapters of rows.
_HARMLESS = frozenset({*_CUT, "attention_mask", "past_key_values", "labels", "logits_to_keep"})


class PooledCache(Protocol):
    """What the pool calls of a cache before and after a forward pass."""

    length: int

    def enter(self, token_ids: Tensor, irregular: BoolArray, num_needed: int = 1) -> list[int]: ...

    def begin(self, token_ids: Tensor, irregular: BoolArray, num_needed: int = 1) -> int: ...

    def end(self, token_ids: Tensor) -> None: ...


class CachePool:
    """Paged memory for one model, shared by the `PagedCache`s of many calls.

    Give `num_blocks` or `num_bytes`; other fields of `KVCacheConfig` (`host_bytes`, `eviction_policy`, ...) may follow.
    Every layer keeps all tokens here, also those with a window or chunks: the model's own masks hide tokens. Sequences end
    where the model's positions do, unless `max_seq_len` says otherwise. Layers that keep a state find it at a checkpoint: a
    prompt is computed in two passes, so that one ends behind its last whole block, and its state is kept there.

    Prefixes outlive the process in tiers, as those of the `Engine` do: `disk` is a directory that holds up to `disk_bytes`
    (10 GiB), or an address like `disk:DIR?bytes=50GB&compress=zstd`; `remote` is the address of a store that many processes
    share (`redis://host`), `tiers` are `KeyedTier`s of your own. The pool asks them in the order `tiers`, `disk`, `remote`. A
    call waits for them `tier_timeout` seconds at most, and a failed tier counts as a miss. `close` finishes stores in flight.

    Everything cached belongs to the weights that it was computed with. If they have changed when a cache begins, or other
    adapters of peft are active, or modules have other forward hooks or forwards, the pool forgets all of it; what is in
    tiers stays for those who have the old weights.
    """

    def __init__(
        self,
        model: Any,
        *,
        num_blocks: int | None = None,
        num_bytes: int | None = None,
        block_size: int = 16,
        dtype: Any = None,
        disk: str | os.PathLike[str] | None = None,
        disk_bytes: int | None = None,
        remote: str | None = None,
        tiers: Sequence[KeyedTier] | None = None,
        tier_timeout: float = REQUEST_TIMEOUT,
        tier_min_uses: int = 1,
        **config: Any,
    ) -> None:
        if (num_blocks is None) == (num_bytes is None):
            raise InvalidArgumentError("give the size of the pool once: num_blocks or num_bytes")
        model_tiers = ModelTiers.of(
            tiers, disk, disk_bytes, remote=remote, tier_timeout=tier_timeout, tier_min_uses=tier_min_uses
        )
        shape = _shape_of(model)
        layers: list[LayerSpec | StateSpec] = [*_cached_layers(model, shape, dtype), *shape.states.values()]
        fields: dict[str, Any] = {"max_seq_len": shape.max_positions, **config}
        self.manager = KVCacheManager(
            KVCacheConfig(layers, block_size, gpu_blocks=num_blocks, gpu_bytes=num_bytes, **fields)
        )
        self.plane = DataPlane(self.manager, model.device)
        self.states = self.plane.state_slots(dict(enumerate(shape.states, len(shape.layers))))
        self.attending = {number: index for index, number in enumerate(shape.attending)}
        self.model_config = model.config
        opened = model_tiers.open(model, self.manager.config)
        self.tiers = None if opened is None else PoolTiers(opened, self.manager, self.plane)
        if self.tiers is not None:
            weakref.finalize(self, self.tiers.close)  # also at the end of the process: what was computed is stored
        self.is_closed = False
        self._weights = SharedWeights(model)
        self._added = _added_to(model)
        self._ids = itertools.count()
        self._gone: deque[list[KVCacheHandle]] = deque()  # sequences of caches that were garbage-collected
        self_or_gone = weakref.ref(self)  # the model must not keep a pool that nobody uses
        self._hooks = (
            model.register_forward_pre_hook(partial(_before_forward, self_or_gone), with_kwargs=True),
            model.register_forward_hook(partial(_after_forward, self_or_gone), with_kwargs=True),
        )

    def follow(self, model: Any) -> None:
        """Forgets what was computed with other weights, adapters or hooks than the model has now."""
        before, self._added = self._added, _added_to(model)
        if self._weights.changed() or self._added != before:
            drop = self.manager.cache.reset
            drop() if self.tiers is None else self.tiers.transport.invalidator.everything(drop, remove=False)

    def next_id(self) -> int:
        """A request id that no sequence of this pool has had."""
        return next(self._ids)

    def stats(self) -> CacheStats:
        """What is cached and how much was reused."""
        self.free_gone()
        return self.manager.stats()

    def tier_stats(self) -> TieringStats | None:
        """What came from tiers and went there; None without tiers."""
        return None if self.tiers is None else self.tiers.stats()

    def invalidate(self, prefix: Any = None, *, scope: ReuseScope | None = None, tenant: str | None = None) -> int:
        """Forgets content that must not be used again, here and in tiers, as `Engine.invalidate` does: what follows the
        token ids of `prefix`, a whole scope, or all scopes of a tenant. Returns the blocks that left the cache.
        """
        ids = None if prefix is None else as_token_array(_plain(prefix), "prefix")
        drop = partial(self.manager.cache.invalidate, ids, scope=scope, tenant=tenant)
        if self.tiers is None:
            return drop()
        if tenant is not None:
            return self.tiers.transport.invalidator.of_tenant(drop, tenant)
        return self.tiers.transport.invalidator.content(drop, ids, scope, None)

    def reset_prefix_cache(self) -> int:
        """Forgets everything cached, here and in tiers. Returns the blocks that left the cache."""
        drop = self.manager.cache.reset
        return drop() if self.tiers is None else self.tiers.transport.invalidator.everything(drop)

    def let_go(self, handles: list[KVCacheHandle]) -> None:
        """Adds sequences to be freed later, because garbage may be collected during an operation of the manager."""
        self._gone.append(handles)

    def release(self, handles: list[KVCacheHandle]) -> None:
        """Ends sequences and empties the list."""
        self.manager.free_batch([handle for handle in handles if handle.is_live])
        handles.clear()

    def free_gone(self) -> None:
        """Ends the sequences of caches that were garbage-collected."""
        while self._gone:
            try:
                handles = self._gone.popleft()
            except IndexError:  # another thread was faster
                return
            self.release(handles)

    def close(self) -> None:
        """Removes the hooks of the model, finishes the stores in flight and gives the memory back."""
        self.free_gone()
        self.is_closed = True
        for hook in self._hooks:
            hook.remove()
        if self.tiers is not None:
            self.tiers.close()
        self.plane.close()

    def __enter__(self) -> CachePool:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _before_forward(
    pool: weakref.ref[CachePool], module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> _Arguments | None:
    """The hook before a forward pass: makes room for the new tokens and leaves out cached ones."""
    cache = _cache_of(pool, kwargs)
    if cache is None:
        return None
    if kwargs.get("use_cache") is False:
        raise InvalidArgumentError(
            "use_cache=False sends all tokens in every step; a PagedCache takes them for new ones"
        )
    token_ids = input_ids(args, kwargs)
    if not token_ids.numel():
        raise InvalidArgumentError(
            f"input_ids of shape {tuple(token_ids.shape)} hold no new token: this PagedCache has {cache.length} of each row "
            "already; give it longer rows, or reset() it for others"
        )
    if not cache.length and (own := pool()) is not None:
        own.follow(module)
    irregular = irregular_rows(kwargs, cache.length, *token_ids.shape)
    if module.training:  # dropout may change keys
        irregular.fill(True)
    num_needed = num_logits(kwargs, token_ids.shape[1])
    ends = cache.enter(token_ids, irregular, num_needed)
    for start, stop in itertools.pairwise(ends):  # passes of their own, which end with a checkpoint
        part = _cut_inputs({**kwargs, "input_ids": token_ids}, start, stop)
        module(**{**part, "attention_mask": None, "logits_to_keep": 1})
    skip = ends[-1] + cache.begin(token_ids[:, ends[-1] :], irregular, num_needed)
    if not skip:
        return None
    return (args[0][:, skip:], *args[1:]) if args else args, _cut_inputs(kwargs, skip, None)


def _cut_inputs(kwargs: dict[str, Any], start: int, stop: int | None) -> dict[str, Any]:
    """The arguments of a pass over some of its tokens."""
    cut = dict(kwargs)
    for name in _CUT:
        if kwargs.get(name) is not None:
            cut[name] = kwargs[name][..., start:stop]
    return cut


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _after_forward(
    pool: weakref.ref[CachePool], module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
) -> None:
    cache = _cache_of(pool, kwargs)
    if cache is not None:
        cache.end(input_ids(args, kwargs))


def _cache_of(pool: weakref.ref[CachePool], kwargs: dict[str, Any]) -> PooledCache | None:
    """The cache of a pass, if it belongs to this pool. A model may have several pools."""
    cache, own = kwargs.get("past_key_values"), pool()
    return cache if own is not None and getattr(cache, "pool", None) is own else None


def _shape_of(model: Any) -> ModelShape:
    """What a model needs of the cache, found out with a copy of it."""
    own = private_copy(model)
    if model.training:
        raise InvalidArgumentError(f"{type(model).__name__} is in training mode: call model.eval() first")
    with without_callers_state(model.device):
        shape = inspect_model(own, with_states=True)
    if beginners := sorted({type(each.module).__name__ for each in state_modules(own) if not each.continues}):
        raise UnsupportedModelError(
            f"{type(model).__name__} cannot use a CachePool: {', '.join(beginners)} of transformers begins at zero when it "
            "gets several tokens behind a state, as behind a cached prefix; kvpool.Engine serves it"
        )
    if any(layer.chosen for layer in shape.layers):
        raise UnsupportedModelError(
            f"{type(model).__name__} cannot use a CachePool: its attention sees tokens that an indexer chooses, whose keys "
            "are not in it; kvpool.Engine serves it"
        )
    return shape


@torch.no_grad()
def _cached_layers(model: Any, shape: ModelShape, dtype: Any) -> list[LayerSpec]:
    """What the model puts into a cache for each token: every one stays, and of MLA it is less than what attention reads."""
    token = torch.zeros((1, 1), dtype=torch.int64, device=model.device)
    with without_callers_state(model.device):
        cache = getattr(private_copy(model)(input_ids=token, use_cache=True), "past_key_values", None)
    if cache is None:  # for instance cache_params of Mamba 2
        raise UnsupportedModelError(
            f"{type(model).__name__} cannot use a CachePool: it takes no cache as past_key_values; kvpool.Engine serves it"
        )
    cached = cache.layers
    specs = []
    for spec, layer in zip(shape.layer_specs(dtype), (cached[number] for number in shape.attending), strict=True):
        (_, heads, _, k_dim), v_dim = layer.keys.shape, layer.values.shape[-1]
        own = replace(spec, window=None, sink_tokens=0, chunk=None, kv_heads=heads, head_dim=k_dim, k_only=False)
        specs.append(replace(own, v_head_dim=None if v_dim == k_dim else v_dim))
    return specs


def _added_to(model: Any) -> list[Any]:
    """The adapters of peft that each layer adds now, how they are scaled, and hooks and forwards that nobody knows."""
    layers = [module for module in model.modules() if hasattr(module, "merged_adapters")]
    adapters = [
        (tuple(layer.active_adapters), layer.disable_adapters, dict(getattr(layer, "scaling", {}))) for layer in layers
    ]
    return [*adapters, *foreign_forwards(model)]


def _plain(tokens: Any) -> Any:
    return tokens.flatten().tolist() if isinstance(tokens, Tensor) else tokens


# --- forward passes --------------------------------------------------------------------------------------------------


def num_logits(kwargs: dict[str, Any], num_tokens: int) -> int:
    """How many of the last tokens need logits."""
    wanted = kwargs.get("logits_to_keep")
    if isinstance(wanted, Tensor) or kwargs.get("labels") is not None:  # both name tokens by their index from the first
        return num_tokens
    return wanted or 1  # by default the caller wants the next token


def irregular_rows(kwargs: dict[str, Any], start: int, num_rows: int, num_tokens: int) -> BoolArray:
    """Rows whose keys depend on more than their ids: images belong to them, or tokens are masked or at unusual positions."""
    more = [value for name, value in kwargs.items() if name not in _HARMLESS and isinstance(value, (Tensor, Sequence))]
    types = [value for name in _TYPES if (value := kwargs.get(name)) is not None]
    irregular = torch.full((num_rows,), bool(more) or any(bool(value.any()) for value in types))
    mask, positions = kwargs.get("attention_mask"), kwargs.get("position_ids")
    if isinstance(mask, Tensor) and mask.ndim == 2:
        irregular = irregular.to(mask.device) | (mask == 0).any(-1)
    elif mask is not None:  # a mask of another form, which may mean anything
        irregular.fill_(True)
    if positions is not None:
        usual = torch.arange(start, start + num_tokens, device=positions.device)
        unusual = (positions != usual).any(-1).reshape(-1, positions.shape[-2]).any(0)
        irregular = irregular.to(unusual.device) | unusual
    return irregular.cpu().numpy()  # only here, because it waits for the GPU


def input_ids(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The ids of its tokens, [row, token]."""
    token_ids = kwargs.get("input_ids", args[0] if args else None)
    if not isinstance(token_ids, Tensor):
        raise InvalidArgumentError("a PagedCache finds prompts by their token ids: pass input_ids, not inputs_embeds")
    if token_ids.ndim != 2:
        raise InvalidArgumentError(f"input_ids must be [row, token], got shape {tuple(token_ids.shape)}")
    return token_ids
