"""What a layer keeps of a whole sequence instead of its tokens: a state of fixed size, as recurrent layers have it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvpool.checks import check_int, show
from kvpool.config.layers import MAX_HEAD_DIM, DType, ceil_div
from kvpool.errors import ConfigError

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
