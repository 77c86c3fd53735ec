"""State: what loading, storing and growing share: the catalog under its lock, and the slabs that jobs keep open."""

from __future__ import annotations

import threading
from collections.abc import Callable

from kvpool.tiers.disk.catalog import Catalog
from kvpool.tiers.disk.slab import Slab


class State:
    """One directory as this process sees it. Whoever uses the catalog holds `lock`, and never during I/O."""

    def __init__(self, report: Callable[[str], None]) -> None:
        self.lock = threading.Lock()
        self.catalog = Catalog()
        self.is_writable = False
        self.problem = ""
        """Why nothing is stored at the moment."""
        self.report = report

    def refuse(self, problem: str) -> None:
        """Notes and reports why something was not stored."""
        with self.lock:
            self.problem = problem
        self.report(problem)

    def begin_job(self, slab: Slab) -> bool:
        """Keeps the files of a slab open for a job; False if the slab is given up."""
        with self.lock:
            if slab.retired:
                return False
            slab.num_jobs += 1
            return True

    def end_job(self, slab: Slab) -> None:
        """The last job of a slab that is given up closes its files."""
        with self.lock:
            slab.num_jobs -= 1
            is_last = slab.retired and not slab.num_jobs
        if is_last:
            slab.close()

    def retire(self, number: int) -> Slab:
        """Takes a slab out of the catalog, called under the lock. It counts as a job, which the caller ends outside of it."""
        slab = self.catalog.retire(number)
        slab.num_jobs += 1
        return slab
