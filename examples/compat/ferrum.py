"""ferrum's paged manager: K and V token by token, clones, prefixes with last logits, swapping, pressure. Needs torch."""

import asyncio

from kvpool.compat.ferrum import AllocationRequest, Device, PagedKvCacheConfig, PagedKvCacheManager, RequestId

SYSTEM = list(range(64))


def request(initial_tokens: int) -> AllocationRequest:
    return AllocationRequest(
        RequestId(), initial_tokens, 2048, num_layers=2, num_heads=8, head_dim=64, device=Device.CPU
    )


async def main() -> None:
    config = PagedKvCacheConfig(max_gpu_blocks=12, max_cpu_blocks=12, num_layers=2, num_heads=8, head_dim=64)
    cache = PagedKvCacheManager(Device.CPU, config)

    # K and V are written one token at a time, through the block table, and gathered in order.
    first = await cache.allocate(request(64))
    for position in range(64):
        for layer in range(2):
            cache.write_kv(first, layer, position, [float(position)] * 512, [-float(position)] * 512)
    keys, _ = cache.read_kv(first, 1, 0, 64)
    print("written:", keys[::512].tolist() == SYSTEM, "in blocks", first.get_physical_blocks())

    # A clone shares every block until one of the two writes; that block alone is copied, with its bytes.
    clone = first.clone_handle()
    await cache.extend(clone, 1)
    cache.write_kv(clone, 0, 64, [1.0] * 512, [2.0] * 512)
    print("clone:", clone.get_physical_blocks(), "shared by", clone.ref_count())
    await cache.deallocate(clone.request_id)

    # A stored prefix outlives its request, and goes into the next one that begins with it.
    cache.store_prefix(SYSTEM, first, [0.1, 0.9])
    await cache.deallocate(first.request_id)
    found = cache.find_prefix([*SYSTEM, 7, 8])
    assert found is not None
    _, kv_handle, _, matched_length = found
    second = await cache.allocate(request(66))
    cache.share_prefix_blocks(kv_handle, second, matched_length // config.block_size)
    print("prefix:", matched_length, "of", second.num_tokens(), "tokens are there")

    # Swapping moves a request with its bytes; its table names no block that another may get meanwhile.
    cache.swap_out(second)
    print("swapped:", second.get_physical_blocks(), cache.read_kv(second, 0, 63, 1)[0][0].item())
    cache.swap_in(second)

    # The callback hears of every allocation under critical pressure before it takes blocks, and may make room for it.
    cache.set_pressure_callback(lambda pressure: print("pressure:", pressure.name, cache.deallocate(second).is_valid()))
    await cache.allocate(request(110))
    await cache.allocate(request(60))
    print("collected:", (await cache.gc()).memory_freed, "bytes;", cache)


asyncio.run(main())
