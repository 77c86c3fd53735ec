"""What steps computed goes to tiers: every block of a live request once it is full, before its windows move on.

Blocks are copied to staging memory at once, in the order of the device, so that nobody has to keep them; the rest happens in
the background. Decoding pays for it only in steps in which a sequence fills a block.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from kvpool.pools.arrays import Int32Array
from kvpool.prefix.announcing.digests import root_digest
from kvpool.scheduling import BatchPlan, ScheduledSequence, Scheduler
from kvpool.storage import DataPlane
from kvpool.tiers.transport.forgetting import Lineage
from kvpool.tiers.transport.prefix_options import BlockKeys
from kvpool.tiers.transport.storing import Storer
from kvpool.tiers.transport.watching import KNOWN_KEYS

BATCH_BYTES = 2**25  # that go to a tier in one call


@dataclass
class _Progress:
    """How many blocks of a sequence were offered, the digest of the last one, and what the next are renamed with."""

    num_blocks: int
    digest: bytes
    salt: bytes | None


class _Offer(NamedTuple):
    """Blocks of one layer group that some tier lacks."""

    group: int
    keys: list[bytes]
    ids: list[int]


class Collector:
    """Offers full blocks to tiers, each once per request, from the request on that is the `min_uses`-th to use it."""

    def __init__(
        self, scheduler: Scheduler, plane: DataPlane, keys: BlockKeys, storer: Storer, min_uses: int = 1
    ) -> None:
        self._scheduler = scheduler
        self._plane = plane
        self._keys = keys
        self._storer = storer
        self.lineage = Lineage()
        self._progress: dict[Hashable, dict[int, _Progress]] = {}  # by request and sample
        self._min_uses = min_uses
        self._uses: OrderedDict[bytes, int] = OrderedDict()  # by digest, those of late

    def collect(self, plan: BatchPlan) -> None:
        """A step has run and is about to be completed: takes the blocks that it filled."""
        size = self._keys.block_size
        counts = np.diff(plan.query_start)
        filled = plan.kv_lengths // size > (plan.kv_lengths - counts) // size
        rows = np.flatnonzero(filled & self._scheduler.current_rows(plan)) if filled.any() else ()
        for row in rows:
            self._collect_sequence(plan.sequences[int(row)], int(plan.kv_lengths[int(row)]))

    def _collect_sequence(self, sequence: ScheduledSequence, num_written: int) -> None:
        handle = sequence.live_handle()
        if not handle.publishes or sequence.group.is_finished:
            return
        tokens = self._scheduler.token_ids(sequence)  # without drafts, which may be rejected
        progress = self._progress_of(sequence)
        start, stop = progress.num_blocks, min(num_written, len(tokens)) // self._keys.block_size
        if stop <= start:
            return
        size = self._keys.block_size
        items = [item._replace(position=item.position - start * size) for item in sequence.request.multimodal]
        digests = self._keys.digests(progress.digest, tokens[start * size : stop * size], items)
        renamed, salt = self._keys.forgotten.renamed(progress.salt, digests)
        self.lineage.note(progress.digest, digests, renamed)
        own = handle.num_cached_blocks  # the first block that it computed
        if start <= own < stop:
            for session in (sequence.request.session, *handle.copied_sessions):
                if session is not None:
                    self.lineage.begin(session, digests[own - start])
        progress.num_blocks, progress.digest, progress.salt = stop, digests[-1], salt
        used = [self._min_uses == 1 or self._count_use(digest) >= self._min_uses for digest in digests]
        for group, keys in zip(self._keys.groups, self._keys.of_digests(renamed), strict=True):
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

    def _progress_of(self, sequence: ScheduledSequence) -> _Progress:
        of_request = self._progress.setdefault(sequence.request.id, {})
        found = of_request.get(sequence.index)
        if found is None:
            root = root_digest(sequence.request.scope)
            found = of_request[sequence.index] = _Progress(0, root, self._keys.forgotten.salt_of(root))
        return found

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

    def forget(self, request_id: Hashable) -> None:
        """A request is over."""
        self._progress.pop(request_id, None)
