"""Manager and data plane together: random operations, and every byte that somebody may read is compared after each.

The keys and values of a token are random numbers seeded by its whole history (every token up to it) and the layer, so a
block reused for another prompt, a copy that came too late or went to a wrong place shows. Free blocks are poisoned.
"""

from __future__ import annotations

import itertools
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from reference import LOCAL_TIERS, cached_blocks, needed_positions

from kvpool import DType, KVCacheConfig, KVCacheHandle, KVCacheManager, LayerSpec, ReuseScope, Tier
from kvpool.config.layers import TokenPart
from kvpool.errors import InvalidArgumentError, OutOfBlocksError, SequenceStateError, SharedBlockError
from kvpool.kinds import kind_of

torch = pytest.importorskip("torch")

from kvpool.kernels.quantization import dequantize, quantize  # noqa: E402
from kvpool.kernels.write import read_values  # noqa: E402
from kvpool.storage import DataPlane  # noqa: E402
from kvpool.storage.disk import DiskStore  # noqa: E402

SCOPE = ReuseScope()
MAX_LIVE = 5
POISON = 0xA5

picks = st.integers(0, 2**16)
prompts = st.lists(st.integers(0, 1), min_size=1, max_size=14)
tiers = st.sampled_from((Tier.GPU, Tier.GPU, Tier.HOST, Tier.DISK))


class Sequence:
    """What the test knows of one live request."""

    def __init__(self, handle: KVCacheHandle, tokens: list[int], cross_seed: int = 0) -> None:
        self.handle = handle
        self.tokens = tokens  # written ones; more once it decodes
        self.cross_seed = cross_seed


