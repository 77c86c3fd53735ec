"""TensorRT-LLM's pools, blocks and events: the hierarchy, reuse, retention by priority, offloading. Needs torch."""

import torch

from kvpool.compat import KvCacheRetentionConfig, TokenRangeRetentionConfig, TrtLlmKVCacheManager

cache = TrtLlmKVCacheManager(
    num_kv_heads_per_layer=[8] * 4,
    size_per_head=64,
    tokens_per_block=32,
    blocks_in_primary_pool=8,
    blocks_in_secondary_pool=4,
    event_buffer_max_size=1024,
    watermark=0.0,
    device="cpu",
)
for window in cache.block_manager.window_block_managers:
    for pool in window.pools:
        print(
            f"window {window.window_size}: {pool.num_primary_blocks} primary, {pool.num_secondary_blocks} secondary blocks"
        )

# A prompt whose system part is worth more than the rest. Its blocks can be reused as soon as they are stored.
system, question = list(range(64)), list(range(1000, 1064))
keep_system = KvCacheRetentionConfig([TokenRangeRetentionConfig(0, 64, priority=90)], decode_retention_priority=10)
cache.add_sequence("one", system + question, keep_system)
data = torch.randn(4, 2, 128, 8, 64).half()  # stands for the model: [layer, K or V, token, head, element]
for layer, (k, v) in enumerate(data):
    cache.write("one", layer, 0, k, v)
cache.store_context_blocks("one")
print("prepopulated:", cache.add_sequence("two", system + [7] * 32), "tokens of the second request")

# Speculative tokens come and go. Both sequences end, and what they stored stays.
for _ in range(4):
    cache.add_token("one")
cache.rewind_kv_cache("one", 4)
cache.remove_sequence("one")
cache.remove_sequence("two")

# New work evicts the lowest priority first: blocks move to the secondary pool, and leave that later.
for name in ("three", "four", "five"):
    tokens = [ord(name[1])] * 128
    cache.add_sequence(name, tokens)
    cache.remove_sequence(name, [*tokens, 1])  # all tokens; the last one was sampled but never computed
for event in cache.get_latest_events():
    blocks = event["data"].get("blocks") or event["data"].get("block_hashes") or [event["data"].get("block_hash")]
    print(f"event {event['event_id']}: {event['data']['type']}, {len(blocks)} of window {event['window_size']}")

# The system prompt is still there, wherever it has been, with its bytes.
cache.manager.cache.offload(8)
print("system prompt kept:", cache.add_sequence("back", [*system, 1]), "of", len(system), "tokens")
for layer, (k, v) in enumerate(data):
    found_k, found_v = cache.read("back", layer, 0, 64)
    assert torch.equal(torch.stack([found_k, found_v]), torch.stack([k, v])[:, :64])
print(cache.get_kv_cache_stats())
