"""For people who stay with transformers: `model.generate(..., past_key_values=PagedCache(pool))` reuses prefixes.

    pool = CachePool(model, num_bytes=2**30)
    model.generate(ids, past_key_values=PagedCache(pool))            # computes the whole prompt
    model.generate(longer_ids, past_key_values=PagedCache(pool))     # computes only what is new

    with CachePool(model, num_bytes=2**30, disk="blocks") as pool:   # prefixes are there after a restart
        model.generate(ids, past_key_values=PagedCache(pool))

The pool hooks into the model's forward passes: it sees the token ids, leaves out tokens that are cached, and publishes what
was computed. A model needs its keys and values as rectangles [batch, head, token, element], so each layer gathers them from
their blocks in every step. `kvpool.engine` reads them in place and is faster for serving.
"""

from kvpool.hf.cache_pool import CachePool
from kvpool.hf.paged_cache import PagedCache

__all__ = ["CachePool", "PagedCache"]
