"""Fetches a prefix from tiers: looks it up, compares loading with computing, loads into staging memory, checks for gaps.

What the first tier lends is not loaded: it is copied to the device from where it lies.

This runs in background threads, while the request waits outside the scheduler. An error makes the prefix shorter or empty.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from dataclasses import field as dataclass_field
from typing import NamedTuple

import numpy as np

from kvpool.config.layers import Tier, ceil_div
from kvpool.core.kind import Group
from kvpool.pools.arrays import Int64Array
from kvpool.tiers.contract import Loan, Outcome
from kvpool.tiers.transport.block_keys import PromptKeys
from kvpool.tiers.transport.chain import TierChain, WatchedTier, call_seconds
from kvpool.tiers.transport.deciding import Decider, LoadDecision
from kvpool.tiers.transport.prefix_options import (
    HERE,
    NOWHERE,
    Option,
    Sources,
    prefix_options,
    read_columns,
    usable_blocks,
)
from kvpool.tiers.transport.staging import Bytes, SharedStage, StagingMemory
from kvpool.tiers.transport.storing import Storer

PROBE_BLOCKS = 4
_SHARES = 4  # one request may take one part in so many of the staging memory
_MARK_BYTES = 16
_ALIGNMENT = 4096


class GroupRows(NamedTuple):
    """Blocks of one layer group that were loaded: their columns, and their bytes.

    These are [block, byte] in staging memory, or an array for each block, where a tier lends them.
    """

    columns: Int64Array
    rows: Bytes | list[Bytes]


@dataclass
class Fetch:
    """The prefix of one request: what to load, and what was loaded. Call `release` when the bytes are used."""

    prompt: PromptKeys
    first: int  # blocks that the cache has already
    began: float  # by `time.monotonic`
    due: float  # when the request stops waiting
    is_asked_for: bool = False  # load it even if computing it would be faster
    decision: LoadDecision | None = None
    num_blocks: int = 0  # blocks of the prefix that are usable after the fetch; `first` or less: nothing was loaded
    groups: list[GroupRows] = dataclass_field(default_factory=list)
    loading_seconds: float = 0.0  # spent in calls to tiers
    num_bytes: int = 0
    media: dict[int, Tier] = dataclass_field(default_factory=dict)  # by block that was loaded: where it lay
    is_part: bool = False  # tiers have more of it, for another fetch: staging memory was too small for all
    memory: SharedStage[Bytes] | Loan | None = None  # keeps the bytes

    @property
    def is_lent(self) -> bool:
        """Whether the bytes lie in memory of a tier; then `is_held` must be asked after they were copied."""
        return isinstance(self.memory, Loan)

    def is_held(self) -> bool:
        """Whether the bytes are still what was fetched."""
        return not isinstance(self.memory, Loan) or self.memory.is_held()

    def release(self) -> None:
        """The bytes are not needed any more."""
        memory, self.memory = self.memory, None
        self.groups = []
        if memory is not None:
            memory.release()


@dataclass
class FetchStats:
    """Prefixes that were looked for since the engine was made."""

    lookups: int = 0
    found: int = 0  # look-ups that found a longer prefix in a tier
    no_memory: int = 0  # given up because staging memory was in use
    incomplete: int = 0  # loads in which something was missing, broken or late
    skipped_tiers: int = 0  # tiers that were skipped because an earlier call to them hangs


class Fetcher:
    """Fetches prefixes from tiers, fastest first. Several threads call `run`."""

    def __init__(
        self,
        chain: TierChain,
        groups: Sequence[Group],
        block_size: int,
        decider: Decider,
        memory: StagingMemory[Bytes],
        storer: Storer,
        may_borrow: Callable[[Loan], bool] = lambda loan: True,
    ) -> None:
        self.tiers = chain.watched
        self._chain = chain
        self.groups = groups
        self.block_size = block_size
        self.decider = decider
        self.memory = memory
        self.storer = storer
        self._may_borrow = may_borrow  # whether the device can copy from there
        self._most_bytes = memory.max_bytes // _SHARES
        self._stats = FetchStats()

    def run(self, fetch: Fetch, done: Callable[[Fetch], None]) -> None:
        """Fetches a prefix, and calls `done` exactly once, also after an error."""
        sources: list[Sources] = []
        try:
            sources = self._look_up(fetch)
            looked = time.monotonic() - fetch.began
            self._load(fetch, sources)
            self.decider.observe_lookup(looked, fetch.num_blocks > fetch.first)
        except BaseException:
            fetch.release()
            fetch.num_blocks = fetch.first
            raise
        finally:
            done(fetch)
        if fetch.decision is not None and fetch.decision.probe:
            self._probe(fetch, sources)

    # --- looking -----------------------------------------------------------------------------------------------------

    def find(self, fetch: Fetch) -> dict[int, Tier]:
        """Where the blocks lie that a fetch could load. Loads and counts nothing."""
        sources = self._sources(fetch)
        end = usable_blocks(self.groups, sources, fetch.prompt.num_tokens, self.block_size)
        return self.media(sources, fetch.first, end)

    def _look_up(self, fetch: Fetch) -> list[Sources]:
        self._stats.lookups += 1
        return self._sources(fetch)

    def _sources(self, fetch: Fetch) -> list[Sources]:
        """Finds the first tier that has each block."""
        prompt = fetch.prompt
        sources = [np.full(prompt.num_blocks, NOWHERE, np.int16) for _ in self.groups]
        for of_group in sources:
            of_group[: fetch.first] = HERE
        places = [(g, c) for g in range(len(sources)) for c in range(fetch.first, prompt.num_blocks)]
        found = self._chain.find([prompt.keys[g][c] for g, c in places], fetch.due)
        for (g, c), index in zip(places, found, strict=True):
            sources[g][c] = index
        return sources

    # --- loading -----------------------------------------------------------------------------------------------------

    def _load(self, fetch: Fetch, sources: list[Sources]) -> None:
        fetch.num_blocks = fetch.first
        prompt, size = fetch.prompt, self.block_size
        options = prefix_options(self.groups, sources, fetch.first, prompt.num_tokens, size, len(self.tiers))
        if fetch.is_asked_for and options:
            decision = fetch.decision = LoadDecision(options[-1], "it was asked for")
        else:
            decision = fetch.decision = self.decider.decide(options, fetch.first, size)
        self._stats.found += bool(options)
        option = decision.option
        if option is None:
            return
        if sum(option.num_bytes) > self._most_bytes:
            part = self._part(fetch, sources)
            if part is None:
                self._stats.no_memory += 1
                return
            share = (part.num_blocks - fetch.first) / (option.num_blocks - fetch.first)
            times = share * decision.load_seconds, share * decision.compute_seconds
            fetch.decision = LoadDecision(part, decision.reason, *times)
            fetch.is_part, option = True, part
        loaded = [np.full_like(of_group, NOWHERE) for of_group in sources]
        for of_group in loaded:
            of_group[: fetch.first] = HERE
        wanted = self._wanted(fetch, option)
        if not self._borrow(fetch, wanted, sources, loaded):
            fetch.groups = self._take_rows(fetch, wanted)
            if not fetch.groups:
                self._stats.no_memory += 1
                return
            for index in range(len(self.tiers)):
                self._load_from(index, fetch, sources, loaded)
        fetch.num_blocks = usable_blocks(self.groups, loaded, prompt.num_tokens, size)
        self._stats.incomplete += fetch.num_blocks < option.num_blocks
        fetch.media = self.media(loaded, fetch.first, fetch.num_blocks)
        if fetch.num_blocks <= fetch.first:
            fetch.release()

    def media(self, sources: Sequence[Sources], first: int, end: int) -> dict[int, Tier]:
        """Where the blocks from `first` on lie. A block counts to the slowest tier that any of its layer groups needs."""
        slowest = np.max(sources, axis=0)
        return {column: self.tiers[slowest[column]].tier.medium for column in range(first, end) if slowest[column] >= 0}

    def _part(self, fetch: Fetch, sources: list[Sources]) -> Option | None:
        """The longest prefix that staging memory can hold; None if it cannot even hold one block of each group."""
        per_block = sum(_aligned(group.spec.block_bytes) for group in self.groups)
        end = fetch.first + self._most_bytes // per_block
        size, shorter = self.block_size, [of_group[:end] for of_group in sources]
        options = prefix_options(self.groups, shorter, fetch.first, end * size + 1, size, len(self.tiers))
        return options[-1] if options else None

    def _wanted(self, fetch: Fetch, option: Option) -> list[Int64Array]:
        """The columns of each group that an option loads."""
        return [
            read_columns(group, fetch.first, option.num_blocks, fetch.prompt.num_tokens, self.block_size)
            for group in self.groups
        ]

    def _borrow(self, fetch: Fetch, wanted: list[Int64Array], sources: list[Sources], loaded: list[Sources]) -> bool:
        """Takes everything from where the first tier has it; False if it lacks something or does not lend it.

        What lies in a later tier is loaded: then faster tiers get it, too, and must get what was verified.
        """
        if any((sources[g][columns] != 0).any() for g, columns in enumerate(wanted)):
            return False
        places = [(g, column) for g, columns in enumerate(wanted) for column in columns.tolist()]
        sizes = [self.groups[g].spec.block_bytes for g, _ in places]
        began = time.monotonic()
        loan = self.tiers[0].lend([fetch.prompt.keys[g][c] for g, c in places], sizes, call_seconds(fetch.due))
        if loan is None:
            return False
        if not self._may_borrow(loan):
            loan.release()
            return False
        fetch.memory = loan
        rows = iter([np.frombuffer(view, np.uint8) for view in loan.views])
        fetch.groups = [GroupRows(columns, [next(rows) for _ in columns]) for columns in wanted]
        good = [place for place, outcome in zip(places, loan.outcomes, strict=True) if outcome == Outcome.OK]
        self._count(0, fetch, sum(self.groups[g].spec.block_bytes for g, _ in good), time.monotonic() - began)
        for g, column in good:
            loaded[g][column] = 0
        return True

    def _count(self, index: int, fetch: Fetch, num_bytes: int, seconds: float) -> None:
        fetch.loading_seconds += seconds
        fetch.num_bytes += num_bytes
        self.decider.observe_load(index, num_bytes, seconds)

    def _take_rows(self, fetch: Fetch, wanted: list[Int64Array]) -> list[GroupRows]:
        """Memory for all wanted columns; an empty list if there is not enough."""
        ends = np.cumsum([_aligned(len(c) * g.spec.block_bytes) for c, g in zip(wanted, self.groups, strict=True)])
        staged = self.memory.take(int(ends[-1]))
        if staged is None:
            return []
        fetch.memory = SharedStage(self.memory, staged)
        found, start = [], 0
        for columns, group, end in zip(wanted, self.groups, ends.tolist(), strict=True):
            shape = len(columns), group.spec.block_bytes
            found.append(GroupRows(columns, staged.data[start : start + shape[0] * shape[1]].reshape(shape)))
            start = end
        return found

    def _load_from(self, index: int, fetch: Fetch, sources: list[Sources], loaded: list[Sources]) -> None:
        """Loads the blocks that one tier has, and marks in `loaded` which of them arrived whole."""
        keys, rows, places = [], [], []
        for g, (columns, of_group) in enumerate(fetch.groups):
            for at, column in enumerate(columns.tolist()):
                if sources[g][column] == index:
                    keys.append(fetch.prompt.keys[g][column])
                    rows.append(of_group[at])
                    places.append((g, column))
        if not keys:
            return
        began = time.monotonic()
        stage = fetch.memory
        assert isinstance(stage, SharedStage)
        outcomes = _load_marked(self.tiers[index], keys, rows, call_seconds(fetch.due), stage)
        good = [i for i, outcome in enumerate(outcomes) if outcome == Outcome.OK]
        self._count(index, fetch, sum(rows[i].nbytes for i in good), time.monotonic() - began)
        for i in good:
            g, column = places[i]
            loaded[g][column] = index
        if index and good:  # faster tiers lack these
            stage.share()
            faster = range(index)
            self.storer.store([keys[i] for i in good], [rows[i] for i in good], stage, _is_there, only=faster)

    def _probe(self, fetch: Fetch, sources: list[Sources]) -> None:
        """Measures tiers that were too slow to be used, with a few blocks; the request does not wait for it."""
        for index, watched in enumerate(self.tiers):
            places = [(g, int(c)) for g, of_group in enumerate(sources) for c in np.flatnonzero(of_group == index)]
            places = places[:PROBE_BLOCKS]
            num_bytes = sum(self.groups[g].spec.block_bytes for g, _ in places)
            staged = self.memory.take(num_bytes) if places else None
            if staged is None:
                continue
            rows, at = [], 0
            for g, _ in places:
                rows.append(staged.data[at : at + self.groups[g].spec.block_bytes])
                at += self.groups[g].spec.block_bytes
            began = time.monotonic()
            watched.load([fetch.prompt.keys[g][c] for g, c in places], rows, watched.tier.timeout)
            self.decider.observe_load(index, num_bytes, time.monotonic() - began)
            self.memory.give(staged)

    def stats(self) -> FetchStats:
        """A copy of the counters."""
        return replace(self._stats, skipped_tiers=self._chain.num_passed_by)


def _load_marked(
    watched: WatchedTier, keys: list[bytes], rows: list[Bytes], timeout: float, stage: SharedStage[Bytes]
) -> list[Outcome]:
    """Calls `load`, and reports a value that does not fill its row as FAILED: a mark at the end of the row is still there."""
    mark = np.frombuffer(secrets.token_bytes(_MARK_BYTES), np.uint8)
    for row in rows:
        row[-_MARK_BYTES:] = mark[-len(row) :]
    outcomes = watched.load(keys, rows, timeout, stage)
    return [
        Outcome.FAILED if outcome == Outcome.OK and bool((row[-_MARK_BYTES:] == mark[-len(row) :]).all()) else outcome
        for outcome, row in zip(outcomes, rows, strict=True)
    ]


def _aligned(num_bytes: int) -> int:
    return ceil_div(num_bytes, _ALIGNMENT) * _ALIGNMENT


def _is_there() -> None:
    """A wait that returns at once, because the bytes are in memory already."""
