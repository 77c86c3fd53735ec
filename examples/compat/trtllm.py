"""TensorRT-LLM's pools, blocks and events: the hierarchy, reuse, retention by priority, offloading, the stream. Needs torch.

Pools hold real keys and values: what moves to the secondary pool is read back after its return and compared.
"""

from collections import Counter
from typing import Any

import torch

from kvpool import Tier
from kvpool.compat import KvCacheRetentionConfig, TokenRangeRetentionConfig, TrtLlmKVCacheManager

# Two windows and two numbers of KV heads: a block manager (layer group) for each combination, pools by block size.
hierarchy = TrtLlmKVCacheManager(
    num_kv_heads_per_layer=[8, 8, 4, 4], size_per_head=64, tokens_per_block=32, blocks_in_primary_pool=64,
    max_attention_window=[None, 256], max_seq_len=4096,
)  # fmt: skip
for group in hierarchy.manager.config.groups:
    print(f"window {group.window or 4096}: layers {group.layers}, {group.block_bytes} bytes a block, pool {group.pool}")
for pool in hierarchy.manager.config.pools:
    print(f"pool {pool.index}: {pool.num_blocks[Tier.GPU]} blocks of {pool.block_bytes} bytes, groups {pool.groups}")

cache = TrtLlmKVCacheManager(
    num_kv_heads_per_layer=[8] * 4, size_per_head=64, tokens_per_block=32, blocks_in_primary_pool=8,
    blocks_in_secondary_pool=4, event_buffer_max_size=1024, attention_dp_rank=0, watermark=0.0, device="cpu",
)  # fmt: skip
seen: Counter[str] = Counter()


def compute(request_id: str, start: int, num_tokens: int) -> torch.Tensor:
    """Stands for the model: K and V of every layer from a position on, [layer, K or V, token, head, element]."""
    made = torch.randn(4, 2, num_tokens, 8, 64).half()
    for layer, (k, v) in enumerate(made):
        cache.write(request_id, layer, start, k, v)
    return made


def is_intact(request_id: str, made: torch.Tensor) -> bool:
    found = (cache.read(request_id, layer, 0, made.shape[2]) for layer in range(4))
    return all(torch.equal(k, made[i, 0]) and torch.equal(v, made[i, 1]) for i, (k, v) in enumerate(found))


def show(title: str) -> None:
    for event in cache.get_latest_events(timeout_ms=0):
        data = event["data"]
        seen[data["type"]] += 1
        if changed := data.get("cache_level") or data.get("priority"):
            kind = "level" if data["cache_level"] else "priority"
            detail = f"{kind} {changed['old_value']} -> {changed['new_value']}"
        elif data["type"] == "created":
            detail = f"blocks per level {data['num_blocks_per_cache_level']}"
        else:
            detail = f"{len(data.get('blocks') or data['block_hashes'])} blocks"
        print(f"  {title}: event {event['event_id']} {data['type']}, {detail}")


# Created: the pools, with their blocks per level. Stored: full blocks, as soon as the context is computed.
show("start")
system, question = list(range(64)), list(range(1000, 1064))
keep_system = KvCacheRetentionConfig([TokenRangeRetentionConfig(0, 64, priority=90)], decode_retention_priority=10)
print("prepopulated:", cache.add_sequence("one", system + question, keep_system))
data = compute("one", 0, 128)
cache.store_context_blocks("one")
show("context")

# Another request with the same system prompt reuses it while the first still runs.
print("prepopulated:", cache.add_sequence("two", system + [7] * 32), "intact:", is_intact("two", data[:, :, :64]))

# Speculative tokens come and go; a block filled by generated tokens is stored as well.
for _ in range(34):
    cache.add_token("one")
cache.rewind_kv_cache("one", 2)
compute("one", 128, 32)
cache.store_new_block("one", list(range(2000, 2032)))
show("generated")

# Released: the blocks stay. The retention changes their priorities: updated.
cache.remove_sequence("one")
show("released")
cache.remove_sequence("two")

# New work evicts the lowest priority first: it moves to the secondary pool (updated), and leaves it later (removed). A
# sequence that ends with its tokens stores them then: all but the last, which was sampled but never computed.
for name in ("three", "four", "five"):
    tokens = [ord(name[1])] * 128
    cache.add_sequence(name, tokens)
    compute(name, 0, 128)
    cache.remove_sequence(name, [*tokens, 1])
    show(name)
print("system prompt kept:", cache.manager.match_prefix([*system, 1]).num_tokens, "of", len(system), "tokens")
print("events:", dict(seen))
assert set(seen) == {"created", "stored", "updated", "removed"}

# What the blocks hold came along, wherever they have been.
cache.manager.offload(8)
cache.add_sequence("back", [*system, 1])
print("onboarded:", cache.manager.stats().onboarded_blocks, "blocks, intact:", is_intact("back", data[:, :, :64]))
assert is_intact("back", data[:, :, :64])
cache.remove_sequence("back")

# Blocks of another LoRA, salt or prompt table (extra ids) are others', and the events say so.
key: dict[str, Any] = dict(lora_task_id=7, cache_salt="tenant", extra_ids=[0] * 32 + [5] * 32)
cache.get_latest_events()
print("prepopulated:", cache.add_sequence("tuned", system, **key))
cache.remove_sequence("tuned", [*system, 1])
(event,) = (event for event in cache.get_latest_events() if event["data"]["type"] == "stored")
block = event["data"]["blocks"][-1]
print("event:", {name: event[name] for name in ("attention_dp_rank", "hash_algo", "layer_group_id")},
      {name: block[name] for name in ("lora_id", "cache_salt", "priority")}, block["tokens"][0])  # fmt: skip
print("statistics:", cache.get_kv_cache_stats())
cache.manager.check()
