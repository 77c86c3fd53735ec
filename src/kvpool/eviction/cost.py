"""Cost-aware eviction: what is cheap to compute again goes before what is expensive, and everything ages."""

from __future__ import annotations

from bisect import bisect_left
from typing import ClassVar

from kvpool.compiling import mypyc_attr
from kvpool.errors import InvalidArgumentError
from kvpool.eviction.policy import KeyedPolicy
from kvpool.eviction.queues import KEY
from kvpool.eviction.run import Run

_MAX_CHECKPOINTS = 4096


@mypyc_attr(allow_interpreted_subclasses=True)
class CostAwarePolicy(KeyedPolicy):
    """Greedy-dual: value = the aging clock when the run was last used + the cost per block of computing it again.

    A block at depth d (in blocks) costs `base_cost + depth_cost * d`: the projections and the MLP cost the same at any
    position, attention reads everything before it. The n blocks of a run that starts at depth s thus cost
    `base_cost + depth_cost * (s + (n - 1) / 2)` each on average: more with position and with length. The least valuable
    run is the victim and the clock rises to its value, so an expensive run that is not used any more is overtaken by
    the fresh ones in the end. Of equal values the least recently used goes.

    The defaults are the ratio of a dense 8B model with blocks of 16 tokens: 4 * layers * hidden FLOPs of attention for
    each token before it against 2 * parameters, about 5e-4 per block of depth.

    The clock is looked up by `last_access`, not taken when the run is added: a parent that becomes a candidate because
    its last child left, or a run that was trimmed, is as old as its last use.
    """

    name: ClassVar[str] = "cost"
    weighs: ClassVar[bool] = True

    def __init__(self, base_cost: float = 1.0, depth_cost: float = 5e-4) -> None:
        if not base_cost > 0.0 or not depth_cost >= 0.0:
            raise InvalidArgumentError(
                f"base_cost is {base_cost} and depth_cost is {depth_cost}; the first must be > 0, the second >= 0"
            )
        super().__init__()
        self._base_cost = base_cost
        self._depth_cost = depth_cost
        self._latest = 0  # newest access seen
        # The clock rose to _clocks[i] after tick _ticks[i]; accesses after it see that value.
        self._ticks: list[int] = []
        self._clocks: list[float] = []

    def weigh(self, depth_cost: float) -> None:
        self._depth_cost = self._base_cost * depth_cost

    def recompute_cost(self, run: Run) -> float:
        """Average cost of computing one block of `run` again, in units of a block at depth 0."""
        return self._base_cost + self._depth_cost * (run.start + (run.num_blocks - 1) / 2)

    def key(self, run: Run) -> tuple[float, int]:
        last_access = run.last_access
        self._latest = max(self._latest, last_access)
        rises_before = bisect_left(self._ticks, last_access)
        clock = self._clocks[rises_before - 1] if rises_before else 0.0
        return clock + self.recompute_cost(run), last_access

    def victim(self) -> Run:
        run = super().victim()
        value: float = run.entry[KEY][0]
        if not self._clocks or value > self._clocks[-1]:
            self._raise_clock(value)
        return run

    def clear(self) -> None:
        super().clear()
        self._ticks.clear()
        self._clocks.clear()

    def _raise_clock(self, value: float) -> None:
        if self._ticks and self._ticks[-1] == self._latest:
            self._clocks[-1] = value
            return
        self._ticks.append(self._latest)
        self._clocks.append(value)
        if len(self._ticks) > _MAX_CHECKPOINTS:  # the older half is kept at half the resolution
            del self._ticks[1 : _MAX_CHECKPOINTS // 2 : 2]
            del self._clocks[1 : _MAX_CHECKPOINTS // 2 : 2]