class DataPlaneMachine(RuleBasedStateMachine):
    """Drives a manager and a data plane as an engine does."""

    config: ClassVar[KVCacheConfig]
    device: ClassVar[str] = "cpu"
    checksums: ClassVar[bool] = False

    def __init__(self) -> None:
        super().__init__()
        self.manager = KVCacheManager(self.config)
        self.plane = DataPlane(self.manager, self.device, check_writes=True, checksums=self.checksums)
        self.live: list[Sequence] = []
        self.names = itertools.count()
        self.values: dict[tuple[tuple[int, ...], int], Any] = {}
        self.unseen_steps = 0
        for (pool, tier), store in self.plane.stores.items():
            self.poison(pool, tier, np.arange(store.num_blocks, dtype=np.int32))

    def teardown(self) -> None:
        self.plane.close()

    # --- bytes -------------------------------------------------------------------------------------------------------

    def token(self, history: tuple[int, ...], layer: int) -> dict[str, Any]:
        """What a layer stores of the last token of a history: each part [head, element], in float32 on the CPU."""
        key = (history, layer)
        if key not in self.values:
            generator = np.random.default_rng([len(history), layer, *history])
            self.values[key] = {
                part.name: torch.from_numpy(generator.standard_normal((part.heads, part.width), np.float32))
                for part in self.config.attention_layer(layer).parts
            }
        return self.values[key]

    def stacked(self, histories: list[tuple[int, ...]], layer: int) -> dict[str, Any]:
        tokens = [self.token(history, layer) for history in histories]
        return {name: torch.stack([token[name] for token in tokens]).to(self.device) for name in tokens[0]}

    def expected(self, histories: list[tuple[int, ...]], layer: int) -> dict[str, Any]:
        """What these tokens are worth once they were stored and read back."""
        given = self.stacked(histories, layer)
        return {
            part.name: dequantize(quantize(given[part.name].cpu(), part.dtype), part.dtype, part.width)
            for part in self.config.attention_layer(layer).parts
        }

    def histories(self, seq: Sequence, positions: range) -> list[tuple[int, ...]]:
        return [tuple(seq.tokens[: position + 1]) for position in positions]

    def write(self, seq: Sequence, slots: Any, tokens: list[int], batch: Any = None) -> None:
        """The forward pass of one sequence: `tokens` follow those written."""
        start = len(seq.tokens)
        seq.tokens = [*seq.tokens, *tokens]
        histories = self.histories(seq, range(start, len(seq.tokens)))
        if not histories:
            return
        step = self.plane.prepare(slots, batch)
        for layer in range(len(self.config.layers)):
            if kind_of(self.config.groups[self.config.group_of_layer[layer]]).grows:
                self.plane.write_parts(step, self.stacked(histories, layer), layer)

    def write_cross(self, seq: Sequence) -> None:
        for layer, group in enumerate(self.config.group_of_layer):
            if not kind_of(self.config.groups[group]).grows and seq.handle.num_fixed_tokens:
                slots = self.plane.cross_slots(seq.handle, group)
                self.plane.write_parts(slots, self.stacked(self.cross_histories(seq), layer), layer)

    @staticmethod
    def cross_histories(seq: Sequence) -> list[tuple[int, ...]]:
        return [(7, seq.cross_seed, position) for position in range(seq.handle.num_fixed_tokens)]

    def poison(self, pool: int, tier: Tier, blocks: Any) -> None:
        store = self.plane.stores[pool, tier]
        if isinstance(store, DiskStore):
            store.write(blocks, [np.full(store.block_bytes, POISON, np.uint8)] * len(blocks))
        elif len(blocks):
            store.data[torch.from_numpy(blocks).long()] = POISON

    def pick(self, number: int, swapped: bool = False) -> Sequence | None:
        chosen = [seq for seq in self.live if seq.handle.is_swapped == swapped]
        return chosen[number % len(chosen)] if chosen else None

    def pick_some(self, number: int, swapped: bool = False) -> list[Sequence]:
        chosen = [seq for seq in self.live if seq.handle.is_swapped == swapped]
        return [seq for i, seq in enumerate(chosen) if number >> i & 1]

    # --- rules -------------------------------------------------------------------------------------------------------

    @precondition(lambda self: len(self.live) < MAX_LIVE)
    @rule(tokens=prompts, again=st.integers(0, 2), reserve=st.none() | st.integers(1, 6), cross=st.integers(0, 5))
    def allocate(self, tokens: list[int], again: int, reserve: int | None, cross: int) -> None:
        """A prompt, often one that begins like another sequence; what is reserved is written and committed."""
        if not again and self.live:
            tokens = [*self.live[len(tokens) % len(self.live)].tokens, *tokens[:2]][:40]
        has_cross = any(not kind_of(group).grows for group in self.config.groups)
        options = {"reserve": None if reserve is None else min(reserve, len(tokens))}
        name = next(self.names)
        try:
            handle = self.manager.allocate(name, tokens, cross_tokens=cross if has_cross else 0, **options)
        except OutOfBlocksError:
            return
        seq = Sequence(handle, tokens[: handle.num_written], name)
        self.live.append(seq)
        self.write_cross(seq)
        self.fill(seq, tokens[handle.num_written : handle.num_reserved])

    def fill(self, seq: Sequence, tokens: list[int]) -> None:
        try:
            slots = self.manager.slot_mapping(
                [seq.handle], seq.handle.num_written, seq.handle.num_written + len(tokens)
            )
        except OutOfBlocksError:
            return
        self.write(seq, slots, tokens)
        self.manager.commit(seq.handle, len(tokens))

    @rule(number=picks, count=st.integers(1, 6), draw=picks, commit=st.booleans())
    def extend(self, number: int, count: int, draw: int, commit: bool) -> None:
        """More tokens for one sequence; drafts stay uncommitted."""
        seq = self.pick(number)
        if seq is None or seq.handle.num_reserved != seq.handle.num_written:
            return
        known = seq.handle.token_ids.tolist()
        tokens = [
            known[p] if p < len(known) else draw >> p % 16 & 1 for p in range(len(seq.tokens), len(seq.tokens) + count)
        ]
        try:
            slots = self.manager.extend(seq.handle, count)
        except OutOfBlocksError:
            return
        self.write(seq, slots, tokens)
        if commit:
            committed = seq.handle.num_committed
            self.manager.commit(seq.handle, seq.tokens[committed:])
        else:
            self.manager.mark_written(seq.handle, count)

    @rule(number=picks, draw=picks, steps=st.integers(1, 3))
    def decode(self, number: int, draw: int, steps: int) -> None:
        """One token for every sequence of a batch, in one write."""
        some = [s for s in self.pick_some(number) if s.handle.num_committed == s.handle.num_reserved]
        some = [s for s in some if len(s.handle.token_ids) == s.handle.num_committed]
        if not some:
            return
        batch = self.manager.batch([seq.handle for seq in some])
        for at in range(steps):
            try:
                slots = self.manager.extend_batch(batch)
            except OutOfBlocksError:
                return
            tokens = [draw >> (at + i) & 1 for i in range(len(some))]
            for i, (seq, token) in enumerate(zip(some, tokens, strict=True)):
                self.write(seq, slots[:, i : i + 1], [token], batch)
            self.manager.commit_batch(batch, tokens)

    @rule(number=picks, count=st.integers(0, 9))
    def rewind(self, number: int, count: int) -> None:
        seq = self.pick(number)
        if seq is None:
            return
        try:
            self.manager.rewind(seq.handle, min(count, seq.handle.num_reserved))
        except (OutOfBlocksError, SequenceStateError):
            return
        del seq.tokens[seq.handle.num_written :]

    @precondition(lambda self: len(self.live) < MAX_LIVE)
    @rule(number=picks, children=st.integers(1, 2))
    def fork(self, number: int, children: int) -> None:
        seq = self.pick(number)
        if seq is not None:
            names = [next(self.names) for _ in range(min(children, MAX_LIVE - len(self.live)))]
            for handle in self.manager.fork(seq.handle, *names):
                self.live.append(Sequence(handle, seq.tokens[:], seq.cross_seed))

    @rule(number=picks, keep=st.booleans())
    def free(self, number: int, keep: bool) -> None:
        if self.live:
            self.manager.free(self.live.pop(number % len(self.live)).handle, keep)

    @rule(number=picks)
    def swap_out(self, number: int) -> None:
        handles = [seq.handle for seq in self.pick_some(number)]
        if self.manager.can_swap_out(*handles):
            self.manager.swap_out(*handles)

    @rule(number=picks)
    def swap_in(self, number: int) -> None:
        handles = [seq.handle for seq in self.pick_some(number, swapped=True)]
        if self.manager.can_swap_in(*handles):
            self.manager.swap_in(*handles)

    @rule(count=st.integers(1, 6), tier=tiers)
    def evict(self, count: int, tier: Tier) -> None:
        self.manager.cache.evict(count, pool=count % len(self.config.pools), tier=tier)

    @rule(count=st.integers(1, 6), tier=st.sampled_from((Tier.GPU, Tier.HOST)))
    def offload(self, count: int, tier: Tier) -> None:
        if self.config.num_blocks(Tier(tier + 1)):
            self.manager.cache.offload(count, pool=count % len(self.config.pools), tier=tier)

    @rule(tokens=prompts, number=picks)
    def onboard(self, tokens: list[int], number: int) -> None:
        if self.live and number % 2:
            tokens = self.live[number % len(self.live)].tokens or tokens
        try:
            self.manager.cache.onboard(tokens)
        except OutOfBlocksError:
            return

    @rule(tier=tiers)
    def defragment(self, tier: Tier) -> None:
        self.manager.cache.defragment(tier)

    @rule(change=st.integers(-4, 4), number=picks, tier=tiers)
    def resize(self, change: int, number: int, tier: Tier) -> None:
        pool = number % len(self.config.pools)
        store = self.plane.stores[pool, tier]
        before = store.num_blocks
        if not before or not 1 <= before + change <= 24:
            return
        try:
            self.plane.resize(before + change, pool=pool, tier=tier)
        except OutOfBlocksError:
            assert store.num_blocks == before
        assert store.num_blocks == self.manager._cache.pools[pool][tier].num_blocks

    @rule(steps=st.integers(1, 3))
    def look_away(self, steps: int) -> None:
        """Planned copies pile up for a while before anybody runs them."""
        self.unseen_steps = steps + 1

    @rule(number=picks)
    def write_where_others_read(self, number: int) -> None:
        """Published, shared and free blocks refuse a write."""
        self.plane.run_copies().wait()
        group = number % sum(kind_of(g).grows for g in self.config.groups)
        layer = self.config.groups[group].layers[0]
        pool = self.manager._cache.pools[self.config.groups[group].pool][Tier.GPU]
        published = {
            blocks[group][2]
            for blocks in cached_blocks(self.manager).values()
            if group in blocks and blocks[group][0] == Tier.GPU
        }
        forbidden = [*published, *pool.free_ids().tolist(), *np.flatnonzero(pool.refs > 1).tolist()]
        if forbidden:
            slot = forbidden[number % len(forbidden)] * self.config.block_size
            with pytest.raises(SharedBlockError):
                self.plane.write_parts([slot], self.stacked([(9,)], layer), layer)

    # --- what must always hold ---------------------------------------------------------------------------------------

    @invariant()
    def bytes_are_right(self) -> None:
        if self.unseen_steps > 0:
            self.unseen_steps -= 1
            return
        self.plane.run_copies().wait()
        for store in self.plane.stores.values():
            self.plane.transfers.wait_for(store)
        for pools in self.manager._cache.pools:
            for pool in pools:
                self.poison(pool.index, pool.tier, pool.free_ids())
        for seq in self.live:
            self.check_sequence(seq)
        self.check_cache()

    def check_sequence(self, seq: Sequence) -> None:
        handle = seq.handle
        assert handle.num_written == len(seq.tokens)
        for layer, group in enumerate(self.config.group_of_layer):
            if not kind_of(self.config.groups[group]).grows:
                ranges, histories = [range(handle.num_fixed_tokens)], self.cross_histories(seq)
            else:
                needed = needed_positions(self.config, group, handle.num_committed)
                needed |= set(range(handle.num_committed, handle.num_written))
                ranges, histories = _ranges(needed), self.histories(seq, range(handle.num_written))
            for positions in ranges:
                wanted = [histories[position] for position in positions]
                if wanted:
                    found = self.plane.read_parts(handle, layer, positions.start, len(positions))
                    _same(found, self.expected(wanted, layer), f"{handle}, layer {layer}, {positions}")
        with pytest.raises(InvalidArgumentError):
            self.plane.read(handle, 0, 0, max(handle.num_written, handle.num_fixed_tokens) + 1)

    def check_cache(self) -> None:
        """Every cached block on every tier holds what its tokens say."""
        size = self.config.block_size
        for (_, prefix), groups in cached_blocks(self.manager).items():
            histories = [prefix[: len(prefix) - size + offset + 1] for offset in range(size)]
            for group, (tier, _, block) in groups.items():
                for index, layer in enumerate(self.config.groups[group].layers):
                    found = self.read_block(group, index, tier, block)
                    _same(
                        found, self.expected(histories, layer), f"cached {prefix}, layer {layer}, {tier.name} {block}"
                    )

    def read_block(self, group: int, index: int, tier: Tier, block: int) -> dict[str, Any]:
        spec = self.config.groups[group]
        store = self.plane.stores[spec.pool, tier]
        slots = torch.arange(self.config.block_size)
        if isinstance(store, DiskStore):
            row = np.empty(store.block_bytes, np.uint8)
            store.read(np.array([block], np.int32), [row])
            layout = self.plane.stores[spec.pool, Tier.GPU].layouts[group]
            cache = layout.layer_cache(torch.from_numpy(row[None]), index)
        else:
            cache = store.layer_cache(group, index)
            slots = (slots + block * self.config.block_size).to(store.device)
        return {name: read_values(part, slots) for name, part in cache.items()}

    @invariant()
    def bytes_allocated_are_bytes_reported(self) -> None:
        stats = self.manager.stats()
        for tier in LOCAL_TIERS:
            reported = sum(p.total * p.block_bytes for p in stats.pools if p.tier == tier)
            assert self.plane.num_bytes[tier] == reported


