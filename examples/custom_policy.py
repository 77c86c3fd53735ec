"""An eviction policy of your own: one method, one name."""

from kvpool.blocks.eviction import KeyedPolicy, Run, register_policy


@register_policy("two-class")
class TwoClass(KeyedPolicy):
    """Runs that nobody reused go before runs that somebody did; in each class the least recently used goes first."""

    def key(self, run: Run) -> tuple[bool, int]:
        return run.hits > 0, run.last_access


# from kvpool import KVCacheConfig, KVCacheManager, LayerSpec
#
# layers = [LayerSpec(kv_heads=8, head_dim=128)] * 32
# manager = KVCacheManager(KVCacheConfig(layers=layers, gpu_blocks=1024, eviction_policy="two-class"))
