"""The cpu backend computes what torch's and the float64 reference compute, with every set of instructions there is here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from emulated_attention import EmulatedAttention
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_cases import Case, feature_cases, shape_cases, spec

from kvpool.attention import AttentionSpec, PagedBatch
from kvpool.attention.cpu_backend import CpuBackend
from kvpool.attention.torch_backend import TorchBackend
from kvpool.config.layers import DType
from kvpool.errors import InvalidArgumentError, UnsupportedAttentionError
from tool_files import compiled_module

CPU = torch.device("cpu")
READ = (DType.FLOAT32, DType.BFLOAT16, DType.FLOAT16, DType.INT8)
CASES = [case for case in feature_cases() + shape_cases() if case.spec.kv_dtype in READ]


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return compiled_module("_paged_attention", tmp_path_factory.mktemp("attention"))


@pytest.fixture(scope="module")
def backends(module: Any) -> list[CpuBackend]:
    return [CpuBackend(CPU, name, module) for name in module.instructions()]


@pytest.fixture
def three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_given_a_poisoned_store_then_the_output_is_that_of_the_reference(
    case: Case, backends: list[CpuBackend]
) -> None:
    built = case.build()

    for backend in backends:
        built.check(built.run(backend))


THREADED = [
    Case("one long sequence: its keys are divided", spec(2, 1, 64), (1,), (5000,)),
    Case("the same with sink logits", spec(2, 1, 64, sink_logits=True), (1,), (5000,)),
    Case("the same with sink tokens", spec(2, 1, 16, window=2000, sink_tokens=5), (2, 0), (5000, 3)),
    Case("enough work for three threads", spec(), (90, 1, 64), (700, 600, 64)),
]


@pytest.mark.usefixtures("three_threads")
@pytest.mark.parametrize("case", THREADED, ids=[case.name for case in THREADED])
def test_given_three_threads_then_the_output_is_the_same(case: Case, backends: list[CpuBackend]) -> None:
    built = case.build()

    built.check(built.run(backends[0]))


ON_ARM = ("plain", "heads first", "odd heads stored as int8", "bfloat16 stored, bfloat16 computed", "stored as float16")
ON_ARM += (
    "soft cap, sink logits, sink tokens",
    "K only",
    "only empty sequences",
    "drafts",
)


def test_given_an_arm_processor_in_an_emulator_then_the_output_is_that_of_the_reference(tmp_path: Path) -> None:
    backend = CpuBackend(CPU, "neon", EmulatedAttention(tmp_path))

    for case in (case for case in CASES if case.name in ON_ARM):
        built = case.build()
        built.check(built.run(backend))


@st.composite
def wild_cases(draw: st.DrawFn) -> Case:
    """Heads of odd sizes, blocks of any size, empty sequences, padding rows and every rule that a layer may have."""
    rules: list[dict[str, Any]] = [
        {},
        {"window": draw(st.integers(1, 40)), "sink_tokens": draw(st.integers(0, 9))},
        {"chunk": draw(st.integers(1, 40))},
        {"causal": False},
    ]
    rule = draw(st.sampled_from(rules))
    group, kv_heads = draw(st.integers(1, 9)), draw(st.integers(1, 5))
    kind = AttentionSpec(
        group * kv_heads,
        kv_heads,
        draw(st.sampled_from([1, 7, 16, 32, 48, 64, 80])),
        v_dim=draw(st.sampled_from([0, 5, 16, 64])),
        soft_cap=draw(st.sampled_from([None, None, 2.0])),
        sink_logits=draw(st.booleans()),
        dtype=draw(st.sampled_from(READ[:3])),
        kv_dtype=draw(st.sampled_from(READ)),
        **rule,
    )
    lengths = []
    for _ in range(draw(st.integers(1, 5))):
        keys = draw(st.integers(0, 90))
        most = 3 if keys == 0 or not kind.causal else keys
        lengths.append((draw(st.integers(0, min(most, draw(st.sampled_from([1, 40]))))), keys))
    queries, keys_of = zip(*lengths, strict=True)
    return Case(
        "wild",
        kind,
        queries,
        keys_of,
        block_size=draw(st.integers(1, 33)),
        layout=draw(st.sampled_from(["nhd", "hnd"])),
        slide=draw(st.booleans()),
        seed=draw(st.integers(0, 99)),
    )


@settings(max_examples=60, deadline=None)
@given(case=wild_cases())
def test_given_wild_shapes_then_it_computes_what_torch_and_the_reference_compute(
    case: Case, backends: list[CpuBackend]
) -> None:
    built = case.build()
    outputs = [built.run(backend) for backend in (*backends, TorchBackend(CPU))]

    for out in outputs:
        built.check(out)


def test_given_sequences_that_share_blocks_then_these_are_read_once_for_all(backends: list[CpuBackend]) -> None:
    built = Case("shared", spec(sink_logits=True), (1, 2, 1, 3), (600, 600, 600, 40)).build()
    lists = [
        built.batch.indices[start:end].copy()
        for start, end in zip(built.batch.indptr, built.batch.indptr[1:], strict=False)
    ]
    for number in (1, 2):
        lists[number][:30] = lists[0][:30]
    shared = PagedBatch.build(
        built.batch.indptr,
        [block for each in lists for block in each],
        (1, 2, 1, 3),
        (600, 600, 600, 40),
        block_size=16,
    )
    alone = TorchBackend(CPU)
    expected = alone.run(built.q, built.cache, alone.plan(built.case.spec, shared), sink_logits=built.sink_logits)

    for backend in backends:
        plan: Any = backend.plan(built.case.spec, shared)
        assert plan.work.num_partials == 2 * 4  # four queries, a part before and a part behind the shared blocks
        out = backend.run(built.q, built.cache, plan, sink_logits=built.sink_logits)
        torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


def test_given_strided_queries_and_outputs_then_they_are_read_and_written_where_they_are(
    backends: list[CpuBackend],
) -> None:
    built = Case("strided", spec()).build()
    q = torch.stack([built.q, built.q], dim=-1)[..., 0]  # every other element
    for backend in backends:
        plan = backend.plan(built.case.spec, built.batch)
        out = torch.full((*built.expected.shape, 2), torch.nan)
        built.check(backend.run(q, built.cache, plan, out=out[..., 1]))
        assert out[..., 0].isnan().all()
        rows = torch.full((len(q), 9, spec().v_dim), torch.nan)
        built.check(backend.run(built.q, built.cache, plan, out=rows[:, 1::2]))
        assert rows[:, ::2].isnan().all()


def test_given_a_key_that_is_not_a_number_then_the_output_is_none_either(backends: list[CpuBackend]) -> None:
    built = Case("not a number", spec(), (1, 20), (40, 30)).build()
    built.cache["k"].data[int(built.batch.indices[0]), 3] = torch.nan
    for backend in backends:
        out = built.run(backend)
        assert out[0].isnan().all()
        assert out[1:].isfinite().all()


def test_given_blocks_that_the_layer_does_not_have_then_nothing_is_read(backends: list[CpuBackend]) -> None:
    built = Case("plain", spec(), (1,), (20,)).build()
    for index, named in ((built.cache.num_blocks, "is listed, but the layer has"), (-1, "is negative")):
        wrong = PagedBatch.build([0, 2], [0, index], [1], [20], block_size=16)
        with pytest.raises(InvalidArgumentError, match=named):
            backends[0].run(built.q, built.cache, backends[0].plan(built.case.spec, wrong))


def test_given_what_it_does_not_do_then_it_says_so(module: Any, backends: list[CpuBackend]) -> None:
    assert backends[0].missing(spec(kv_dtype=DType.INT4)) == "K and V stored as int4"
    with pytest.raises(UnsupportedAttentionError, match="this processor has no mmx; it has"):
        CpuBackend(CPU, "mmx", module)
