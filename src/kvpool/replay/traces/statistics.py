"""What a trace is like, without replaying it: sizes, sharing, how far apart uses of a block lie, the working set."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from kvpool.pools.arrays import Int64Array
from kvpool.replay.traces.trace import FloatArray, Trace


class Reuses(NamedTuple):
    """Every use of a block that was used before."""

    seconds: FloatArray  # since the use before
    new_blocks: Int64Array  # different blocks that appeared for the first time in between


def summary(trace: Trace) -> dict[str, Any]:
    """Figures of a trace by name, in the order in which people ask for them."""
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
    found = reuses(trace)
    figures |= {
        "tokens_per_id": trace.unit,
        "ids": trace.num_ids,
        "different_ids": trace.num_unique,
        "reuse_ratio_infinite_cache": len(found.seconds) / trace.num_ids,
        "ids_used_once": int((np.unique(trace.ids, return_counts=True)[1] == 1).sum()),
        "reuse_gap_seconds_median": float(np.median(found.seconds)) if len(found.seconds) else 0.0,
        "reuse_gap_seconds_p90": float(np.percentile(found.seconds, 90)) if len(found.seconds) else 0.0,
        "sessions": len(set(trace.sessions)) if trace.sessions is not None else 0,
        "tenants": len(set(trace.tenants)) if trace.tenants is not None else 0,
    }
    return figures


def reuses(trace: Trace) -> Reuses:
    """Time and volume between two uses of the same block, for all of them."""
    owner = np.repeat(np.arange(len(trace)), np.diff(trace.offsets))
    order = np.argsort(trace.ids, kind="stable")
    again = np.flatnonzero(trace.ids[order[1:]] == trace.ids[order[:-1]])
    before, after = order[again], order[again + 1]
    is_first = np.zeros(len(trace.ids), np.bool_)
    is_first[order[np.concatenate(([True], trace.ids[order[1:]] != trace.ids[order[:-1]]))]] = True
    appeared = np.cumsum(is_first)
    times = trace.timestamps
    return Reuses((times[owner[after]] - times[owner[before]]) / 1000, appeared[after] - appeared[before])


def working_set(trace: Trace, window_seconds: float) -> tuple[FloatArray, Int64Array]:
    """Different blocks used in each window of time: the windows' starts in seconds, and how many."""
    owner = np.repeat(np.arange(len(trace)), np.diff(trace.offsets))
    begin = trace.timestamps.min(initial=0.0)
    window = ((trace.timestamps[owner] - begin) / 1000 // window_seconds).astype(np.int64)
    pairs = np.unique(np.stack((window, trace.ids.astype(np.int64))), axis=1)[0]
    counts = np.bincount(pairs, minlength=1).astype(np.int64)
    return np.arange(len(counts)).astype(np.float64) * window_seconds, counts


def footprint(trace: Trace) -> tuple[FloatArray, Int64Array]:
    """How many different blocks the trace has used up to each request: the growth of an infinite cache."""
    _, first = np.unique(trace.ids, return_index=True)
    owner = np.repeat(np.arange(len(trace)), np.diff(trace.offsets))
    new = np.bincount(owner[first], minlength=len(trace))
    return (trace.timestamps - trace.timestamps.min(initial=0.0)) / 1000, np.cumsum(new)
