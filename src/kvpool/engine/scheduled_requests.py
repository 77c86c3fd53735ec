"""The requests that an engine has handed to its scheduler."""

from __future__ import annotations

from collections.abc import Hashable

from kvpool.engine.beams import BeamSearch
from kvpool.engine.generation import Generation
from kvpool.errors import KVPoolError
from kvpool.scheduling import Request, Scheduler


class ScheduledRequests:
    """What the engine knows of each request in its scheduler: its generation, and its beam search if it has one."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self.generations: dict[Hashable, Generation] = {}  # by request id
        self.searches: dict[Hashable, BeamSearch] = {}

    def enqueue(self, generation: Generation, request: Request) -> None:
        """Hands a request to the scheduler; raises if it can never run."""
        self._scheduler.add(request)
        self.register(generation, request)

    def register(self, generation: Generation, request: Request) -> None:
        """Adds a request that the scheduler has already."""
        self.generations[request.id] = generation
        if request.steered:
            self.searches[request.id] = BeamSearch(generation.params, request)

    def includes(self, generation: Generation) -> bool:
        """Whether this request is ours and not over. Ids alone do not tell: another engine may have one of the same id."""
        return self.generations.get(generation.id) is generation

    def fail(self, error: KVPoolError) -> None:
        """Ends every request with an error."""
        for generation in self.generations.values():
            generation.end(error)
        self.generations.clear()
        self.searches.clear()
