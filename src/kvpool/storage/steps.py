"""CopyOps checked and joined: what the transfer engine carries out in one go."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from kvpool.blocks.arrays import BoolArray, Int32Array
from kvpool.blocks.copies import CopyOp
from kvpool.config import LayerGroup, Tier
from kvpool.errors import InvalidArgumentError
from kvpool.storage.disk import DiskStore
from kvpool.storage.store import BlockStore

Store: TypeAlias = "BlockStore | DiskStore"
Stores: TypeAlias = "Mapping[tuple[int, Tier], Store]"


@dataclass
class Step:
    """Independent copies between two stores: operations that follow each other and do not depend on each other."""

    source: Store
    target: Store
    group: int
    src: Int32Array
    dst: Int32Array
    num_tokens: Int32Array | None  # per block; None: whole blocks
    ops: list[CopyOp] = field(default_factory=list)

    @property
    def num_bytes(self) -> int:
        return len(self.src) * self.source.block_bytes

    def join(self, other: Step) -> bool:
        """Takes another step's copies in, if they may run together with these."""
        if self.source is not other.source or self.target is not other.target:
            return False
        if (self.num_tokens is None) != (other.num_tokens is None) or (
            self.num_tokens is not None and self.group != other.group
        ):
            return False
        if _meet(self.dst, other.dst) or (
            self.source is self.target and (_meet(self.dst, other.src) or _meet(self.src, other.dst))
        ):
            return False
        self.src = np.concatenate([self.src, other.src])
        self.dst = np.concatenate([self.dst, other.dst])
        if self.num_tokens is not None and other.num_tokens is not None:
            self.num_tokens = np.concatenate([self.num_tokens, other.num_tokens])
        self.ops.extend(other.ops)
        return True


class Access:
    """Blocks that a step reads and writes, for finding out who must wait for whom."""

    def __init__(self, step: Step) -> None:
        self.reads = (step.source, _mask(step.source, step.src))
        self.writes = (step.target, _mask(step.target, step.dst))

    def conflicts(self, step: Step) -> bool:
        """Whether `step` must wait: it reads what this writes, or writes what this reads or writes."""
        return (
            self.changes(step.source, step.src) or self.changes(step.target, step.dst) or self.uses(step.target, step.dst)
        )

    def changes(self, store: Store, blocks: Int32Array | None) -> bool:
        """Whether some of these blocks (None: any) are written."""
        return self.writes[0] is store and (blocks is None or bool(self.writes[1][blocks].any()))

    def uses(self, store: Store, blocks: Int32Array | None) -> bool:
        """Whether some of these blocks (None: any) are read."""
        return self.reads[0] is store and (blocks is None or bool(self.reads[1][blocks].any()))


def plan_steps(ops: Sequence[CopyOp], stores: Stores, groups: Sequence[LayerGroup]) -> list[Step]:
    """The operations as steps, in order. Every one is checked before any is carried out."""
    steps: list[Step] = []
    for op in ops:
        if not len(op.src) and not len(op.dst):
            continue
        step = _checked(op, stores, groups)
        if not steps or not steps[-1].join(step):
            steps.append(step)
    return steps


def _checked(op: CopyOp, stores: Stores, groups: Sequence[LayerGroup]) -> Step:
    if not 0 <= op.group < len(groups):
        raise InvalidArgumentError(f"{op.kind.value} names layer group {op.group}; there are {len(groups)}")
    pool = groups[op.group].pool
    for tier in (op.src_tier, op.dst_tier):
        if (pool, tier) not in stores:
            raise InvalidArgumentError(f"{op.kind.value} needs a store of pool {pool} on {tier!r}, which there is not")
    source, target = stores[pool, op.src_tier], stores[pool, op.dst_tier]
    src, dst = _ids(op.src, source, op), _ids(op.dst, target, op)
    if len(src) != len(dst) or len(np.unique(dst)) != len(dst):
        raise InvalidArgumentError(f"{op.kind.value} must name as many distinct targets as sources: {src} to {dst}")
    if source is target and _meet(src, dst):
        raise InvalidArgumentError(f"{op.kind.value} reads and writes the same blocks: {src} to {dst}")
    tokens = None
    if op.num_tokens is not None and op.num_tokens != groups[op.group].block_size:
        if not 0 < op.num_tokens < groups[op.group].block_size:
            raise InvalidArgumentError(
                f"{op.kind.value} of {op.num_tokens} tokens: a block has {groups[op.group].block_size}"
            )
        tokens = np.full(len(src), op.num_tokens, np.int32)
    return Step(source, target, op.group, src, dst, tokens, [op])


def _ids(ids: Int32Array, store: Store, op: CopyOp) -> Int32Array:
    if len(ids) and not (int(ids.min()) >= 0 and int(ids.max()) < store.num_blocks):
        raise InvalidArgumentError(
            f"{op.kind.value} names blocks {int(ids.min())}..{int(ids.max())} of pool {store.pool} on {store.tier.name}, "
            f"whose store has {store.num_blocks}; change pools with DataPlane.resize"
        )
    return np.ascontiguousarray(ids, np.int32)


def _meet(left: Int32Array, right: Int32Array) -> bool:
    if len(left) == len(right) == 1:
        return bool(left[0] == right[0])
    return bool(np.isin(left, right).any())


def _mask(store: Store, blocks: Int32Array) -> BoolArray:
    mask = np.zeros(store.num_blocks, np.bool_)
    mask[blocks] = True
    return mask
