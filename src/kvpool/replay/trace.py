"""A recorded workload in memory: the times and ids of requests, as flat arrays with 4 bytes per block or token."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvpool.checks import as_count
from kvpool.config.layers import ceil_div
from kvpool.errors import InvalidArgumentError, TraceError
from kvpool.pools.arrays import MAX_TOKEN_ID, Int32Array, Int64Array
from kvpool.scope import ReuseHint

FloatArray = npt.NDArray[np.float64]

TOKENS_PER_BLOCK = 16  # if a trace has no blocks
END_MARK = MAX_TOKEN_ID  # ids of a trace are smaller
MAX_IDS = 2**30  # a trace may take 4 GiB of memory, whatever its file holds
MAX_REQUESTS = 2**25
MAX_LENGTH = 2**31 - 1  # tokens of a prompt or an answer
MAX_TIMESTAMP = 2**53  # milliseconds; a float cannot hold larger ones exactly


class TraceRequest(NamedTuple):
    """One request of a trace."""

    timestamp: float  # milliseconds since the trace began
    ids: Int32Array  # of its blocks or tokens, in order; empty when reuse is not known
    input_length: int  # tokens
    output_length: int  # tokens
    session: str | None = None
    tenant: str | None = None
    stop: str | None = None  # why it stopped: a word of `ReuseHint`
    expected_seconds: float | None = None  # when its continuation was expected, as `ReuseHint` has it


@dataclass
class Problems:
    """Problems of a file: broken lines, which are skipped, and counts of unusual things that work."""

    broken: list[tuple[int, str]] = field(default_factory=list)  # (line number, what is wrong with it)
    unsorted: int = 0  # requests that are older than the one before them
    zero_length: int = 0  # requests without a prompt
    repeating: int = 0  # requests that name one id twice
    renumbered: bool = False  # ids were not small integers and got new numbers

    def sentences(self) -> list[str]:
        """One sentence for each problem; empty if there was none."""
        found = [f"line {number} is skipped: {reason}" for number, reason in self.broken]
        if self.unsorted:
            found.append(f"{self.unsorted} requests are older than the one before; replay keeps the order of the file")
        if self.zero_length:
            found.append(
                f"{self.zero_length} requests have an empty prompt; they count as requests and ask for nothing"
            )
        if self.repeating:
            found.append(
                f"{self.repeating} requests name the same id twice; a block is found by all that precedes it, so the "
                "second one is another block"
            )
        if self.renumbered:
            found.append("ids that are not integers below 2**31 - 1 were renumbered in order of appearance")
        return found


@dataclass(frozen=True)
class Trace:
    """Requests in the order of the file.

    Each id stands for `unit` tokens: 1 in traces of tokens, the block size in traces of block ids. Traces without reuse
    information (`reuse_known` is False) have lengths and no ids.

    >>> trace = TraceBuilder("tiny", unit=16).add(0.0, [1, 2], 32, 5).add(9.0, [1, 3], 20, 5).build()
    >>> len(trace), trace.num_ids, trace.num_unique, trace.ids_of(1).tolist()
    (2, 4, 3, [1, 3])
    """

    name: str
    format: str
    unit: int
    ids: Int32Array
    offsets: Int64Array
    timestamps: FloatArray
    input_lengths: Int64Array
    output_lengths: Int64Array
    sessions: tuple[str | None, ...] | None = None
    reuse_known: bool = True
    problems: Problems = field(default_factory=Problems)
    tenants: tuple[str | None, ...] | None = None  # None: the trace does not say who asked
    stops: tuple[str | None, ...] | None = None  # None: the trace does not say why requests stopped
    expected: tuple[float | None, ...] | None = None  # seconds until their continuation, if the trace says so

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __iter__(self) -> Iterator[TraceRequest]:
        return (self[index] for index in range(len(self)))

    def __getitem__(self, index: int) -> TraceRequest:
        """A request by its number; negative ones count from the end."""
        index = range(len(self))[index]
        return TraceRequest(
            float(self.timestamps[index]),
            self.ids_of(index),
            int(self.input_lengths[index]),
            int(self.output_lengths[index]),
            None if self.sessions is None else self.sessions[index],
            None if self.tenants is None else self.tenants[index],
            None if self.stops is None else self.stops[index],
            None if self.expected is None else self.expected[index],
        )

    def ids_of(self, index: int) -> Int32Array:
        """The ids of one request, a view."""
        index = range(len(self))[index]
        return self.ids[self.offsets[index] : self.offsets[index + 1]]

    @property
    def block_size(self) -> int:
        """Tokens of a block: those of the trace, or the usual number if its ids are tokens."""
        return self.unit if self.unit > 1 else TOKENS_PER_BLOCK

    def ids_per_block(self, block_size: int) -> int:
        """Ids in a block of so many tokens."""
        if as_count(block_size, "block_size") < 1 or block_size % self.unit:
            raise InvalidArgumentError(
                f"block_size={block_size} is no multiple of the trace's blocks of {self.unit} tokens; "
                "what lies inside them is not known"
            )
        return block_size // self.unit

    @property
    def num_ids(self) -> int:
        """Ids over all requests."""
        return len(self.ids)

    @property
    def num_unique(self) -> int:
        """Different ids: what an infinite cache would hold at the end."""
        return len(np.unique(self.ids))

    @property
    def is_tree(self) -> bool:
        """Whether every id always follows the same id, so that an id identifies the whole prefix."""
        before = np.concatenate(([-1], self.ids[:-1])).astype(np.int64)
        before[self.offsets[:-1][np.diff(self.offsets) > 0]] = -1
        return len(np.unique((before << 32) + self.ids)) == self.num_unique

    @property
    def duration(self) -> float:
        """Seconds between the first and the last arrival."""
        return float(np.ptp(self.timestamps)) / 1000 if len(self) else 0.0

    def hints(self) -> list[ReuseHint | None] | None:
        """What each request says about its continuation; None if none says anything."""
        if self.stops is None and self.expected is None:
            return None
        known: dict[tuple[str | None, float | None], ReuseHint | None] = {(None, None): None}
        unsaid = (None,) * len(self)
        said = list(zip(self.stops or unsaid, self.expected or unsaid, strict=True))
        for each in dict.fromkeys(said):
            known.setdefault(each, ReuseHint(*each))
        return [known[each] for each in said]

    def head(self, num_requests: int) -> Trace:
        """The first requests, as a trace of its own."""
        count = min(as_count(num_requests, "num_requests"), len(self))
        return Trace(
            self.name,
            self.format,
            self.unit,
            self.ids[: self.offsets[count]],
            self.offsets[: count + 1],
            self.timestamps[:count],
            self.input_lengths[:count],
            self.output_lengths[:count],
            None if self.sessions is None else self.sessions[:count],
            self.reuse_known,
            self.problems,
            None if self.tenants is None else self.tenants[:count],
            None if self.stops is None else self.stops[:count],
            None if self.expected is None else self.expected[:count],
        )

    def full_blocks_only(self) -> Trace:
        """The trace without the partial last block of each prompt, which a real engine does not publish."""
        lengths = np.minimum(np.diff(self.offsets), self.input_lengths // self.unit)
        keep = np.zeros(len(self.ids), np.bool_)
        positions = np.arange(len(self.ids)) - np.repeat(self.offsets[:-1], np.diff(self.offsets))
        keep[:] = positions < np.repeat(lengths, np.diff(self.offsets))
        offsets = np.concatenate(([0], np.cumsum(lengths)))
        return Trace(
            self.name,
            self.format,
            self.unit,
            self.ids[keep],
            offsets,
            self.timestamps,
            self.input_lengths,
            self.output_lengths,
            self.sessions,
            self.reuse_known,
            self.problems,
            self.tenants,
            self.stops,
            self.expected,
        )


class TraceBuilder:
    """Collects requests into a `Trace`. Ids that do not fit into 31 bits, or are no integers, get new numbers."""

    def __init__(self, name: str, *, unit: int = 1, format: str = "memory", reuse_known: bool = True) -> None:
        self.name, self.unit, self.format, self.reuse_known = name, unit, format, reuse_known
        self.problems = Problems()
        self._ids = array("i")
        self._ends = array("q")
        self._timestamps = array("d")
        self._inputs = array("q")
        self._outputs = array("q")
        self._sessions: list[str | None] = []
        self._tenants: list[str | None] = []
        self._stops: list[str | None] = []
        self._expected: list[float | None] = []
        self._numbers: dict[object, int] | None = None

    def __len__(self) -> int:
        return len(self._ends)

    def add(
        self,
        timestamp: float,
        ids: Sequence[object],
        input_length: int,
        output_length: int,
        session: str | None = None,
        tenant: str | None = None,
        stop: str | None = None,
        expected_seconds: float | None = None,
    ) -> TraceBuilder:
        """One more request. The caller has checked that lengths are not negative."""
        if len(self._ends) >= MAX_REQUESTS or len(self._ids) + len(ids) > MAX_IDS:
            raise TraceError(
                f"{self.name} has more than {MAX_REQUESTS:,} requests or {MAX_IDS:,} ids, too many for a trace in memory; "
                "read fewer of them with limit (--limit)"
            )
        if self._timestamps and timestamp < self._timestamps[-1]:
            self.problems.unsorted += 1
        if not input_length:
            self.problems.zero_length += 1
        if self.unit > 1 and len(set(ids)) != len(ids):
            self.problems.repeating += 1
        self._append_ids(ids)
        self._ends.append(len(self._ids))
        self._timestamps.append(timestamp)
        self._inputs.append(input_length)
        self._outputs.append(output_length)
        self._sessions.append(session)
        self._tenants.append(tenant)
        self._stops.append(stop)
        self._expected.append(expected_seconds)
        return self

    def _append_ids(self, ids: Sequence[Any]) -> None:
        start = len(self._ids)
        if self._numbers is None:
            try:
                self._ids.extend(ids)  # raises if an id is no small integer
                if not len(ids) or (min(ids) >= 0 and max(ids) < END_MARK):
                    return
            except (OverflowError, TypeError):
                pass
            del self._ids[start:]
            numbers: dict[object, int] = {}
            self._ids = array("i", [numbers.setdefault(number, len(numbers)) for number in self._ids])
            self._numbers = numbers
            self.problems.renumbered = True
        numbers = self._numbers
        self._ids.extend([numbers.setdefault(value, len(numbers)) for value in ids])

    def build(self) -> Trace:
        """The trace so far."""
        sessions, tenants, stops = (
            tuple(names) if any(name is not None for name in names) else None
            for names in (self._sessions, self._tenants, self._stops)
        )
        expected = tuple(self._expected) if any(value is not None for value in self._expected) else None
        return Trace(
            self.name,
            self.format,
            self.unit,
            np.array(self._ids, np.int32),
            np.concatenate(([0], np.array(self._ends, np.int64))),
            np.array(self._timestamps, np.float64),
            np.array(self._inputs, np.int64),
            np.array(self._outputs, np.int64),
            sessions,
            self.reuse_known,
            self.problems,
            tenants,
            stops,
            expected,
        )


def to_blocks(trace: Trace, block_size: int | None = None, *, keep_ends: bool = True) -> Trace:
    """The trace in blocks of so many tokens, by default its own, whose ids stand for all that precedes them, too.

    Equal prefixes have equal ids and no others do, whatever the ids of the trace stand for. Ids at the end of a prompt that
    fill no block are a block of their own; without `keep_ends` they are left out, since no cache finds them again.
    """
    size = trace.block_size if block_size is None else block_size
    step = trace.ids_per_block(size)
    if step == 1 and trace.is_tree:
        return trace
    numbers: dict[tuple[int, bytes], int] = {}
    builder = TraceBuilder(trace.name, unit=size, format=trace.format, reuse_known=trace.reuse_known)
    for request in trace:
        stop = len(request.ids) if keep_ends else len(request.ids) // step * step
        ids, parent = [], -1
        for start in range(0, stop, step):
            parent = numbers.setdefault((parent, request.ids[start : start + step].tobytes()), len(numbers))
            ids.append(parent)
        builder.add(request.timestamp, ids, *request[2:])
    return builder.build()


class Reuses(NamedTuple):
    """Every use of a block that was used before."""

    seconds: FloatArray  # since the use before
    new_blocks: Int64Array  # different blocks that appeared for the first time in between


def summary(trace: Trace) -> dict[str, Any]:
    """Figures of a trace by name, in the order of display. Ids are those of blocks, of a trace of tokens as well."""
    lengths = trace.input_lengths
    figures: dict[str, Any] = {
        "name": trace.name,
        "format": trace.format,
        "requests": len(trace),
        "seconds": trace.duration,
        "requests_per_second": len(trace) / trace.duration if trace.duration else 0.0,
        "prompt_tokens": int(lengths.sum()),
        "prompt_tokens_median": float(np.median(lengths)) if len(trace) else 0.0,
        "prompt_tokens_p99": float(np.percentile(lengths, 99)) if len(trace) else 0.0,
        "prompt_tokens_max": int(lengths.max(initial=0)),
        "output_tokens_median": float(np.median(trace.output_lengths)) if len(trace) else 0.0,
        "reuse_known": trace.reuse_known,
    }
    if not trace.reuse_known or not trace.num_ids:
        return figures
    blocks = to_blocks(trace, keep_ends=False)
    found, num_ids = reuses(blocks), int(ceil_div(np.diff(trace.offsets), blocks.unit // trace.unit).sum())
    num_ends = num_ids - blocks.num_ids  # of prompts that end inside a block, which nobody finds again
    figures |= {
        "tokens_per_id": blocks.unit,
        "ids": num_ids,
        "different_ids": blocks.num_unique + num_ends,
        "reuse_ratio_infinite_cache": len(found.seconds) / num_ids,
        "ids_used_once": int((np.unique(blocks.ids, return_counts=True)[1] == 1).sum()) + num_ends,
        "reuse_gap_seconds_median": float(np.median(found.seconds)) if len(found.seconds) else 0.0,
        "reuse_gap_seconds_p90": float(np.percentile(found.seconds, 90)) if len(found.seconds) else 0.0,
        "sessions": len(set(trace.sessions or ()) - {None}),
        "tenants": len(set(trace.tenants or ()) - {None}),
    }
    return figures


def reuses(trace: Trace) -> Reuses:
    """Time and volume between two uses of the same block, for all of them."""
    owner = np.repeat(np.arange(len(trace)), np.diff(trace.offsets))
    order = np.argsort(trace.ids, kind="stable")
    again = np.flatnonzero(trace.ids[order[1:]] == trace.ids[order[:-1]])
    before, after = order[again], order[again + 1]
    is_first = np.zeros(len(trace.ids), np.bool_)
    is_first[np.unique(trace.ids, return_index=True)[1]] = True
    appeared = np.cumsum(is_first)
    times = np.maximum.accumulate(trace.timestamps)  # time never goes back, as in a replay
    return Reuses((times[owner[after]] - times[owner[before]]) / 1000, appeared[after] - appeared[before])


def working_set(trace: Trace, window_seconds: float) -> tuple[FloatArray, Int64Array]:
    """How many different blocks each window of time uses: the starts of the windows in seconds, and the counts."""
    owner = np.repeat(np.arange(len(trace)), np.diff(trace.offsets))
    begin = trace.timestamps.min(initial=0.0)
    window = ((trace.timestamps[owner] - begin) / 1000 // window_seconds).astype(np.int64)
    pairs = np.unique(np.stack((window, trace.ids.astype(np.int64))), axis=1)[0]
    counts = np.bincount(pairs, minlength=1).astype(np.int64)
    return np.arange(len(counts)).astype(np.float64) * window_seconds, counts


def footprint(trace: Trace) -> tuple[FloatArray, Int64Array]:
    """How many different blocks were used up to each request: the size of an infinite cache."""
    _, first = np.unique(trace.ids, return_index=True)
    owner = np.repeat(np.arange(len(trace)), np.diff(trace.offsets))
    new = np.bincount(owner[first], minlength=len(trace))
    return (trace.timestamps - trace.timestamps.min(initial=0.0)) / 1000, np.cumsum(new)
