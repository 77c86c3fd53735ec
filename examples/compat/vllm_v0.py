"""vLLM V0's block manager and cache engine: admission, samples, copy-on-write, swaps, an encoder's table. Needs torch."""

import torch

from kvpool import AllocStatus, LayerSpec
from kvpool.compat import BlockManager, CacheEngine

layers = [LayerSpec(kv_heads=2, head_dim=32)] * 2
blocks = BlockManager(
    block_size=16, num_gpu_blocks=32, num_cpu_blocks=16, watermark=0.1, enable_caching=True, layers=layers, device="cpu"
)
engine = CacheEngine(blocks)
print("a block takes", CacheEngine.get_cache_block_size(16, layers), "bytes")

# OK now, LATER when others have finished, NEVER in this pool. The watermark is rounded down to whole blocks.
for num_tokens in (40, 32 * 16):
    print("admission of", num_tokens, "tokens:", blocks.can_allocate(list(range(num_tokens))).name)

# Parallel sampling as V0 does it: the samples share the prompt's blocks before it is computed, once.
prompt = list(range(40))
keys = torch.randn(40, 2, 32).bfloat16()
blocks.allocate("s0", prompt)
for sample in ("s1", "s2"):
    blocks.fork("s0", sample)
for layer in range(2):  # stands for the model
    blocks.write("s0", layer, 0, keys, -keys)
blocks.mark_blocks_as_computed("s0", 40)
group = ["s0", "s1", "s2"]
print("shared:", blocks.get_common_computed_block_ids(group), "free", blocks.get_num_free_gpu_blocks())

# Whoever writes into the shared tail gets a copy of that one block; the last one keeps the original.
copies = {sequence: blocks.append_slots(sequence) for sequence in group}
print("copies:", copies)
for number, (sequence, pairs) in enumerate(copies.items()):
    engine.copy(pairs)
    for layer in range(2):
        blocks.write(sequence, layer, 40, torch.full((1, 2, 32), number), torch.zeros(1, 2, 32))
    blocks.mark_blocks_as_computed(sequence, [100 + number])

# Swapping a group moves shared blocks once and keeps them shared; the bytes come back.
assert blocks.can_swap_out(group)
engine.swap_out(blocks.swap_out(group))
print("swapped out:", blocks.get_block_table("s0"), "CPU blocks free", blocks.get_num_free_cpu_blocks())
assert blocks.can_swap_in(group) is AllocStatus.OK
engine.swap_in(blocks.swap_in(group))
intact = all(torch.equal(blocks.read(sequence, 1, 0, 40)[0], keys) for sequence in group)
print("intact:", intact, "last keys", [float(blocks.read(sequence, 0, 40, 1)[0][0, 0, 0]) for sequence in group])
assert intact

# What finished sequences computed stays cached, found by its tokens, and counts as free.
for sequence in group:
    blocks.free(sequence)
blocks.allocate("again", prompt)
print("cached tokens:", blocks.get_num_cached_tokens("again"), "reset while running:", blocks.reset_prefix_cache())

# An encoder's blocks have a table of their own, until free_cross.
audio = BlockManager(block_size=16, num_gpu_blocks=64, encoder_decoder=True)
audio.allocate("words", prompt, num_encoder_tokens=30, encoder_key="a.wav")
print("encoder blocks:", audio.get_cross_block_table("words"))
audio.free("words")
audio.free_cross("words")
blocks.manager.check()
