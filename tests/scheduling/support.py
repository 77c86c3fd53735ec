"""Small pools and requests for the scheduler's tests."""

from __future__ import annotations

from typing import Any

from toy_engine import ToyEngine

from kvpool import KVCacheManager, LayerSpec
from kvpool.scheduling import BatchPlan, CostModel, Request, Scheduler, SchedulerConfig
from managers import Clock, make_manager

SLIDING = LayerSpec(kv_heads=1, head_dim=8, window=6)


def make_engine(
    manager: KVCacheManager | None = None,
    *,
    depth: int = 1,
    costs: CostModel | None = None,
    clock: Clock | None = None,
    drafts: tuple[int, ...] = (),
    link_steps: int = 0,
    **config: Any,
) -> ToyEngine:
    """An engine over a scheduler that serves in order of arrival; `config` is that of the scheduler."""
    options: dict[str, Any] = {"max_tokens_per_step": 64, "max_sequences": 8, "policy": "fcfs"} | config
    reports = {"reports_landings": True} if link_steps else {}
    scheduler = Scheduler(manager or make_manager(), SchedulerConfig(**options), costs, clock or Clock(), **reports)
    return ToyEngine(scheduler, depth, drafts, link_steps)


def request(name: str, num_tokens: int, max_new_tokens: int = 4, first: int = 0, **options: Any) -> Request:
    """A prompt of consecutive ids from `first` on."""
    return Request(name, range(first, first + num_tokens), max_new_tokens, **options)


def add(engine: ToyEngine, *requests: Request) -> None:
    for each in requests:
        engine.scheduler.add(each)


def names(sequences: Any) -> list[Any]:
    """The request ids of sequences."""
    return [sequence.request.id for sequence in sequences]


def tokens_of(plan: BatchPlan) -> dict[Any, int]:
    """How many tokens a plan computes for each request."""
    return {
        sequence.request.id: int(plan.query_start[row + 1] - plan.query_start[row])
        for row, sequence in enumerate(plan.sequences)
    }
