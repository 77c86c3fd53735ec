"""The Triton kernels compute what the float64 reference says: in the interpreter here, on a GPU where there is one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

import torch
from paged_cases import MIXED_KEYS, Case, feature_cases, large_cases, shape_cases, spec

from kvpool.attention import PagedBatch, triton_backend
from kvpool.attention.triton_backend import TritonBackend
from kvpool.config.layers import DType
from kvpool.errors import InvalidArgumentError, UnsupportedAttentionError
from kvpool.kernels import attention as paged_attention
from kvpool.kernels.attention import TileShape
from kvpool.kernels.attention_reference import attend_items_reference, merge_partials_reference
from kvpool.kernels.attention_spec import AttentionSpec
from kvpool.kernels.layout import LayerCache

CASES = feature_cases() + shape_cases()
CPU = torch.device("cpu")
REFERENCE_CASES = [
    Case("divided keys", spec(), (1, 1), (150, 40)),
    Case("tiles", spec(window=20, sink_tokens=3), (6, 1), (60, 40)),
    Case("sink logits", spec(sink_logits=True, soft_cap=4.0), (1, 3), (100, 40)),
]
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs the compiled kernels")


def interpreter_cases() -> list[Case]:
    """The same features on fewer tokens: the interpreter is slow. It cannot multiply bfloat16 either."""
    cases = []
    for case in CASES:
        if case.spec.dtype is DType.BFLOAT16 or max(case.kv_lens, default=0) > 120 or len(case.kv_lens) > 10:
            continue
        mixed = case.kv_lens == MIXED_KEYS
        cases.append(replace(case, query_lens=(1, 9, 0, 1), kv_lens=(1, 37, 9, 43)) if mixed else case)
    cases.append(Case("chunk behind a prefix", spec(2, 1, 16, window=30), (40, 1), (90, 60)))
    cases.append(Case("sinks, a gap, a chunk", spec(2, 1, 16, window=12, sink_tokens=3), (9, 20), (90, 70), 8))
    return cases


@pytest.mark.quick(
    "plain",
    "8 query heads each",
    "blocks of 12",
    "window 23",
    "chunk 24",
    "soft cap and window",
    "sink logits and window",
    "cross",
    "stored as fp8_e4m3",
)
@interpreted
@pytest.mark.parametrize("case", interpreter_cases(), ids=lambda case: case.name)
def test_given_the_interpreter_then_the_output_is_that_of_the_reference(case: Case) -> None:
    built = case.build()

    built.check(built.run(TritonBackend(CPU)))


class SmallTiles(TritonBackend):
    """Few keys a round, and few items at once: even short lists take several rounds, and some are divided besides."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self.num_sms = 1

    def tile_shape(self, spec: AttentionSpec, *, short: bool) -> TileShape:
        return super().tile_shape(spec, short=short)._replace(keys=16)


@pytest.mark.quick(
    "plain", "window 23", "sink tokens", "soft cap and window", "stored as int4", "drafts", "chunk behind a prefix"
)
@interpreted
@pytest.mark.parametrize("case", interpreter_cases(), ids=lambda case: case.name)
def test_given_items_of_several_rounds_then_the_output_is_that_of_the_reference(case: Case) -> None:
    built = case.build()

    built.check(built.run(SmallTiles()))


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES + large_cases(), ids=lambda case: case.name)
def test_given_a_gpu_then_the_output_is_that_of_the_reference(case: Case) -> None:
    built = case.build("cuda")

    built.check(built.run(TritonBackend(torch.device("cuda"))))


