"""Random paged batches with poison in every slot that nobody may read, and the float64 answer to each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvpool.attention import AttentionBackend, AttentionSpec, PagedBatch
from kvpool.config.layers import DType
from kvpool.kernels.attention_reference import reference_attention
from kvpool.kernels.layout import LayerCache, StoredPart
from kvpool.kernels.quantization import TORCH_DTYPES, quantize

MIXED_QUERIES = (1, 1, 5, 1, 33, 2, 0, 1)
MIXED_KEYS = (1, 70, 5, 33, 64, 18, 40, 17)
TOLERANCE = {DType.FLOAT32: 2e-6, DType.FLOAT16: 2e-3, DType.BFLOAT16: 1e-2}


def poisoned_layer(spec: AttentionSpec, num_blocks: int, block_size: int, layout: str, device: str) -> LayerCache:
    """Layer 1 of a block-first store of two layers, K beside V; every byte is NaN, or worth NaN."""

    def part(dim: int, dtype: DType) -> Tensor:
        stored, width = TORCH_DTYPES[dtype], -(-dim // 2) if dtype is DType.INT4 else dim
        inner = (block_size, spec.kv_heads) if layout == "nhd" else (spec.kv_heads, block_size)
        memory = torch.full((num_blocks, 2, 2, *inner, width), 0.0, device=device)
        memory = memory.to(stored) if not stored.is_floating_point else memory.fill_(torch.nan).to(stored)
        views = memory[:, 1]
        return views if layout == "nhd" else views.transpose(2, 3)

    def scales() -> Tensor:
        return torch.full((num_blocks, 2, 2, block_size, spec.kv_heads), torch.nan, device=device).half()[:, 1]

    parts = {}
    for at, ((name, dtype, width), factor) in enumerate(zip(spec.reads, (0.5, 0.25), strict=False)):
        parts[name] = StoredPart(
            dtype,
            part(width, dtype)[:, at],
            width,
            scales()[:, at] if dtype.scale_bytes else None,
            scales()[:, at] if dtype is DType.INT4 else None,
            factor if "fp8" in dtype.value else 1.0,
        )
    return LayerCache(parts)


def write(cache: LayerCache, blocks: Tensor, offsets: Tensor, given: Mapping[str, Tensor]) -> None:
    """Keys and values [tokens, heads, dim] by name into their places, quantised as the store does."""
    for name, values in given.items():
        dtype, data, _, scale, zero, factor = cache[name]
        stored = quantize(values, dtype, factor)
        if data.element_size() == 1:  # indexing has no fp8
            data.view(torch.uint8)[blocks, offsets] = stored.data.view(torch.uint8)
        else:
            data[blocks, offsets] = stored.data
        for rows, target in ((stored.scale, scale), (stored.zero, zero)):
            if target is not None:
                assert rows is not None
                target[blocks, offsets] = rows


@dataclass
class Case:
    """A spec and the lengths of a batch; `build` draws the rest."""

    name: str
    spec: AttentionSpec
    query_lens: tuple[int, ...] = MIXED_QUERIES
    kv_lens: tuple[int, ...] = MIXED_KEYS
    block_size: int = 16
    layout: str = "nhd"
    slide: bool = True  # a windowed sequence has let go of the blocks that no query of this step sees
    spare_blocks: int = 1  # reserved ahead: listed, but nothing is written there
    seed: int = field(default=0)

    def build(self, device: str = "cpu") -> BuiltCase:
        """Writes every token that the block lists hold, and nothing else, then asks the reference."""
        rng = np.random.default_rng(self.seed)
        torch.manual_seed(self.seed)
        spec, size = self.spec, self.block_size
        lists, gaps, taken = [], [], 0
        sink_blocks = -(-spec.sink_tokens // size)
        for queries, keys in zip(self.query_lens, self.kv_lens, strict=True):
            first = int(spec.first_visible(np.int64(max(keys - queries, 0))))
            dropped = max(0, first // size - sink_blocks) if self.slide else 0
            count = -(-keys // size) - dropped + self.spare_blocks
            gaps.append(dropped * size)
            lists.append(list(range(taken, taken + count)))
            taken += count
        order = rng.permutation(taken + 3)
        blocks = [[int(order[block]) for block in block_list] for block_list in lists]
        cache = poisoned_layer(spec, taken + 3, size, self.layout, device)
        for block_list, keys, gap in zip(blocks, self.kv_lens, gaps, strict=True):
            listed = torch.arange(max(keys - gap, 0))
            places = torch.tensor(block_list, dtype=torch.long)[listed // size].to(device), (listed % size).to(device)
            shape = (len(listed), spec.kv_heads)
            sides = {name: torch.randn(*shape, width, device=device) for name, _, width in spec.reads}
            write(cache, *places, sides)
        total = sum(self.query_lens)
        q = torch.randn(total, spec.q_heads, spec.head_dim, device=device).to(TORCH_DTYPES[spec.dtype])
        if self.layout == "hnd":  # queries as a model hands them over: a view of [head, token, element]
            q = q.transpose(0, 1).contiguous().transpose(0, 1)
        sinks = torch.randn(spec.q_heads, device=device) * 2 if spec.sink_logits else None
        lengths = self.query_lens, self.kv_lens
        expected = reference_attention(q, cache, spec, blocks, *lengths, gaps, sinks)
        indptr = np.cumsum([0, *(len(block_list) for block_list in blocks)])
        indices = np.concatenate([*blocks, []]).astype(np.int32)
        batch = PagedBatch.build(
            indptr, indices, self.query_lens, self.kv_lens, block_size=size, gaps=np.array(gaps, np.int64)
        )
        return BuiltCase(self, batch, cache, q, sinks, expected)


@dataclass
class BuiltCase:
    """A case with its data and the expected output."""

    case: Case
    batch: PagedBatch
    cache: LayerCache
    q: Tensor
    sink_logits: Tensor | None
    expected: Tensor

    def run(self, backend: AttentionBackend) -> Tensor:
        """What a backend computes, into an output full of poison or one of its own."""
        plan = backend.plan(self.case.spec, self.batch)
        out = None
        if self.case.layout == "nhd":
            out = torch.full(self.expected.shape, torch.nan, dtype=self.q.dtype, device=self.q.device)
        return backend.run(self.q, self.cache, plan, sink_logits=self.sink_logits, out=out)

    def check(self, out: Tensor) -> None:
        """Fails where `out` differs from the float64 answer by more than its type explains."""
        assert out.shape == self.expected.shape
        assert out.isfinite().all(), "poison was read, or a row was not written"
        error = (out.double() - self.expected).norm() / self.expected.norm().clamp(min=1e-30)
        assert error < TOLERANCE[self.case.spec.dtype], f"relative error {error:.2e}"


def spec(q_heads: int = 4, kv_heads: int = 2, head_dim: int = 64, **options: Any) -> AttentionSpec:
    """Float32 unless said otherwise, so that mistakes are not lost in rounding."""
    types = {"dtype": DType.FLOAT32, "kv_dtype": DType.FLOAT32}
    return AttentionSpec(q_heads, kv_heads, head_dim, **{**types, **options})


def feature_cases() -> list[Case]:
    """Every feature alone and the combinations that models have, on a batch of decode rows and prompt chunks."""
    cases = [
        Case("plain", spec()),
        Case("heads first", spec(), layout="hnd"),
        *(Case(f"head dim {dim}", spec(head_dim=dim)) for dim in (80, 96, 128)),
        *(Case(f"{ratio} query heads each", spec(q_heads=2 * ratio)) for ratio in (1, 3, 7, 8)),
        *(Case(f"blocks of {size}", spec(), block_size=size) for size in (1, 32, 12)),
        *(Case(f"window {window}", spec(window=window)) for window in (1, 16, 23)),
        Case("window, nothing dropped", spec(window=23), slide=False),
        Case("sink tokens", spec(window=20, sink_tokens=5)),
        Case("sink tokens beyond a block", spec(window=9, sink_tokens=18), block_size=8),
        Case("sink tokens, nothing dropped", spec(window=20, sink_tokens=5), slide=False),
        *(Case(f"chunk {chunk}", spec(chunk=chunk)) for chunk in (16, 24)),
        Case("soft cap", spec(soft_cap=1.5)),
        Case("soft cap and window", spec(soft_cap=2.0, window=20)),
        Case("sink logits", spec(sink_logits=True)),
        Case("sink logits and window", spec(sink_logits=True, window=20)),
        Case("soft cap, sink logits, sink tokens", spec(soft_cap=2.0, sink_logits=True, window=16, sink_tokens=4)),
        Case("own scale", spec(scale=0.3)),
        Case("negative scale", spec(scale=-0.3)),
        Case("negative scale and soft cap", spec(scale=-0.3, soft_cap=2.0)),
        Case("K only", spec(1 * 4, 1, 96, v_dim=64, values="k")),
        Case("short V", spec(v_dim=32)),
        Case("cross", spec(causal=False), query_lens=(3, 1, 2, 1, 20), kv_lens=(40, 0, 17, 33, 64)),
        Case("cross, equal numbers of queries", spec(causal=False), query_lens=(3, 3), kv_lens=(40, 37)),
        Case("both ways in a window", spec(causal=False, window=20), (3, 1, 20, 33), (40, 17, 64, 33)),
        Case("both ways, window, sink tokens", spec(causal=False, window=9, sink_tokens=5), (3, 30), (40, 80), 8),
        Case("cross with sink logits", spec(causal=False, sink_logits=True), (3, 1, 2), (40, 0, 17)),
    ]
    cases += [Case(f"stored as {dtype.value}", spec(kv_dtype=dtype)) for dtype in DType if dtype is not DType.FLOAT32]
    narrow = (DType.INT8, DType.INT4, DType.FP8_E4M3, DType.FP8_E5M2)
    cases += [Case(f"odd heads stored as {dtype.value}", spec(head_dim=33, kv_dtype=dtype)) for dtype in narrow]
    cases += [Case("short V stored as int4", spec(head_dim=40, v_dim=22, kv_dtype=DType.INT4))]
    cases += [
        Case(f"K only, stored as {dtype.value}", spec(4, 1, 96, v_dim=64, values="k", kv_dtype=dtype))
        for dtype in (DType.INT8, DType.INT4)
    ]
    cases += [
        Case(f"{kv.value} stored, {dtype.value} computed", spec(dtype=dtype, kv_dtype=kv), layout="hnd")
        for dtype in (DType.BFLOAT16, DType.FLOAT16)
        for kv in (dtype, *narrow)
    ]
    return cases


def shape_cases() -> list[Case]:
    """Lengths at the edges."""
    return [
        Case("one token", spec(), (1,), (1,)),
        Case("only empty sequences", spec(), (0, 1, 0), (0, 0, 20)),
        Case("padding rows between others", spec(), (1, 1, 1, 2), (33, 0, 16, 7)),
        Case("long decode", spec(), (1,) * 3, (700, 3, 350)),
        Case("many decode rows of alike lengths", spec(), (1,) * 40, tuple(range(64, 104))),
        Case("drafts", spec(window=40), (4,) * 6, (100, 90, 80, 70, 60, 4)),
        Case("long chunk behind a prefix", spec(), (90,), (300,)),
        Case("whole prompt", spec(), (130, 64), (130, 64)),
        Case("long chunk in a window", spec(window=50), (90, 1), (300, 300)),
        Case("long chunk, sinks and window", spec(window=50, sink_tokens=3), (90, 1), (300, 300)),
        Case("long chunk over chunk borders", spec(chunk=32), (90, 1), (300, 300)),
        Case("more than one tile of a long prompt", spec(2, 1, 16), (1100, 1), (1200, 40)),
        Case("more than one tile in the open", spec(2, 1, 16, soft_cap=5.0), (1100, 1), (5000, 40)),
    ]


def large_cases() -> list[Case]:
    """Sizes that only a GPU should be asked for: shapes of real models, long contexts, splits."""
    rng = np.random.default_rng(7)
    lens = tuple(int(n) for n in rng.integers(1, 3000, 40))
    bf16: dict[str, Any] = {"dtype": DType.BFLOAT16, "kv_dtype": DType.BFLOAT16}
    cases = [
        Case("llama decode", spec(32, 8, 128, **bf16), (1,) * 40, lens),
        Case("llama decode, one long", spec(32, 8, 128, **bf16), (1,) * 3, (30_000, 5, 17)),
        Case("llama mixed", spec(32, 8, 128, **bf16), (1,) * 20 + (700, 64, 5), (*lens[:20], 2000, 64, 900)),
        Case("llama heads first", spec(32, 8, 128, **bf16), (1,) * 20 + (700,), (*lens[:20], 700), layout="hnd"),
        Case("gemma 2", spec(16, 8, 256, soft_cap=50.0, window=512, **bf16), (1, 600, 1), (1500, 1400, 30)),
        Case("gpt-oss", spec(64, 8, 64, sink_logits=True, window=128, **bf16), (1, 600, 1), (1500, 1400, 30)),
        Case("latent", spec(16, 1, 576, v_dim=512, values="k", **bf16), (1, 20, 1), (900, 100, 30)),
        *(
            Case(
                f"latent of {heads} heads",
                spec(heads, 1, 576, v_dim=512, values="k", **bf16),
                (1,) * 20 + (30, 7),
                lens[:22],
            )
            for heads in (128, 64, 16, 8, 24)
        ),
        Case("latent, one long", spec(128, 1, 576, v_dim=512, values="k", **bf16), (1,) * 3, (30_000, 5, 17)),
        *(
            Case(
                f"latent in blocks of {size}", spec(16, 1, 576, v_dim=512, values="k", **bf16), (1, 9), (500, 333), size
            )
            for size in (8, 64, 12)
        ),
        Case("many query heads", spec(71, 1, 64, **bf16), (1, 40, 1), (900, 100, 30)),
        Case("prompts of odd lengths", spec(32, 8, 128, **bf16), (130, 257, 1, 64, 33), (130, 300, 90, 64, 1033)),
        Case("a short chunk behind a long prefix", spec(32, 8, 128, **bf16), (40,), (5000,)),
        Case("a head each", spec(4, 4, 128, **bf16), (300, 77), (300, 500)),
        Case("prompts without keys", spec(32, 8, 128, **bf16), (40, 20), (0, 90)),
        Case("prompts over heads of 64", spec(16, 8, 64, **bf16), (300,), (700,)),
        *(
            Case(f"prompts in blocks of {size}", spec(32, 8, 128, **bf16), (300,), (700,), size)
            for size in (8, 64, 256, 12)
        ),
        Case("prompts across", spec(32, 8, 128, causal=False, **bf16), (60, 20), (333, 90)),
        Case("prompts in float16", spec(8, 4, 128, dtype=DType.FLOAT16, kv_dtype=DType.FLOAT16), (300,), (300,)),
    ]
    for kv in (DType.FP8_E4M3, DType.FP8_E5M2, DType.INT8, DType.INT4):
        latent = spec(128, 1, 576, v_dim=512, values="k", dtype=DType.BFLOAT16, kv_dtype=kv)
        cases.append(Case(f"latent in {kv.value}", latent, (1,) * 20 + (9,), (*lens[:20], 400)))
        kind = spec(32, 8, 128, dtype=DType.BFLOAT16, kv_dtype=kv)
        cases.append(Case(f"llama in {kv.value}", kind, (1,) * 20 + (300,), (*lens[:20], 700)))
        cases.append(Case(f"prompts of odd lengths in {kv.value}", kind, (130, 257, 40, 33), (130, 300, 0, 9033), 256))
        narrow = spec(16, 8, 64, causal=False, dtype=DType.FLOAT16, kv_dtype=kv)
        cases.append(Case(f"prompts across heads of 64 in {kv.value}", narrow, (300, 20), (700, 90), 12))
    return cases
