"""How long a prefix tiers can load, and which blocks that needs. Arithmetic only.

A prefix is usable if every layer group has the blocks that the next query reads: all of them with full attention, only those
in the window (and the sinks) with windowed attention. So loading a prefix needs fewer blocks than the prefix has.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from kvpool.config.layers import ceil_div
from kvpool.core.kind import Group
from kvpool.pools.arrays import Int64Array

NOWHERE = -1
HERE = -2
Sources: TypeAlias = npt.NDArray[np.int16]
"""Where each block of a layer group is: the number of a tier, `HERE` in the cache, or `NOWHERE`."""


class Option(NamedTuple):
    """A prefix that tiers can load: how many blocks, and how many bytes come from each tier."""

    num_blocks: int
    num_bytes: tuple[int, ...]


def next_query(num_blocks: int, num_tokens: int, block_size: int) -> int:
    """The first position to compute after `num_blocks` loaded blocks. The last token of a prompt is always computed."""
    return min(num_blocks * block_size, num_tokens - 1)


def usable_blocks(groups: Sequence[Group], sources: Sequence[Sources], num_tokens: int, block_size: int) -> int:
    """The longest usable prefix of a prompt, in blocks."""
    length = next_query(num_tokens // block_size, num_tokens, block_size)
    shortened = True
    while shortened and length > 0:
        shortened = False
        for group, of_group in zip(groups, sources, strict=True):
            valid = group.longest_valid(of_group != NOWHERE, length)
            if valid < length:
                length, shortened = valid, True
    return ceil_div(length, block_size) if length > 0 else 0


def read_columns(group: Group, first: int, num_blocks: int, num_tokens: int, block_size: int) -> Int64Array:
    """The blocks from `first` on that a layer group needs for a prefix of `num_blocks`."""
    columns = np.arange(first, num_blocks)
    needed: Int64Array = columns[group.reads(columns, next_query(num_blocks, num_tokens, block_size))]
    return needed


def prefix_options(
    groups: Sequence[Group], sources: Sequence[Sources], first: int, num_tokens: int, block_size: int, num_tiers: int
) -> list[Option]:
    """Prefixes longer than the `first` cached blocks: from the fastest tier only, from the two fastest, and so on."""
    found: list[Option] = []
    longest = first
    for last in range(num_tiers):
        within = [np.where(of_group > last, NOWHERE, of_group).astype(np.int16) for of_group in sources]
        num_blocks = usable_blocks(groups, within, num_tokens, block_size)
        if num_blocks <= longest:
            continue
        longest = num_blocks
        num_bytes = [0] * num_tiers
        for group, of_group in zip(groups, within, strict=True):
            tiers = of_group[read_columns(group, first, num_blocks, num_tokens, block_size)]
            for tier in range(num_tiers):
                num_bytes[tier] += int((tiers == tier).sum()) * group.spec.block_bytes
        found.append(Option(num_blocks, tuple(num_bytes)))
    return found
