"""A real manager drives attention: chunks, decode, forks, prefix hits and windows, against dense attention."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from paged_cases import poisoned_layer, write
from torch import Tensor

from kvpool import KVCacheConfig, KVCacheManager, LayerSpec
from kvpool.attention import AttentionSpec, PagedBatch, create_backend
from kvpool.config.layers import DType

KINDS: dict[str, dict[str, Any]] = {
    "full": {},
    "window": {"window": 11},
    "window and sinks": {"window": 11, "sink_tokens": 3},
    "chunk": {"chunk": 16},
}


class TinyModel:
    """One attention layer whose K, V and q are functions of token and position, so that anybody can recompute them."""

    def __init__(self, block_size: int, **options: Any) -> None:
        layer = LayerSpec(kv_heads=2, head_dim=16, dtype=DType.FLOAT32, **options)
        self.spec = AttentionSpec.of(layer, 4, dtype=DType.FLOAT32)
        self.kv = KVCacheManager(KVCacheConfig([layer], block_size, gpu_blocks=192))
        self.group = self.kv.config.groups[0]
        self.cache = poisoned_layer(self.spec, 192, block_size, "nhd", "cpu")
        self.backend = create_backend("torch", "cpu")
        self.sequences: dict[Any, list[int]] = {}

    def vectors(self, tokens: list[int], first: int, heads: int, kind: int) -> Tensor:
        rows = []
        for position, token in enumerate(tokens, first):
            generator = torch.Generator().manual_seed(token * 8192 + position * 4 + kind)
            rows.append(torch.randn(heads, 16, generator=generator))
        return torch.stack(rows) if rows else torch.empty(0, heads, 16)

    def copy_blocks(self) -> None:
        for copy in self.kv.take_copies():
            for _, part, *_ in self.cache.values():
                part[copy.dst, : copy.num_tokens] = part[copy.src, : copy.num_tokens]

    def step(self, work: dict[Any, list[int]]) -> None:
        """Reserves, writes, attends and commits these new tokens of each sequence, then compares every output."""
        handles = list(work)
        for handle, new in work.items():
            missing = handle.num_written + len(new) - handle.num_reserved
            if missing > 0:
                self.kv.extend(handle, missing)
        self.copy_blocks()
        starts = [handle.num_written for handle in handles]
        for handle, start in zip(handles, starts, strict=True):
            mapping = self.kv.slot_mapping([handle], start, start + len(work[handle]))
            slots = torch.from_numpy(mapping[0].astype(np.int64))
            keep = slots >= 0
            k, v = (self.vectors(work[handle], start, 2, kind)[keep] for kind in (1, 2))
            size = self.group.block_size
            write(self.cache, slots[keep] // size, slots[keep] % size, {"k": k, "v": v})
        lens = [len(work[handle]) for handle in handles]
        kv_lens = [start + count for start, count in zip(starts, lens, strict=True)]
        batch = PagedBatch.of(self.kv.batch(handles).csr(self.group.index), self.group, lens, kv_lens)
        q = torch.cat([self.vectors(work[h], start, 4, 0) for h, start in zip(handles, starts, strict=True)])
        out = self.backend.run(q, self.cache, self.backend.plan(self.spec, batch))
        row = 0
        for handle, start, count in zip(handles, starts, lens, strict=True):
            self.sequences[handle] = self.sequences.get(handle, [])[:start] + work[handle]
            expected = self.dense(self.sequences[handle], start)
            torch.testing.assert_close(out[row : row + count], expected, rtol=1e-4, atol=1e-5)
            row += count
            self.kv.commit(handle, work[handle])

    def dense(self, tokens: list[int], start: int) -> Tensor:
        q = self.vectors(tokens, 0, 4, 0)[start:]
        k, v = (self.vectors(tokens, 0, 2, kind).repeat_interleave(2, dim=1) for kind in (1, 2))
        scores = torch.einsum("qhd,khd->hqk", q, k) * self.spec.scale
        positions = torch.arange(len(tokens))
        seen = self.spec.visible(positions[start:, None], positions[None, :])
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)


@pytest.mark.quick("full-4", "window-16", "window and sinks-4", "chunk-1")
@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS.keys())
def test_given_chunked_prefill_and_decode_in_one_batch_then_every_step_is_right(
    options: dict[str, Any], block_size: int
) -> None:
    model = TinyModel(block_size, **options)
    long, short = list(range(100, 150)), list(range(7))
    first = model.kv.allocate("long", long, reserve=13)
    second = model.kv.allocate("short", short)

    model.step({first: long[:13], second: short})
    for start in range(13, 50, 9):
        model.step({first: long[start : start + 9], second: [start]})
    for token in range(20):
        model.step({second: [token], first: [token + 1]})

    model.kv.check()


@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS.keys())
def test_given_a_cached_prefix_then_the_rest_of_the_prompt_attends_to_it(options: dict[str, Any]) -> None:
    model = TinyModel(4, **options)
    prompt = list(range(30))
    first = model.kv.allocate("first", prompt)
    model.step({first: prompt})
    model.sequences.clear()

    second = model.kv.allocate("second", [*prompt[:26], 77, 78, 79])
    assert second.num_written > 0
    model.sequences[second] = prompt[: second.num_written]
    model.step({second: [*prompt[:26], 77, 78, 79][second.num_written :]})
    model.step({second: [5]})


@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS.keys())
def test_given_forks_then_each_attends_to_the_shared_past_and_its_own_tokens(options: dict[str, Any]) -> None:
    model = TinyModel(4, **options)
    prompt = list(range(18))
    parent = model.kv.allocate("parent", prompt)
    model.step({parent: prompt})
    children = model.kv.fork(parent, "a", "b")
    for child in children:
        model.sequences[child] = list(prompt)

    for step in range(12):
        model.step({parent: [step], children[0]: [50 + step], children[1]: [90 + step]})

    model.kv.check()


def test_given_lookahead_places_then_only_written_tokens_are_read() -> None:
    model = TinyModel(4)
    handle = model.kv.allocate("drafted", list(range(6)))
    model.step({handle: list(range(6))})

    model.kv.extend(handle, 1, lookahead=9)
    model.step({handle: [42]})
