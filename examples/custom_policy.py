"""An eviction policy of your own: one method, one name."""

from kvpool import KeyedPolicy, KVCacheConfig, KVCacheManager, LayerSpec, register_policy
from kvpool.eviction import Run


@register_policy("two-class")
class TwoClass(KeyedPolicy):
    """Runs that nobody reused go before runs that somebody did; in each class the least recently used goes first."""

    def key(self, run: Run) -> tuple[bool, int]:
        return run.hits > 0, run.last_access


def cached_after_pressure(policy: str) -> int:
    """Tokens of a reused prompt that are still cached after one-off prompts have filled the pool."""
    layers = [LayerSpec(kv_heads=8, head_dim=128)] * 32
    manager = KVCacheManager(KVCacheConfig(layers, gpu_blocks=64, watermark=0.0, eviction_policy=policy))

    def run(tokens: list[int]) -> None:
        handle = manager.allocate("request", tokens)
        manager.commit(handle, len(tokens) - handle.num_cached_tokens)
        manager.free(handle)

    system = list(range(256))
    run(system)
    run([*system, 1, 2, 3])  # somebody reuses it
    for one_off in range(1000, 1006):
        run([one_off] * 256)
    manager.check()
    return manager.match_prefix([*system, 9]).num_tokens


for name in ("lru", "two-class"):
    print(f"{name}: {cached_after_pressure(name)} of 256 tokens still cached")
