"""Engines and a pool of transformers that share a node: right answers, also when the node is killed."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("xxhash")
sys.path.append(str(Path(__file__).resolve().parents[1] / "tiers"))

from models import tiny_model  # noqa: E402
from nodes import NodeProcess, needs_linux, node_folder  # noqa: E402
from servers import eventually  # noqa: E402
from tier_faults import ALL_CACHED, PARAMS, PROMPTS, assert_right, computed, make_engine  # noqa: E402

from kvpool.hf import CachePool, PagedCache  # noqa: E402
from kvpool.scope import Retention, TokenRange  # noqa: E402
from kvpool.storage import DataPlane  # noqa: E402
from kvpool.tiers import NodeTier, Outcome  # noqa: E402
from kvpool.tiers.contract import Worth  # noqa: E402
from kvpool.tiers.node.region import Region  # noqa: E402
from kvpool.tiers.transport.tier_transport import TierTransport  # noqa: E402

pytestmark = [needs_linux, pytest.mark.usefixtures("one_self_check")]


@pytest.fixture
def node() -> Iterator[NodeProcess]:
    with node_folder() as folder:
        made = NodeProcess(folder, "--bytes", "64MB")
        made.start()
        yield made
        made.kill()


def num_values(node: NodeProcess) -> int:
    with NodeTier(f"node:{node.directory}?timeout=30") as tier:
        return int(tier.node_stats()["num_values"])


@pytest.mark.slow
def test_given_several_engines_then_what_one_computed_all_load_and_it_is_in_memory_once(node: NodeProcess) -> None:
    address = f"node:{node.directory}?timeout=30"
    with make_engine(remote=address, tier_timeout=60.0) as engine:
        assert_right(engine)
        stored = num_values(node)
    for _ in range(2):
        with make_engine(remote=address, tier_timeout=60.0) as engine:
            assert assert_right(engine) >= ALL_CACHED
            found = engine.stats().tiers
            assert found is not None
            assert found.tiers[0].stats.hits > 0
    assert num_values(node) <= stored + len(PROMPTS) * 2  # and blocks that were generated


def test_given_a_node_then_its_values_are_copied_from_where_they_lie_and_no_staging_memory_is_used(
    node: NodeProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = f"node:{node.directory}?timeout=30"
    with make_engine(remote=address, tier_timeout=60.0) as engine:
        assert_right(engine)

    def refuse(tier: NodeTier, *call: object, **options: object) -> list[Outcome]:
        raise AssertionError("it loads into memory of the engine")

    monkeypatch.setattr(NodeTier, "_load", refuse)
    with make_engine(remote=address, tier_timeout=60.0) as engine:
        assert assert_right(engine) >= ALL_CACHED
        found = engine.stats().tiers
        assert found is not None
        assert (found.tiers[0].stats.load_failures, found.staging_bytes) == (0, 0)
    with NodeTier(address) as tier:
        assert sum(client["leased"] for client in tier.node_stats()["clients"]) == 0


@pytest.mark.slow
def test_given_a_node_then_blocks_are_written_straight_into_its_memory(
    node: NodeProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(tier: NodeTier, *call: object, **options: object) -> list[Outcome]:
        raise AssertionError("it stores from staging memory")

    address = f"node:{node.directory}?timeout=30"
    with monkeypatch.context() as patched:
        patched.setattr(NodeTier, "_store_rated", refuse)
        with make_engine(remote=address, tier_timeout=60.0) as engine:
            assert_right(engine)
            assert engine._tiers.flush(60.0)
            found = engine.stats().tiers
            assert found is not None
            assert found.stores.stored > 0
            assert (found.stores.failed, found.stores.dropped, found.staging_bytes) == (0, 0, 0)
    with make_engine(remote=address, tier_timeout=60.0) as engine:
        assert assert_right(engine) >= ALL_CACHED


@pytest.mark.slow
def test_given_memory_that_the_device_cannot_write_to_yet_then_blocks_are_stored_from_staging_memory(
    node: NodeProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TierTransport, "_can_write", lambda transport, slots: False)
    address = f"node:{node.directory}?timeout=30"
    with make_engine(remote=address, tier_timeout=60.0) as engine:
        assert_right(engine)
    with make_engine(remote=address, tier_timeout=60.0) as engine:
        assert assert_right(engine) >= ALL_CACHED


@pytest.mark.slow
def test_given_memory_of_another_node_that_is_not_locked_then_what_waits_for_it_is_not_stored_and_nothing_leaks(
    node: NodeProcess, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(TierTransport, "_can_write", lambda transport, slots: slots is None)
    address = f"node:{node.directory}?timeout=30"
    with make_engine(remote=address, tier_timeout=60.0) as engine:
        assert_right(engine)
        assert engine._tiers.flush(60.0)
        found = engine.stats().tiers
        assert found is not None
        assert (found.stores.stored, found.staging_bytes) == (0, 0)
        assert found.stores.failed > 0
    with NodeTier(address) as tier:
        eventually(lambda: not tier.node_stats()["used_bytes"], "no slot is reserved any more")


@pytest.mark.slow
def test_given_a_node_that_leaves_while_values_are_copied_then_they_are_not_used(
    node: NodeProcess, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    address = f"node:{node.directory}?timeout=30"
    with make_engine(remote=address, tier_timeout=60.0) as engine:
        assert_right(engine)
    write = DataPlane.write_blocks

    def written(plane: DataPlane, *call: Any) -> Any:
        node.kill(signal.SIGKILL)
        for row in call[2]:
            row[:] = 255  # the next node gave the slot to another engine
        return write(plane, *call)

    monkeypatch.setattr(DataPlane, "write_blocks", written)
    with make_engine(remote=address, tier_timeout=60.0) as engine:
        assert assert_right(engine) == 0
    assert "left while it was copied" in caplog.text


@pytest.mark.slow
def test_given_a_node_that_is_killed_and_started_again_then_engines_go_on_and_find_what_was_there(
    node: NodeProcess, caplog: pytest.LogCaptureFixture
) -> None:
    address = f"node:{node.directory}?timeout=5"
    with make_engine(remote=address, tier_timeout=60.0) as engine:
        assert_right(engine)
        node.kill(signal.SIGKILL)
        engine.manager.cache.reset()
        assert assert_right(engine) == 0, "computed, as if there were no tier"
        node.start()

        def is_warm() -> bool:
            """Without requests: they are computed where that was faster than loading."""
            engine.manager.cache.reset()
            return sum(engine.prefetch(prompt).result(60) for prompt in PROMPTS) >= ALL_CACHED

        eventually(is_warm, "what the first node held comes from the second")
        results = [engine.generate([prompt], PARAMS)[0] for prompt in PROMPTS]
        assert tuple(tuple(result.token_ids) for result in results) == computed()
        assert sum(result.num_cached_tokens for result in results) >= ALL_CACHED


@pytest.mark.slow
def test_given_a_node_that_hangs_then_requests_are_answered(
    node: NodeProcess, caplog: pytest.LogCaptureFixture
) -> None:
    address = f"node:{node.directory}?timeout=1"
    with make_engine(remote=address, tier_timeout=0.5) as engine:
        assert_right(engine)
        node.send(signal.SIGSTOP)
        engine.manager.cache.reset()
        assert assert_right(engine) == 0
        node.send(signal.SIGCONT)
        engine.manager.cache.reset()
        assert_right(engine)


@pytest.mark.slow
def test_given_retention_then_the_node_learns_of_priorities_their_times_and_depths(node: NodeProcess) -> None:
    retention = Retention([TokenRange(0, 16, priority=90), TokenRange(16, 32, priority=90, duration=60.0)])
    with make_engine(remote=f"node:{node.directory}?timeout=30", tier_timeout=60.0) as engine:
        engine.submit(PROMPTS[0], PARAMS, retention=retention).result(60)
    node.kill(signal.SIGTERM)
    records = list(Region(node.directory, 64_000_000).records())
    found = {record.worth.depth: record.worth for record in records}
    ranges = [Worth(90)] * 2 + [Worth(90, seconds=64.0)] * 2 + [Worth()] * len(found)
    assert found == {depth: ranges[depth]._replace(depth=depth) for depth in range(len(found))}


@pytest.mark.slow
def test_given_a_pool_of_transformers_then_the_next_one_starts_warm(node: NodeProcess) -> None:
    model, prompt = tiny_model("llama"), torch.arange(1, 42).unsqueeze(0)

    def generated() -> tuple[list[int], int]:
        address = f"node:{node.directory}?timeout=30"
        with CachePool(model, num_blocks=64, block_size=4, remote=address, tier_timeout=60.0) as pool:
            with PagedCache(pool) as cache:
                out = model.generate(
                    prompt, past_key_values=cache, do_sample=False, max_new_tokens=6, eos_token_id=-1, pad_token_id=0
                )
            return out[0].tolist(), cache.num_cached_tokens

    first, cold = generated()
    second, warm = generated()
    assert (second, cold, warm) == (first, 0, 40)
