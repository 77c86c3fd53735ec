"""For people who stay with transformers: `model.generate(..., past_key_values=PagedCache(pool))` reuses prefixes.

    pool = CachePool(model, num_bytes=2**30)
    model.generate(ids, past_key_values=PagedCache(pool))            # computes the whole prompt
    model.generate(longer_ids, past_key_values=PagedCache(pool))     # computes only what is new

    with CachePool(model, num_bytes=2**30, disk="blocks") as pool:   # prefixes are there after a restart
        model.generate(ids, past_key_values=PagedCache(pool))

The pool watches the model's forward passes: it sees the token ids, cuts off what is cached already, and makes what was
computed findable. A model wants its keys and values back as rectangles [batch, head, token, element], so each layer gathers
them from their blocks in every step; `kvpool.engine` reads them in place and is the faster way to serve.
"""

from kvpool.hf.cache_pool import CachePool
from kvpool.hf.paged_cache import PagedCache

__all__ = ["CachePool", "PagedCache"]
