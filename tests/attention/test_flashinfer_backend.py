"""The FlashInfer backend computes what the float64 reference says, and names what it cannot do."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("flashinfer")

import torch
from paged_cases import Case, large_cases, spec

from kvpool.attention import AttentionBackend, create_backend
from kvpool.attention.flashinfer_backend import FlashInferBackend
from kvpool.config.layers import DType
from kvpool.errors import UnsupportedAttentionError

BF16: dict[str, Any] = {"dtype": DType.BFLOAT16, "kv_dtype": DType.BFLOAT16}
LLAMA = spec(32, 8, 128, **BF16)
CASES = [
    *(case for case in large_cases() if case.spec == LLAMA),
    Case("short chunks between decode rows", LLAMA, (1, 5, 1, 33, 0, 1), (70, 5, 33, 64, 40, 17)),
    Case("sequences without keys", LLAMA, (1, 1, 3, 1), (33, 0, 0, 16)),
    Case("blocks ahead", LLAMA, (1, 1), (33, 16), spare_blocks=3),
]
WINDOWED = Case("window and soft cap", spec(32, 8, 128, window=40, soft_cap=30.0, **BF16), (1, 90, 1), (300, 200, 30))


@pytest.fixture(scope="module")
def backend() -> AttentionBackend:
    return create_backend("flashinfer", "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*CASES, WINDOWED], ids=lambda case: case.name)
def test_given_a_gpu_then_the_output_is_that_of_the_reference(case: Case, backend: AttentionBackend) -> None:
    built = case.build("cuda")

    built.check(built.run(backend))


@pytest.mark.gpu
def test_given_plans_that_live_at_once_then_each_keeps_its_own_batch(backend: AttentionBackend) -> None:
    builts = [Case("several", LLAMA, (1,) * 3, (40 * n, 7, 100), seed=n).build("cuda") for n in (1, 2, 3)]
    plans = [backend.plan(LLAMA, built.batch) for built in builts]

    for built, plan in zip(builts, plans, strict=True):
        built.check(backend.run(built.q, built.cache, plan))


@pytest.mark.gpu
def test_given_a_captured_graph_when_it_is_replayed_for_other_batches_then_each_replay_is_right(
    backend: AttentionBackend,
) -> None:
    buffers = backend.reserve(LLAMA, max_sequences=4, max_blocks=512)
    first = Case("capture", LLAMA, (1,) * 4, (100, 200, 900, 1)).build("cuda")
    q, out = first.q.clone(), torch.zeros_like(first.q)
    cache = first.cache
    plan = backend.plan(LLAMA, first.batch, buffers)
    backend.run(q, cache, plan, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        backend.run(q, cache, plan, out=out)

    for seed, lengths in enumerate(((60, 3), (100, 200, 300, 1), (400,)), 1):
        built = Case("replay", LLAMA, (1,) * len(lengths), lengths, seed=seed).build("cuda")
        for name, part in built.cache.items():
            cache[name].data[: built.cache.num_blocks] = part.data
        backend.plan(LLAMA, built.batch, buffers)
        q[: len(lengths)] = built.q
        graph.replay()
        built.check(out[: len(lengths)])


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"dtype": DType.FLOAT32, "kv_dtype": DType.FLOAT32}, "float32 queries"),
        ({"kv_dtype": DType.INT8}, "stored as int8"),
        ({"head_dim": 80}, "heads of 80"),
        ({"v_dim": 64}, "V of 64"),
        ({"values": "k"}, "K and V in one part"),
        ({"window": 8, "sink_tokens": 2}, "sink tokens"),
        ({"chunk": 8}, "chunked"),
        ({"sink_logits": True}, "sink logits"),
    ],
)
def test_given_a_feature_it_lacks_then_the_backend_names_it(options: dict[str, Any], named: str) -> None:
    kind = spec(**{"q_heads": 32, "kv_heads": 8, "head_dim": 128, **BF16, **options})
    backend = FlashInferBackend.__new__(FlashInferBackend)  # `missing` needs no device

    with pytest.raises(UnsupportedAttentionError, match=named):
        backend.require(kind)
    assert backend.missing(LLAMA) is None
