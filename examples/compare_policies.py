"""Would another eviction policy, or twice the memory, help this workload? Make one, replay it, read the answer."""

from kvpool.replay import ReplayConfig, replay
from kvpool.replay.bounds import run_model
from kvpool.replay.synth import WorkloadModel, synthesise

# Chats that continue after a while, below a few shared prompts. A real trace: kvpool.replay.read_trace("trace.jsonl.gz")
trace = synthesise(WorkloadModel(rate=5.0), num_requests=2_000, seed=1)
print(f"{len(trace):,} requests, {trace.num_ids:,} blocks of {trace.unit} tokens, {trace.num_unique:,} different")

for capacity in (2_000, 4_000, 8_000):
    ratios = {policy: replay(trace, ReplayConfig(policy, capacity)).hit_ratio for policy in ("lru", "adaptive")}
    ratios["optimum"] = run_model(trace, "optimum", capacity).hit_ratio
    print(f"{capacity:,} blocks: " + ", ".join(f"{name} {ratio:.3f}" for name, ratio in ratios.items()))
