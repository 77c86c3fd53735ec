"""What a prompt shares with the tree, and an admission that was thought through."""

from __future__ import annotations

from typing import Any

from kvpool.compiling import mypyc_attr
from kvpool.core.node import Node, Root
from kvpool.pools.arrays import Int32Array
from kvpool.pools.symbols import Fresh


@mypyc_attr(acyclic=True)
class Match:
    """What a prompt shares with the tree. `num_blocks` full blocks along `path`, then `num_partial` tokens of `partial`."""

    __slots__ = (
        "fresh",
        "logits",
        "next_key",
        "num_blocks",
        "num_matched_blocks",
        "num_partial",
        "num_recomputed",
        "partial",
        "path",
        "root",
        "source",
        "tokens",
    )

    def __init__(
        self,
        root: Root | None,
        path: list[Node],
        num_blocks: int,
        partial: Node | None = None,
        num_partial: int = 0,
        next_key: bytes | None = None,
        num_recomputed: int = 0,
    ) -> None:
        self.root = root
        self.path = path
        self.num_blocks = num_blocks
        self.num_matched_blocks = num_blocks  # the same before something was cut off that cannot be reused
        self.partial = partial  # the node that holds the block whose first `num_partial` tokens match
        self.num_partial = num_partial
        self.next_key = next_key  # the tokens of the first block that is not cached, if the path ends where it begins
        self.num_recomputed = num_recomputed  # 1 if all is cached and the last token is computed again, for its logits
        # Set by who looks for a prompt:
        self.tokens: Int32Array | None = (
            None  # all of them as the tree holds them, with symbols for placeholders of images
        )
        self.fresh: Fresh | None = None  # symbols among them that nobody keeps yet
        self.logits: Any = None  # stored for exactly these tokens
        self.source: int | None = None  # the number (`created`) of `partial`, before anything was cut off the match

    def num_tokens(self, block_size: int) -> int:
        """Tokens that need not be computed."""
        return self.num_blocks * block_size + self.num_partial - self.num_recomputed


@mypyc_attr(acyclic=True)
class AdmissionPlan:
    """An admission, thought through: what is matched and what each GPU pool must supply."""

    __slots__ = (
        "evicts",
        "fits",
        "match",
        "needs",
        "num_blocks",
        "num_fixed",
        "num_hit_tokens",
        "supply",
    )

    def __init__(
        self,
        match: Match,
        num_hit_tokens: int,
        num_blocks: int,
        num_fixed: int,
        needs: list[int],
        supply: list[int],
        fits: bool,
        evicts: bool,
    ) -> None:
        self.match = match
        self.num_hit_tokens = num_hit_tokens
        self.num_blocks = num_blocks
        self.num_fixed = num_fixed
        self.needs = needs
        self.supply = supply
        self.fits = fits
        self.evicts = evicts  # something must be evicted first
