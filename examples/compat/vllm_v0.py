"""vLLM V0's block manager and cache engine: a scheduler's questions, copy-on-write, swaps, encoder tables. Needs torch.

The manager hands out pairs of block ids, the cache engine moves the bytes, and the example reads them back.
"""

import torch

from kvpool import AllocStatus, LayerSpec
from kvpool.compat import BlockManager, CacheEngine

layers = [LayerSpec(kv_heads=2, head_dim=32)] * 2
blocks = BlockManager(block_size=16, num_gpu_blocks=32, num_cpu_blocks=16, watermark=0.01, layers=layers, device="cpu")
engine = CacheEngine(blocks)
prompt = list(range(40))
written: dict[str, torch.Tensor] = {}


def compute(seq: str, num_tokens: int) -> None:
    """Stands for the model: K and V of the next tokens, [layer, K or V, token, head, element]."""
    made = torch.randn(2, 2, num_tokens, 2, 32).bfloat16()
    start = written[seq].shape[2] if seq in written else 0
    for layer, (k, v) in enumerate(made):
        blocks.write(seq, layer, start, k, v)
    written[seq] = torch.cat([written[seq], made], dim=2) if start else made


def is_intact(seq: str) -> bool:
    found = (blocks.read(seq, layer, 0, written[seq].shape[2]) for layer in range(2))
    return all(
        torch.equal(k, written[seq][i, 0]) and torch.equal(v, written[seq][i, 1]) for i, (k, v) in enumerate(found)
    )


# OK now, LATER when others have finished, NEVER in this pool. The watermark is at least one block.
blocks.allocate("running", list(range(500, 500 + 64)))
for num_tokens in (40, 31 * 16, 32 * 16):
    print("admission of", num_tokens, "tokens:", blocks.can_allocate(list(range(num_tokens))).name)
blocks.free("running")

# Parallel sampling: the prompt is computed once, the samples share its blocks.
blocks.allocate("s0", prompt)
compute("s0", 40)
blocks.mark_blocks_as_computed("s0", len(prompt))
for sample in ("s1", "s2"):
    blocks.fork("s0", sample)
    written[sample] = written["s0"]
print("shared:", blocks.get_common_computed_block_ids(["s0", "s1", "s2"]), "free", blocks.get_num_free_gpu_blocks())

# Whoever writes into the shared tail gets a copy of that one block; the last one keeps the original.
copies = {seq: blocks.append_slots(seq) for seq in ("s0", "s1", "s2")}
print("copies:", copies)
assert [len(pairs) for pairs in copies.values()] == [1, 1, 0]
for pairs in copies.values():
    engine.copy(pairs)
for seq, token in (("s0", 100), ("s1", 101), ("s2", 102)):
    compute(seq, 1)
    blocks.mark_blocks_as_computed(seq, [token])
print("three continuations of one prompt:", all(map(is_intact, ("s0", "s1", "s2"))))
assert all(map(is_intact, ("s0", "s1", "s2")))

# Lookahead slots for drafts also count as a write: a fork's tail is copied before drafts go there.
blocks.fork("s2", "s3")
written["s3"] = written["s2"]
lookahead = blocks.append_slots("s3", num_tokens=0, num_lookahead_slots=4)
engine.copy(lookahead)
print("lookahead:", lookahead)

# Swapping a group moves shared blocks once and keeps them shared; the tables come back complete, with their bytes.
group = ["s0", "s1", "s2", "s3"]
held = {block for seq in group for block in blocks.get_block_table(seq)}
out = blocks.swap_out(group)
engine.swap_out(out)
print("swapped out:", len(out), "blocks for", len(held), "held; table now", blocks.get_block_table("s0"))
blocks.allocate("meanwhile", list(range(900, 900 + 29 * 16)))  # takes every block that they left
compute("meanwhile", 29 * 16)
blocks.free("meanwhile")
assert blocks.can_swap_in(group) is AllocStatus.OK
engine.swap_in(blocks.swap_in(group))
assert None not in blocks.get_block_table("s0")
print("shared again:", blocks.get_common_computed_block_ids(group), "intact:", all(map(is_intact, group)))
assert all(map(is_intact, group))

# What finished requests computed stays cached, found by its tokens, and counts as free.
for seq in group:
    blocks.free(seq)
print("free:", blocks.get_num_free_gpu_blocks(), "GPU,", blocks.get_num_free_cpu_blocks(), "CPU")
blocks.allocate("again", prompt)
cached = blocks.get_num_cached_tokens("again")
print("cached tokens:", cached, "hit rate", f"{blocks.get_prefix_cache_hit_rate():.2f}")
assert torch.equal(blocks.read("again", 1, 0, cached)[0], written["s0"][1, 0, :cached])
print("reset while running:", blocks.reset_prefix_cache(), end="; ")
blocks.free("again")
print("when idle:", blocks.reset_prefix_cache())

# An encoder's blocks have a table of their own. Decoders share blocks only where they heard the same.
audio = BlockManager(block_size=16, num_gpu_blocks=64, encoder_decoder=True)
for name, key in (("first", "a.wav"), ("same audio", "a.wav"), ("another", "b.wav"), ("unnamed", "")):
    audio.allocate(name, prompt, num_encoder_tokens=30, encoder_key=key)
    print(
        f"{name}: encoder blocks {audio.get_cross_block_table(name)}, {audio.get_num_cached_tokens(name)} tokens cached"
    )
    audio.mark_blocks_as_computed(name, 40 - audio.get_num_cached_tokens(name))
for name in ("first", "same audio", "another", "unnamed"):
    audio.free(name)
    audio.free_cross(name)
assert audio.get_num_free_gpu_blocks() == 64

# A fork of a sequence of 20,000 blocks is no recursion.
long = BlockManager(block_size=1, num_gpu_blocks=20_100)
long.allocate("long", list(range(20_000)))
long.fork("long", "branch")
for manager in (long.manager, blocks.manager, audio.manager):
    manager.check()
print("forked a sequence of", len(long.get_block_table("branch")), "blocks")
