"""vLLM V0's block manager: a scheduler's questions, copy-on-write, lookahead slots, swapping that keeps sharing."""

from kvpool import AllocStatus
from kvpool.compat import BlockManager

blocks = BlockManager(block_size=16, num_gpu_blocks=32, num_cpu_blocks=16, watermark=0.01)
prompt = list(range(40))

# OK now, LATER when others have finished, NEVER in this pool. The watermark is at least one block.
blocks.allocate("running", list(range(500, 500 + 64)))
for num_tokens in (40, 31 * 16, 32 * 16):
    print("admission of", num_tokens, "tokens:", blocks.can_allocate(list(range(num_tokens))).name)
blocks.free("running")

# Parallel sampling: the prompt is computed once, the samples share its blocks.
blocks.allocate("s0", prompt)
blocks.mark_blocks_as_computed("s0", len(prompt))
blocks.fork("s0", "s1")
blocks.fork("s0", "s2")
print("shared:", blocks.get_common_computed_block_ids(["s0", "s1", "s2"]), "free", blocks.get_num_free_gpu_blocks())

# Whoever writes into the shared tail gets a copy of that one block; the last one keeps the original.
copies = {seq: blocks.append_slots(seq) for seq in ("s0", "s1", "s2")}
print("copies:", copies)
assert [len(pairs) for pairs in copies.values()] == [1, 1, 0]
for seq, token in (("s0", 100), ("s1", 101), ("s2", 102)):
    blocks.mark_blocks_as_computed(seq, [token])

# Lookahead slots for drafts also count as a write: a fork's tail is copied before drafts go there.
blocks.fork("s2", "s3")
print("lookahead:", blocks.append_slots("s3", num_tokens=0, num_lookahead_slots=4))

# Swapping a group moves shared blocks once and keeps them shared; the tables come back complete.
group = ["s0", "s1", "s2", "s3"]
held = {block for seq in group for block in blocks.get_block_table(seq)}
out = blocks.swap_out(group)
print("swapped out:", len(out), "blocks for", len(held), "held; table now", blocks.get_block_table("s0"))
assert blocks.can_swap_in(group) is AllocStatus.OK
blocks.swap_in(group)
assert None not in blocks.get_block_table("s0")
print("shared again:", blocks.get_common_computed_block_ids(group))

# What finished requests computed stays cached, found by its tokens, and counts as free.
for seq in group:
    blocks.free(seq)
print("free:", blocks.get_num_free_gpu_blocks(), "GPU,", blocks.get_num_free_cpu_blocks(), "CPU")
blocks.allocate("again", prompt)
print("cached tokens:", blocks.get_num_cached_tokens("again"), "hit rate", f"{blocks.get_prefix_cache_hit_rate():.2f}")
print("reset while running:", blocks.reset_prefix_cache(), end="; ")
blocks.free("again")
print("when idle:", blocks.reset_prefix_cache())

# A fork of a sequence of 20,000 blocks is no recursion.
long = BlockManager(block_size=1, num_gpu_blocks=20_100)
long.allocate("long", list(range(20_000)))
long.fork("long", "branch")
long.manager.check()
blocks.manager.check()
print("forked a sequence of", len(long.get_block_table("branch")), "blocks")
