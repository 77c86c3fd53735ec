"""vLLM V0's `BlockManager`: AllocStatus answers, lookahead slots, copies and swaps as lists of (source, destination).

V0 handed the scheduler plain pairs of block ids, and its worker's `CacheEngine` moved the bytes. Pairs are enough for one
table per sequence without background copies, so the manager behind these calls has partial-block reuse and offloading on
eviction switched off. As in V0, one scheduler thread makes the calls, and the worker runs the returned copies before the
next step.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import numpy as np

from kvpool.compat.known_settings import knows_settings
from kvpool.compat.spelling import Spelling
from kvpool.config import KVCacheConfig, LayerSpec, Tier
from kvpool.errors import ConfigError, DuplicateRequestError, InvalidArgumentError, UnknownRequestError
from kvpool.manager import KVCacheManager
from kvpool.pools.copies import CopyKind, CopyOp
from kvpool.pools.groups import kind_of
from kvpool.scope import ReuseScope
from kvpool.sequences.handle import KVCacheHandle
from kvpool.sequences.state import AllocStatus

Pairs = list[tuple[int, int]]


@dataclass
class _Encoder:
    """Who holds the encoder's blocks of a request: its sequences, and after the last of them a fork without tokens."""

    sequences: list[Hashable]
    holder: KVCacheHandle | None = None


