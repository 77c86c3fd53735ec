"""Bytes behind the blocks: K and V are written, shared by a fork, swapped to the host and read back. Needs torch."""

import torch

from kvpool import KVCacheConfig, KVCacheManager, LayerSpec, Tier
from kvpool.storage import DataPlane

layers = [LayerSpec(kv_heads=2, head_dim=64)] * 4
manager = KVCacheManager(KVCacheConfig(layers, block_size=16, gpu_blocks=64, host_blocks=64))
plane = DataPlane(manager, "cuda" if torch.cuda.is_available() else "cpu", checksums=True)
print(f"{plane.num_bytes[Tier.GPU]} bytes on {plane.device}, {plane.num_bytes[Tier.HOST]} on the host")


def forward(num_tokens: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Stands for the model: new keys and values of every layer."""
    new = torch.randn(len(layers), 2, num_tokens, 2, 64, device=plane.device).bfloat16()
    return [(k, v) for k, v in new]


# A prompt of 40 tokens: the manager says where, the plane writes.
request = manager.allocate("request", list(range(40)))
step = plane.prepare(manager.slot_mapping([request], 0, 40))
prompt = forward(40)
for layer, (k, v) in enumerate(prompt):
    plane.write(step, k, v, layer)
manager.commit(request)

# A fork shares every block. Both decode: the last block is copied before one of them writes into it.
(sample,) = manager.fork(request, "second sample")
batch = manager.batch([request, sample])
step = plane.prepare(manager.extend_batch(batch), batch)
for layer, (k, v) in enumerate(forward(2)):
    plane.write(step, k, v, layer)
manager.commit_batch(batch, [1, 2])
shared = torch.equal(plane.read(request, 3, 0, 40)[0], plane.read(sample, 3, 0, 40)[0])
print(f"the samples share their prompt: {shared}")

# Preempted and resumed: the blocks travel to the host and back, checked on their return.
manager.swap_out(request, sample)
plane.run_copies().wait()
manager.swap_in(request, sample)
plane.run_copies().wait()
intact = all(torch.equal(plane.read(request, layer, 0, 40)[0], k) for layer, (k, _) in enumerate(prompt))
print(f"intact after the journey: {intact}")
plane.close()
