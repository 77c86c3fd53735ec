"""CopyOps checked and joined: what the transfer engine carries out in one go."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import NamedTuple, TypeAlias

import numpy as np

from kvpool.config import LayerGroup, Tier
from kvpool.errors import InvalidArgumentError
from kvpool.pools.arrays import BoolArray, Int32Array
from kvpool.pools.pool import CopyOp
from kvpool.storage.disk import DiskStore
from kvpool.storage.store import BlockStore

Store: TypeAlias = "BlockStore | DiskStore"
Stores: TypeAlias = "Mapping[tuple[int, Tier], Store]"


PIECE_BYTES = 1 << 28  # over the link in one step, 5 ms: who needs its first blocks does not wait for many others


class _Copies(NamedTuple):
    """A checked operation: blocks of one store to blocks of another. The same store twice: no block is on both sides."""

    source: Store
    target: Store
    src: Int32Array
    dst: Int32Array


class TransferStep:
    """Independent copies between two stores: operations that follow each other and do not depend on each other."""

    def __init__(self, copies: _Copies, op: CopyOp, is_partial: bool) -> None:
        self.source, self.target = copies.source, copies.target
        self.group = op.group  # whose layout tells where tokens are, in partial copies
        self.ops = [op]
        self.is_partial = is_partial
        self._src, self._dst = [copies.src], [copies.dst]

    @cached_property
    def _read(self) -> BoolArray:
        return _mask(self.source, np.concatenate(self._src))

    @cached_property
    def _written(self) -> BoolArray:
        return _mask(self.target, np.concatenate(self._dst))

    @cached_property
    def src(self) -> Int32Array:
        return np.concatenate(self._src)

    @cached_property
    def dst(self) -> Int32Array:
        return np.concatenate(self._dst)

    @cached_property
    def num_tokens(self) -> Int32Array | None:
        """How many tokens of each block are copied; None: whole blocks."""
        if not self.is_partial:
            return None
        return np.repeat([op.num_tokens or 0 for op in self.ops], [len(op.src) for op in self.ops]).astype(np.int32)

    @property
    def is_on_link(self) -> bool:
        """Whether it goes from the GPU tier to the host's, or back."""
        return _is_on_link(self.source, self.target)

    def join(self, copies: _Copies, op: CopyOp, is_partial: bool) -> bool:
        """Takes in the copies of the operation that follows, if they may run together with these."""
        source, target, src, dst = copies
        if source is not self.source or target is not self.target or is_partial != self.is_partial:
            return False
        if sum(map(len, self._src)) + len(src) > _piece_blocks(source, target):
            return False
        if is_partial and op.group != self.group:
            return False
        if self._written[dst].any() or (source is target and (self._written[src].any() or self._read[dst].any())):
            return False
        self._read[src] = True
        self._written[dst] = True
        self._src.append(src)
        self._dst.append(dst)
        self.ops.append(op)
        return True

    def conflicts(self, later: TransferStep) -> bool:
        """Whether `later` must wait for this: it reads what this writes, or writes what this reads or writes."""
        return (
            self.writes(later.source, later.src)
            or self.writes(later.target, later.dst)
            or self.reads(later.target, later.dst)
        )

    def writes(self, store: Store, blocks: Int32Array | None) -> bool:
        """Whether some of these blocks (None: any) are written."""
        return self.target is store and (blocks is None or bool(self._written[blocks].any()))

    def reads(self, store: Store, blocks: Int32Array | None) -> bool:
        """Whether some of these blocks (None: any) are read."""
        return self.source is store and (blocks is None or bool(self._read[blocks].any()))


def plan_steps(ops: Sequence[CopyOp], stores: Stores, groups: Sequence[LayerGroup]) -> list[TransferStep]:
    """The operations as steps, in order. Every one is checked before any is carried out."""
    steps: list[TransferStep] = []
    for op in ops:
        if not len(op.src) and not len(op.dst):
            continue
        copies = _checked(op, stores, groups)
        is_partial = op.num_tokens is not None and op.num_tokens < groups[op.group].block_size
        size = _piece_blocks(copies.source, copies.target)
        for start in range(0, len(copies.src), size):
            src, dst = copies.src[start : start + size], copies.dst[start : start + size]
            piece, part = copies._replace(src=src, dst=dst), op._replace(src=src, dst=dst)
            if not steps or not steps[-1].join(piece, part, is_partial):
                steps.append(TransferStep(piece, part, is_partial))
    return steps


def _piece_blocks(source: Store, target: Store) -> int:
    """The most blocks of a step: all that can be joined, but over the link between GPU and host no more than a piece."""
    return max(1, PIECE_BYTES // source.block_bytes if _is_on_link(source, target) else target.num_blocks)


def _is_on_link(source: Store, target: Store) -> bool:
    return {source.tier, target.tier} == {Tier.GPU, Tier.HOST}


def _checked(op: CopyOp, stores: Stores, groups: Sequence[LayerGroup]) -> _Copies:
    if not 0 <= op.group < len(groups):
        raise InvalidArgumentError(f"{op.kind.value} names layer group {op.group}; there are {len(groups)}")
    group = groups[op.group]
    for tier in (op.src_tier, op.dst_tier):
        if (group.pool, tier) not in stores:
            raise InvalidArgumentError(f"{op.kind.value} needs a store of pool {group.pool} on {tier!r}: there is none")
    if op.num_tokens is not None and not 0 < op.num_tokens <= group.block_size:
        raise InvalidArgumentError(f"{op.kind.value} of {op.num_tokens} tokens: a block has {group.block_size}")
    source, target = stores[group.pool, op.src_tier], stores[group.pool, op.dst_tier]
    src, dst = _ids(op.src, source, op), _ids(op.dst, target, op)
    targets = _mask(target, dst) if len(dst) > 1 else None
    if len(src) != len(dst) or (targets is not None and int(np.count_nonzero(targets)) != len(dst)):
        raise InvalidArgumentError(f"{op.kind.value} must name as many distinct targets as sources: {src} to {dst}")
    if source is target and (targets[src].any() if targets is not None else src[0] == dst[0]):
        raise InvalidArgumentError(f"{op.kind.value} reads and writes the same blocks: {src} to {dst}")
    return _Copies(source, target, src, dst)


def _ids(ids: Int32Array, store: Store, op: CopyOp) -> Int32Array:
    if len(ids) and not (int(ids.min()) >= 0 and int(ids.max()) < store.num_blocks):
        raise InvalidArgumentError(
            f"{op.kind.value} names blocks {int(ids.min())}..{int(ids.max())} of pool {store.pool} on {store.tier.name}, "
            f"whose store has {store.num_blocks}; change pools with DataPlane.resize"
        )
    return np.ascontiguousarray(ids, np.int32)


def _mask(store: Store, blocks: Int32Array) -> BoolArray:
    mask = np.zeros(store.num_blocks, np.bool_)
    mask[blocks] = True
    return mask