@pytest.mark.parametrize("case", REFERENCE_CASES, ids=lambda case: case.name)
def test_given_work_items_then_the_kernels_compute_what_their_references_do(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    built = case.build(device)
    backend = TritonBackend(torch.device(device))
    computed = built.run(backend)

    monkeypatch.setattr(triton_backend, "attend_items", attend_items_reference)
    monkeypatch.setattr(triton_backend, "merge_partials", merge_partials_reference)
    expected = built.run(backend)

    built.check(expected)
    torch.testing.assert_close(computed, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@interpreted
def test_given_buffers_when_batches_change_then_one_plan_after_another_is_right() -> None:
    backend = TritonBackend(CPU)
    buffers = backend.reserve(spec(), max_sequences=6, max_blocks=64)
    addresses = set()

    for lengths in ((70, 3, 33), (71, 5, 34), (16, 80, 1, 5, 0), (90,), (91,)):
        built = Case("step", spec(), (1,) * len(lengths), lengths).build()
        plan = backend.plan(spec(), built.batch, buffers)
        q = torch.randn(6, 4, 64)
        q[: len(lengths)] = built.q
        out = backend.run(q, built.cache, plan)
        built.check(out[: len(lengths)])
        addresses.add(tuple(tensor.data_ptr() for tensor in (plan.indices, *plan.launches[0][2:4])))

    assert len(addresses) == 1


@pytest.mark.quick("window")
@interpreted
@pytest.mark.parametrize("kind", [spec(), spec(window=20, sink_logits=True)], ids=["plain", "window"])
def test_given_kernels_that_are_compiled_ahead_then_nothing_is_computed(kind: AttentionSpec) -> None:
    built = Case("step", kind, (1, 8), (70, 8)).build()
    before = built.cache["k"].data.clone()

    for compile in TritonBackend(CPU).compilations(kind, built.cache):
        compile()

    torch.testing.assert_close(built.cache["k"].data, before, rtol=0, atol=0, equal_nan=True)
    built.check(built.run(TritonBackend(CPU)))


@pytest.mark.gpu
def test_given_kernels_that_are_compiled_ahead_then_no_step_in_a_graph_compiles_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import triton

    kind = spec(8, 2, 128, dtype=DType.BFLOAT16, kv_dtype=DType.BFLOAT16)
    backend = TritonBackend(torch.device("cuda"))
    mixed = Case("mixed", kind, (1, 1, 300), (70, 33, 900)).build("cuda")
    single = Case("single", kind, (1,), (70,)).build("cuda")
    for compile in backend.compilations(kind, mixed.cache):
        compile()
    compiled: list[str] = []
    monkeypatch.setattr(triton.knobs.compilation, "listener", lambda *, src, **_: compiled.append(src.name))
    for built, sizes in ((mixed, {"max_sequences": 8, "max_query_tokens": 512}), (single, {"max_sequences": 1})):
        plan = backend.plan(kind, built.batch, backend.reserve(kind, max_blocks=256, **sizes))
        q = torch.zeros(sizes.get("max_query_tokens", 1), *built.q.shape[1:], dtype=built.q.dtype, device="cuda")
        backend.run(q, built.cache, plan)
    assert compiled == []


@interpreted
def test_given_sequences_that_grow_then_their_keys_are_divided_as_from_the_beginning() -> None:
    backend = TritonBackend(CPU)
    backend.num_sms = 132
    kept = backend.reserve(spec(), max_sequences=4, max_blocks=1024)
    random = np.random.default_rng(0)
    for _ in range(20):
        lengths = random.integers(1, 3000, 3)
        for more in range(4):
            needed = -(-(lengths + more) // 16)
            indptr = np.append(0, np.cumsum(needed))
            batch = PagedBatch.build(indptr, np.arange(indptr[-1]), [1] * 3, lengths + more, block_size=16)
            fresh = backend.reserve(spec(), max_sequences=4, max_blocks=1024)
            backend.plan(spec(), batch, kept)
            backend.plan(spec(), batch, fresh)
            items = [buffers.launches[0].items.numpy() for buffers in (kept, fresh)]
            ways = [np.unique(each[each[:, 0] < 3], axis=0).tolist() for each in items]  # without padding
            assert ways[0] == ways[1]
            assert torch.equal(kept.launches[0].tiles, fresh.launches[0].tiles)


@pytest.mark.quick("3")
@interpreted
@pytest.mark.parametrize("most", [3, 12])
def test_given_buffers_for_drafts_then_sequences_may_have_several_queries(most: int) -> None:
    backend = TritonBackend(CPU)
    buffers = backend.reserve(spec(window=20), max_sequences=most, max_query_tokens=12, max_blocks=64)
    built = Case("drafts", spec(window=20), (4, 1, 4), (70, 3, 33)).build()
    q = torch.randn(12, 4, 64)
    q[:9] = built.q

    out = backend.run(q, built.cache, backend.plan(built.case.spec, built.batch, buffers))

    built.check(out[:9])


@pytest.mark.slow
@interpreted
@pytest.mark.parametrize("options", [{}, {"window": 20, "sink_tokens": 3}, {"sink_logits": True}], ids=str)
def test_given_buffers_for_mixed_steps_then_decode_and_chunks_are_right_and_the_rows_behind_are_zero(
    options: dict[str, object],
) -> None:
    kind = spec(2, 1, 16, **options)
    backend = TritonBackend(CPU)
    backend.num_sms = 2  # fewer rows behind, which cost as much as the others in the interpreter
    buffers = backend.reserve(kind, max_sequences=4, max_query_tokens=80, max_blocks=64)
    steps = [((1, 1, 70), (90, 33, 75)), ((9, 1, 1, 30), (9, 5, 70, 60))]
    if not options:  # how full the buffers are is the same to all kinds
        steps += [((1,), (40,)), ((80,), (80,))]

    for queries, keys in steps:
        built = Case("step", kind, queries, keys).build()
        q = torch.randn(80, 2, 16)
        q[: sum(queries)] = built.q
        plan = backend.plan(kind, built.batch, buffers)
        out = torch.full((80, 2, 16), torch.nan)
        backend.run(q, built.cache, plan, sink_logits=built.sink_logits, out=out)
        built.check(out[: sum(queries)])
        assert not out[sum(queries) :].any()


@interpreted
def test_given_buffers_beside_larger_ones_then_they_share_the_memory_of_partial_results() -> None:
    backend = TritonBackend(CPU)
    large = backend.reserve(spec(), max_sequences=8, max_query_tokens=64, max_blocks=64)
    small = backend.reserve(spec(), max_sequences=4, max_query_tokens=32, max_blocks=64, beside=large)
    decode = backend.reserve(spec(), max_sequences=4, max_blocks=64, beside=large)
    other = backend.reserve(spec(window=9), max_sequences=4, max_blocks=64, beside=large)

    def memory(buffers: Any) -> list[int]:
        return [launch.partials.values.data_ptr() for launch in buffers.launches]

    assert memory(small) == memory(large)
    assert memory(decode) == memory(large)[:1]
    assert memory(other) != memory(large)[:1]


@pytest.mark.quick("6")
@interpreted
@pytest.mark.parametrize("heads", [4, 6])
def test_given_buffers_for_many_sequences_then_several_heads_are_merged_together(
    heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paged_attention, "FEW_MERGES", 40)  # so that 12 sequences are many: the interpreter is slow
    kind = spec(heads, 2, 16, sink_logits=True)
    backend = TritonBackend(CPU)
    buffers = backend.reserve(kind, max_sequences=12, max_blocks=64)
    built = Case("two of them", kind, (1, 1), (300, 9)).build()
    q = torch.zeros(12, heads, 16)
    q[:2] = built.q

    out = backend.run(q, built.cache, backend.plan(kind, built.batch, buffers), sink_logits=built.sink_logits)

    built.check(out[:2])


@interpreted
def test_given_a_batch_beyond_its_buffers_then_it_is_refused() -> None:
    backend = TritonBackend(CPU)
    buffers = backend.reserve(spec(), max_sequences=2, max_blocks=4)
    batch = PagedBatch.build([0, 2, 5], [0, 1, 2, 3, 4], [1, 1], [20, 40], block_size=16)

    with pytest.raises(InvalidArgumentError, match="5 blocks"):
        backend.plan(spec(), batch, buffers)


@interpreted
def test_given_heads_that_fit_no_tile_then_the_backend_says_so() -> None:
    with pytest.raises(UnsupportedAttentionError, match="heads of 2048 elements"):
        TritonBackend(CPU).require(spec(head_dim=2048))


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"window": 40}, {"sink_logits": True}], ids=str)
def test_given_a_captured_mixed_step_when_it_is_replayed_for_other_batches_then_each_replay_is_right(
    options: dict[str, object],
) -> None:
    kind = spec(8, 2, 128, dtype=DType.BFLOAT16, kv_dtype=DType.BFLOAT16, **options)
    backend = TritonBackend(torch.device("cuda"))
    buffers = backend.reserve(kind, max_sequences=16, max_query_tokens=512, max_blocks=512)
    first = Case("capture", kind, (1, 1, 300, 9), (900, 200, 900, 70), seed=1).build("cuda")
    q, out = (torch.zeros(512, 8, 128, device="cuda").bfloat16() for _ in range(2))
    cache = LayerCache((name, part._replace(data=torch.empty_like(part.data))) for name, part in first.cache.items())
    sinks = None if first.sink_logits is None else torch.empty_like(first.sink_logits)
    plan = backend.plan(kind, first.batch, buffers)
    backend.run(q, cache, plan, sink_logits=sinks, out=out)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        backend.run(q, cache, plan, sink_logits=sinks, out=out)

    shapes = (((1, 200, 1), (300, 500, 33)), ((512,), (512,)), ((1, 1), (700, 9)), ((3, 40), (60, 40)))
    for seed, (queries, keys) in enumerate(shapes):
        built = Case("replay", kind, queries, keys, seed=seed).build("cuda")
        assert built.cache.num_blocks <= cache.num_blocks
        for name, part in built.cache.items():
            cache[name].data[: built.cache.num_blocks] = part.data
        if sinks is not None:
            sinks.copy_(built.sink_logits)
        backend.plan(kind, built.batch, buffers)
        q[: sum(queries)] = built.q
        out.fill_(torch.nan)
        graph.replay()
        built.check(out[: sum(queries)])
        assert not out[sum(queries) :].any()


