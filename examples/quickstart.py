"""The quick start: one request computes a prompt, others reuse it, a branch shares it, everything stays cached."""

from kvpool import KVCacheConfig, KVCacheManager, LayerSpec

layers = [LayerSpec(kv_heads=8, head_dim=128)] * 32
kv = KVCacheManager(KVCacheConfig(layers, block_size=16, gpu_blocks=1024))

prompt = list(range(1000))
first = kv.allocate("first", prompt)  # blocks for the whole prompt
kv.commit(first)  # after the forward pass: its keys and values are written, others may reuse them

print(kv.match_prefix([*prompt, 7]).num_tokens, "tokens of the next prompt are cached")
second = kv.allocate("second", [*prompt, 7])  # reuses 62 full blocks
kv.commit(second)
(branch,) = kv.fork(second, "branch")  # shares every block until one of them writes

batch = kv.batch([first, second, branch])
for token in (11, 12, 13):
    slots = kv.extend_batch(batch)  # a place for one more token each: [layer group, sequence]
    copies = kv.take_copies()  # run these before the forward pass
    table = batch.csr()  # indptr, indices, last_page_len: what the attention kernel reads
    kv.commit_batch(batch, [token] * len(batch))  # after the forward pass: the tokens that it wrote
print(len(table.indices), "blocks read by", len(batch), "sequences;", kv.stats().copies_on_write, "copied on write")

kv.free_batch(batch)  # nobody uses the blocks any more; full ones stay cached
print(f"{kv.stats().token_hit_rate:.0%} of the prompt tokens came from the cache")
kv.check()  # raises if any invariant is broken
