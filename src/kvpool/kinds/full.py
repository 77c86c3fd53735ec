"""Full attention: every query reads every block."""

from __future__ import annotations

from typing import ClassVar

from kvpool.compiling import mypyc_attr
from kvpool.core.kind import Group
from kvpool.pools.arrays import Int32Array


@mypyc_attr(allow_interpreted_subclasses=True)
class FullGroup(Group):
    """Blocks are written by one sequence and read along tree paths, so a single owner is not counted at all.

    Admitting, publishing and freeing a sequence then never touch `refs`; counting starts when forks share a block.
    """

    single_owner: ClassVar[int] = 0

    def take(self, num_blocks: int) -> Int32Array:
        return self.gpu.take(num_blocks)

    def give_back(self, ids: Int32Array, shared: bool) -> None:
        if shared:
            self.gpu.unshare(ids)
        else:
            self.gpu.give(ids)

    def share(self, ids: Int32Array) -> None:
        self.gpu.share(ids)

    def publish(self, ids: Int32Array) -> None:
        """From now on their readers are counted on the node that holds them."""
        self.gpu.refs[ids] = 0