@pytest.mark.gpu
@pytest.mark.parametrize("size", [8, 160])
@pytest.mark.parametrize("options", [{}, {"window": 40}, {"sink_logits": True}], ids=str)
def test_given_a_captured_graph_when_it_is_replayed_for_other_batches_then_each_replay_is_right(
    options: dict[str, object], size: int
) -> None:
    kind = spec(8, 2, 128, dtype=DType.BFLOAT16, kv_dtype=DType.BFLOAT16, **options)
    backend = TritonBackend(torch.device("cuda"))
    buffers = backend.reserve(kind, max_sequences=size, max_blocks=512)
    first = Case("capture", kind, (1,) * 8, (100, 200, 300, 1, 5, 70, 16, 17), seed=1).build("cuda")
    q, out = (torch.zeros(size, 8, 128, device="cuda").bfloat16() for _ in range(2))
    cache = LayerCache((name, part._replace(data=torch.empty_like(part.data))) for name, part in first.cache.items())
    sinks = None if first.sink_logits is None else torch.empty_like(first.sink_logits)
    plan = backend.plan(kind, first.batch, buffers)
    backend.run(q, cache, plan, sink_logits=sinks, out=out)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        backend.run(q, cache, plan, sink_logits=sinks, out=out)

    for seed, lengths in enumerate(((60, 3, 33), (100, 200, 300, 1, 5, 70, 16, 17), (400,))):
        built = Case("replay", kind, (1,) * len(lengths), lengths, seed=seed).build("cuda")
        if built.cache.num_blocks > cache.num_blocks:
            pytest.fail("the captured store is too small for this test")
        for name, part in built.cache.items():
            cache[name].data[: built.cache.num_blocks] = part.data
        if sinks is not None:
            sinks.copy_(built.sink_logits)
        backend.plan(kind, built.batch, buffers)
        q[: len(lengths)] = built.q
        out.fill_(torch.nan)
        graph.replay()
        built.check(out[: len(lengths)])
