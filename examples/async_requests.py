"""asyncio: forty requests share a pool for eight; each waits in line, and one that gives up leaves nothing behind."""

import asyncio

from kvpool import KVCacheConfig, KVCacheManager, LayerSpec
from kvpool.manager.aio import AsyncKVCacheManager

config = KVCacheConfig([LayerSpec(kv_heads=8, head_dim=128)] * 32, gpu_blocks=64, watermark=0.0)
cache = AsyncKVCacheManager(KVCacheManager(config))
served: list[int] = []


async def request(number: int) -> None:
    prompt = [number] * 120
    async with cache.sequence(number, prompt, timeout=30) as handle:  # waits until eight blocks are there
        served.append(number)
        cache.commit(handle)
        for token in range(8):
            cache.extend(handle)
            await asyncio.sleep(0)  # the forward pass
            cache.commit(handle, [token])


async def main() -> None:
    tasks = [asyncio.create_task(request(number)) for number in range(40)]
    await asyncio.sleep(0)
    print(len(served), "run,", cache.num_waiting, "wait")
    tasks[20].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    print("served in order:", served == [number for number in range(40) if number != 20])


asyncio.run(main())
cache.check()
print("in use at the end:", cache.stats().pool().referenced)
