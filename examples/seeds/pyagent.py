"""PyAgent's KV cache manager, as its documentation promises it: paging, growth, pressure, and defragmentation too."""

from kvpool import CopyKind, PressureChange, create_kv_cache_manager
from kvpool.errors import DuplicateRequestError, NeverFitsError, UnknownRequestError

cache = create_kv_cache_manager(num_layers=4, num_heads=8, head_dim=64, num_blocks=100, block_size=16)
levels: list[str] = []


def note_pressure(change: PressureChange) -> None:
    levels.append(change.level.name)


cache.on_memory_pressure(note_pressure)

# 40 tokens take three blocks, the same ids in every layer of a group; a fresh pool is all free.
cache.allocate("chat", 40)
print("40 tokens:", cache.get_block_table("chat", layer_idx=3), "usage", cache.usage)

# Extending really grows: 8 more tokens fill the third block, the next one takes a fourth.
cache.extend("chat", 8)
assert len(cache.get_block_table("chat", 0)) == 3
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
cache.free("chat")
cache.free("batch")
print("pressure:", " -> ".join(levels))

# Defragmentation is real: live blocks move to the lowest ids, and the copies say which bytes to move.
for name in ("a", "b", "c"):
    cache.allocate(name, 32)
cache.free("b")
print("before:", cache.get_block_table("a"), cache.get_block_table("c"))
moved = cache.manager.defragment()
(copy,) = (op for op in cache.manager.take_copies() if op.kind is CopyKind.DEFRAGMENT)
print("after: ", cache.get_block_table("a"), cache.get_block_table("c"), f"({moved} copies, {copy.src} -> {copy.dst})")
cache.free("a")
cache.free("c")
cache.manager.check()
print("free at the end:", cache.get_num_free_blocks(), "of 100")
