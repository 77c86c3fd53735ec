"""ferrum's paged manager: prefixes with last logits, sharing, copy-on-write of one block, swapping, collection."""

from kvpool import create_kv_cache_manager

cache = create_kv_cache_manager(
    num_layers=2, num_heads=8, head_dim=64, num_blocks=64, block_size=16, num_cpu_blocks=32, offload_on_evict=False
)
system = list(range(64))

# A prefix is stored once its keys and values are written, with the logits behind it; it outlives its request.
cache.allocate("first", tokens=system)
cache.store_prefix(system, "first", last_logits=[0.1, 0.9])
cache.deallocate("first")
found = cache.find_prefix(system)
assert found is not None
print("exact:", found.num_tokens, "tokens, logits", found.last_logits)
longer = cache.find_prefix([*system, 7, 8])
assert longer is not None
assert longer.last_logits is None  # they belong to the exact prompt only
print("longer:", longer.num_tokens, "tokens, logits", longer.last_logits)
assert cache.find_prefix([9, 9, 9]) is None

# The same prompt again: everything comes from the cache, no forward pass is needed.
again = cache.allocate("again", tokens=system)
print("again:", again.num_cached_tokens, "of", len(system), "cached, logits", again.last_logits)

# Sharing 40 tokens shares two full blocks; the third is cut in two, so exactly that one is copied.
cache.manager.take_copies()
shared = cache.share_prefix("again", "shared", num_tokens=40)
cache.extend("shared", 1)
(copy,) = cache.manager.take_copies()
print("share:", cache.get_block_table("again"), cache.get_block_table("shared"), "copied", copy.num_blocks, "block")
assert copy.num_tokens == 8

# Swapping moves requests: the table forgets GPU ids at once and gets new ones back, the bytes travel with it.
cache.allocate("other", 100)
cache.manager.commit(cache.manager.get("other"), 100)
free_before = cache.get_num_free_blocks()
out = cache.swap_out("other")
freed = cache.get_num_free_blocks() - free_before
print("swap out:", out, "copies,", freed, "blocks freed, table", cache.get_block_table("other"))
back = cache.swap_in("other")
assert None not in cache.get_block_table("other")
print("swap in:", back, "copies, in order:", [(op.kind.value, op.num_blocks) for op in cache.manager.take_copies()])

# Pressure is measured, not guessed: a nearly empty pool is LOW.
print("pressure:", cache.check_pressure().name, "handles:", [name for name, _ in cache.list_handles()])
for name, _ in cache.list_handles():
    cache.deallocate(name)
assert cache.get_handle("again") is None

# Evicting and clearing really free blocks, and the statistics count hits and misses in one unit.
print("evicted:", cache.evict_prefixes(2), cache.prefix_cache_stats())
cache.clear_prefix_cache()
assert cache.get_num_free_blocks() == 64

# Garbage collection frees what has outlived its time to live, and says how many bytes that were.
timed = create_kv_cache_manager(num_layers=2, num_heads=8, head_dim=64, num_blocks=8, default_ttl=1e-9)
timed.allocate("brief", tokens=system)
timed.store_prefix(system, "brief")
timed.deallocate("brief")
collected = timed.gc()
print("collected:", collected.caches_freed, "blocks,", collected.memory_freed, "bytes")
for manager in (cache.manager, timed.manager):
    manager.check()
