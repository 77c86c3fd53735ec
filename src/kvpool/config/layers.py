"""What one layer keeps per token, how layers form groups, and how groups share pools. Exact integer arithmetic."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import Enum, IntEnum
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, overload

from kvpool.checks import check_bool, check_int, show
from kvpool.errors import ConfigError, InvalidArgumentError

if TYPE_CHECKING:
    import numpy.typing as npt


MAX_BLOCKS = 2**31 - 1  # block ids are int32
MAX_BYTES = 2**63 - 1
MAX_TOKENS = 2**40
MAX_HEADS = 2**16
MAX_HEAD_DIM = 2**20
MAX_BLOCK_SIZE = 2**20


class Tier(IntEnum):
    """Where a block lives, fastest first. No pool is `REMOTE`: nodes of a cluster announce blocks in a shared store so."""

    GPU = 0
    HOST = 1
    DISK = 2
    REMOTE = 3


class DType(str, Enum):
    """Element type of the stored K and V. `DType("fp16")`, `DType("half")` and `DType("torch.float16")` are FLOAT16.

    Integer types are quantised per token and head, separately for K and V: 8 bits have one float16 scale, 4 bits a float16
    scale and a float16 zero point. INT4 is the type of V; K beside it is INT8, because 4 bits are too few for keys. The fp8
    types store no scales (a constant per layer goes with the weights).
    """

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    FP8_E4M3 = "fp8_e4m3"
    FP8_E5M2 = "fp8_e5m2"
    INT8 = "int8"
    INT4 = "int4"

    @classmethod
    def _missing_(cls, value: object) -> DType | None:
        name = str(value).lower().removeprefix("torch.")
        return next((dtype for dtype, names in _SPELLINGS.items() if name == dtype.value or name in names), None)

    @classmethod
    def parse(cls, value: object, name: str = "dtype") -> DType:
        """The DType meant by a name, a DType, a torch dtype or a numpy dtype; ConfigError otherwise."""
        try:
            return cls(value)
        except Exception:  # ValueError, mostly; an object's own hash or text may raise anything
            known = ", ".join(dtype.value for dtype in cls)
            raise ConfigError(f"{name}={show(value)} is no known dtype; use one of {known}") from None

    @property
    def of_keys(self) -> DType:
        """The type of K where V has this one.

        >>> DType.INT4.of_keys
        <DType.INT8: 'int8'>
        """
        return DType.INT8 if self is DType.INT4 else self

    @property
    def bits(self) -> int:
        """Bits of one element."""
        return _BITS[self]

    @property
    def scale_bytes(self) -> int:
        """Bytes of scale (and zero point) stored beside each row of this type: one head of one token."""
        return _SCALE_BYTES.get(self, 0)

    def row_bytes(self, dim: int) -> int:
        """Bytes of one head of one token with `dim` elements, scales included. A head starts on a whole byte."""
        return ceil_div(dim * self.bits, 8) + self.scale_bytes


_BITS = {
    DType.FLOAT32: 32,
    DType.FLOAT16: 16,
    DType.BFLOAT16: 16,
    DType.FP8_E4M3: 8,
    DType.FP8_E5M2: 8,
    DType.INT8: 8,
    DType.INT4: 4,
}
_SCALE_BYTES = {DType.INT8: 2, DType.INT4: 4}
_SPELLINGS: dict[DType, frozenset[str]] = {
    DType.FLOAT32: frozenset({"fp32", "f32", "float"}),
    DType.FLOAT16: frozenset({"fp16", "f16", "half"}),
    DType.BFLOAT16: frozenset({"bf16"}),
    DType.FP8_E4M3: frozenset({"fp8", "float8", "e4m3", "float8_e4m3", "float8_e4m3fn", "fp8_e4m3fn"}),
    DType.FP8_E5M2: frozenset({"e5m2", "float8_e5m2"}),
    DType.INT8: frozenset({"i8"}),
    DType.INT4: frozenset({"i4"}),
}


class GroupKind(str, Enum):
    """Which earlier tokens a layer looks at. A STATE layer looks at none: it keeps a state that sums them up.

    These are the kinds that kvpool has. A spec of one's own may name another, which `kinds.KINDS` knows.
    """

    FULL = "full"
    SLIDING = "sliding"
    CHUNKED = "chunked"
    STATE = "state"
    CROSS = "cross"

    __str__ = str.__str__


@overload
def ceil_div(numerator: int, denominator: int) -> int: ...
@overload
def ceil_div(numerator: npt.NDArray[Any], denominator: int | npt.NDArray[Any]) -> npt.NDArray[Any]: ...
def ceil_div(numerator: Any, denominator: Any) -> Any:
    """The quotient of integers, or of arrays of them, rounded up, without floats.

    >>> ceil_div(17, 16)
    2

    Admission, steps and eviction write it out: there, for every request, the call would cost more than the division.
    """
    return -(-numerator // denominator)


class TokenPart(NamedTuple):
    """One tensor of what a layer stores of each token."""

    name: str
    dtype: DType
    heads: int
    width: int  # elements of a head

    @property
    def bytes(self) -> int:
        """Bytes of one token, scales included."""
        return self.heads * self.dtype.row_bytes(self.width)

    def __str__(self) -> str:
        heads = "" if self.heads == 1 else f"{self.heads} heads x "
        return f"{self.name} of {heads}{self.width} {self.dtype.value}"


INDEX = "index"


def index_part(width: int, dtype: object) -> TokenPart:
    """The keys of an indexer, by which sparse attention chooses tokens: one for all heads, as the model computes them."""
    return TokenPart(INDEX, DType.parse(dtype), 1, width)


def _token_parts(given: object) -> tuple[TokenPart, ...]:
    """Further parts of a layer, checked; lists of their fields, as recordings hold them, are welcome."""
    if not isinstance(given, (list, tuple)):
        raise ConfigError(f"extra_parts={show(given)} must be a list of TokenPart(name, dtype, heads, width)")
    parts = []
    for each in given:
        if not isinstance(each, (list, tuple)) or len(each) != len(TokenPart._fields):
            raise ConfigError(f"extra_parts holds {show(each)}, which is no TokenPart(name, dtype, heads, width)")
        name, dtype, heads, width = each
        if not isinstance(name, str) or not name.isidentifier() or name in ("k", "v"):
            raise ConfigError(f"extra_parts names a part {show(name)}; use an identifier other than k and v")
        heads, width = check_int(heads, "heads", 1, MAX_HEADS), check_int(width, "width", 1, MAX_HEAD_DIM)
        parts.append(TokenPart(name, DType.parse(dtype), heads, width))
    names = [part.name for part in parts]
    if len(set(names)) < len(names):
        raise ConfigError(f"extra_parts names a part twice: {', '.join(names)}")
    return tuple(parts)


@dataclass(frozen=True)
class LayerSpec:
    """One attention layer, as the cache sees it.

    `kv_heads` are the K/V heads, not the query heads. `window` counts the tokens a query sees, itself included
    (Hugging Face's `sliding_window`); the first `sink_tokens` stay visible beside it. `chunk` is the length of
    chunked-local attention, where a query sees its own chunk only. A `k_only` layer stores no V: multi-head latent
    attention (MLA) is one head of `kv_lora_rank + qk_rope_head_dim`. `extra_parts` lie behind K and V: an indexer's keys, by
    which sparse attention chooses tokens. A kind of one's own is a subclass with another `kind`.

    >>> LayerSpec(kv_heads=8, head_dim=128).bytes_per_token  # 8 heads x (128 K + 128 V) x 2 bytes
    4096
    """

    kv_heads: int
    head_dim: int
    dtype: DType = DType.BFLOAT16
    v_head_dim: int | None = None
    k_only: bool = False
    window: int | None = None
    chunk: int | None = None
    sink_tokens: int = 0
    cross_attention: bool = False
    extra_parts: tuple[TokenPart, ...] = ()

    def __post_init__(self) -> None:
        put = object.__setattr__
        put(self, "kv_heads", check_int(self.kv_heads, "kv_heads", 1, MAX_HEADS))
        put(self, "head_dim", check_int(self.head_dim, "head_dim", 1, MAX_HEAD_DIM))
        put(self, "dtype", DType.parse(self.dtype))
        for name, high in (("v_head_dim", MAX_HEAD_DIM), ("window", MAX_TOKENS), ("chunk", MAX_TOKENS)):
            if getattr(self, name) is not None:
                put(self, name, check_int(getattr(self, name), name, 1, high))
        put(self, "sink_tokens", check_int(self.sink_tokens, "sink_tokens", 0, MAX_TOKENS))
        check_bool(self.k_only, "k_only")
        check_bool(self.cross_attention, "cross_attention")
        put(self, "extra_parts", _token_parts(self.extra_parts))
        if self.k_only and self.v_head_dim is not None:
            raise ConfigError(f"v_head_dim={self.v_head_dim} with k_only=True: a K-only layer has no V; drop one")
        if self.window is not None and self.chunk is not None:
            raise ConfigError(f"window={self.window} and chunk={self.chunk}: a layer slides or is chunked, not both")
        if self.sink_tokens and self.window is None:
            raise ConfigError(f"sink_tokens={self.sink_tokens} needs a window: without one every token stays visible")
        if self.cross_attention and self.window_tokens is not None:
            raise ConfigError(
                f"cross_attention with a window or chunk of {self.window_tokens}: it sees the whole input"
            )

    @property
    def kind(self) -> str:
        """Which group kind the layer belongs to: a `GroupKind`, or the name of a kind of one's own."""
        if self.cross_attention:
            return GroupKind.CROSS
        if self.window is not None:
            return GroupKind.SLIDING
        return GroupKind.FULL if self.chunk is None else GroupKind.CHUNKED

    def __str__(self) -> str:
        values = "K only" if self.k_only else "K and V" if self.value_dim == self.head_dim else f"V of {self.value_dim}"
        extra = "".join(f" + {part}" for part in self.extra_parts)
        return f"{self.kv_heads} heads x {self.head_dim} {self.dtype.value} ({values}){extra}"

    @property
    def window_tokens(self) -> int | None:
        """The window or chunk length, whichever there is."""
        return self.chunk if self.window is None else self.window

    @property
    def value_dim(self) -> int:
        """V elements per head and token; 0 for a K-only layer."""
        return 0 if self.k_only else self.head_dim if self.v_head_dim is None else self.v_head_dim

    @property
    def parts(self) -> tuple[TokenPart, ...]:
        """What the layer stores of each token, in the order in which it lies in a block: layouts ask for nothing else.

        >>> [(part.name, part.dtype.value, part.bytes) for part in LayerSpec(2, 64, "int4").parts]  # scales included
        [('k', 'int8', 132), ('v', 'int4', 72)]
        """
        keys = TokenPart("k", self.dtype.of_keys, self.kv_heads, self.head_dim)
        own = (keys,) if self.k_only else (keys, TokenPart("v", self.dtype, self.kv_heads, self.value_dim))
        return own + self.extra_parts

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token takes in this layer, scales included."""
        return sum(part.bytes for part in self.parts)

    @property
    def group_key(self) -> tuple[Any, ...]:
        """Layers with equal keys share a group: they keep the same tokens in the same shape."""
        return (self.kind, self.window_tokens, self.sink_tokens, self.dtype, self.parts)

    def max_live_blocks(self, num_tokens: int, block_size: int) -> int:
        """The most blocks a sequence holds at any moment while it grows to `num_tokens`, one token at a time.

        Blocks that fell out of the window are given back before the next one is taken. With cross-attention `num_tokens` are
        the encoder's. For a chunk that is no multiple of the block size it is the limit over all alignments.
        """
        num_blocks = ceil_div(num_tokens, block_size)
        if self.window is not None:
            sinks = ceil_div(self.sink_tokens, block_size)
            return min(num_blocks, ceil_div(self.window - 1, block_size) + 1 + sinks)
        if self.chunk is not None:
            worst_offset = block_size - math.gcd(self.chunk, block_size)  # of a chunk's first token inside its block
            return min(num_blocks, ceil_div(worst_offset + self.chunk, block_size))
        return num_blocks


PART_ALIGNMENT = 16  # bytes: what a GPU loads at once


_DTYPES = (DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16)


@dataclass(frozen=True)
class StatePart:
    """One tensor of a layer's state: the last inputs of a convolution, or what a recurrence has summed up.

    Its dtype is the one in which the model computes it. States are not quantised: errors would add up with every token.
    """

    name: str
    shape: tuple[int, ...]
    dtype: DType

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ConfigError(f"name={show(self.name)} of a state's part must be a string")
        try:
            shape = tuple(self.shape)
        except TypeError:
            raise ConfigError(f"shape={show(self.shape)} of a state's part must be a sequence of integers") from None
        if not shape:
            raise ConfigError(f"the part {self.name!r} of a state has no dimensions; give its shape for one sequence")
        object.__setattr__(self, "shape", tuple(check_int(size, "shape", 1, MAX_HEAD_DIM) for size in shape))
        object.__setattr__(self, "dtype", DType.parse(self.dtype))
        if self.dtype not in _DTYPES:
            known = ", ".join(dtype.value for dtype in _DTYPES)
            raise ConfigError(f"the part {self.name!r} of a state is {self.dtype.value}; states are kept in {known}")

    @property
    def bytes(self) -> int:
        """Bytes of its elements."""
        return math.prod(self.shape) * self.dtype.bits // 8


@dataclass(frozen=True)
class StateSpec:
    """The state of one layer, as the cache sees it: so many bytes a sequence, however long it is.

    >>> convolution = StatePart("conv", (8192, 4), DType.BFLOAT16)
    >>> StateSpec((convolution, StatePart("recurrent", (32, 128, 128), DType.FLOAT32))).bytes
    2162688
    """

    parts: tuple[StatePart, ...]

    def __post_init__(self) -> None:
        try:
            parts = tuple(self.parts)
        except TypeError:
            raise ConfigError(f"parts={show(self.parts)} must be a sequence of StatePart") from None
        if not parts or not all(isinstance(part, StatePart) for part in parts):
            raise ConfigError(f"parts={show(self.parts)} must name at least one StatePart, and nothing else")
        names = [part.name for part in parts]
        if len(set(names)) < len(names):
            raise ConfigError(f"two parts of a state have the same name: {', '.join(names)}")
        object.__setattr__(self, "parts", parts)

    @property
    def offsets(self) -> tuple[int, ...]:
        """The byte at which each part begins, and at last the byte behind them all: multiples of `PART_ALIGNMENT`."""
        ends = [0]
        for part in self.parts:
            ends.append(ends[-1] + ceil_div(part.bytes, PART_ALIGNMENT) * PART_ALIGNMENT)
        return tuple(ends)

    @property
    def bytes(self) -> int:
        """Bytes that the state of one sequence takes in this layer."""
        return self.offsets[-1]

    def __str__(self) -> str:
        return f"{self.bytes} bytes together for each checkpoint"

    @property
    def kind(self) -> GroupKind:
        """Which group kind the layer belongs to."""
        return GroupKind.STATE

    @property
    def window_tokens(self) -> None:
        """None: a state sums up all tokens."""
        return None

    @property
    def group_key(self) -> tuple[Any, ...]:
        """All layers with a state are one group."""
        return (GroupKind.STATE,)

    def max_live_blocks(self, num_tokens: int, block_size: int) -> int:
        """At most two checkpoints: the one where a sequence stands, and the one where its step goes."""
        return min(ceil_div(num_tokens, block_size), 2)


def described(layer: LayerSpec | StateSpec) -> dict[str, Any]:
    """Its fields as JSON-able values; `extra_parts` where there are some, so that earlier descriptions stay the same."""
    return {name: value for name, value in asdict(layer).items() if name != "extra_parts" or value}


@dataclass(frozen=True)
class LayerGroup:
    """Layers that keep the same tokens in the same shape, so one block table serves them all.

    All layers that keep a state are one group. Its block is a checkpoint: the states of all of them behind one token.
    """

    index: int
    kind: str  # a `GroupKind`, or the name of a kind of one's own
    layers: tuple[int, ...]  # layer indices, ascending
    window: int | None  # window or chunk length in tokens
    sink_tokens: int
    bytes_per_token: int  # over all its layers; 0 if they keep a state
    block_bytes: int
    pool: int  # index of the pool its blocks come from
    spec: LayerSpec | StateSpec  # what every one of its layers looks like; the states of all of them
    block_size: int  # tokens in one block, or between the places of two checkpoints

    @property
    def attention(self) -> LayerSpec:
        """What every one of its layers looks like, if they attend."""
        if not isinstance(self.spec, LayerSpec):
            raise InvalidArgumentError(f"the layers of group {self.index} keep a state: they have no keys and values")
        return self.spec

    def max_live_blocks(self, num_tokens: int) -> int:
        """The most blocks a sequence holds at any moment while it grows to `num_tokens`, one token at a time."""
        return self.spec.max_live_blocks(num_tokens, self.block_size)

    def __str__(self) -> str:
        window = "" if self.window is None else f" of {self.window} tokens"
        sinks = f" + {self.sink_tokens} sink tokens" if self.sink_tokens else ""
        per_token = f", {self.bytes_per_token} bytes per token" if self.bytes_per_token else ""
        return (
            f"group {self.index}: {self.kind}{window}{sinks}, {len(self.layers)} layers of {self.spec}"
            f"{per_token}, pool {self.pool}"
        )


@dataclass(frozen=True)
class PoolSpec:
    """Blocks of one size, and how many of them each local tier has. Groups with equal block bytes share a pool."""

    index: int
    block_bytes: int
    groups: tuple[int, ...]
    num_blocks: Mapping[Tier, int] = field(hash=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_blocks", MappingProxyType(dict(self.num_blocks)))

    def __reduce__(self) -> tuple[type[PoolSpec], tuple[Any, ...]]:  # a mapping proxy cannot be pickled
        return PoolSpec, (self.index, self.block_bytes, self.groups, dict(self.num_blocks))


def build_groups(layers: Sequence[LayerSpec | StateSpec], block_size: int) -> tuple[LayerGroup, ...]:
    """FULL groups first, then SLIDING, CHUNKED and others by length, STATE, CROSS; ties in order of their first layer."""
    members: dict[tuple[Any, ...], list[int]] = {}
    for index, layer in enumerate(layers):
        members.setdefault(layer.group_key, []).append(index)
    rank: dict[str, int] = {GroupKind.FULL: 0, GroupKind.STATE: 2, GroupKind.CROSS: 3}  # others are between: 1

    def order(indices: list[int]) -> tuple[int, int, int]:
        first = layers[indices[0]]
        return rank.get(first.kind, 1), first.window_tokens or 0, indices[0]

    groups: list[LayerGroup] = []
    pools: dict[int, int] = {}
    for indices in sorted(members.values(), key=order):
        spec: LayerSpec | StateSpec = layers[indices[0]]
        if isinstance(spec, StateSpec):
            spec = join_states({index: state for index in indices if isinstance(state := layers[index], StateSpec)})
            bytes_per_token, block_bytes, sinks = 0, spec.bytes, 0
        else:
            bytes_per_token = len(indices) * spec.bytes_per_token
            block_bytes, sinks = block_size * bytes_per_token, spec.sink_tokens
        pool = pools.setdefault(block_bytes, len(pools))
        shape = (spec.kind, tuple(indices), spec.window_tokens, sinks)
        groups.append(LayerGroup(len(groups), *shape, bytes_per_token, block_bytes, pool, spec, block_size))
    return tuple(groups)


def join_states(states: Mapping[int, StateSpec]) -> StateSpec:
    """The states of several layers, by the numbers of these, as one: what a checkpoint holds."""
    return StateSpec(
        tuple(replace(part, name=f"{layer}.{part.name}") for layer, spec in states.items() for part in spec.parts)
    )


def build_pools(groups: Sequence[LayerGroup]) -> tuple[PoolSpec, ...]:
    """The pools of these groups, without blocks as yet."""
    members: dict[int, list[LayerGroup]] = {}
    for group in groups:
        members.setdefault(group.pool, []).append(group)
    return tuple(PoolSpec(pool, gs[0].block_bytes, tuple(g.index for g in gs), {}) for pool, gs in members.items())


def divide_budget(
    num_bytes: int, block_bytes: Sequence[int], needs: Sequence[int], minimums: Sequence[int]
) -> tuple[int, ...]:
    """Blocks per pool out of `num_bytes`, in proportion to `needs` but never below `minimums` (which must fit).

    A budget of exactly k times the needs gives exactly k times the needs. The remainder goes, one block each, to the
    pools that rounding took most from. Integers only, so no share is lost or overdrawn to float rounding.
    """
    counts = list(minimums)
    flexible = list(range(len(counts)))
    spare, weight = num_bytes, 1
    while flexible:
        fixed = (counts[pool] * block_bytes[pool] for pool in range(len(counts)) if pool not in flexible)
        spare = num_bytes - sum(fixed)
        weight = sum(needs[pool] * block_bytes[pool] for pool in flexible)
        enough = [pool for pool in flexible if spare * needs[pool] // weight >= minimums[pool]]
        if len(enough) == len(flexible):
            break
        flexible = enough
    for pool in flexible:
        counts[pool] = spare * needs[pool] // weight
    rest = num_bytes - sum(count * size for count, size in zip(counts, block_bytes, strict=True))
    for pool in sorted(flexible, key=lambda pool: -(spare * needs[pool] % weight)):
        if block_bytes[pool] <= rest:
            counts[pool] += 1
            rest -= block_bytes[pool]
    return tuple(counts)


PREFIX_TOKENS = 2048  # a typical prefix: system prompt and some turns
STATE_SHARE = 0.25  # of the bytes that prefixes get, for checkpoints at most


def prefix_needs(groups: Sequence[LayerGroup], num_tokens: int, cross_tokens: int, is_written: bool) -> list[int]:
    """Blocks per pool that a typical prefix of `num_tokens` keeps.

    Where prefixes are also written (`is_written`: on the GPU), a windowed group needs its last window while the prefix is
    cached, and all of its blocks while the prompt is written in one piece: the budget plans for the middle of both. Where
    checkpoints would take more than `STATE_SHARE` of the bytes, several prefixes share one (docs/decisions/0016).
    """
    needs = [0] * (1 + max(group.pool for group in groups))
    of_tokens = 0
    states = None
    for group in groups:
        if group.kind is GroupKind.STATE:
            states = group
            continue
        if group.kind is GroupKind.CROSS:
            need = group.max_live_blocks(cross_tokens)
        else:
            need = group.max_live_blocks(num_tokens)
            if is_written:
                need = ceil_div(need + ceil_div(num_tokens, group.block_size), 2)
        needs[group.pool] += need
        of_tokens += need * group.block_bytes
    if states is not None:
        checkpoints = 2 if is_written else 1  # one at the end of the prefix, and one that is written
        least = int(checkpoints * states.block_bytes * (1 / STATE_SHARE - 1))  # bytes of K and V beside them
        if of_tokens:
            needs = [need * max(1, ceil_div(least, of_tokens)) for need in needs]
        needs[states.pool] += checkpoints
    return needs


def divide_for_prefixes(
    num_bytes: int,
    block_bytes: Sequence[int],
    prefix: Sequence[int],
    longest: Sequence[int] | None,
    minimums: Sequence[int],
) -> tuple[int, ...]:
    """Blocks per pool: those of one `longest` sequence first, if given, and the rest in proportion to a `prefix`.

    A budget that does not hold the longest sequence is divided as that sequence needs it.
    """
    if longest is None:
        return divide_budget(num_bytes, block_bytes, prefix, minimums)
    first = [max(need, least) for need, least in zip(longest, minimums, strict=True)]
    rest = num_bytes - sum(count * size for count, size in zip(first, block_bytes, strict=True))
    if rest < 0:
        return divide_budget(num_bytes, block_bytes, longest, minimums)
    more = divide_budget(rest, block_bytes, prefix, [0] * len(first))
    return tuple(a + b for a, b in zip(first, more, strict=True))


def divide_by_shares(
    num_bytes: int, block_bytes: Sequence[int], shares: Sequence[float], minimums: Sequence[int]
) -> tuple[int, ...]:
    """Blocks per pool where pool i takes the fraction `shares[i]` of the bytes, but never less than its minimum."""
    weights = [round(share * 2**40 / size) for share, size in zip(shares, block_bytes, strict=True)]
    return divide_budget(num_bytes, block_bytes, weights, minimums)
