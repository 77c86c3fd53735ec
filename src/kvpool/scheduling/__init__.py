"""Who runs next: queues, admission, preemption and batch plans over a `KVCacheManager`; numpy only."""

from __future__ import annotations

from kvpool.scheduling.batch_plan import BatchPlan
from kvpool.scheduling.cost_model import CostModel, LinearCostModel
from kvpool.scheduling.policies import (
    POLICIES,
    FairShare,
    FirstComeFirstServed,
    LongestPrefixMatch,
    Priority,
    RankedPolicy,
    SchedulingPolicy,
    ShortestRemaining,
    SoonestFirstToken,
)
from kvpool.scheduling.queues import SchedulerStats
from kvpool.scheduling.request import Finished, FinishReason, Output, Request, ScheduledSequence, SequenceState
from kvpool.scheduling.results import Fork
from kvpool.scheduling.scheduler import Scheduler, StepResult
from kvpool.scheduling.scheduler_config import CapacityMode, PreemptionMode, SchedulerConfig

__all__ = [
    "BatchPlan",
    "CapacityMode",
    "CostModel",
    "FairShare",
    "FinishReason",
    "Finished",
    "FirstComeFirstServed",
    "Fork",
    "RankedPolicy",
    "LinearCostModel",
    "LongestPrefixMatch",
    "Output",
    "POLICIES",
    "PreemptionMode",
    "Priority",
    "Request",
    "ScheduledSequence",
    "Scheduler",
    "SchedulerConfig",
    "SchedulerStats",
    "SchedulingPolicy",
    "SequenceState",
    "ShortestRemaining",
    "SoonestFirstToken",
    "StepResult",
]
