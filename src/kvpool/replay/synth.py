"""Makes workloads from a few parameters, fits these to a trace, and turns traces of tokens into traces of blocks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from heapq import heappop, heappush

import numpy as np

from kvpool.checks import check_int, check_number
from kvpool.config.layers import ceil_div
from kvpool.errors import InvalidArgumentError, TraceError
from kvpool.replay.trace import MAX_LENGTH, MAX_TIMESTAMP, TOKENS_PER_BLOCK, Trace, TraceBuilder, to_blocks

MAX_BLOCKS = 2**24  # that one turn may add
MAX_GAP = 2**40  # seconds between two turns
MAX_TURN = 16  # turns with a probability of their own


@dataclass(frozen=True)
class WorkloadModel:
    """Conversations below shared prompts. Lengths and gaps are log-normal: (mean, deviation) of the logarithm.

    A conversation starts with one of `num_stems` shared prompts (the popularity falls as a power of the rank) and adds new
    blocks. It continues after a gap, with the probability of its turn. Each turn repeats everything before it. With
    `num_tenants`, every shared prompt and every conversation belongs to one tenant.
    """

    unit: int = 512
    rate: float = 3.0  # requests per second
    burstiness: float = 1.0  # deviation of the time between arrivals over its mean; 1: Poisson
    num_stems: int = 64
    stem_skew: float = 1.0
    stem_blocks: float = 2.0
    unshared: float = 0.3  # fraction of conversations that start with no shared prompt
    first_blocks: tuple[float, float] = (2.0, 1.0)
    turn_blocks: tuple[float, float] = (1.0, 0.8)
    gap_seconds: tuple[float, float] = (4.6, 1.0)
    output_tokens: tuple[float, float] = (5.5, 0.8)
    continues: tuple[float, ...] = (0.3, 0.4, 0.5, 0.6, 0.65)  # by turn; the last one holds for all later turns
    num_tenants: int = 0  # 0: the trace does not say who asked

    def __post_init__(self) -> None:
        check_number(self.rate, "rate", "a number of requests per second", InvalidArgumentError)
        if self.rate <= 0 or self.num_stems < 1 or not self.continues:
            raise InvalidArgumentError("rate must be above 0, num_stems at least 1 and continues not empty")
        if not 0 <= self.num_tenants <= self.num_stems:
            raise InvalidArgumentError(
                f"num_tenants is {self.num_tenants}; it must be 0 (none) to {self.num_stems}, the number of shared prompts"
            )
        if any(not 0 <= chance < 1 for chance in self.continues):
            raise InvalidArgumentError(f"continues is {self.continues}; probabilities lie in 0 <= p < 1")

    def with_rate(self, rate: float) -> WorkloadModel:
        """The same workload at another load."""
        return replace(self, rate=rate)

    def with_tenants(self, num_tenants: int) -> WorkloadModel:
        """The same workload, asked by so many tenants."""
        return replace(self, num_tenants=num_tenants, num_stems=max(self.num_stems, num_tenants))


def fit(trace: Trace) -> WorkloadModel:
    """Fits the parameters to a trace. A request that repeats all but the end of an earlier one is its continuation.

    A trace with lengths only gives arrivals and lengths. Then the prompts of the model share nothing.
    """
    if not len(trace):
        raise InvalidArgumentError(f"{trace.name} has no requests to fit")
    rate, burstiness = _arrivals(trace)
    if not trace.reuse_known:
        return WorkloadModel(
            unit=TOKENS_PER_BLOCK,
            rate=rate,
            burstiness=burstiness,
            unshared=1.0,
            continues=(0.0,),
            first_blocks=_log_normal(ceil_div(trace.input_lengths, TOKENS_PER_BLOCK)),
            output_tokens=_log_normal(trace.output_lengths),
        )
    trace = to_blocks(trace)
    turns, fresh, gaps, stems = _classify(trace)
    starts = turns == 0
    reached = np.bincount(np.minimum(turns, MAX_TURN), minlength=MAX_TURN + 2).astype(float)
    chances = [float(min(0.98, reached[t + 1] / reached[t])) for t in range(MAX_TURN) if reached[t] >= 20]
    shared = stems[starts]
    popularity = np.sort(np.unique(shared[shared > 0], return_counts=True)[1])[::-1]
    num_tenants = 0 if trace.tenants is None else len(set(trace.tenants))
    return WorkloadModel(
        unit=trace.unit,
        rate=rate,
        burstiness=burstiness,
        num_stems=max(1, int(len(trace) * 0.01), len(popularity), num_tenants),
        stem_blocks=float(max(1.0, shared[shared > 0].mean())) if (shared > 0).any() else 1.0,
        unshared=float((shared == 0).mean()) if len(shared) else 1.0,
        first_blocks=_log_normal(fresh[starts]),
        turn_blocks=_log_normal(fresh[~starts]),
        gap_seconds=_log_normal(np.asarray(gaps)),
        output_tokens=_log_normal(trace.output_lengths),
        continues=tuple(chances) or (0.0,),
        num_tenants=num_tenants,
    )


def _arrivals(trace: Trace) -> tuple[float, float]:
    """Requests per second, and the deviation of the time between them over its mean; in the order of arrival."""
    gaps = np.diff(np.sort(trace.timestamps)) / 1000
    mean = float(gaps.mean()) if len(gaps) else 0.0
    return (1 / mean, float(min(gaps.std() / mean, 20.0))) if mean > 0 else (1.0, 1.0)


def _classify(trace: Trace) -> tuple[np.ndarray, np.ndarray, list[float], np.ndarray]:
    """For each request its turn, its new blocks, and the length of the prefix it shares; also the gaps between turns."""
    last_user: dict[int, int] = {}  # block -> the request that used it last
    turns = np.zeros(len(trace), np.int64)
    fresh = np.zeros(len(trace), np.int64)
    stems = np.zeros(len(trace), np.int64)
    gaps: list[float] = []
    for index, request in enumerate(trace):
        ids = request.ids.tolist()
        known = next((at for at, block in enumerate(ids) if block not in last_user), len(ids))
        fresh[index] = len(ids) - known
        if known:
            before = last_user[ids[known - 1]]
            length = int(trace.offsets[before + 1] - trace.offsets[before])
            if known >= length - 1 and len(ids) > known:  # all but the partial last block
                turns[index] = turns[before] + 1
                gaps.append(max((request.timestamp - trace.timestamps[before]) / 1000, 0.01))
            else:
                stems[index] = known
        for block in ids:
            last_user[block] = index
    return turns, fresh, gaps, stems


def _log_normal(values: np.ndarray) -> tuple[float, float]:
    positive = values[values > 0]
    if not len(positive):
        return 0.0, 0.0
    logs = np.log(positive)
    return float(logs.mean()), float(logs.std())


def synthesise(model: WorkloadModel, num_requests: int, *, seed: int = 0, name: str = "synthetic") -> Trace:
    """A trace of so many requests. The same arguments give the same trace.

    >>> synthesise(WorkloadModel(), 100).num_ids == synthesise(WorkloadModel(), 100).num_ids
    True
    """
    random = np.random.default_rng(check_int(seed, "seed", 0, 2**63, InvalidArgumentError))
    builder = TraceBuilder(name, unit=model.unit, format="synthetic")
    weights = 1.0 / np.arange(1, model.num_stems + 1) ** model.stem_skew
    stem_lengths = 1 + random.poisson(max(0.0, model.stem_blocks - 1), model.num_stems)
    ends = np.cumsum(stem_lengths)
    next_id = int(ends[-1])
    mean_turns = _expected_turns(model.continues)
    waiting: list[tuple[float, int, int, list[int], int]] = []  # (time, serial, turn, blocks so far, tenant)
    next_start, serial = 0.0, 0
    while len(builder) < num_requests:
        if waiting and waiting[0][0] <= next_start:
            time, _, turn, blocks, tenant = heappop(waiting)
            new_blocks = model.turn_blocks
        else:
            time, turn, blocks = next_start, 0, []
            next_start += _arrival_gap(random, model.rate / mean_turns, model.burstiness)
            shares = random.random() >= model.unshared
            stem = int(random.choice(model.num_stems, p=weights / weights.sum())) if shares or model.num_tenants else 0
            tenant = stem % max(1, model.num_tenants)
            if shares:
                blocks = list(range(int(ends[stem] - stem_lengths[stem]), int(ends[stem])))
            new_blocks = model.first_blocks
        count = max(1, round(_draw(random, new_blocks, MAX_BLOCKS)))
        blocks = [*blocks, *range(next_id, next_id + count)]
        next_id += count
        tokens = len(blocks) * model.unit - int(random.integers(model.unit))
        output = max(1, round(_draw(random, model.output_tokens, MAX_LENGTH)))
        who = f"tenant {tenant + 1}" if model.num_tenants else None
        if time * 1000 > MAX_TIMESTAMP:
            raise TraceError(f"at rate={model.rate:g} a request comes after {time:.3g} s: no trace can hold such times")
        builder.add(time * 1000, blocks, tokens, output, tenant=who)
        if random.random() < model.continues[min(turn, len(model.continues) - 1)]:
            serial += 1
            if tokens % model.unit:
                blocks = blocks[:-1]  # the next turn fills up the partial block, so that it gets another id
            gap = _draw(random, model.gap_seconds, MAX_GAP)
            heappush(waiting, (time + gap, serial, turn + 1, blocks, tenant))
    return builder.build()


def _draw(random: np.random.Generator, of: tuple[float, float], most: int) -> float:
    """A number whose logarithm has this mean and deviation."""
    drawn = float(random.lognormal(*of))
    if drawn > most:
        raise TraceError(
            f"{drawn:.3g} was drawn for exp({of[0]:.1f} ± {of[1]:.1f}): no trace can hold what varies so much"
        )
    return drawn


def _expected_turns(continues: tuple[float, ...]) -> float:
    turns, reached = 1.0, 1.0
    for chance in continues[:-1]:
        reached *= chance
        turns += reached
    return turns + reached * continues[-1] / (1 - continues[-1])


def _arrival_gap(random: np.random.Generator, rate: float, burstiness: float) -> float:
    shape = 1 / max(burstiness, 0.05) ** 2
    return float(random.gamma(shape, 1 / (rate * shape)))
