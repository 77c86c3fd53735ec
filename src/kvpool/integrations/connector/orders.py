"""Messages between the two sides of a connector: orders go to the workers with every step, reports come back.

A *row* is a block of host memory, a *page* a block of the engine's own cache; both are numbers here. An engine may keep
layers in several groups, each with its own pages. A row holds the pages of all groups. `NO_PAGE` stands for a page that has
left its window. Layers that keep a state have groups and rows of their own (`Checkpoint`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from kvpool.tiers import Fingerprint

NO_PAGE = -1


class Checkpoint(NamedTuple):
    """The states behind one block: their row among the rows of states, and their page in each group that keeps states."""

    row: int
    pages: list[int]


class Displaced(NamedTuple):
    """Pages that a load copies to these rows before it fills its pages from `before` on.

    The rows may be some that the load has read by then.
    """

    before: int
    pages: list[int]
    rows: list[int]


@dataclass
class Load:
    """Copy rows into pages; the request waits outside of steps until this is done.

    Rows from `num_present` on are filled from tiers first, by `digests`; without these they fail.

    A load with a checkpoint fails as a whole: states are right behind the last block and nowhere else. The checkpoint comes
    from tiers if a row does.
    """

    job: int
    request_id: str
    rows: list[int]
    pages: list[list[int]]  # of each group
    num_present: int
    digests: list[bytes] = field(default_factory=list)
    checkpoint: Checkpoint | None = None  # behind the last block
    displaced: list[Displaced] = field(default_factory=list)  # in order; only if all rows are present


@dataclass
class Store:
    """Copy pages into rows, once the step has written them, or before it begins if they are written already."""

    job: int
    pages: list[list[int]]  # of each group
    rows: list[int]
    checkpoint: Checkpoint | None = None  # behind the last block
    is_written: bool = False


@dataclass
class Spill:
    """Store rows in the tiers. Only rows that every worker has confirmed are ordered."""

    job: int
    rows: list[int]
    digests: list[bytes]
    checkpoint_rows: list[int] = field(default_factory=list)
    checkpoint_digests: list[bytes] = field(default_factory=list)  # of the blocks before them


@dataclass
class Orders:
    """All orders of a step for a worker."""

    loads: list[Load] = field(default_factory=list)
    stores: list[Store] = field(default_factory=list)
    spills: list[Spill] = field(default_factory=list)
    fence: bool = False
    """The step may write pages that stores still read: it waits for them."""
    fences_loads: bool = False
    """The same of its loads."""
    settles: bool = False
    """Somebody else may write pages that stores still read, outside of steps: nothing begins before they are over."""
    is_idle: bool = False
    """The step computes nothing, so a short wait for loads delays no request."""


@dataclass
class JobProgress:
    """How a job went: how many workers have done it, and the fewest blocks that one of them got right."""

    num_workers: int
    num_blocks: int

    def joined(self, other: JobProgress) -> JobProgress:
        """The progress of two sets of workers together."""
        return JobProgress(self.num_workers + other.num_workers, min(self.num_blocks, other.num_blocks))


@dataclass
class Report:
    """Jobs that ended in a step."""

    jobs: dict[int, JobProgress] = field(default_factory=dict)

    def joined(self, other: Report) -> Report:
        """The reports of two sets of workers about one step, together."""
        jobs = dict(self.jobs)
        for job, progress in other.jobs.items():
            jobs[job] = jobs[job].joined(progress) if job in jobs else progress
        return Report(jobs)


@dataclass(frozen=True)
class Introduction:
    """What a worker says about itself before the first step."""

    rank: int
    num_workers: int
    num_rows: int
    fingerprint: Fingerprint
    num_checkpoints: int = 0  # rows of states; 0 if no layer keeps one
