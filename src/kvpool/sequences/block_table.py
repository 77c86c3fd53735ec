"""Block ids of one sequence as plain values: its table as its user sees it, and where it lies while it is swapped out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import overload

from kvpool.pools.arrays import Int32Array


class BlockTable(Sequence["int | None"]):
    """Logical block to block id for one sequence and layer group; None where a block left its window.

    >>> table = BlockTable([4, 7, -1])
    >>> list(table), len(table)
    ([4, 7, None], 3)
    """

    __slots__ = ("_ids",)

    def __init__(self, ids: Sequence[int]) -> None:
        self._ids = [None if block_id < 0 else block_id for block_id in ids]

    def __len__(self) -> int:
        return len(self._ids)

    @overload
    def __getitem__(self, index: int) -> int | None: ...
    @overload
    def __getitem__(self, index: slice) -> list[int | None]: ...
    def __getitem__(self, index: int | slice) -> int | list[int | None] | None:
        return self._ids[index]

    def __iter__(self) -> Iterator[int | None]:
        return iter(self._ids)

    def __eq__(self, other: object) -> bool:
        return list(self) == list(other) if isinstance(other, Sequence) else NotImplemented

    def __repr__(self) -> str:
        return f"BlockTable({self._ids})"


@dataclass(slots=True)
class SwappedBlocks:
    """Where a swapped-out sequence keeps its data: host block ids per group and column, -1 where there is none."""

    ids: list[Int32Array]
