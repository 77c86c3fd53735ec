"""Keyed tiers behind an engine on a GPU: blocks leave and come back over the link, beside running steps, bit for bit.

Later tokens are not compared: steps of other sizes round otherwise in bfloat16.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

sys.path.append(str(Path(__file__).resolve().parents[1] / "tiers"))

from models import random_prompt, tiny_model  # noqa: E402

from kvpool.engine import Engine, SamplingParams  # noqa: E402
from kvpool.scope import ReuseScope  # noqa: E402
from kvpool.tiers import KeyedTier, MemoryTier, NodeTier, Outcome  # noqa: E402
from kvpool.tiers.transport.deciding import LoadDecision  # noqa: E402

pytestmark = pytest.mark.gpu
SECONDS = 60.0


def make_engine(family: str, *tiers: MemoryTier, **options: Any) -> Engine:
    # Steps of few and of many tokens round differently: in bfloat16 a router may choose other experts
    model = tiny_model(family).to("cuda", torch.float32 if family == "gpt_oss" else torch.bfloat16)
    return Engine(model, kv_blocks=options.pop("kv_blocks", 256), block_size=16, tiers=list(tiers), **options)


def compared_blocks(engine: Engine, tier: KeyedTier, prompt: list[int]) -> int:
    """Compares the cached blocks of a prompt with what the tier holds under their keys; returns how many there were."""
    assert engine._tiers is not None
    assert engine._tiers.flush(SECONDS)
    keys = engine._tiers.keys.of_prompt(np.array(prompt, np.int32), ReuseScope())
    handle = engine.manager.allocate("look", prompt)
    compared = 0
    for group, of_group in zip(engine._tiers.keys.groups, keys.keys, strict=True):
        ids = handle.block_ids(group.index)[: handle.num_cached_blocks].copy()
        columns = np.flatnonzero(ids >= 0)
        rows = torch.empty((len(columns), group.spec.block_bytes), dtype=torch.uint8).pin_memory()
        engine.plane.read_blocks(ids[columns], group.index, rows)()
        for row, column in zip(rows.numpy(), columns.tolist(), strict=True):
            held = bytearray(row.nbytes)
            assert tier.load([of_group[column]], [held], timeout=SECONDS) == [Outcome.OK]
            assert row.tobytes() == held
            compared += 1
    engine.manager.free(handle)
    return compared


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
def test_given_prefixes_in_a_tier_then_another_engine_has_the_same_bytes_and_goes_on_from_them(family: str) -> None:
    prompts = [random_prompt(180, seed=seed).tolist() for seed in range(6)]
    params = SamplingParams(max_new_tokens=3, ignore_eos=True)
    tier = MemoryTier(2**28)
    with make_engine(family, tier) as engine:
        want = [result.token_ids for result in engine.generate(prompts, params)]
        assert all(compared_blocks(engine, tier, prompt) >= 11 for prompt in prompts)
        engine.manager.check()
    with make_engine(family, tier, tier_timeout=SECONDS) as engine:
        results = engine.generate(prompts, params)
        assert all(compared_blocks(engine, tier, prompt) >= 11 for prompt in prompts)
        engine.manager.check()
        stats = engine.stats().tiers
        assert stats is not None
        assert stats.imports == len(prompts)
        assert (stats.leases, stats.held) == ((), 0)
    assert all(result.num_cached_tokens >= 160 for result in results)
    assert [result.token_ids for result in results] == want


def test_given_a_node_then_blocks_go_straight_into_its_memory_and_come_straight_from_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from nodes import node_folder, node_thread
    from servers import eventually

    def refuse(tier: NodeTier, *call: object, **options: object) -> list[Outcome]:
        raise AssertionError("it copies through staging memory")

    prompts = [random_prompt(180, seed=seed).tolist() for seed in range(6)]
    params = SamplingParams(max_new_tokens=3, ignore_eos=True)
    with node_folder() as folder, node_thread(folder, 2**26), NodeTier(f"node:{folder}?timeout={SECONDS}") as tier:
        for is_warm in (False, True):
            with make_engine("llama", remote=f"node:{folder}?timeout={SECONDS}", tier_timeout=SECONDS) as engine:
                linked = engine._tiers.transport._linked
                eventually(lambda linked=linked: linked.is_locked, "the region is locked for the GPU")
                with monkeypatch.context() as patched:
                    patched.setattr(NodeTier, "_store_rated", refuse)
                    patched.setattr(NodeTier, "_load", refuse)
                    engine.generate(prompts, params)
                    assert engine._tiers.flush(SECONDS)
                assert all(compared_blocks(engine, tier, prompt) >= 11 for prompt in prompts)
                stats = engine.stats().tiers
                assert (stats.stores.failed, stats.stores.dropped, stats.tiers[0].stats.load_failures) == (0, 0, 0)
                assert stats.imports == (len(prompts) if is_warm else 0)
                assert stats.stores.stored > 0 or is_warm


def test_given_a_pool_that_evicts_all_the_time_then_nothing_that_comes_back_is_wrong(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A GPU computes prompts of a tiny model faster than anything loads them: here they are loaded all the same.
    deciding = "kvpool.tiers.transport.deciding."
    monkeypatch.setattr(deciding + "Decider.is_worth_looking", lambda self, num_tokens: True)
    monkeypatch.setattr(
        deciding + "Decider._decide", lambda self, options, *_: LoadDecision([None, *options][-1], "always")
    )
    prompts = [random_prompt(150, seed=seed).tolist() for seed in range(12)]
    params = SamplingParams(max_new_tokens=3, ignore_eos=True)
    with make_engine("llama", kv_blocks=256) as engine:
        want = [engine.generate([prompt], params)[0].token_ids for prompt in prompts]
    tier = MemoryTier(2**28)
    with make_engine("llama", tier, kv_blocks=40, tier_timeout=SECONDS) as engine:
        for _ in range(4):
            for prompt, expected in zip(prompts, want, strict=True):
                assert engine.generate([prompt], params)[0].token_ids == expected
                assert compared_blocks(engine, tier, prompt) >= 9
        engine.manager.check()
        assert engine.stats().tiers.prompt_tokens_loaded > 0
