"""Groups whose blocks count every sequence that holds them."""

from __future__ import annotations

from kvpool.compiling import mypyc_attr
from kvpool.pools.arrays import Int32Array
from kvpool.pools.groups.group import Group


@mypyc_attr(allow_interpreted_subclasses=True)
class CountedGroup(Group):
    """A private block says how many sequences hold it, also when it is one; tables may have holes (-1)."""

    def take(self, num_blocks: int) -> Int32Array:
        return self.gpu.take_counted(num_blocks)

    def give_back(self, ids: Int32Array, shared: bool) -> None:
        self.gpu.release(ids[ids >= 0])

    def share(self, ids: Int32Array) -> None:
        self.gpu.acquire(ids[ids >= 0])
