"""The kernel over latents on Hopper: for what it is used. What it computes is tested on a GPU, in test_paged_attention."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

import torch
from paged_cases import Case, spec

from kvpool.attention import triton_backend
from kvpool.attention.triton_backend import TritonBackend
from kvpool.config.layers import DType
from kvpool.kernels.attention import Partials, TileShape
from kvpool.kernels.attention_reference import attend_items_reference
from kvpool.kernels.attention_spec import AttentionSpec
from kvpool.kernels.latents import LATENT_TILE, attends_latents
from kvpool.kernels.layout import LayerCache

LATENT: dict[str, Any] = {"v_dim": 512, "values": "k", "dtype": DType.BFLOAT16, "kv_dtype": DType.BFLOAT16}


@pytest.mark.parametrize("options", [{}, {"causal": False}], ids=str)
@pytest.mark.parametrize("heads", [8, 16, 64, 128])
def test_given_latents_of_deepseek_then_it_is_used(heads: int, options: dict[str, Any]) -> None:
    assert attends_latents(spec(heads, 1, 576, **{**LATENT, **options}))


@pytest.mark.parametrize(
    "options",
    [
        *({"window": 9}, {"chunk": 16}, {"soft_cap": 30.0}, {"sink_logits": True}, {"scale": -1.0}, {"values": "v"}),
        *({"q_heads": 24}, {"v_dim": 256}, {"head_dim": 640}, {"dtype": DType.FLOAT32}, {"kv_dtype": DType.FLOAT16}),
        *({"kv_dtype": kv} for kv in (DType.INT8, DType.FP8_E4M3)),
    ],
    ids=str,
)
def test_given_anything_else_then_it_is_not(options: dict[str, Any]) -> None:
    assert not attends_latents(spec(**{"q_heads": 128, "kv_heads": 1, "head_dim": 576, **LATENT, **options}))


class Specialised(TritonBackend):
    """As on a Hopper GPU."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.specialised = True


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is off where there is a GPU")
@pytest.mark.parametrize("block_size", [16, 12])
def test_given_latents_then_it_has_decoding_and_prompts_and_the_general_kernel_what_it_cannot_read(
    block_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[str] = []

    def latents(
        q: Any,
        cache: LayerCache,
        kind: AttentionSpec,
        indices: Any,
        items: Any,
        tokens: int,
        shape: TileShape,
        out: Any,
        partials: Partials | None,
    ) -> None:
        used.append("latents")
        assert shape == LATENT_TILE
        attend_items_reference(q, cache, kind, indices, items, tokens, shape, out, partials, None)

    def attend(*given: Any) -> None:
        used.append(f"{given[6].rows} rows")
        attend_items_reference(*given)

    monkeypatch.setattr(triton_backend, "latent_items", latents)
    monkeypatch.setattr(triton_backend, "attend_items", attend)
    case = Case("latents", spec(16, 1, 576, **LATENT), (1, 9, 1), (600, 40, 3), block_size).build()
    case.check(case.run(Specialised()))
    assert used == (["latents"] * 2 if block_size == 16 else ["16 rows"] * 2)
