"""Copies of plans: started before their step, and told to the scheduler when they are done."""

from __future__ import annotations

from kvpool.scheduling import BatchPlan, Scheduler
from kvpool.storage.data_plane import DataPlane
from kvpool.storage.transfer import Transfer


class Landings:
    """The copies that a scheduler planned, on their way."""

    def __init__(self, scheduler: Scheduler, plane: DataPlane) -> None:
        self._scheduler = scheduler
        self._plane = plane
        self._unstarted: list[BatchPlan] = []  # whose copies are not on their way yet: starting them failed
        self._started: list[tuple[list[BatchPlan], Transfer]] = []

    def start(self, plan: BatchPlan) -> None:
        """Starts the copies of a plan, behind those that could not be started before."""
        if plan.copies:
            self._unstarted.append(plan)
        transfer = self._plane.run_copies(plan.copies, overlap=True)
        if self._unstarted:
            self._started.append((self._unstarted, transfer))
            self._unstarted = []

    def tell(self) -> None:
        """Tells the scheduler which copies are done, so that it plans with what they brought."""
        for done in [item for item in self._started if item[1].done()]:
            self._started.remove(done)
            for plan in done[0]:
                self._scheduler.landed(plan)

    def clear(self) -> None:
        """Nobody waits for any of them any more."""
        self._unstarted.clear()
        self._started.clear()
