"""An engine of your own in seventy lines: the scheduler decides, this loop obeys. The "model" adds up tokens."""

import numpy as np

from kvpool import KVCacheConfig, KVCacheManager, LayerSpec, Tier
from kvpool.scheduling import BatchPlan, Request, Scheduler, SchedulerConfig

VOCABULARY = 1000
manager = KVCacheManager(
    KVCacheConfig([LayerSpec(kv_heads=1, head_dim=8)], block_size=4, gpu_blocks=12, host_blocks=24)
)  # far too small, so that requests are swapped out and come back
scheduler = Scheduler(manager, SchedulerConfig(max_tokens_per_step=32, max_sequences=8, preemption="swap"))

# What a device would hold: "keys and values" (here the token ids themselves) of each tier, and the newest token by lane.
memory = {tier: np.zeros((manager.config.num_blocks(tier), 4), np.int32) for tier in (Tier.GPU, Tier.HOST)}
newest = np.zeros(scheduler.config.max_sequences, np.int32)


def run_copies(plan: BatchPlan) -> None:
    """What comes before the forward pass, and also where there is none: an empty plan may have copies."""
    for op in plan.copies:
        memory[op.dst_tier][op.dst, : op.num_tokens] = memory[op.src_tier][op.src, : op.num_tokens]


def forward(plan: BatchPlan) -> np.ndarray:
    """Runs one step on the "device": all rows of the plan as one flat batch."""
    row_of_token = np.repeat(np.arange(len(plan.sequences)), np.diff(plan.query_start))
    known = plan.token_ids >= 0  # the others were sampled by a step whose result the host has not seen yet
    inputs = np.where(known, plan.token_ids, newest[plan.lanes[row_of_token]])
    written = plan.slots[0] >= 0
    memory[Tier.GPU].reshape(-1)[plan.slots[0][written]] = inputs[written]
    table = plan.batch.csr()
    samples = []
    for row in plan.sampling_rows:
        blocks = table.indices[table.indptr[row] : table.indptr[row + 1]]
        history = memory[Tier.GPU][blocks].reshape(-1)[: plan.kv_lengths[row]]
        samples.append(int(history.sum()) % VOCABULARY)
    newest[plan.lanes[plan.sampling_rows]] = samples
    return np.array(samples, np.int32)


for number in range(12):
    system_prompt = list(range(16))  # computed once, shared by all
    scheduler.add(Request(number, [*system_prompt, number, number], max_new_tokens=20))

outputs: dict[object, list[int]] = {}
flying = None  # the step on the device, whose samples have not come back
while scheduler.has_work:
    plan = scheduler.step()  # while the device still works on the one before
    run_copies(plan)
    launched = None if plan.is_empty else (plan, forward(plan))
    if flying is not None:
        for done in scheduler.complete(*flying).finished:
            outputs[done.request.id] = done.token_ids.tolist()
    flying = launched


def alone(tokens: list[int]) -> list[int]:
    """What the "model" says without a scheduler."""
    for _ in range(20):
        tokens.append(sum(tokens) % VOCABULARY)
    return tokens[-20:]


stats = scheduler.stats
right = all(outputs[number] == alone([*range(16), number, number]) for number in outputs)
print(f"{len(outputs)} requests are as they would be alone: {right}")
print(f"{stats.finished} requests in {stats.steps} steps, {stats.cached_tokens} prompt tokens from the cache")
print(f"{stats.prefill_tokens} computed, {stats.preemptions} preemptions, {stats.stalls} stalls")
