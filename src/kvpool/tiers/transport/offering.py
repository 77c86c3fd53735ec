"""Full blocks on offer to tiers: named, copied to staging memory in the order of the device, stored in the background.

Nobody has to keep a block until it is stored, and a block that every tier has is not copied at all.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from kvpool.pools.arrays import Int32Array
from kvpool.prefix.digests import root_digest
from kvpool.scope import MultimodalItem, ReuseScope
from kvpool.sequences.handle import KVCacheHandle
from kvpool.storage import DataPlane
from kvpool.tiers.keys import named
from kvpool.tiers.transport.forgetting import Lineage
from kvpool.tiers.transport.prefix_options import BlockKeys
from kvpool.tiers.transport.storing import Storer
from kvpool.tiers.transport.watching import KNOWN_KEYS

BATCH_BYTES = 2**25  # that go to a tier in one call


@dataclass
class Progress:
    """How many blocks of a sequence were offered, the digest of the last one, and what the next are renamed with."""

    num_blocks: int
    digest: bytes
    salt: bytes | None


class _Offer(NamedTuple):
    """Blocks of one layer group that some tier lacks."""

    group: int
    keys: list[bytes]
    ids: list[int]


class Offers:
    """Offers blocks to tiers from the request on that is the `min_uses`-th to use them."""

    def __init__(self, plane: DataPlane, keys: BlockKeys, storer: Storer, min_uses: int = 1) -> None:
        self.block_size = keys.block_size
        self.lineage = Lineage()
        self._plane = plane
        self._keys = keys
        self._storer = storer
        self._min_uses = min_uses
        self._uses: OrderedDict[bytes, int] = OrderedDict()  # by digest, those of late

    def begin(self, scope: ReuseScope) -> Progress:
        """Of a sequence of which nothing was offered."""
        root = root_digest(scope)
        return Progress(0, root, self._keys.salt_of(scope, root))

    def offer(
        self,
        handle: KVCacheHandle,
        tokens: Int32Array,
        progress: Progress,
        multimodal: Sequence[MultimodalItem] = (),
        session: str | None = None,
        *,
        is_demanded: bool = False,
    ) -> None:
        """The whole blocks of `tokens`, all of them written, that were not offered before; demanded: at any use."""
        size = self.block_size
        start, stop = progress.num_blocks, len(tokens) // size
        if stop <= start:
            return
        items = [item._replace(position=item.position - start * size) for item in multimodal]
        digests = self._keys.digests(progress.digest, tokens[start * size : stop * size], items)
        renamed, salt = self._keys.forgotten.renamed(progress.salt, digests)
        names = named(handle.scope, renamed)
        self.lineage.note(progress.digest, digests, names)
        own = handle.num_cached_blocks  # the first block that it computed
        if start <= own < stop:
            for each in (session, *handle.copied_sessions):
                if each is not None:
                    self.lineage.begin(each, digests[own - start])
        progress.num_blocks, progress.digest, progress.salt = stop, digests[-1], salt
        used = [self._min_uses == 1 or self._count_use(digest) >= self._min_uses or is_demanded for digest in digests]
        for group, keys in zip(self._keys.groups, self._keys.of_digests(names), strict=True):
            ids = handle.block_ids(group.index)[start:stop].tolist()
            wanted = [i for i, key in enumerate(keys) if used[i] and ids[i] >= 0 and self._storer.wants(key)]
            step = max(1, BATCH_BYTES // group.spec.block_bytes)
            for at in range(0, len(wanted), step):
                part = wanted[at : at + step]
                self._send(_Offer(group.index, [keys[i] for i in part], [ids[i] for i in part]), group.spec.block_bytes)

    def _count_use(self, digest: bytes) -> int:
        uses = self._uses.pop(digest, 0) + 1
        self._uses[digest] = uses
        if len(self._uses) > KNOWN_KEYS:
            self._uses.popitem(last=False)
        return uses

    def _send(self, offer: _Offer, block_bytes: int) -> None:
        """Copies blocks to staging memory and has them stored."""
        stage = self._storer.take_memory(len(offer.ids) * block_bytes, len(offer.ids))
        if stage is None:
            return
        rows = stage.data.reshape(len(offer.ids), block_bytes)
        blocks: Int32Array = np.array(offer.ids, np.int32)
        try:
            wait: Callable[[], None] = self._plane.read_blocks(blocks, offer.group, torch.from_numpy(rows))
        except BaseException:
            stage.release()
            raise
        self._storer.store(offer.keys, list(rows), stage, wait)
