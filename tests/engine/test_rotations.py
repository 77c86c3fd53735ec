"""int8 and int4 caches: keys, and values in int4, are rotated before they are stored, because of outliers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from models import random_prompt, tiny_model  # noqa: E402

from kvpool.config.layers import DType  # noqa: E402
from kvpool.engine import Engine, SamplingParams, eager_runner  # noqa: E402
from kvpool.kernels.quantization import dequantize, quantize, rotation  # noqa: E402
from kvpool.kernels.write import read_values  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_self_check")
GREEDY = SamplingParams(max_new_tokens=6, temperature=0.0, ignore_eos=True)
PROMPTS = [random_prompt(length, seed=length).tolist() for length in (5, 40, 70)]


@pytest.mark.parametrize("dim", [1, 8, 64, 80, 96, 128])
def test_given_a_width_then_rotating_twice_gives_what_was_there(dim: int) -> None:
    torch.testing.assert_close(rotation(dim) @ rotation(dim).T, torch.eye(dim), rtol=0, atol=1e-6)


def test_given_values_with_an_outlier_then_rotated_ones_lose_less_than_half_as_much() -> None:
    generator = torch.Generator().manual_seed(0)
    weights, v = torch.rand(64, 64, generator=generator), torch.randn(64, 64, generator=generator)
    v[:, 3] += 20.0  # as some channels of trained models are
    wanted = weights @ v

    def error(turn: Any) -> float:
        stored = dequantize(quantize(v @ turn, DType.INT4), DType.INT4, 64)
        return float((weights @ stored @ turn.T - wanted).pow(2).mean().sqrt())

    assert error(rotation(64)) < 0.5 * error(torch.eye(64))


@pytest.mark.quick("llama-both0")
@pytest.mark.parametrize("both", [(True, False), (True, True)])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_given_rotated_keys_and_values_that_lose_nothing_then_the_answers_are_the_same(
    family: str, both: tuple[bool, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    def tokens(model: Any) -> list[list[int]]:
        with Engine(model, kv_blocks=64) as engine:
            return [out.token_ids for out in engine.generate(PROMPTS, GREEDY)]

    model = tiny_model(family)
    plain = tokens(model)
    monkeypatch.setattr(eager_runner, "rotates", lambda layer: both)
    assert tokens(model) == plain


@pytest.mark.parametrize(
    ("kv_dtype", "warns"),
    [("int4", True), ("fp8_e4m3", True), ("fp8_e5m2", True), ("int8", False), (None, False)],
)
def test_given_a_type_that_changes_many_answers_then_a_warning_names_it(
    kv_dtype: str | None, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with Engine(tiny_model("llama"), kv_blocks=64, kv_dtype=kv_dtype):
        assert (f"values in {kv_dtype} change answers" in caplog.text) == warns
        assert ("change answers" in caplog.text) == warns


@pytest.mark.parametrize(("kv_dtype", "are_values_rotated", "loss"), [("int8", False, 0.01), ("int4", True, 0.15)])
def test_given_integers_then_rotated_keys_are_stored_in_8_bits_beside_values(
    kv_dtype: str, are_values_rotated: bool, loss: float
) -> None:
    kept = []
    for stored_as in ("float32", kv_dtype):
        with Engine(tiny_model("llama"), kv_blocks=64, kv_dtype=stored_as) as engine:
            engine.generate(PROMPTS[1:2], SamplingParams(max_new_tokens=1, ignore_eos=True))
            dim = engine.config.attention_layer(0).head_dim
            kept.append([read_values(part, torch.arange(32)) for part in engine.plane.layer_cache(0).values()])
    (plain_k, plain_v), (stored_k, stored_v) = kept
    turn = rotation(dim)
    assert (stored_k @ turn.T - plain_k).abs().mean() < 0.01 * plain_k.abs().mean()
    values = stored_v @ turn.T if are_values_rotated else stored_v
    assert (values - plain_v).abs().mean() < loss * plain_v.abs().mean()


@pytest.mark.quick("int8")
@pytest.mark.parametrize("kv_dtype", ["int8", "int4"])
def test_given_a_disk_with_blocks_that_are_not_rotated_then_an_engine_that_rotates_does_not_find_them(
    kv_dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = np.arange(3, 67).tolist()
    found = []
    for rotates in (False, True, True):
        with monkeypatch.context() as patch:
            if not rotates:
                patch.setattr("kvpool.engine.engine_parts.rotates", lambda layer: (False, False))
                patch.setattr(eager_runner, "rotates", lambda layer: (False, False))
            with Engine(
                tiny_model("llama"), kv_blocks=64, kv_dtype=kv_dtype, disk=tmp_path, tier_timeout=60.0
            ) as engine:
                found.append(engine.generate([prompt], GREEDY)[0].num_cached_tokens)
    assert found == [0, 0, len(prompt) - 1]
