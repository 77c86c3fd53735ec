"""Attention over tokens that an indexer chooses: torch and the Triton kernels give what a float64 reference says."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

import torch
from paged_cases import BuiltCase, Case, spec

from kvpool.attention import AttentionBackend, PagedBatch
from kvpool.attention.cpu_backend import CpuBackend
from kvpool.attention.torch_backend import TorchBackend
from kvpool.attention.triton_backend import TritonBackend
from kvpool.config.layers import INDEX, DType
from kvpool.errors import InvalidArgumentError
from kvpool.kernels.attention_reference import reference_attention
from kvpool.kernels.layout import LayerCache, StoredPart
from kvpool.kernels.quantization import TORCH_DTYPES
from kvpool.kernels.sparse import Choice, score, score_reference

CPU = torch.device("cpu")
INDEX_HEADS, INDEX_DIM, MOST = 8, 12, 20
LATENT: dict[str, Any] = {"v_dim": 32, "values": "k", "chosen": MOST}
MIXED: dict[str, Any] = {"query_lens": (1, 5, 0, 1, 9), "kv_lens": (1, 37, 9, 83, 24)}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
CASES = [
    Case("latents", spec(4, 1, 40, **LATENT), **MIXED),
    Case("decoding", spec(4, 1, 40, **LATENT), (1,) * 5, (70, 21, 20, 3, 110)),
    Case("many heads", spec(33, 1, 24, **{**LATENT, "v_dim": 16}), **MIXED),
    Case("blocks of 12", spec(4, 1, 40, **LATENT), block_size=12, **MIXED),
    Case("blocks of 1", spec(4, 1, 40, **LATENT), block_size=1, **MIXED),
    Case("heads in blocks", spec(4, 1, 40, **LATENT), layout="hnd", **MIXED),
    Case("keys and values", spec(4, 2, 16, chosen=MOST), **MIXED),
    Case("sink logits", spec(4, 1, 40, sink_logits=True, **LATENT), **MIXED),
    Case("float16", spec(4, 1, 40, dtype=DType.FLOAT16, kv_dtype=DType.FLOAT16, **LATENT), **MIXED),
    Case("int8", spec(4, 1, 40, kv_dtype=DType.INT8, **LATENT), **MIXED),
    Case("fp8", spec(4, 1, 40, kv_dtype=DType.FP8_E4M3, **LATENT), **MIXED),
    Case("one token", spec(4, 1, 40, **{**LATENT, "chosen": 1}), **MIXED),
    Case("all see all", spec(4, 1, 40, **LATENT), (1, 20, 3), (20, 20, 11)),
]


QUICK = ("latents", "blocks of 12", "int8", "sink logits", "all see all")  # the interpreter is slow


@dataclass
class Indexed:
    """A case whose layer has an indexer's keys, too, with NaN where nobody may read."""

    built: BuiltCase
    choice: Choice

    @classmethod
    def of(cls, case: Case, device: str = "cpu") -> Indexed:
        built = case.build(device)
        batch, cache = built.batch, built.cache
        torch.manual_seed(7)
        dtype = case.spec.dtype
        data = torch.full((cache.num_blocks, case.block_size, 1, INDEX_DIM), torch.nan, device=device)
        best = torch.full((len(built.q), MOST), -1)
        queries = torch.randn(len(built.q), INDEX_HEADS, INDEX_DIM).to(TORCH_DTYPES[dtype])
        weights = torch.randn(len(built.q), INDEX_HEADS)
        row = 0
        for number, (count, length) in enumerate(zip(case.query_lens, case.kv_lens, strict=True)):
            listed = np.arange(length)
            blocks = torch.from_numpy(batch.indices[batch.indptr[number] + listed // case.block_size]).long()
            keys = torch.randn(length, INDEX_DIM).to(TORCH_DTYPES[dtype])
            data[blocks, torch.from_numpy(listed % case.block_size), 0] = keys.float().to(device)
            for each in range(count):
                seen = keys[: length - count + each + 1].double()
                scores = (queries[row].double() @ seen.T).relu().T @ weights[row].double()
                most = min(case.spec.chosen, len(seen))
                best[row, :most] = scores.topk(most).indices
                row += 1
        part = StoredPart(dtype, data.to(TORCH_DTYPES[dtype]), INDEX_DIM)
        built.cache = LayerCache({**cache, INDEX: part})
        lists = [batch.indices[start:stop].tolist() for start, stop in pairwise(batch.indptr)]
        lengths, gaps = (case.query_lens, case.kv_lens), [0] * len(lists)
        built.expected = reference_attention(
            built.q, built.cache, case.spec, lists, *lengths, gaps, built.sink_logits, best.to(device)
        )
        given = (each.to(device) for each in (queries, torch.zeros(len(queries), 1, INDEX_DIM), weights))
        return cls(built, Choice(0, *given, case.spec.chosen))

    def run(self, backend: AttentionBackend, choice: Choice | None = None) -> torch.Tensor:
        built = self.built
        plan = backend.plan(built.case.spec, built.batch)
        return backend.run(built.q, built.cache, plan, sink_logits=built.sink_logits, choice=choice or self.choice)


@pytest.mark.quick(*(f"{name}-{backend}Backend-cpu" for name in QUICK for backend in ("Torch", "Triton")))
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("backend", [TorchBackend, TritonBackend])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_given_an_indexer_then_queries_see_the_tokens_of_its_highest_scores(
    case: Case, backend: type[AttentionBackend], device: str
) -> None:
    indexed = Indexed.of(case, device)
    indexed.built.check(indexed.run(backend(torch.device(device))))


@pytest.mark.parametrize("backend", [TorchBackend, TritonBackend])
def test_given_what_a_layer_before_it_chose_then_a_layer_without_an_indexers_keys_uses_it(
    backend: type[AttentionBackend],
) -> None:
    indexed = Indexed.of(CASES[0])
    made = backend(CPU)
    indexed.run(made)
    chosen = indexed.choice.chosen
    assert chosen is not None
    indexed.built.cache.pop(INDEX)
    indexed.built.check(indexed.run(made))
    assert indexed.choice.chosen is chosen


@pytest.mark.parametrize("tiles", [1, 100])
def test_given_little_memory_for_scores_then_queries_come_in_tiles(tiles: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("torch_sparse", "triton_sparse"):
        monkeypatch.setattr(f"kvpool.attention.{name}._TILE", tiles)
    for backend in (TorchBackend(CPU), TritonBackend(CPU)):
        indexed = Indexed.of(CASES[0])
        indexed.built.check(indexed.run(backend))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("heads", "dim", "page"), [(8, 12, 4), (64, 128, 16), (5, 7, 3), (80, 16, 1)])
def test_given_the_kernel_then_its_scores_are_the_references(heads: int, dim: int, page: int, device: str) -> None:
    torch.manual_seed(heads)
    positions = torch.tensor([0, 5, -1, 100, 63], dtype=torch.int32)
    starts = torch.tensor([0, 3, 0, 40, 40], dtype=torch.int32)
    indices = torch.randint(9, (200,), dtype=torch.int32)
    data = torch.randn(9, page, 2, 1, dim)[:, :, 1]
    given = torch.randn(5, heads, dim), torch.zeros(5, 1, dim), torch.randn(5, heads)
    arrays = [array.to(device) for array in (starts, positions, indices)]
    choice = Choice(0, *(each.to(device) for each in given), MOST)
    cache = LayerCache({INDEX: StoredPart(DType.FLOAT32, data.to(device), dim)})
    found, wanted = (torch.full((5, 90), torch.nan, device=device) for _ in range(2))
    score(choice, cache, *arrays, found)
    score_reference(choice, cache, *arrays, wanted)
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
    assert (found == -torch.inf).sum() == 89 + 84 + 90 + 0 + 26


def test_given_buffers_of_a_graph_then_each_plan_in_them_is_read_by_what_was_recorded() -> None:
    backend = TritonBackend(CPU)
    asked = spec(4, 1, 40, **LATENT)
    buffers = backend.reserve(asked, max_sequences=6, max_blocks=64, max_query_tokens=48, max_keys=160)
    recorded = None
    for case in (CASES[1], CASES[0], CASES[12]):
        indexed = Indexed.of(replace(case, spec=asked))
        built, count = indexed.built, len(indexed.built.q)
        plan = backend.plan(asked, built.batch, buffers)
        recorded = recorded or plan
        choice = Choice(
            0, *(_padded(part, 48) for part in (indexed.choice.q, indexed.choice.k, indexed.choice.weights)), MOST
        )
        out = backend.run(_padded(built.q, 48), built.cache, recorded, choice=choice)
        built.check(out[:count])
        assert not out[count:].any()


def _padded(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    return torch.cat([tensor, tensor.new_ones(rows - len(tensor), *tensor.shape[1:])])


def test_given_a_longer_sequence_than_buffers_have_room_for_then_it_is_refused() -> None:
    backend, asked = TritonBackend(CPU), spec(4, 1, 40, **LATENT)
    buffers = backend.reserve(asked, max_sequences=2, max_blocks=64, max_keys=40)
    batch = PagedBatch.build([0, 4], range(4), [1], [41], block_size=16)
    with pytest.raises(InvalidArgumentError, match="41 keys of a sequence, its buffers hold 40"):
        backend.plan(asked, batch, buffers)


def test_given_a_choice_that_does_not_fit_the_plan_then_it_is_refused() -> None:
    indexed = Indexed.of(CASES[0])
    backend, built = TorchBackend(CPU), indexed.built
    plan = backend.plan(built.case.spec, built.batch)
    with pytest.raises(InvalidArgumentError, match="pass a choice if it is not 0"):
        backend.run(built.q, built.cache, plan)
    with pytest.raises(InvalidArgumentError, match=r"of 3 tokens for each of 16, planned was 20 for 16"):
        indexed.run(backend, Choice(0, indexed.choice.q, indexed.choice.k, indexed.choice.weights, 3))
    built.cache.pop(INDEX)
    with pytest.raises(InvalidArgumentError, match="no part 'index' to choose by"):
        indexed.run(backend)


def test_given_a_backend_that_cannot_choose_then_it_says_so() -> None:
    assert (
        CpuBackend.missing(object.__new__(CpuBackend), CASES[0].spec) == "attention over tokens that an indexer chooses"
    )
