"""What one attention layer computes: its shape, and which keys a query sees. Everything paged attention agrees on."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property
from typing import Any, TypeAlias

from kvpool.checks import check_bool, check_int, check_number
from kvpool.config.layers import MAX_HEAD_DIM, MAX_HEADS, MAX_TOKENS, DType, LayerSpec, ceil_div
from kvpool.errors import ConfigError

Positions: TypeAlias = Any  # a numpy array or a torch tensor of token positions


@dataclass(frozen=True)
class AttentionSpec:
    """One attention layer, as a backend sees it. Layers with equal specs and one block table share a plan.

    A query sees a key if neither is hidden by any of the rules: `causal` (not after itself), `window` (the last so many
    tokens, itself included; the first `sink_tokens` stay visible) and `chunk` (its own chunk only). If not `causal`, it
    also sees all keys after itself. `soft_cap` bounds
    scores to ±soft_cap by tanh. With `sink_logits`, each query head has a learned logit that takes part in the softmax and
    contributes no value (gpt-oss); the tensor itself comes with every call. Where `chosen` is not 0, an indexer chooses so
    many tokens at most for each query, which sees no others; its `Choice` comes with every call. `dtype` is that of
    queries and outputs, `kv_dtype` that of the values in the store.

    `keys` and `values` name the parts of the layer's cache that are scored and summed up. They may be one part: then V is its
    first `v_dim` elements, as in a latent of multi-head latent attention.

    >>> AttentionSpec(q_heads=32, kv_heads=8, head_dim=128).scale
    0.08838834764831845
    """

    q_heads: int
    kv_heads: int
    head_dim: int
    _: KW_ONLY
    v_dim: int = 0  # 0: as head_dim
    scale: float = 0.0  # 0: head_dim ** -0.5
    causal: bool = True
    window: int | None = None
    sink_tokens: int = 0
    chunk: int | None = None
    soft_cap: float | None = None
    sink_logits: bool = False
    chosen: int = 0
    keys: str = "k"
    values: str = "v"
    dtype: DType = DType.BFLOAT16
    kv_dtype: DType = DType.BFLOAT16

    def __post_init__(self) -> None:
        put = object.__setattr__
        put(self, "q_heads", check_int(self.q_heads, "q_heads", 1, MAX_HEADS))
        put(self, "kv_heads", check_int(self.kv_heads, "kv_heads", 1, MAX_HEADS))
        put(self, "head_dim", check_int(self.head_dim, "head_dim", 1, MAX_HEAD_DIM))
        put(self, "v_dim", check_int(self.v_dim, "v_dim", 0, MAX_HEAD_DIM) or self.head_dim)
        put(self, "scale", check_number(self.scale, "scale", "a number, 0 for head_dim ** -0.5") or self.head_dim**-0.5)
        for name in ("window", "chunk"):
            if getattr(self, name) is not None:
                put(self, name, check_int(getattr(self, name), name, 1, MAX_TOKENS))
        put(self, "sink_tokens", check_int(self.sink_tokens, "sink_tokens", 0, MAX_TOKENS))
        put(self, "chosen", check_int(self.chosen, "chosen", 0, MAX_TOKENS))
        for name in ("causal", "sink_logits"):
            check_bool(getattr(self, name), name)
        put(self, "dtype", DType.parse(self.dtype))
        put(self, "kv_dtype", DType.parse(self.kv_dtype, "kv_dtype"))
        self._check_together()

    def _check_together(self) -> None:
        if self.q_heads % self.kv_heads:
            raise ConfigError(f"q_heads={self.q_heads} is no multiple of kv_heads={self.kv_heads}: groups must be even")
        if self.shares_part and self.v_dim > self.head_dim:
            raise ConfigError(
                f"v_dim={self.v_dim} with values={self.values!r}: V is part of K, which has {self.head_dim} elements"
            )
        if self.window is not None and self.chunk is not None:
            raise ConfigError(f"window={self.window} and chunk={self.chunk}: a layer slides or is chunked, not both")
        if self.sink_tokens and self.window is None:
            raise ConfigError(f"sink_tokens={self.sink_tokens} needs a window: without one every token stays visible")
        if self.chosen and not (self.causal and self.window is None and self.chunk is None):
            raise ConfigError(f"chosen={self.chosen} needs causal attention without a window or chunk")
        if not self.causal and self.chunk is not None:
            raise ConfigError(f"causal=False with chunk={self.chunk}: a chunk ends with the query's own position")
        if self.soft_cap is not None and check_number(self.soft_cap, "soft_cap", "a positive number or None") <= 0:
            raise ConfigError(f"soft_cap={self.soft_cap} must be positive, or None for no bound")
        if self.dtype not in (DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16):
            raise ConfigError(f"dtype={self.dtype.value}: queries are float32, float16 or bfloat16; see kv_dtype")

    @classmethod
    def of(cls, layer: LayerSpec, q_heads: int, **options: Any) -> AttentionSpec:
        """The attention over a layer of the cache; `options` are the fields that the cache knows nothing about.

        >>> AttentionSpec.of(LayerSpec(kv_heads=4, head_dim=64, window=512), q_heads=8, soft_cap=50.0).window
        512
        """
        keys = layer.parts[0]
        values = next((part for part in layer.parts if part.name == cls.values), keys)
        if keys is values and "v_dim" not in options:
            raise ConfigError("a K-only layer needs v_dim: how many elements of K are V (MLA: kv_lora_rank)")
        known = cls(
            q_heads,
            keys.heads,
            keys.width,
            v_dim=values.width,
            causal=not layer.cross_attention,
            window=layer.window,
            sink_tokens=layer.sink_tokens,
            chunk=layer.chunk,
            keys=keys.name,
            values=values.name,
            kv_dtype=layer.dtype,
        )
        return replace(known, **options)

    @property
    def shares_part(self) -> bool:
        """Whether keys and values are the same part of the cache."""
        return self.keys == self.values

    @cached_property
    def reads(self) -> tuple[tuple[str, DType, int], ...]:
        """The parts of the cache that it reads: their names, types, and elements of a head."""
        keys = self.keys, self.kv_dtype.of_keys, self.head_dim
        return (keys,) if self.shares_part else (keys, (self.values, self.kv_dtype, self.v_dim))

    @property
    def group_size(self) -> int:
        """Query heads that share one KV head."""
        return self.q_heads // self.kv_heads

    def sink_slots(self, block_size: int) -> int:
        """The slots of the blocks that hold sink tokens: only after them may a list of blocks skip some."""
        return ceil_div(self.sink_tokens, block_size) * block_size

    @property
    def sees_all(self) -> bool:
        """Whether every query sees every key."""
        return not self.causal and self.window is None

    def first_visible(self, query: Positions) -> Positions:
        """The first position that a query at this position sees, the sink tokens left aside."""
        if self.window is not None:
            return (query - (self.window - 1)).clip(0)
        if self.chunk is not None:
            return query // self.chunk * self.chunk
        return query * 0

    def visible(self, query: Positions, key: Positions) -> Positions:
        """Whether each query sees each key, by position; the two are broadcast against each other."""
        seen = (key >= self.first_visible(query)) | (key < self.sink_tokens)
        return seen & (key <= query) if self.causal else seen
