"""Decides for each request whether to load its prefix from tiers or to compute it, from measured times.

    load_seconds    = other waiting (look-ups, queues) + for each tier: latency + bytes / bandwidth
    compute_seconds = measured time of steps for so many prompt tokens

Both predictions learn from every request. Each decision keeps its prediction, so that `DecisionStats` can say how good
predictions are. A tier that was not measured yet is tried. A tier that was too slow is measured again now and then, with a
few blocks for which no request waits.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from kvpool.tiers.transport.prefix_options import Option

SMOOTHING = 0.2  # weight of the newest measurement
MARGIN = 1.05  # the prediction for loading must be better by this factor, because predictions err
PROBE_SECONDS = 10.0  # between measurements of a tier that is not used because it is slow


class TransferSpeed:
    """Latency and bandwidth of one tier: a line fitted to its measured loads. Recent loads weigh more.

    >>> speed = TransferSpeed()
    >>> for num_bytes in (1_000_000, 2_000_000, 4_000_000):
    ...     speed.observe(num_bytes, 0.001 + num_bytes / 1e9)
    >>> round(speed.predict(8_000_000), 4)
    0.009
    """

    measured_at: float  # by the clock of who observes

    def __init__(self) -> None:
        self.count = 0
        self._weight = self._bytes = self._seconds = self._squares = self._products = 0.0
        self._error = 0.0  # mean relative error of predictions

    def observe(self, num_bytes: int, seconds: float, now: float = 0.0) -> None:
        """Learns from a load of `num_bytes` that took `seconds`."""
        if self.count:
            predicted = self.expect(num_bytes)
            off = max(0.0, seconds / predicted - 1.0) if predicted > 0 else 0.0
            self._error += SMOOTHING * (min(off, 10.0) - self._error)
        keep = 1.0 - SMOOTHING
        self._weight = keep * self._weight + 1.0
        self._bytes = keep * self._bytes + num_bytes
        self._seconds = keep * self._seconds + seconds
        self._squares = keep * self._squares + float(num_bytes) ** 2
        self._products = keep * self._products + num_bytes * seconds
        self.count += 1
        self.measured_at = now

    @property
    def latency(self) -> float:
        """Seconds that a load takes whatever its size."""
        return self._fit()[0]

    @property
    def bytes_per_second(self) -> float:
        """The bandwidth; 0.0 before anything was measured."""
        slope = self._fit()[1]
        return 1.0 / slope if slope > 0 else 0.0

    def predict(self, num_bytes: int) -> float:
        """Seconds that `num_bytes` will take, plus the recent error of predictions; 0.0 for an unmeasured tier."""
        return self.expect(num_bytes) * (1.0 + self._error) if self.count else 0.0

    def expect(self, num_bytes: int) -> float:
        """Seconds that `num_bytes` will take, without that addition."""
        latency, slope = self._fit()
        return latency + slope * num_bytes

    def _fit(self) -> tuple[float, float]:
        """Intercept and slope, neither of them negative."""
        if not self._weight or not self._bytes:
            return (self._seconds / self._weight if self._weight else 0.0), 0.0
        spread = self._weight * self._squares - self._bytes**2
        through_zero = self._seconds / self._bytes
        if spread <= 1e-6 * self._bytes**2:  # all loads had one size, so latency and bandwidth cannot be told apart
            return 0.0, through_zero
        slope = (self._weight * self._products - self._bytes * self._seconds) / spread
        latency = (self._seconds - slope * self._bytes) / self._weight
        if latency < 0:
            return 0.0, through_zero
        return (latency, slope) if slope >= 0 else (self._seconds / self._weight, 0.0)


class LoadDecision(NamedTuple):
    """What to do for a request, why, and how long that should take."""

    option: Option | None  # what to load; None: compute everything
    reason: str
    load_seconds: float = 0.0
    compute_seconds: float = 0.0
    probe: bool = False  # measure the tiers with a few blocks; the request does not wait for that

    @property
    def is_prediction(self) -> bool:
        """Whether both loading and computing were measured before, so that this is a prediction."""
        return self.option is not None and self.load_seconds > 0 and self.compute_seconds > 0


@dataclass
class DecisionStats:
    """Decisions since the engine was made. Seconds are those of loads that were predicted."""

    loads: int = 0
    recomputes: int = 0
    unmeasured: int = 0  # loads before both sides were known
    probes: int = 0
    slower_than_computing: int = 0  # loads that took longer than the prediction for computing
    predicted_seconds: float = 0.0
    actual_seconds: float = 0.0
    saved_seconds: float = 0.0  # predicted time of computing, less the time that loading took


class Decider:
    """Chooses for requests, and learns. Several threads use it."""

    def __init__(self, num_tiers: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.speeds = [TransferSpeed() for _ in range(num_tiers)]
        self.wait = TransferSpeed()  # other waiting than for loads: look-ups, queues, writing into blocks
        self.prompts = TransferSpeed()  # of computing, by tokens instead of bytes
        self._look_seconds = 0.0
        self._look_gain = 1.0  # the share of look-ups that led to a load
        self._num_looks = 0
        self._looked_at = -math.inf
        self._clock = clock
        self._lock = threading.Lock()
        self._stats = DecisionStats()

    def compute_seconds(self, num_tokens: int) -> float | None:
        """Seconds that `num_tokens` of a prompt take to compute; None before that was measured."""
        with self._lock:
            return self.prompts.expect(num_tokens) if self.prompts.count else None

    def is_worth_looking(self, num_tokens: int) -> bool:
        """Whether a look-up in tiers costs nearly nothing compared with computing, or pays on average."""
        with self._lock:
            if not self.prompts.count or not self._num_looks:
                return True
            computing = self.prompts.expect(num_tokens)
            return self._look_seconds <= max((MARGIN - 1.0), self._look_gain) * computing

    def is_time_to_look(self) -> bool:
        """Whether to measure look-ups again although they are not worth it; True once every `PROBE_SECONDS`."""
        with self._lock:
            now = self._clock()
            if now - self._looked_at < PROBE_SECONDS:
                return False
            self._looked_at = now
            return True

    def decide(self, options: Sequence[Option], first: int, block_size: int) -> LoadDecision:
        """The option that saves most time, compared with computing all after the `first` blocks."""
        with self._lock:
            decision = self._decide(options, first, block_size)
            stats = self._stats
            if decision.option is None:
                stats.recomputes += bool(options)
                stats.probes += decision.probe
            else:
                stats.loads += 1
                stats.unmeasured += not decision.is_prediction
            return decision

    def _decide(self, options: Sequence[Option], first: int, block_size: int) -> LoadDecision:
        if not options:
            return LoadDecision(None, "no tier has more of it")
        if not self.prompts.count:
            return LoadDecision(options[-1], "the speed of prompts is not known yet")
        best, best_saved = None, 0.0
        for option in options:
            computing = self.prompts.expect((option.num_blocks - first) * block_size)
            unknown = any(num and not speed.count for num, speed in zip(option.num_bytes, self.speeds, strict=True))
            if unknown:
                return LoadDecision(option, "a tier was not measured yet", 0.0, computing)
            loading = self.predict(option)
            if computing - MARGIN * loading > best_saved:
                best_saved = computing - MARGIN * loading
                best = LoadDecision(option, "loading is faster", loading, computing)
        if best is not None:
            return best
        shortest = options[0]
        computing = self.prompts.expect((shortest.num_blocks - first) * block_size)
        return LoadDecision(None, "computing is faster", self.predict(shortest), computing, self._is_stale(shortest))

    def predict(self, option: Option) -> float:
        """Seconds that a request will wait for this option."""
        loading = sum(speed.predict(num) for num, speed in zip(option.num_bytes, self.speeds, strict=True) if num)
        return loading + self.wait.predict(sum(option.num_bytes))

    def _is_stale(self, option: Option) -> bool:
        """Whether to measure a tier of this option again; True for each tier once every `PROBE_SECONDS`."""
        now, stale = self._clock(), False
        for num, speed in zip(option.num_bytes, self.speeds, strict=True):
            if num and now - speed.measured_at >= PROBE_SECONDS:
                speed.measured_at, stale = now, True
        return stale

    def observe_prompt(self, num_tokens: int, seconds: float) -> None:
        """Learns from a step that computed `num_tokens` of prompts in `seconds`."""
        with self._lock:
            self.prompts.observe(num_tokens, seconds, self._clock())

    def observe_lookup(self, seconds: float, has_helped: bool) -> None:
        """Learns from a look-up that took `seconds`; `has_helped` says whether a load followed."""
        with self._lock:
            share = SMOOTHING if self._num_looks else 1.0
            self._look_seconds += share * (seconds - self._look_seconds)
            self._look_gain += SMOOTHING * (has_helped - self._look_gain)
            self._num_looks += 1

    def observe_load(self, tier: int, num_bytes: int, seconds: float) -> None:
        """Learns from a tier that loaded `num_bytes` in `seconds`."""
        with self._lock:
            self.speeds[tier].observe(num_bytes, seconds, self._clock())

    def observe_wait(self, decision: LoadDecision, num_bytes: int, waited: float, loading: float) -> None:
        """Learns from a request that waited `waited` seconds for its load; tiers took `loading` of them."""
        with self._lock:
            self.wait.observe(num_bytes, max(0.0, waited - loading), self._clock())
            if decision.is_prediction:
                stats = self._stats
                stats.predicted_seconds += decision.load_seconds
                stats.actual_seconds += waited
                stats.saved_seconds += decision.compute_seconds - waited
                stats.slower_than_computing += waited > decision.compute_seconds

    def stats(self) -> DecisionStats:
        """A copy of the counters."""
        with self._lock:
            return replace(self._stats)
