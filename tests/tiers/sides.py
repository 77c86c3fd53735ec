"""Two caches with tiers between them, without a model: keys and values follow from tokens, so that every byte is known."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from kvpool import KVCacheConfig, KVCacheHandle, KVCacheManager, LayerSpec
from kvpool.scheduling import Request
from kvpool.storage import DataPlane
from kvpool.tiers import Fingerprint, KeyedTier, KeySpace
from kvpool.tiers.model_tiers import OpenedTiers
from kvpool.tiers.transport.block_keys import BlockKeys
from kvpool.tiers.transport.fetching import Fetch
from kvpool.tiers.transport.tier_transport import TierTransport

SECONDS = 60.0
SIZE = 4
FULL = LayerSpec(kv_heads=1, head_dim=8)
SLIDING = LayerSpec(kv_heads=1, head_dim=8, window=8)
PROMPT = list(range(100, 130))  # seven blocks and two tokens


class Side:
    """A cache with its data and its tiers."""

    def __init__(
        self,
        *tiers: KeyedTier,
        layers: Any = (FULL, SLIDING),
        gpu_blocks: Any = 64,
        min_uses: int = 1,
    ) -> None:
        config = KVCacheConfig(list(layers), SIZE, gpu_blocks=gpu_blocks, watermark=0.0)
        self.manager = KVCacheManager(config)
        self.plane = DataPlane(self.manager, "cpu")
        keys = BlockKeys(KeySpace(Fingerprint.of(config, "model", "weights")), config)
        opened = OpenedTiers(list(tiers), keys, SECONDS, min_uses, ())
        self.transport = TierTransport(opened, self.manager, self.plane)

    def compute(self, tokens: list[int], name: str = "a") -> KVCacheHandle:
        """A request whose keys and values follow from its tokens."""
        handle = self.manager.allocate(name, tokens)
        start = handle.num_written
        values = torch.tensor(tokens[start:]).bfloat16()[:, None, None].expand(-1, 1, 8)
        slots = self.manager.slot_mapping([handle], start, len(tokens))
        for layer in range(len(self.manager.config.layers)):
            self.plane.write(slots, values + layer, values + layer + 0.5, layer=layer)
        self.manager.commit(handle)
        return handle

    def store(self, handle: KVCacheHandle) -> None:
        """Offers all blocks of a request, in two parts."""
        offers, tokens = self.transport.offers, handle.token_ids
        progress = offers.begin(handle.scope)
        for stop in (len(tokens) // 2, len(tokens)):
            offers.offer(handle, tokens[:stop], progress)
        assert self.transport.storer.flush(SECONDS)

    def fetch(self, tokens: list[int], first: int = 0, **options: Any) -> Fetch:
        """What the tiers have of a prompt."""
        keys = self.transport.keys.of_prompt(np.array(tokens, np.int32), Request("r", tokens, 1).scope)
        now, done, ended = time.monotonic(), [], threading.Event()

        def take(fetch: Fetch) -> None:
            done.append(fetch)
            ended.set()

        assert self.transport.fetch(Fetch(keys, first, now, now + SECONDS, **options), take, ended.set)
        assert ended.wait(SECONDS)
        return done[0]

    def take_in(self, tokens: list[int], fetch: Fetch) -> int:
        """Writes what was fetched into the cache; returns how many tokens of the prompt are cached then."""
        lease, waits = self.transport.import_prefix(Request("r", tokens, 1), fetch)
        self.transport.give_back(fetch, waits)
        if lease is not None:
            self.manager.free(lease)
        self.manager.check()
        return self.manager.match_prefix(tokens).num_tokens

    def assert_right(self, tokens: list[int], num_cached: int) -> None:
        """A request that reuses so many tokens reads what belongs to each of them."""
        handle = self.manager.allocate("reader", tokens)
        assert handle.num_cached_tokens == num_cached
        for layer, spec in enumerate(self.manager.config.layers):
            first = 0 if getattr(spec, "window", None) is None else max(0, num_cached - 7)
            k, v = self.plane.read(handle, layer=layer, start=first)
            wanted = torch.tensor(tokens[first:num_cached]).bfloat16()
            assert torch.equal(k[:, 0, 0], wanted + layer)
            assert torch.equal(v[:, 0, 0], wanted + layer + 0.5)
        self.manager.free(handle)


@contextmanager
def sides(*pairs: tuple[KeyedTier, ...], **options: Any) -> Iterator[list[Side]]:
    made = [Side(*tiers, **options) for tiers in pairs]
    yield made
    for side in made:
        assert side.transport.stats().staging_bytes == 0
        side.transport.close()
