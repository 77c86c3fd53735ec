"""vLLM V0's `BlockManager`: AllocStatus answers, lookahead slots, copies and swaps as lists of (source, destination).

V0 handed the scheduler plain pairs of block ids, and its worker's `CacheEngine` moved the bytes. Pairs are enough for one
table per sequence without background copies, so the manager behind these calls has partial-block reuse and offloading on
eviction switched off. As in V0, one scheduler thread makes the calls, and the worker runs the returned copies before the
next step.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, NoReturn

from kvpool.checks import as_count, check_bool, check_int, check_number, show
from kvpool.compat.adapter import Adapter, knows_settings
from kvpool.compat.vllm_v0_evictor import Evictor
from kvpool.compat.vllm_v0_utils import check_sizes, scope_of, tier_of
from kvpool.config import KVCacheConfig, LayerSpec, Tier
from kvpool.config.layers import MAX_BLOCKS, ceil_div
from kvpool.core.cache import AllocStatus
from kvpool.core.handle import KVCacheHandle, is_among
from kvpool.errors import (
    ConfigError,
    DuplicateRequestError,
    InvalidArgumentError,
    SequenceStateError,
    UnknownRequestError,
)
from kvpool.eviction import EvictionPolicy
from kvpool.kinds import kind_of
from kvpool.manager import KVCacheManager

Pairs = list[tuple[int, int]]


@dataclass
class _Encoder:
    """Who holds the encoder's blocks of a request: its sequences, and after the last of them a fork without tokens.

    If the last of them ended while it was swapped out, nobody does.
    """

    sequences: list[Hashable]
    num_blocks: int
    holder: KVCacheHandle | None = None


class BlockManager(Adapter):
    """The block space manager of vLLM V0, sequences named by their ids.

    `layers` give the blocks the shape of a model, for `CacheEngine`; without, they are ids only. With `encoder_decoder` (or
    a layer of cross-attention among `layers`) requests may have a table of encoder blocks. A `manager` that exists already
    must have the sizes that are given with it.

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
        enable_caching: bool = False,
        *,
        eviction_policy: str | Callable[[], EvictionPolicy] | type[Evictor] | None = "lru",
        encoder_decoder: bool = False,
        layers: Sequence[LayerSpec] | None = None,
        manager: KVCacheManager | None = None,
        device: str | None = None,
    ) -> None:
        check_bool(encoder_decoder, "encoder_decoder")
        check_int(num_gpu_blocks, "num_gpu_blocks", 0, MAX_BLOCKS)
        check_int(num_cpu_blocks, "num_cpu_blocks", 0, MAX_BLOCKS)
        watermark = check_number(watermark, "watermark", "in [0, 1)")
        if 0 < watermark * num_gpu_blocks < 1:
            watermark = 0.0  # V0 rounds down; the configuration would make one block of it
        if manager is None:
            if layers is None:  # V0's manager knew no shapes, only ids
                layers = [LayerSpec(kv_heads=1, head_dim=1, window=sliding_window)]
                if encoder_decoder:
                    layers.append(LayerSpec(kv_heads=1, head_dim=1, cross_attention=True))
            elif sliding_window is not None or encoder_decoder:
                raise ConfigError(
                    "give sliding_window and encoder_decoder as fields of the layers: window, cross_attention"
                )
            policy: Any = (
                "lru" if eviction_policy is Evictor else eviction_policy
            )  # Evictor orders blocks by themselves
            manager = KVCacheManager(
                KVCacheConfig(
                    layers,
                    block_size,
                    gpu_blocks=num_gpu_blocks,
                    host_blocks=num_cpu_blocks,
                    watermark=watermark,
                    enable_prefix_caching=enable_caching,
                    partial_match=False,
                    offload_on_evict=False,
                ),
                policy=policy,
            )
        super().__init__(manager, device=device)
        check_sizes(manager.config, block_size, num_gpu_blocks, num_cpu_blocks)
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
        self._samples: dict[
            Hashable, tuple[Hashable, int]
        ] = {}  # forked before their parent is computed: it, its length
        self._at_reset: dict[Tier, tuple[int, int]] = {}  # hits in a tier and lookups before its cache was reset

    def handle(self, request: Hashable | KVCacheHandle) -> KVCacheHandle:
        """The handle of a sequence; one that was forked before its parent was computed becomes a fork of it now."""
        if self._waits(request):
            parent, length = self._samples[request]
            source = self.handle(parent)
            if source.num_written < length:
                raise SequenceStateError(
                    f"sequence {request!r} shares the prompt of {parent!r}, of which {source.num_written} of {length} tokens "
                    f"are computed; write it and call mark_blocks_as_computed({parent!r}, ...) first"
                )
            self._settle(request)
        return super().handle(request)

    def _waits(self, request: Hashable | KVCacheHandle) -> bool:
        return not isinstance(request, KVCacheHandle) and is_among(request, self._samples)

    def _settle(self, sample: Hashable) -> None:
        """Makes a sequence that waited for its parent's prompt a fork of it, of the length that the parent had."""
        parent, length = self._samples[sample]
        source = super().handle(parent)
        [child] = self.manager.fork(source, sample)
        if child.num_reserved > length:
            self.manager.rewind(child, child.num_reserved - length)
        del self._samples[sample]

    def _after_step(self, seq_id: Hashable) -> KVCacheHandle:
        """The handle of a sequence in a later step than its last: V0's worker has written every place that it had."""
        if self._waits(seq_id):
            self._after_step(self._samples[seq_id][0])
        handle = self.handle(seq_id)
        unmarked = 0 if handle.is_swapped else handle.num_reserved - handle.num_written
        if unmarked:
            self.manager.mark_written(handle, unmarked)
            if not self.manager.config.enable_prefix_caching:  # otherwise what is marked later is published first
                self.manager.narrow(handle, handle.num_written)
        self._settle_samples(handle)
        return handle

    def _settle_samples(self, parent: KVCacheHandle) -> None:
        """Makes those who waited for a sequence's prompt forks of it if all of it is written."""
        for sample, (waits_for, length) in list(self._samples.items()):
            if waits_for == parent.request_id and parent.num_written >= length:
                self._settle(sample)

    # --- admission ---------------------------------------------------------------------------------------------------

    def can_allocate(
        self, tokens: Any, num_lookahead_slots: int = 0, *, num_encoder_tokens: int = 0, lora_int_id: int = 0
    ) -> AllocStatus:
        if tokens is None:
            raise InvalidArgumentError("tokens=None: V0's can_allocate takes the prompt's token ids")
        return self.manager.can_allocate(
            tokens, lookahead=num_lookahead_slots, cross_tokens=num_encoder_tokens, scope=scope_of(lora_int_id)
        ).status

    def allocate(
        self,
        seq_id: Hashable,
        tokens: Any,
        num_lookahead_slots: int = 0,
        *,
        num_encoder_tokens: int = 0,
        encoder_key: str = "",
        request_id: Hashable = None,
        lora_int_id: int = 0,
    ) -> None:
        """Blocks for a prompt, and for its encoder's tokens: their table is `request_id`'s (default: the sequence's id).

        `encoder_key` names the content of the encoder's input. Prompts with equal keys share blocks; without one an
        encoder's request shares none. Prompts under different LoRAs share none either; 0 is no LoRA.
        """
        if tokens is None:
            raise InvalidArgumentError("tokens=None: V0's allocate takes the prompt's token ids")
        request = seq_id if request_id is None else request_id
        num_encoder_tokens = as_count(num_encoder_tokens, "num_encoder_tokens")
        self._check_new(seq_id)
        if is_among(request, self._encoders) and num_encoder_tokens:
            raise DuplicateRequestError(
                f"request {request!r} has a table of encoder blocks already; free_cross it first"
            )
        scope = scope_of(lora_int_id, encoder_key)
        self.manager.allocate(
            seq_id, tokens, lookahead=num_lookahead_slots, cross_tokens=num_encoder_tokens, scope=scope
        )
        if num_encoder_tokens:
            self._encoders[request] = _Encoder([seq_id], len(self.table(seq_id, self._cross_group or 0)))
            self._request_of[seq_id] = request

    def _check_new(self, seq_id: Hashable) -> None:
        if is_among(seq_id, self._samples):
            raise DuplicateRequestError(f"sequence {seq_id!r} is already live; free it first or use another id")

    def free(self, seq_id: Hashable) -> None:
        """Ends a sequence. Its encoder's blocks stay until `free_cross`."""
        if is_among(seq_id, self._samples):
            del self._samples[seq_id]
            self._leave_encoder(seq_id)
            return
        handle = self.handle(seq_id)
        self._hand_on(seq_id)
        encoder = self._encoders.get(self._request_of.get(seq_id))
        if encoder is not None and encoder.sequences == [seq_id] and not handle.is_swapped:
            [encoder.holder] = self.manager.fork(handle, ("encoder of", self._request_of[seq_id]))
            self.manager.rewind(encoder.holder, encoder.holder.num_reserved)
        self.manager.free(handle)
        self._leave_encoder(seq_id)

    def _leave_encoder(self, seq_id: Hashable) -> None:
        encoder = self._encoders.get(self._request_of.pop(seq_id, None))
        if encoder is not None:
            encoder.sequences.remove(seq_id)

    def _hand_on(self, seq_id: Hashable) -> None:
        """Those who wait for the prompt of a sequence that ends wait for the first of them, which becomes its fork."""
        waiting = [sample for sample, (parent, _) in self._samples.items() if parent == seq_id]
        if waiting:
            self._settle(waiting[0])
        for sample in waiting[1:]:
            self._samples[sample] = (waiting[0], self._samples[sample][1])

    def get_block_table(self, seq_id: Hashable) -> list[int | None]:
        """The blocks of a sequence; a sample whose prompt is not computed yet has those of its parent."""
        if is_among(seq_id, self._samples):
            parent, length = self._samples[seq_id]
            return self.get_block_table(parent)[: ceil_div(length, self.manager.config.block_size)]
        return self.table(seq_id, 0)

    def get_cross_block_table(self, request_id: Hashable) -> list[int | None]:
        """The encoder's blocks of a request; None for each while it is swapped out, and if it ended there."""
        encoder = self._encoder(request_id)
        holder = encoder.holder if encoder.holder is not None else next(iter(encoder.sequences), None)
        return [None] * encoder.num_blocks if holder is None else self.table(holder, self._cross_group or 0)

    def free_cross(self, request_id: Hashable) -> None:
        """Gives the encoder's blocks of a request back; sequences of it that still run keep them until they end."""
        encoder = self._encoder(request_id)
        if encoder.holder is not None:
            self.manager.free(encoder.holder)
        del self._encoders[request_id]

    def _encoder(self, request_id: Hashable) -> _Encoder:
        if self._cross_group is None:
            raise InvalidArgumentError("this model has no encoder: make the BlockManager with encoder_decoder=True")
        if not is_among(request_id, self._encoders):
            raise UnknownRequestError(f"request {request_id!r} has no table of encoder blocks")
        return self._encoders[request_id]

    # --- steps -------------------------------------------------------------------------------------------------------

    def can_append_slots(self, seq_ids: Sequence[Hashable], num_lookahead_slots: int = 0) -> bool:
        """Whether one more token for each of them fits, in the worst case."""
        handles = self._handles(seq_ids, self._after_step)
        needs = [self.manager.blocks_needed(handle, 1, num_lookahead_slots)[0] for handle in handles]
        return sum(needs) <= self.get_num_free_gpu_blocks()

    def append_slots(self, seq_id: Hashable, num_lookahead_slots: int = 0, *, num_tokens: int = 1) -> Pairs:
        """Places for the next tokens and for drafts behind them; returns the copies-on-write to run first.

        V0's sequences know their new tokens, so its second argument is the lookahead. The places that the sequence had
        count as written from now on, as they do in `swap_out` and `fork`: V0's worker has run since.
        """
        handle = self._after_step(seq_id)
        first = handle.num_written // self.manager.config.block_size
        before = handle.block_ids()[first:].tolist()
        self.manager.extend(handle, num_tokens, num_lookahead_slots)
        pairs, after = self._pairs(), handle.block_ids()[first:].tolist()
        # The manager copies no lookahead, as nothing is written there. V0's worker may have written drafts.
        replaced = [(old, new) for old, new in zip(before, after, strict=False) if old != new]
        return pairs + [pair for pair in replaced if pair not in pairs]

    def mark_blocks_as_computed(self, seq_id: Hashable, tokens: Any) -> None:
        """These tokens (ids, how many of the prompt's, or None for its rest) are written: full blocks are reusable.

        Samples that were forked before their prompt was computed become forks of it when all of it is.
        """
        handle = self.handle(seq_id)
        self.manager.commit(handle, tokens)
        self._settle_samples(handle)

    def fork(self, parent_seq_id: Hashable, child_seq_id: Hashable) -> None:
        """A sequence that shares every block of another; before the prompt is computed, as V0 makes samples, too."""
        parent = self._after_step(parent_seq_id) if self._waits(parent_seq_id) else self.handle(parent_seq_id)
        self._check_new(child_seq_id)
        if parent.num_written < parent.num_prompt_tokens and not parent.is_swapped:
            if is_among(child_seq_id, [handle.request_id for handle in self.manager.handles]):
                raise DuplicateRequestError(f"sequence {child_seq_id!r} is already live; use another id")
            self._samples[child_seq_id] = (parent.request_id, parent.num_prompt_tokens)
        else:
            self.manager.fork(self._after_step(parent_seq_id), child_seq_id)
        request = self._request_of.get(parent_seq_id)
        if request in self._encoders:
            self._encoders[request].sequences.append(child_seq_id)
            self._request_of[child_seq_id] = request

    def get_common_computed_block_ids(self, seq_ids: Sequence[Hashable]) -> list[int]:
        """Blocks that all these sequences have computed and share, from the start up to the first that left a window."""
        size = self.manager.config.block_size
        handles = self._handles(seq_ids)
        columns = zip(*(h.block_ids()[: h.num_committed // size].tolist() for h in handles), strict=False)
        return [ids[0] for ids in takewhile(lambda ids: ids[0] >= 0 and len(set(ids)) == 1, columns)]

    def get_num_cached_tokens(self, seq_id: Hashable) -> int:
        return self.handle(seq_id).num_cached_tokens

    # --- swapping ----------------------------------------------------------------------------------------------------

    def can_swap_out(self, seq_ids: Sequence[Hashable]) -> bool:
        return bool(self.manager.can_swap_out(*self._handles(seq_ids, self._after_step)))

    def can_swap_in(self, seq_ids: Sequence[Hashable], num_lookahead_slots: int = 0) -> AllocStatus:
        """Whether the GPU can take a group back, with so many more places behind each of its sequences.

        NEVER follows from all blocks of the group, also those that the GPU still has cached.
        """
        handles, lookahead = self._handles(seq_ids), as_count(num_lookahead_slots, "num_lookahead_slots")
        admission, size = self.manager.can_swap_in(*handles), self.manager.config.block_size
        on_host, num_behind, num_more = set[int](), 0, 0
        for handle in handles:
            assert handle.swapped is not None  # which `can_swap_in` has refused
            on_host.update(*(ids[ids >= 0].tolist() for ids in handle.swapped))
            num_behind += handle.num_blocks - ceil_div(handle.num_written, size)
            num_more += max(0, ceil_div(handle.num_reserved + lookahead, size) - handle.num_blocks)
        num_blocks = self.manager.inspect.num_blocks()
        mark = self.manager.config.watermark_blocks(0, num_blocks)
        if len(on_host) + num_behind + num_more > num_blocks - mark:
            return AllocStatus.NEVER
        need = admission.blocks_needed[0] + num_more
        return AllocStatus.OK if need <= max(0, admission.blocks_available[0] - mark) else AllocStatus.LATER

    def swap_out(self, seq_ids: Sequence[Hashable]) -> Pairs:
        """(GPU block, CPU block) for every block to copy; forks swapped together stay shared."""
        self.manager.swap_out(*self._handles(seq_ids, self._after_step))
        return self._pairs()

    def swap_in(self, seq_ids: Sequence[Hashable]) -> Pairs:
        """(CPU block, GPU block) for every block to copy; what is still cached on the GPU is not copied."""
        self.manager.swap_in(*self._handles(seq_ids))
        return self._pairs()

    def _handles(
        self, seq_ids: Sequence[Hashable], find: Callable[[Hashable], KVCacheHandle] | None = None
    ) -> list[KVCacheHandle]:
        """The handles of a group of sequences, which is a list of ids."""
        if not isinstance(seq_ids, (list, tuple)):
            raise InvalidArgumentError(f"seq_ids must be a list of sequence ids, got {show(seq_ids)}")
        return [(find or self.handle)(seq) for seq in seq_ids]

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
        return sum(pool.available for pool in pools)

    def reset_prefix_cache(self, device: object = None) -> bool:
        """Forgets everything cached (of a `device`: there) and its hits; False, changing nothing, while sequences are live.

        The manager itself could do it then, too. What is forgotten on the GPU takes along what follows it on the CPU.
        """
        tier = Tier.GPU if device is None else tier_of(device)
        if self.manager.handles:
            return False
        if tier is Tier.GPU:
            self.manager.cache.reset()
        else:
            self.manager.cache.evict(self.manager.inspect.num_blocks(tier=tier), tier=tier)
        stats = self.manager.stats()
        for counted in Tier if device is None else (tier,):
            self._at_reset[counted] = stats.hit_blocks[counted.name], stats.prompt_blocks
        return True

    def get_prefix_cache_hit_rate(self, device: object = None) -> float:
        """Prompt blocks found (on a `device`: there) since the last reset, of those looked up; -1 when caching is off."""
        tiers = tuple(Tier) if device is None else (tier_of(device),)
        if not self.manager.config.enable_prefix_caching:
            return -1.0
        stats = self.manager.stats()
        before = [self._at_reset.get(tier, (0, 0)) for tier in tiers]
        lookups = stats.prompt_blocks - min(at_reset for _, at_reset in before)
        hits = sum(stats.hit_blocks[tier.name] for tier in tiers) - sum(hits for hits, _ in before)
        return hits / lookups if lookups else 0.0

    # --- calls of V0 that nobody needs here --------------------------------------------------------------------------

    def access_all_blocks_in_seq(self, *_: Any, **__: Any) -> NoReturn:
        raise InvalidArgumentError(
            "access_all_blocks_in_seq: every use of a block is noted where it happens; leave it out"
        )

    def remove_seq_from_computed_blocks_tracker(self, *_: Any, **__: Any) -> NoReturn:
        raise InvalidArgumentError(
            "remove_seq_from_computed_blocks_tracker: free(seq_id) forgets everything of a sequence"
        )
