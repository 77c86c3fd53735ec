"""Cross-attention: the encoder's tokens, fixed at admission and never in the prefix cache."""

from __future__ import annotations

from typing import ClassVar

from kvpool.compiling import mypyc_attr
from kvpool.pools.groups.counted import CountedGroup
from kvpool.pools.groups.group import T


@mypyc_attr(allow_interpreted_subclasses=True)
class CrossGroup(CountedGroup):
    """All blocks are taken at admission and given back at the end."""

    grows: ClassVar[bool] = False

    @classmethod
    def follows(cls, of_sequence: T, of_encoder: T) -> T:
        return of_encoder

    def held_at_once(self, num_blocks: int, num_fixed: int, num_reused: int, num_reused_tokens: int) -> int:
        return num_fixed
