"""Capacities and tiers as people write them; traces and results files, checked before anything runs for long."""

from __future__ import annotations

from pathlib import Path

from kvpool.errors import InvalidArgumentError, TraceError
from kvpool.replay.traces.formats import read_trace
from kvpool.replay.traces.trace import Trace
from kvpool.terminal import parse_count

DEFAULT_STEPS = (1, 2, 3, 5)  # of each power of ten in a range


def parse_capacities(text: str) -> list[int | None]:
    """`1k:100k` (steps 1, 2, 3, 5 of each power of ten), `1k,10k`, `inf`.

    >>> parse_capacities("1k:5k,inf")
    [1000, 2000, 3000, 5000, None]
    """
    found: list[int | None] = []
    for part in text.split(","):
        low, colon, high = part.strip().partition(":")
        if low.lower() in ("inf", "infinite", "∞"):
            found.append(None)
        elif not colon:
            found.append(parse_count(low, "--capacity"))
        else:
            found.extend(_range(parse_count(low, "--capacity"), parse_count(high, "--capacity")))
    return list(dict.fromkeys(found))


def _range(low: int, high: int) -> list[int]:
    if low > high:
        raise InvalidArgumentError(f"the range {low}:{high} is empty; write the smaller number first")
    inside = [step * 10**power for power in range(16) for step in DEFAULT_STEPS if low < step * 10**power < high]
    return sorted({low, high, *inside})


def parse_tiers(text: str) -> dict[str, int]:
    """`gpu=10k,host=50k,disk=1m`: blocks per tier."""
    tiers: dict[str, int] = {}
    for part in text.split(","):
        name, equals, value = part.strip().lower().partition("=")
        if not equals or name not in ("gpu", "host", "disk"):
            raise InvalidArgumentError(f"--tiers has {part!r}; write gpu=10k,host=50k,disk=1m (blocks)")
        tiers[name] = parse_count(value, f"--tiers {name}")
    if "gpu" not in tiers:
        raise InvalidArgumentError(f"--tiers {text!r} has no gpu tier; write gpu=10k,host=50k")
    return tiers


def load_trace(path: Path, max_errors: int, limit: int | None = None) -> Trace:
    """A trace with at least one request."""
    loaded = read_trace(path, max_errors=max_errors, limit=limit)
    if not len(loaded):
        reasons = "; ".join(loaded.problems.sentences()[:3]) or "it has no lines behind its first"
        raise TraceError(f"{path} holds no request that can be read ({reasons})")
    return loaded
