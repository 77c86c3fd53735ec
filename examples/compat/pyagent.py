"""PyAgent's KV cache manager as its document has it: paging, pressure, swaps, defragmentation, single blocks. Needs torch."""

import numpy as np

from kvpool.compat import KVCacheAllocator, KVCacheConfig, KVCacheManager, KVCacheTransfer
from kvpool.errors import OutOfBlocksError

config = KVCacheConfig(
    num_layers=4, num_heads=8, head_dim=64, block_size=16, num_gpu_blocks=100, num_cpu_blocks=20, device="cpu"
)
cache = KVCacheManager(config)
cache.on_memory_pressure(lambda: print("pressure: critical"))
print("bytes:", config.kv_size_per_token, "a token,", config.block_size_bytes, "a block")

# 40 tokens take three blocks, the same ids in every layer. The ninth token more takes a fourth.
print("40 tokens:", cache.allocate("chat", 40).gpu_blocks, "usage", cache.usage)
numbers = np.random.default_rng(0).standard_normal((40, 8, 64)).astype(np.float16)
for layer in range(4):  # stands for the model
    cache.write("chat", layer, 0, numbers + layer, -numbers)
assert cache.extend("chat", 8).num_blocks == 0
cache.extend("chat", 1)
print("49 tokens:", cache.get_block_table("chat", 0), "free", cache.get_num_free_blocks())

# Running out is an error that changes nothing; a table never mixes blocks of both sides, so requests move as a whole.
cache.allocate("batch", 92 * 16)
assert not cache.can_allocate(80)
try:
    cache.allocate("more", 80)
except OutOfBlocksError as error:
    print("refused:", error)
cache.swap_out("chat")
print("swapped out:", cache.get_blocks("chat"))
cache.allocate("more", 80)
cache.free("batch")
cache.swap_in("chat")

# Defragmentation moves blocks and bytes to the lowest ids.
before = cache.get_block_table("chat", 0)
cache.free("more")
cache.manager.cache.defragment()
found = cache.read("chat", 3, 0, 40)[0].numpy()
print("defragmented:", before, "->", cache.get_block_table("chat", 0), "intact:", np.array_equal(found, numbers + 3))
assert np.array_equal(found, numbers + 3)

# Single blocks of single layers, as numpy arrays, and transfers between them.
allocator, transfer = KVCacheAllocator(config), KVCacheTransfer(config)
block, host = allocator.allocate_gpu_block(0), allocator.allocate_cpu_block(0)
np.copyto(block.key_cache, numbers[:16])
transfer.swap_out(block, host)
assert np.array_equal(host.key_cache, numbers[:16])
allocator.free_block(block)
allocator.free_block(host)
cache.free("chat")
cache.manager.check()
print("free at the end:", cache.get_num_free_blocks(), "of 100;", allocator.get_num_free_gpu_blocks(), "single blocks")