class BlockManager(Spelling):
    """The block space manager of vLLM V0, sequences named by their ids.

    `layers` give the blocks the shape of a model, for `CacheEngine`; without, they are ids only. With `encoder_decoder` (or
    a layer of cross-attention among `layers`) requests may have a table of encoder blocks.

    >>> blocks = BlockManager(block_size=4, num_gpu_blocks=8, num_cpu_blocks=8)
    >>> blocks.allocate("parent", [1, 2, 3, 4, 5, 6])
    >>> blocks.mark_blocks_as_computed("parent", 6)
    >>> blocks.fork("parent", "child")
    >>> blocks.append_slots("child")
    [(1, 2)]
    """

    @knows_settings("BlockManager")
    def __init__(
        self,
        block_size: int,
        num_gpu_blocks: int,
        num_cpu_blocks: int = 0,
        watermark: float = 0.01,
        sliding_window: int | None = None,
        enable_caching: bool = True,
        *,
        encoder_decoder: bool = False,
        layers: Sequence[LayerSpec] | None = None,
        manager: KVCacheManager | None = None,
        device: str | None = None,
    ) -> None:
        if manager is None:
            if layers is None:  # V0's manager knew no shapes, only ids
                layers = [LayerSpec(kv_heads=1, head_dim=1, window=sliding_window)]
                if encoder_decoder:
                    layers.append(LayerSpec(kv_heads=1, head_dim=1, cross_attention=True))
            elif sliding_window is not None or encoder_decoder:
                raise ConfigError(
                    "give sliding_window and encoder_decoder as fields of the layers: window, cross_attention"
                )
            manager = KVCacheManager(
                KVCacheConfig(layers, block_size, gpu_blocks=num_gpu_blocks, host_blocks=num_cpu_blocks,
                              watermark=watermark, enable_prefix_caching=enable_caching,
                              partial_match=False, offload_on_evict=False)
            )  # fmt: skip
        super().__init__(manager, device=device)
        config = manager.config
        tables = [group.index for group in config.groups if kind_of(group).grows]
        if len(tables) > 1 or len(config.pools) > 1 or config.partial_match or config.offload_on_evict:
            raise ConfigError(
                "V0's pairs of block ids need one layer group, partial_match=False and offload_on_evict=False (encoder "
                "blocks as large as the decoder's); otherwise use KVCacheManager.take_copies"
            )
        self._cross_group = next((group.index for group in config.groups if not kind_of(group).grows), None)
        self._encoders: dict[Hashable, _Encoder] = {}  # by request, until `free_cross`
        self._request_of: dict[Hashable, Hashable] = {}  # sequence -> the request whose encoder it reads

    # --- admission ---------------------------------------------------------------------------------------------------

    def can_allocate(self, tokens: Any, num_lookahead_slots: int = 0, *, num_encoder_tokens: int = 0) -> AllocStatus:
        return self.manager.can_allocate(tokens, lookahead=num_lookahead_slots, cross_tokens=num_encoder_tokens).status

    def allocate(
        self, seq_id: Hashable, tokens: Any, num_lookahead_slots: int = 0, *,
        num_encoder_tokens: int = 0, encoder_key: str = "", request_id: Hashable = None,
    ) -> None:  # fmt: skip
        """Blocks for a prompt, and for its encoder's tokens: their table is `request_id`'s (default: the sequence's id).

        `encoder_key` names the content of the encoder's input. Prompts with equal keys share blocks; without one an
        encoder's request shares none.
        """
        request = seq_id if request_id is None else request_id
        if num_encoder_tokens and request in self._encoders:
            raise DuplicateRequestError(
                f"request {request!r} has a table of encoder blocks already; free_cross it first"
            )
        scope = ReuseScope(encoder=encoder_key)
        self.manager.allocate(
            seq_id, tokens, lookahead=num_lookahead_slots, cross_tokens=num_encoder_tokens, scope=scope
        )
        if num_encoder_tokens:
            self._encoders[request] = _Encoder([seq_id])
            self._request_of[seq_id] = request

    def free(self, seq_id: Hashable) -> None:
        """Ends a sequence. Its encoder's blocks stay until `free_cross`."""
        handle = self.handle(seq_id)
        encoder = self._encoders.get(self._request_of.get(seq_id))
        if encoder is not None and encoder.sequences == [seq_id] and not handle.is_swapped:
            [encoder.holder] = self.manager.fork(handle, ("encoder of", self._request_of[seq_id]))
            self.manager.rewind(encoder.holder, encoder.holder.num_reserved)
        self.manager.free(handle)
        self._request_of.pop(seq_id, None)
        if encoder is not None:
            encoder.sequences.remove(seq_id)

    def get_block_table(self, seq_id: Hashable) -> list[int | None]:
        return self.table(seq_id, 0)

    def get_cross_block_table(self, request_id: Hashable) -> list[int | None]:
        """The encoder's blocks of a request; None for each while it is swapped out."""
        encoder = self._encoder(request_id)
        holders = [encoder.holder] if encoder.holder is not None else encoder.sequences[:1]
        return [block for holder in holders for block in self.table(holder, self._cross_group or 0)]

    def free_cross(self, request_id: Hashable) -> None:
        """Gives the encoder's blocks of a request back; sequences of it that still run keep them until they end."""
        encoder = self._encoder(request_id)
        if encoder.holder is not None:
            self.manager.free(encoder.holder)
        del self._encoders[request_id]

    def _encoder(self, request_id: Hashable) -> _Encoder:
        if self._cross_group is None:
            raise InvalidArgumentError("this model has no encoder: make the BlockManager with encoder_decoder=True")
        if request_id not in self._encoders:
            raise UnknownRequestError(f"request {request_id!r} has no table of encoder blocks")
        return self._encoders[request_id]

    # --- steps -------------------------------------------------------------------------------------------------------

    def can_append_slots(self, seq_ids: Sequence[Hashable], num_lookahead_slots: int = 0) -> bool:
        """Whether one more token for each of them fits, in the worst case."""
        needs = (self.manager.blocks_needed(self.handle(seq), 1, num_lookahead_slots)[0] for seq in seq_ids)
        return sum(needs) <= self.get_num_free_gpu_blocks()

    def append_slots(self, seq_id: Hashable, num_tokens: int = 1, num_lookahead_slots: int = 0) -> Pairs:
        """Places for the next tokens and for drafts behind them; returns the copies-on-write to run first."""
        self.manager.extend(self.handle(seq_id), num_tokens, num_lookahead_slots)
        return self._pairs()

    def mark_blocks_as_computed(self, seq_id: Hashable, tokens: Any) -> None:
        """These tokens (ids, or how many of the prompt's) are written: their full blocks are reusable."""
        self.manager.commit(self.handle(seq_id), tokens)

    def fork(self, parent_seq_id: Hashable, child_seq_id: Hashable) -> None:
        self.manager.fork(self.handle(parent_seq_id), child_seq_id)
        request = self._request_of.get(parent_seq_id)
        if request in self._encoders:
            self._encoders[request].sequences.append(child_seq_id)
            self._request_of[child_seq_id] = request

    def get_common_computed_block_ids(self, seq_ids: Sequence[Hashable]) -> list[int]:
        """Blocks that all these sequences have computed and share, from the start up to the first that left a window."""
        size = self.manager.config.block_size
        handles = [self.handle(seq) for seq in seq_ids]
        columns = zip(*(h.block_ids()[: h.num_committed // size].tolist() for h in handles), strict=False)
        return [ids[0] for ids in takewhile(lambda ids: ids[0] >= 0 and len(set(ids)) == 1, columns)]

    def get_num_cached_tokens(self, seq_id: Hashable) -> int:
        return self.handle(seq_id).num_cached_tokens

    # --- swapping ----------------------------------------------------------------------------------------------------

    def can_swap_out(self, seq_ids: Sequence[Hashable]) -> bool:
        return bool(self.manager.can_swap_out(*map(self.handle, seq_ids)))

    def can_swap_in(self, seq_ids: Sequence[Hashable]) -> AllocStatus:
        return self.manager.can_swap_in(*map(self.handle, seq_ids)).status

    def swap_out(self, seq_ids: Sequence[Hashable]) -> Pairs:
        """(GPU block, CPU block) for every block to copy; forks swapped together stay shared."""
        self.manager.swap_out(*map(self.handle, seq_ids))
        return self._pairs()

    def swap_in(self, seq_ids: Sequence[Hashable]) -> Pairs:
        """(CPU block, GPU block) for every block to copy; what is still cached on the GPU is not copied."""
        self.manager.swap_in(*map(self.handle, seq_ids))
        return self._pairs()

    def _pairs(self) -> Pairs:
        copies = self.manager.take_copies()
        return [pair for op in copies for pair in zip(op.src.tolist(), op.dst.tolist(), strict=True)]

    # --- the cache ---------------------------------------------------------------------------------------------------

    def get_num_free_gpu_blocks(self) -> int:
        """Free blocks, those that eviction could free included."""
        return self._free_blocks(Tier.GPU)

    def get_num_free_cpu_blocks(self) -> int:
        return self._free_blocks(Tier.HOST)

    def _free_blocks(self, tier: Tier) -> int:
        pools = [pool for pool in self.manager.stats().pools if pool.tier == tier]
        return sum(pool.free + pool.cached - pool.pinned for pool in pools)

    def reset_prefix_cache(self) -> bool:
        """Forgets everything cached; False, changing nothing, while sequences are live (the manager itself could)."""
        if self.manager.handles:
            return False
        self.manager.reset_prefix_cache()
        return True

    def get_prefix_cache_hit_rate(self) -> float:
        """Prompt blocks found, as a fraction of those looked up; -1 when caching is off."""
        stats = self.manager.stats()
        if not self.manager.config.enable_prefix_caching:
            return -1.0
        return sum(stats.hit_blocks.values()) / stats.prompt_blocks if stats.prompt_blocks else 0.0


class CacheEngine:
    """The worker's side: the tensors behind a `BlockManager` with `layers`, and the pairs carried out on them."""

    def __init__(self, blocks: BlockManager) -> None:
        self.plane = blocks.plane

    def copy(self, src_to_dst: Pairs) -> None:
        """Copies-on-write inside the GPU, as `append_slots` returned them."""
        self._run(CopyKind.COPY_ON_WRITE, src_to_dst, Tier.GPU, Tier.GPU)

    def swap_out(self, src_to_dst: Pairs) -> None:
        """GPU to CPU, as `BlockManager.swap_out` returned them."""
        self._run(CopyKind.SWAP_OUT, src_to_dst, Tier.GPU, Tier.HOST)

    def swap_in(self, src_to_dst: Pairs) -> None:
        """CPU to GPU, as `BlockManager.swap_in` returned them."""
        self._run(CopyKind.SWAP_IN, src_to_dst, Tier.HOST, Tier.GPU)

    def _run(self, kind: CopyKind, pairs: Pairs, source: Tier, target: Tier) -> None:
        ops = [CopyOp(kind, 0, source, target, np.array([a], np.int32), np.array([b], np.int32)) for a, b in pairs]
        self.plane.run_copies(ops).wait()

    def get_cache_block_size(self) -> int:
        """Bytes of one block over all layers of a table."""
        return self.plane.config.groups[0].block_bytes
