"""TensorRT-LLM's calls in random order, against a slow and obvious model of what every token's bytes must be.

The bytes of a token are a number for everything that they depend on: the LoRA, the salt, every token before it with its extra
id and image, and how often the cache was reset before. So two tokens have equal bytes exactly when one may be read for the
other. After every call all live sequences are read in all layers, and what the events told is compared with what is cached.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import Any

import pytest

from kvpool.compat import KvCacheRetentionConfig, TokenRangeRetentionConfig, TrtLlmKVCacheManager
from kvpool.errors import OutOfBlocksError
from kvpool.events import Stored

torch = pytest.importorskip("torch")

STEPS = 50
SHAPES: dict[str, dict[str, Any]] = {
    "full": dict(num_kv_heads_per_layer=[1, 1], blocks_in_primary_pool=24, blocks_in_secondary_pool=12),
    "no host": dict(num_kv_heads_per_layer=[1], blocks_in_primary_pool=16),
    "windows": dict(
        num_kv_heads_per_layer=[1, 2, 1],
        blocks_in_primary_pool=40,
        blocks_in_secondary_pool=16,
        max_attention_window=[None, 8],
    ),
    "sinks": dict(
        num_kv_heads_per_layer=[1, 1], blocks_in_primary_pool=40, max_attention_window=[8], sink_token_length=4
    ),
    "no partial reuse": dict(
        num_kv_heads_per_layer=[1], blocks_in_primary_pool=20, blocks_in_secondary_pool=8, enable_partial_reuse=False
    ),
    "no reuse": dict(num_kv_heads_per_layer=[1], blocks_in_primary_pool=20, enable_block_reuse=False),
}


@dataclass
class Sequence:
    """A live sequence as the model sees it: its tokens with what stands behind each, and the bytes of those written."""

    start: int
    tokens: list[tuple[int, Any]]
    num_prompt: int
    values: list[int] = field(default_factory=list)
    is_swapped: bool = False


class Run:
    """One cache and the model beside it."""

    def __init__(self, seed: int, shape: dict[str, Any]) -> None:
        self.random = Random(seed)
        self.cache = TrtLlmKVCacheManager(
            size_per_head=4, tokens_per_block=4, dtype="float32", device="cpu", event_buffer_max_size=4096, **shape
        )
        self.live: dict[str, Sequence] = {}
        self.pins: list[Any] = []
        self.numbers: dict[Any, int] = {}
        self.num_resets = self.num_sequences = self.num_reused = self.next_event = 0
        self.told: dict[tuple[int, str], tuple[int, int]] = {}  # (group, hash): cache level and priority
        self.paths: dict[str, tuple[Any, ...]] = {}  # hash: all tokens up to its block, with extra ids
        self.known: set[tuple[Any, ...]] = set()  # the beginnings of all sequences there were

    def number(self, *parts: Any) -> int:
        return self.numbers.setdefault(parts, len(self.numbers) + 1)

    # --- calls -------------------------------------------------------------------------------------------------------

    def add(self) -> None:
        """A prompt that shares its beginning with others, up to their extra ids and images."""
        name, random = f"s{self.num_sequences}", self.random
        self.num_sequences += 1
        length = random.randint(1, 24)
        tokens = [random.choice((7, 8)) if index > 11 else index for index in range(length)]
        behind: list[Any] = [None] * length
        keys: dict[str, Any] = dict(
            lora_task_id=random.choice([None, None, 3]), cache_salt=random.choice([None, "salt"])
        )
        start = self.number("start", *keys.values(), self.num_resets)
        if length > 12 and random.random() < 0.5:
            image = (random.choice(["cat", "dog"]), 5, 4)
            keys["multimodal"] = [image]
            for index in range(4):
                behind[5 + index] = (*image, index)
        elif random.random() < 0.3:
            extras = [random.choice((0, 4)) if index > 8 else 0 for index in range(length)]
            keys["extra_ids"] = extras
            behind = [extra or None for extra in extras]
        if random.random() < 0.3:
            keys["retention_config"] = KvCacheRetentionConfig(
                [TokenRangeRetentionConfig(0, 8, 90)], random.choice((10, 35))
            )
        sequence = Sequence(start, list(zip(tokens, behind, strict=True)), length)
        found = self.cache.add_sequence(name, tokens, **keys)
        self.num_reused += found
        self.live[name] = sequence
        self.compute(sequence, found)

    def compute(self, sequence: Sequence, num_tokens: int) -> None:
        """Notes the bytes of the next tokens."""
        for _ in range(num_tokens):
            before = sequence.values[-1] if sequence.values else sequence.start
            sequence.values.append(self.number(before, *sequence.tokens[len(sequence.values)]))

    def write(self, name: str, most: int = 99) -> None:
        """Keys and values of tokens that have none yet."""
        sequence = self.live[name]
        begin = len(sequence.values)
        self.compute(sequence, min(most, len(sequence.tokens) - begin))
        if len(sequence.values) > begin:
            for layer, spec in enumerate(self.cache.manager.config.layers):
                keys = self.expected(sequence.values[begin:], layer, spec.kv_heads)
                self.cache.write(name, layer, begin, keys, -keys)

    def expected(self, values: list[int], layer: int, heads: int) -> Any:
        numbers = torch.tensor(values, dtype=torch.float32) * 8 + layer
        return numbers[:, None, None].expand(-1, heads, 4)

    def store(self, name: str) -> None:
        self.write(name)
        self.cache.store_context_blocks(name)

    def generate(self, name: str) -> None:
        """New tokens, one by one, of which the last may be a draft that is taken back."""
        self.store(name)
        sequence, size = self.live[name], self.cache.tokens_per_block
        for _ in range(self.random.randint(1, 2 * size)):
            self.cache.add_token(name)
            token = self.random.choice((7, 8))
            sequence.tokens.append((token, None))
            self.write(name)
            if self.random.random() < 0.2:
                self.cache.rewind_kv_cache(name, 1)
                sequence.tokens.pop()
                sequence.values.pop()
            else:
                self.cache.store_new_block(name, [token])

    def fork(self, name: str) -> None:
        """A beam."""
        sequence, child = self.live[name], f"s{self.num_sequences}"
        self.num_sequences += 1
        self.cache.manager.fork(self.cache.handle(name), child)
        self.live[child] = Sequence(
            sequence.start, list(sequence.tokens), sequence.num_prompt, list(sequence.values), sequence.is_swapped
        )

    def remove(self, name: str) -> None:
        """The end of a sequence: cancelled, or with all tokens and the one that was sampled last."""
        tokens = None
        if self.random.random() < 0.8:
            self.write(name)
            tokens = [*(token for token, _ in self.live[name].tokens), 1]
        pin = self.cache.remove_sequence(name, tokens, pin_on_release=self.random.random() < 0.2)
        del self.live[name]
        if pin is not None:
            self.pins.append(pin)

    def swap(self, name: str) -> None:
        manager, handle = self.cache.manager, self.cache.handle(name)
        if self.live[name].is_swapped:
            manager.swap_in(handle)
        elif manager.can_swap_out(handle):
            manager.swap_out(handle)
        self.live[name].is_swapped = handle.is_swapped

    def upkeep(self) -> None:
        choice = self.random.randrange(12)
        pool = self.random.randrange(len(self.cache.manager.config.pools))
        if choice == 0:
            self.cache.reset_reuse_state()
            self.num_resets += 1
            self.pins.clear()
        elif choice < 5 and self.pins:
            self.cache.unpin_blocks_by_id(self.pins.pop())
        elif choice < 8 and self.cache.block_manager.pools[0].num_secondary_blocks:
            self.cache.manager.cache.offload(self.random.randint(1, 4), pool=pool)
        elif choice < 10:
            self.cache.manager.cache.evict(self.random.randint(1, 4), pool=pool)
        else:
            self.cache.manager.cache.defragment()

    def step(self) -> None:
        active = [name for name, sequence in self.live.items() if not sequence.is_swapped]
        choice = self.random.random()
        before = {name: (list(s.tokens), list(s.values)) for name, s in self.live.items()}
        try:
            if choice < 0.3 or not self.live:
                self.add()
            elif choice < 0.4:
                self.upkeep()
            elif choice < 0.5:
                self.swap(self.random.choice(list(self.live)))
            elif active:
                call = self.random.choice(
                    [self.store, self.generate, self.generate, self.fork, self.remove, self.remove]
                )
                call(self.random.choice(active))
        except OutOfBlocksError:
            self.forget_what_failed(before)

    def forget_what_failed(self, before: dict[str, Any]) -> None:
        """Room for a token was refused. What was written before stays; the token does not."""
        for name, sequence in self.live.items():
            length = self.cache.handle(name).num_written
            assert length >= len(before[name][1]) - 1
            del sequence.values[length:], sequence.tokens[max(length, sequence.num_prompt) :]

    # --- checks ------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        self.check_bytes()
        self.check_events()
        self.check_blocks()
        self.cache.manager.check()

    def check_bytes(self) -> None:
        for name, sequence in self.live.items():
            for layer, spec in enumerate(self.cache.manager.config.layers):
                first = 0 if spec.window is None else max(0, len(sequence.values) - spec.window + 1)
                values = sequence.values[first:]
                keys, negative = self.cache.read(name, layer, first, len(values))
                assert negative is not None
                wanted = self.expected(values, layer, spec.kv_heads)
                assert torch.equal(keys, wanted), (name, layer)
                assert torch.equal(negative, -wanted), (name, layer)

    def check_events(self) -> None:
        """The events are numbered without a gap, and lead to what is cached now."""
        for sequence in self.live.values():
            content = tuple((token, extra if isinstance(extra, int) else 0) for token, extra in sequence.tokens)
            self.known |= {content[:end] for end in range(1, len(content) + 1)}
        for event in self.cache.get_latest_events():
            assert event["event_id"] == self.next_event
            self.next_event += 1
            self.follow(event["layer_group_id"], event["data"])
        with self.cache.manager.subscribe() as subscription:
            now = [event for event in subscription.poll().events if isinstance(event, Stored)]
        cached = {(event.group, d.hex()): (int(event.tier), event.priority) for event in now for d in event.digests}
        assert self.told == cached

    def follow(self, group: int, data: dict[str, Any]) -> None:
        if data["type"] == "stored":
            parent = data["parent_hash"]
            for block in data["blocks"]:
                tokens = tuple((token["token_id"], token["token_extra_id"]) for token in block["tokens"])
                self.paths[block["block_hash"]] = path = (() if parent is None else self.paths[parent]) + tokens
                assert path in self.known
                assert (group, block["block_hash"]) not in self.told
                self.told[group, block["block_hash"]] = block["cache_level"], block["priority"]
                parent = block["block_hash"]
        elif data["type"] == "removed":
            for block_hash in data["block_hashes"]:
                del self.told[group, block_hash]
        elif data["type"] == "updated":
            level, priority = self.told[group, data["block_hash"]]
            if (diff := data["cache_level"]) is not None:
                assert diff["old_value"] == level
                level = diff["new_value"]
            if (diff := data["priority"]) is not None:
                assert diff["old_value"] == priority
                priority = diff["new_value"]
            self.told[group, data["block_hash"]] = level, priority

    def check_blocks(self) -> None:
        """The blocks in the tables of live sequences are those that are used."""
        used = set()
        for window in self.cache.block_manager.window_block_managers:
            for index, pool in enumerate(window.pools):
                for name, sequence in self.live.items():
                    if not sequence.is_swapped:
                        (ids,) = self.cache.get_cache_block_ids(name, window.window_size, index)
                        used |= {(pool.memory, block) for block in ids if block is not None}
        stats = self.cache.get_kv_cache_stats()
        assert stats.used_num_blocks == len(used)
        assert stats.free_num_blocks + stats.used_num_blocks <= stats.max_num_blocks


@pytest.mark.quick("0-full", "0-no host")
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("seed", range(1))
def test_given_random_calls_then_every_token_has_its_bytes_and_events_tell_what_is_cached(
    shape: str, seed: int
) -> None:
    run = Run(seed, SHAPES[shape])
    for _ in range(STEPS):
        run.step()
        run.check()
    assert run.num_sequences > 10
    assert run.num_reused > 0 or shape == "no reuse"
    for name in list(run.live):
        run.cache.manager.free(run.cache.handle(name))
    for pin in run.pins:
        run.cache.unpin_blocks_by_id(pin)
    stats = run.cache.get_kv_cache_stats()
    assert (stats.free_num_blocks, stats.used_num_blocks) == (stats.max_num_blocks, 0)
