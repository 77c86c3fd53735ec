"""Rotary positions in one operation: in modules whose function turns halves of heads, and only in the engine's copy."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from fusing import check_logits_stay  # noqa: E402
from models import tiny_model  # noqa: E402

from kvpool.engine import Engine  # noqa: E402
from kvpool.model import faster_layers  # noqa: E402
from kvpool.model.faster_layers import fuse_rotations  # noqa: E402
from kvpool.model.probing import inspect_model, run_probe  # noqa: E402

# One in each of two layers; others rotate pairs of neighbours, a part of a head, or nothing.
EXPECTED = {"llama": 2, "qwen3": 2, "gemma2": 2, "mixtral": 2, "cohere2": 0, "glm4": 0, "gpt2": 0}


@pytest.mark.parametrize("family", EXPECTED)
def test_given_a_model_when_its_rotations_are_fused_then_its_logits_stay(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model(family)
    check_logits_stay(model, fuse_rotations, EXPECTED[family])
    calls: list[int] = []
    own = faster_layers.rotated
    monkeypatch.setattr(faster_layers, "rotated", lambda x, *angles: calls.append(x.shape[1]) or own(x, *angles))

    run_probe(model)
    assert bool(calls) == bool(EXPECTED[family])


def test_given_an_engine_then_the_modules_of_its_owner_keep_their_forward() -> None:
    model = tiny_model("llama")
    own = type(model.model.layers[0].self_attn).forward.__globals__["apply_rotary_pos_emb"]

    with Engine(model, kv_blocks=16):
        assert all("forward" not in vars(module) for module in model.modules())

    assert type(model.model.layers[0].self_attn).forward.__globals__["apply_rotary_pos_emb"] is own


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_given_angles_in_float32_and_16_bit_weights_then_queries_and_keys_keep_their_type(dtype: torch.dtype) -> None:
    model = tiny_model("olmo2").to(dtype)  # its function gives back the type that it was given
    inspect_model(model)
    before, _ = run_probe(model)

    assert fuse_rotations(model) == 2

    after, calls = run_probe(model)
    assert {x.dtype for call in calls for x in (call.q, call.k)} == {dtype}
    torch.testing.assert_close(after, before)
