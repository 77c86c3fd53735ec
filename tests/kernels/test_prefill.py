"""The kernel for long chunks on Hopper: for what it is used. What it computes is tested on a GPU, in test_paged_attention."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

import torch
from paged_cases import Case, poisoned_layer, spec

from kvpool.attention import triton_backend
from kvpool.attention.triton_backend import TritonBackend
from kvpool.config.layers import DType
from kvpool.kernels.attention import Partials, TileShape
from kvpool.kernels.attention_reference import attend_items_reference
from kvpool.kernels.attention_spec import AttentionSpec
from kvpool.kernels.layout import LayerCache, StoredPart
from kvpool.kernels.prefill import PREFILL_TILE, prefills, prefills_on, reads

CPU = torch.device("cpu")
HALF: dict[str, Any] = {"dtype": DType.BFLOAT16, "kv_dtype": DType.BFLOAT16}
LLAMA = spec(32, 8, 128, **HALF)


@pytest.mark.parametrize(
    "kind",
    [
        LLAMA,
        spec(8, 8, 64, **HALF),
        spec(64, 1, 128, **HALF),
        spec(32, 8, 128, causal=False, **HALF),
        spec(32, 8, 128, dtype=DType.FLOAT16, kv_dtype=DType.FLOAT16),
        *(
            spec(32, 8, 128, dtype=DType.BFLOAT16, kv_dtype=kv)
            for kv in (DType.INT8, DType.INT4, DType.FP8_E4M3, DType.FP8_E5M2)
        ),
    ],
    ids=str,
)
def test_given_plain_attention_of_16_bit_floats_then_it_is_used(kind: AttentionSpec) -> None:
    assert prefills(kind)


@pytest.mark.parametrize(
    "options",
    [
        *(
            {"window": 9},
            {"chunk": 16},
            {"soft_cap": 30.0},
            {"sink_logits": True},
            {"values": "k"},
            {"scale": -1.0},
        ),
        *({"v_dim": 64}, {"head_dim": 96, "v_dim": 96}, {"head_dim": 256, "v_dim": 256}),
        *({"q_heads": 24}, {"q_heads": 128, "kv_heads": 1}, {"kv_dtype": DType.FLOAT16}),
        *({"dtype": DType.FLOAT32, "kv_dtype": kv} for kv in (DType.FLOAT32, DType.INT8)),
    ],
    ids=str,
)
def test_given_anything_else_then_it_is_not(options: dict[str, Any]) -> None:
    assert not prefills(spec(**{"q_heads": 32, "kv_heads": 8, "head_dim": 128, **HALF, **options}))


def test_given_no_gpu_then_it_is_not_used() -> None:
    assert not prefills_on(CPU)


def store(num_blocks: int = 4, block_size: int = 16, token_padding: int = 0) -> tuple[StoredPart, StoredPart]:
    k, v = (torch.zeros(num_blocks, block_size, 8, 128 + token_padding).bfloat16()[..., :128] for _ in range(2))
    return StoredPart(DType.BFLOAT16, k, 128), StoredPart(DType.BFLOAT16, v, 128)


def test_given_tensors_that_the_copy_engine_cannot_read_then_it_is_not_used() -> None:
    q = torch.zeros(300, 32, 128).bfloat16()

    assert reads(q, *store())
    assert reads(q, *store(block_size=256))
    assert not reads(q, *store(token_padding=4))
    assert not reads(q, *store(block_size=12))
    assert not reads(q, *store(block_size=4))
    assert not reads(torch.zeros(300 * 32 * 128 + 1).bfloat16()[1:].view(300, 32, 128), *store())


@pytest.mark.parametrize("kv_dtype", [DType.INT8, DType.INT4, DType.FP8_E4M3])
def test_given_quantised_tensors_then_blocks_of_any_size_can_be_read_and_rows_of_odd_sizes_cannot(
    kv_dtype: DType,
) -> None:
    q = torch.zeros(300, 32, 128).bfloat16()
    kind = replace(LLAMA, kv_dtype=kv_dtype)

    for block_size in (1, 12, 16, 256):
        assert reads(q, *poisoned_layer(kind, 4, block_size, "nhd", "cpu").values())
    odd = poisoned_layer(replace(kind, head_dim=130, v_dim=130), 4, 16, "nhd", "cpu").values()
    keys, values = (part._replace(data=part.data[..., : 64 if part.dtype is DType.INT4 else 128]) for part in odd)
    assert not reads(q, keys, values)


class Specialised(TritonBackend):
    """As on a Hopper GPU."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self.specialised = True


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is off where there is a GPU")
@pytest.mark.parametrize("block_size", [16, 12])
def test_given_prompts_then_it_has_those_alone_and_the_general_kernel_what_it_cannot_read(
    block_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[str] = []

    def prefill(
        q: Any,
        cache: LayerCache,
        kind: AttentionSpec,
        indices: Any,
        items: Any,
        shape: TileShape,
        out: Any,
        partials: Partials | None,
        num_programs: int,
    ) -> None:
        used.append("prefill")
        assert shape == PREFILL_TILE
        attend_items_reference(
            q, cache, kind, indices, items, shape.rows // kind.group_size, shape, out, partials, None
        )

    def attend(
        q: Any,
        cache: LayerCache,
        kind: AttentionSpec,
        indices: Any,
        items: Any,
        tokens: int,
        shape: TileShape,
        *rest: Any,
    ) -> None:
        used.append(f"{shape.rows} rows")
        attend_items_reference(q, cache, kind, indices, items, tokens, shape, *rest)

    monkeypatch.setattr(triton_backend, "prefill_items", prefill)
    monkeypatch.setattr(triton_backend, "attend_items", attend)
    built = Case("mixed", LLAMA, (1, 90, 40), (30, 90, 400), block_size).build()

    built.check(built.run(Specialised()))

    assert used == ["16 rows", "prefill" if block_size == 16 else "128 rows"]