def _ranges(positions: set[int]) -> list[range]:
    """Positions as stretches that follow each other."""
    found: list[range] = []
    for position in sorted(positions):
        if found and found[-1].stop == position:
            found[-1] = range(found[-1].start, position + 1)
        else:
            found.append(range(position, position + 1))
    return found


def _same(found: dict[str, Any], expected: dict[str, Any], where: str) -> None:
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert torch.equal(found[name].cpu(), values), f"{name} of {where} differs"


FULL = LayerSpec(kv_heads=2, head_dim=4)
SLIDING = LayerSpec(kv_heads=2, head_dim=4, window=6, sink_tokens=1)
ALL_TIERS = dict(gpu_blocks=12, host_blocks=10, disk_blocks=8)
CONFIGS: dict[str, dict[str, Any]] = {
    "one group, blocks of 4": dict(layers=[FULL] * 2, block_size=4, **ALL_TIERS),
    "one group, blocks of 1, float32": dict(
        layers=[LayerSpec(kv_heads=1, head_dim=3, dtype="float32")], block_size=1, gpu_blocks=24, host_blocks=16
    ),
    "blocks of 16, fp8": dict(layers=[LayerSpec(kv_heads=1, head_dim=2, dtype="fp8")] * 2, block_size=16, **ALL_TIERS),
    "full and sliding in one pool": dict(
        layers=[FULL, SLIDING], block_size=2, gpu_blocks=24, host_blocks=16, host_write="through"
    ),
    "full and sliding, K-only and int8": dict(
        layers=[
            LayerSpec(kv_heads=1, head_dim=6, k_only=True),
            LayerSpec(kv_heads=2, head_dim=4, dtype="int8", window=5),
        ],
        block_size=4,
        **ALL_TIERS,
    ),
    "an indexer's keys beside a latent, and beside int8": dict(
        layers=[
            LayerSpec(kv_heads=1, head_dim=6, k_only=True, extra_parts=(TokenPart("index", DType.FLOAT32, 1, 4),)),
            LayerSpec(2, 4, "int8", window=5, extra_parts=(TokenPart("index", DType.BFLOAT16, 1, 8),)),
        ],
        block_size=4,
        **ALL_TIERS,
    ),
    "int4 of odd width, host only": dict(
        layers=[LayerSpec(kv_heads=3, head_dim=5, v_head_dim=2, dtype="int4")] * 2,
        block_size=4,
        gpu_blocks=10,
        host_blocks=12,
        host_write="through",
    ),
    "disk without host": dict(layers=[FULL], block_size=2, gpu_blocks=12, disk_blocks=12),
    "with cross-attention": dict(
        layers=[FULL, LayerSpec(kv_heads=2, head_dim=4, cross_attention=True)],
        block_size=2,
        gpu_blocks=24,
        host_blocks=16,
    ),
}


def run_machine(name: str, device: str, max_examples: int) -> None:
    members = {"config": KVCacheConfig(**CONFIGS[name], watermark=0), "device": device, "checksums": len(name) % 2 == 0}
    machine = type("Machine", (DataPlaneMachine,), members)
    run_state_machine_as_test(machine, settings=settings(max_examples=max_examples, stateful_step_count=40))


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    """Tensors this small only suffer from threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.quick("full and sliding in one pool", "with cross-attention")
@pytest.mark.parametrize("name", CONFIGS)
def test_given_random_operations_then_every_byte_is_what_its_tokens_say(name: str) -> None:
    run_machine(name, "cpu", settings().max_examples // 8)


@pytest.mark.quick("full and sliding in one pool", "with cross-attention")
@pytest.mark.gpu
@pytest.mark.parametrize("name", CONFIGS)
def test_given_random_operations_on_a_gpu_then_every_byte_is_what_its_tokens_say(name: str) -> None:
    run_machine(name, "cuda", settings().max_examples // 16)
