"""PyAgent's KV cache manager, as its documentation promises it: paging, transfers, pressure, defragmentation. Needs torch.

Keys and values are real: what is written before a transfer, a swap or a move is read back and compared.
"""

import torch

from kvpool import CopyKind, PressureChange
from kvpool.compat.pyagent import KVCacheAllocator, KVCacheConfig, KVCacheManager, KVCacheTransfer
from kvpool.errors import DuplicateRequestError, NeverFitsError, UnknownRequestError

config = KVCacheConfig(
    num_layers=4, num_heads=8, head_dim=64, block_size=16, num_gpu_blocks=100, num_cpu_blocks=20, device="cpu"
)
cache = KVCacheManager(config)
levels: list[str] = []


def note_pressure(change: PressureChange) -> None:
    levels.append(change.level.name)


def fill(request_id: str, num_tokens: int) -> torch.Tensor:
    """Stands for the model: random keys and values of every layer, [layer, K or V, token, head, element]."""
    made = torch.randn(config.num_layers, 2, num_tokens, config.num_heads, config.head_dim).half()
    for layer, (k, v) in enumerate(made):
        cache.write(request_id, layer, 0, k, v)
    return made


def is_intact(request_id: str, made: torch.Tensor) -> bool:
    """Whether every layer still holds what was written."""
    found = (cache.read(request_id, layer, 0, made.shape[2]) for layer in range(config.num_layers))
    return all(torch.equal(k, made[i, 0]) and torch.equal(v, made[i, 1]) for i, (k, v) in enumerate(found))


cache.on_memory_pressure(note_pressure)
print("bytes:", config.kv_size_per_token, "a token,", config.block_size_bytes, "a block")

# 40 tokens take three blocks, the same ids in every layer; a fresh pool is all free.
blocks = cache.allocate("chat", 40)
print("40 tokens:", blocks.gpu_blocks, "usage", cache.usage)
chat = fill("chat", 40)

# Extending really grows: 8 more tokens fill the third block, the next one takes a fourth.
assert cache.extend("chat", 8).num_blocks == 0
cache.extend("chat", 1)
print("49 tokens:", cache.get_block_table("chat", 0), "free", cache.get_num_free_blocks())

# Running out is an error that changes nothing, and the answer to "does it fit" says whether waiting helps.
print("1000 tokens:", cache.can_allocate(1000).status.value, "· 2000 tokens:", cache.can_allocate(2000).status.value)
assert not cache.can_allocate(1600)
try:
    cache.allocate("huge", 2000)
except NeverFitsError as error:
    print("refused:", error)
assert cache.get_num_free_blocks() == 96

# A request id is used once at a time, and an unknown one is an error, not an empty table.
for mistake, expected in ((lambda: cache.allocate("chat", 1), DuplicateRequestError),
                          (lambda: cache.get_block_table("nobody", 0), UnknownRequestError)):  # fmt: skip
    try:
        mistake()
    except expected as error:
        print("refused:", error)

# Callbacks tell the level whenever it changes, in both directions.
cache.allocate("batch", 92 * 16)
cache.free("batch")
print("pressure:", " -> ".join(levels))

# Swapping moves a request: table, references and bytes. Its blocks then stand on the CPU's side of the list.
cache.swap_out("chat")
print("swapped out:", cache.get_blocks("chat"))
cache.allocate("other", 64)
fill("other", 64)  # others write into the blocks that it left
cache.swap_in("chat")
print("swapped in:", cache.get_blocks("chat").gpu_blocks, "intact:", is_intact("chat", chat))
assert is_intact("chat", chat)

# Defragmentation is real: live blocks move to the lowest ids, and their bytes with them.
cache.free("other")
before = cache.get_block_table("chat")
moved = cache.manager.defragment()
copies = cache.manager.take_copies()
cache.plane.run_copies(copies)
pairs = [(op.src.tolist(), op.dst.tolist()) for op in copies if op.kind is CopyKind.DEFRAGMENT]
print("defragmented:", before, "->", cache.get_block_table("chat"), f"({moved} copies, {pairs})")
assert is_intact("chat", chat)
cache.free("chat")
cache.manager.check()
print("free at the end:", cache.get_num_free_blocks(), "of 100")

# Below the manager: single blocks of single layers, with zeroed tensors of their own, and transfers between them.
allocator, transfer = KVCacheAllocator(config), KVCacheTransfer(config)
source, host, target = allocator.allocate_gpu_block(0), allocator.allocate_cpu_block(0), allocator.allocate_gpu_block(0)
assert None not in (source, host, target)  # None would mean that no block is free
source.key_cache.copy_(chat[0, 0, :16])
source.value_cache.copy_(chat[0, 1, :16])
source.num_tokens, source.request_id = 16, "chat"
transfer.swap_out(source, host)
transfer.swap_in(host, target)
same = torch.equal(target.key_cache, source.key_cache) and torch.equal(target.value_cache, source.value_cache)
print("block", source.block_id, "by way of the host to block", target.block_id, "intact:", same, target.request_id)
assert same
transfer.copy_blocks([source], [host])
for block in (source, host, target):
    allocator.free_block(block)
print("allocator:", allocator.get_num_free_gpu_blocks(), "GPU,", allocator.get_num_free_cpu_blocks(), "CPU blocks free")
