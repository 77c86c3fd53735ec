"""ferrum's paged manager: K and V token by token, prefixes with last logits, sharing, swapping, collection. Needs torch."""

import torch

from kvpool import create_kv_cache_manager
from kvpool.compat import AllocationRequest, PagedKvCacheConfig, PagedKvCacheManager

config = PagedKvCacheConfig(
    block_size=16, max_gpu_blocks=64, max_cpu_blocks=32, num_layers=2, num_heads=8, head_dim=64, max_prefixes=8
)
cache = PagedKvCacheManager("cpu", config)
system = list(range(64))


def request(name: str, initial_tokens: int, tokens: list[int] | None = None) -> AllocationRequest:
    return AllocationRequest(
        name, initial_tokens, max_sequence_length=2048, num_layers=2, num_heads=8, head_dim=64, device="cpu", dtype="fp16",
        tokens=tokens,
    )  # fmt: skip


# K and V are written one token at a time, through the block table, and gathered in order.
first = cache.allocate(request("first", 64, system))
numbers = torch.randn(2, 64, 512).half()
for layer in range(2):
    for position in range(64):
        cache.write_kv(first, layer, position, numbers[layer, position], -numbers[layer, position])
keys, values = cache.read_kv(first, 1, 0, 64)
print("written:", len(keys), "numbers of layer 1 in blocks", first.get_physical_blocks())
assert torch.equal(keys, numbers[1].float().reshape(-1))
assert torch.equal(values, -keys)
print("statistics:", first.stats()[:4])

# A prefix is stored once its keys and values are written, with the logits behind it; it outlives its request.
cache.store_prefix(system, first, last_logits=[0.1, 0.9])
print("stored:", cache.prefix_cache_stats().total_cached_tokens, "tokens while the request lives")
cache.deallocate("first")
found = cache.find_prefix(system)
assert found is not None
print("exact:", found.num_tokens, "tokens, logits", found.last_logits)
longer = cache.find_prefix([*system, 7, 8])
assert longer is not None
assert longer.last_logits is None  # they belong to the exact prompt only
print("longer:", longer.num_tokens, "tokens, logits", longer.last_logits)
assert cache.find_prefix([9, 9, 9]) is None

# The same prompt again: everything comes from the cache, byte for byte, and no forward pass is needed.
again = cache.allocate(request("again", 64, system))
print("again:", again.handle.num_cached_tokens, "of", len(system), "cached, logits", again.handle.last_logits)
assert torch.equal(cache.read_kv(again, 1, 0, 64)[0], keys)

# Sharing 40 tokens shares two full blocks; the third is cut in two, so exactly that one is copied, with its bytes.
shared = cache.share_prefix("again", "shared", num_tokens=40)
cache.extend(shared, 1)
copies = cache.manager.take_copies()
print("share:", again.get_physical_blocks(), shared.get_physical_blocks(), "copied", len(copies), "block")
cache.plane.run_copies(copies)
cache.write_kv(shared, 1, 40, [1.0] * 512, [2.0] * 512)
assert torch.equal(cache.read_kv(shared, 1, 0, 40)[0], keys[: 40 * 512])
assert torch.equal(cache.read_kv(again, 1, 0, 64)[0], keys)  # the other one does not see that write

# Swapping moves requests: the table forgets GPU ids at once and gets new ones back, the bytes travel with it.
other = cache.allocate(request("other", 100))
travels = torch.randn(100, 8, 64).half()
cache.write(other, 0, 0, travels, travels)
free_before = cache.free_block_count()
out = cache.swap_out(other)
print(
    "swap out:",
    out,
    "copies,",
    cache.free_block_count() - free_before,
    "blocks freed, table",
    other.get_physical_blocks(),
)
cache.allocate(request("meanwhile", 100))
cache.write("meanwhile", 0, 0, torch.zeros(100, 8, 64), torch.zeros(100, 8, 64))
back = cache.swap_in(other)
intact = torch.equal(cache.read(other, 0)[0], travels)
print("swap in:", back, "copies, intact:", intact)
assert intact

# Pressure is measured against the watermarks, not guessed: a pool that is mostly free is LOW.
print("pressure:", cache.check_pressure().name, "handles:", [name for name, _ in cache.list_handles()])
for name, _ in cache.list_handles():
    cache.deallocate(name)
assert cache.get_handle("again") is None

# Evicting and clearing really free blocks, and the statistics count hits and misses in one unit.
print("evicted:", cache.evict_prefixes(2), "prefix,", cache.prefix_cache_stats())
cache.clear_prefix_cache()
print("manager:", cache.stats())
assert cache.free_block_count() == cache.total_blocks() == 64

# Garbage collection frees what has outlived its time to live, and says how many bytes that were.
timed = create_kv_cache_manager(num_layers=2, num_heads=8, head_dim=64, num_blocks=8, default_ttl=1e-9)
timed.allocate("brief", tokens=system)
timed.store_prefix(system, "brief")
timed.deallocate("brief")
collected = timed.gc()
print("collected:", collected.caches_freed, "blocks,", collected.memory_freed, "bytes")
for manager in (cache.manager, timed.manager):
    manager.check()
