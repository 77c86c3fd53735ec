"""What takes part in an engine's steps beside its model. Each optional feature is a `StepPart` in its own file.

Some parts also let requests wait outside the scheduler: for a prefix from tiers, for a place of an adapter.

The loop names no feature: it calls its parts at the moments of a step, in the order of the methods below. A part that an
engine does not need is not made (`engine_parts`), and a moment that a part does not override costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from kvpool.engine.generation import Generation
from kvpool.engine.spans import Span
from kvpool.errors import KVPoolError
from kvpool.model.vision import Shown
from kvpool.pools.arrays import Int64Array
from kvpool.scheduling import BatchPlan, Request, ScheduledSequence
from kvpool.scheduling.request import Finished


@dataclass
class StepInputs:
    """What a step is run with, beside its plan.

    A step with pictures or `spans` runs without a graph, and so does one that is to `launch` each operation, or to `keep` the
    logits of other tokens. `closing` is closed when the step was launched, also if that failed.
    """

    token_ids: Tensor  # on the device
    positions: Int64Array  # of its tokens; [axis, token] where the model has several axes
    shown: Shown | None = None  # the pictures that it computes
    spans: Sequence[Span] = ()  # tokens that see one another in both directions
    launch: bool = False
    keep: Int64Array | None = None  # flat indices of the tokens whose logits are needed; None: those of the plan
    adapter_slots: Int64Array | None = None  # [token]: the slot of its adapter, -1 without one
    closing: ExitStack = field(default_factory=ExitStack)

    @property
    def is_plain(self) -> bool:
        """Whether a graph may run the step."""
        return not (self.launch or self.shown is not None or self.spans or self.keep is not None)


class StepPart:
    """Something that takes part in steps. The engine's thread calls it."""

    # --- requests that are not in the scheduler, between two steps

    def adding(self) -> None:
        """A request is about to be queued. Raises if the engine can take none."""

    def held(self) -> Sequence[Request]:
        """The requests that it lets wait outside the scheduler."""
        return ()

    def patience(self) -> float | None:
        """Seconds until `tend` has something to do; None: until something else happens."""
        return None

    def tend(self) -> None:
        """Lets requests go on that have waited long enough."""

    def release(self, generation: Generation) -> None:
        """Hands a request that waits to the scheduler, because it is about to be cancelled."""

    def fail(self, error: KVPoolError) -> None:
        """The engine ends: so does every request that waits."""

    # --- while no request is there

    def has_idle_work(self) -> bool:
        """Whether `use_idle_time` has something to do."""
        return False

    def use_idle_time(self) -> None:
        """Does a bit of work, so short that a request that comes meanwhile can wait for it."""

    # --- steps

    def planning(self) -> None:
        """The next step is about to be planned."""

    def before(self, plan: BatchPlan) -> None:
        """A step was planned and is about to be launched."""

    def entered(self, sequence: ScheduledSequence) -> None:
        """A sequence has a lane now: it was admitted, came back, or branched off."""

    def inputs(self, plan: BatchPlan, inputs: StepInputs) -> None:
        """Changes what a step is run with."""

    def after(self, plan: BatchPlan, logits: Tensor) -> Tensor:
        """A step was launched. Takes its rows from the end of the logits, and returns the others."""
        return logits

    def done(self, plan: BatchPlan, seconds: float | None) -> None:
        """A step has run and is about to be completed. It took `seconds`, if steps like it will take as long."""

    def ended(self, done: Finished) -> None:
        """A request is over."""


class StepParts:
    """The parts of an engine, by moment: of each moment only the methods of the parts that override it."""

    def __init__(self, parts: Sequence[StepPart]) -> None:
        def of(moment: str) -> list[Callable[..., Any]]:
            return [
                getattr(part, moment) for part in parts if getattr(type(part), moment) is not getattr(StepPart, moment)
            ]

        self.adding = of("adding")
        self.held = of("held")
        self.patience = of("patience")
        self.tend = of("tend")
        self.release = of("release")
        self.fail = of("fail")
        self.has_idle_work = of("has_idle_work")
        self.use_idle_time = of("use_idle_time")
        self.planning = of("planning")
        self.before = of("before")
        self.entered = of("entered")
        self.inputs = of("inputs")
        self.after = of("after")
        self.done = of("done")
        self.ended = of("ended")
