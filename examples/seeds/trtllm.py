"""TensorRT-LLM's pools, blocks and events: the hierarchy, reuse, retention by priority, offloading, the stream."""

from collections import Counter

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
    blocks_in_secondary_pool=4, event_buffer_max_size=1024, watermark=0.0,
)  # fmt: skip
seen: Counter[str] = Counter()


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
cache.store_context_blocks("one")
show("context")

# Another request with the same system prompt reuses it while the first still runs.
print("prepopulated:", cache.add_sequence("two", system + [7] * 32))

# Speculative tokens come and go; a block filled by generated tokens is stored as well.
for _ in range(34):
    cache.add_token("one")
cache.rewind_kv_cache("one", 2)
cache.store_new_block("one", list(range(2000, 2032)))
show("generated")

# Released: the blocks stay. The retention changes their priorities: updated.
cache.remove_sequence("one")
show("released")
cache.remove_sequence("two")

# New work evicts the lowest priority first: it moves to the secondary pool (updated), and leaves it later (removed).
for name in ("three", "four", "five"):
    cache.add_sequence(name, [ord(name[1])] * 128)
    cache.store_context_blocks(name)
    cache.remove_sequence(name)
    show(name)
print("system prompt kept:", cache.manager.match_prefix([*system, 1]).num_tokens, "of", len(system), "tokens")
print("events:", dict(seen))
assert set(seen) == {"created", "stored", "updated", "removed"}
print("statistics:", cache.get_kv_cache_stats())
cache.manager.check()
