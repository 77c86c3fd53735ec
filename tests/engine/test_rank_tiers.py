"""Tiers of a divided model: each rank stores its shards, and what one rank lacks is a miss for all."""

from __future__ import annotations

import json
import shutil
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("xxhash")
sys.path.append(str(Path(__file__).resolve().parents[1] / "tiers"))

from models import random_prompt, tiny_model  # noqa: E402
from nodes import NodeProcess, needs_linux, node_folder  # noqa: E402
from servers import RedisServer, eventually, running  # noqa: E402

from kvpool.config import Tier  # noqa: E402
from kvpool.engine import Engine, SamplingParams  # noqa: E402
from kvpool.engine.rank_channel import Channel  # noqa: E402
from kvpool.engine.rank_tiers import RankTiers  # noqa: E402
from kvpool.engine.ranks import Ranks  # noqa: E402
from kvpool.errors import ConfigError  # noqa: E402
from kvpool.tiers.upkeep import listed, opened_store  # noqa: E402

pytestmark = pytest.mark.usefixtures("patient_tiers")

SECONDS = 60.0
EIGHT = SamplingParams(max_new_tokens=8, ignore_eos=True)
PROMPTS = [random_prompt(length, seed=length).tolist() for length in (66, 43)]
ALL_CACHED = 64 + 40
HEADER_BYTES = 4096  # of a slab


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    """Two ranks, this process and another one, which takes a while to start."""
    with Ranks(2, device="cpu") as started:
        yield started


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    found = {family: str(tmp_path_factory.mktemp(family)) for family in ("llama", "gemma2")}
    for family, directory in found.items():
        tiny_model(family).save_pretrained(directory)
    return found


@pytest.fixture(scope="module")
def expected(models: dict[str, str]) -> dict[str, list[list[int]]]:
    """The answers of one process without tiers."""
    found = {}
    for family, directory in models.items():
        with Engine(directory, device="cpu", kv_blocks=64, block_size=8) as one:
            found[family] = answers(one)[0]
    return found


def engine(model: str, ranks: Ranks | int, **settings: Any) -> Engine:
    fixed = {"device": "cpu", "kv_blocks": 64, "block_size": 8, "tier_timeout": SECONDS}
    return Engine(model, tensor_parallel=ranks, **{**fixed, **settings})


def answers(made: Engine) -> tuple[list[list[int]], int]:
    """The tokens of all prompts, and how many tokens of these were cached."""
    done = made.generate(PROMPTS, EIGHT)
    return [each.token_ids for each in done], sum(each.num_cached_tokens for each in done)


@pytest.mark.parametrize("family", ["llama", "gemma2"])  # the second has windows: a layer group of its own
def test_given_shards_on_disk_then_the_next_engine_loads_them_on_every_rank(
    family: str, ranks: Ranks, models: dict[str, str], expected: dict[str, list[list[int]]], tmp_path: Path
) -> None:
    with engine(models[family], ranks, disk=tmp_path) as first:
        assert answers(first) == (expected[family], 0)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["rank-0-of-2", "rank-1-of-2"]
    with engine(models[family], ranks, disk=tmp_path) as second:
        assert second.cached_tokens(PROMPTS[0])[Tier.DISK] == 64
        assert answers(second) == (expected[family], ALL_CACHED)
        tiers = second.stats().tiers
        assert tiers is not None
        assert (tiers.imports, tiers.leases, tiers.staging_bytes) == (2, (), 0)


@pytest.fixture(params=["redis", "node"])
def remote(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The address of a store that all ranks share."""
    if request.param == "redis":
        pytest.importorskip("glide_sync")
        server = RedisServer(tmp_path)
        with running(server):
            yield f"{server.url}?timeout=30"
        return
    with node_folder() as folder:
        node = NodeProcess(folder, "--bytes", "64MB")
        node.start()
        yield f"node:{node.directory}?timeout=30"
        node.kill()


@needs_linux
def test_given_a_shared_store_then_the_next_engine_loads_every_shard_and_removes_every_shard(
    remote: str, ranks: Ranks, models: dict[str, str], expected: dict[str, list[list[int]]]
) -> None:
    with engine(models["llama"], ranks, remote=remote) as first:
        assert answers(first) == (expected["llama"], 0)
    with opened_store(remote) as store:
        shards = len(listed(store).sizes)
    with engine(models["llama"], ranks, remote=remote) as second:
        assert answers(second) == (expected["llama"], ALL_CACHED)
        second.reset_prefix_cache()
        with opened_store(remote) as store:
            eventually(lambda: not listed(store).sizes, "all ranks have removed their shards")
        assert answers(second) == (expected["llama"], 0)
    assert shards == 2 * sum((len(prompt) + 7) // 8 for prompt in PROMPTS)


@pytest.mark.parametrize("fault", ["lost", "damaged"])
def test_given_a_rank_without_its_shards_then_it_is_a_miss_for_all_and_they_are_stored_again(
    fault: str, ranks: Ranks, models: dict[str, str], expected: dict[str, list[list[int]]], tmp_path: Path
) -> None:
    with engine(models["llama"], ranks, disk=tmp_path) as first:
        answers(first)
    folder = tmp_path / "rank-1-of-2"
    if fault == "lost":
        shutil.rmtree(folder)
    with engine(models["llama"], ranks, disk=tmp_path) as second:
        if fault == "damaged":  # after it was opened: rank 1 finds every key, and no value is right
            for slab in folder.glob("*.kvslab"):
                with slab.open("r+b") as file:
                    file.seek(HEADER_BYTES)
                    file.write(bytes(slab.stat().st_size - HEADER_BYTES))
        else:
            assert sum(second.cached_tokens(PROMPTS[0]).values()) == 0
        assert answers(second) == (expected["llama"], 0)
        tiers = second.stats().tiers
        assert tiers is not None
        assert (tiers.fetches.found, tiers.fetches.incomplete, tiers.staging_bytes) == (2, 2, 0)
    with engine(models["llama"], ranks, disk=tmp_path) as third:
        assert answers(third) == (expected["llama"], ALL_CACHED)


def test_given_other_weights_on_one_rank_then_no_rank_finds_shards(
    ranks: Ranks, models: dict[str, str], tmp_path: Path
) -> None:
    changed = tiny_model("llama")
    with torch.no_grad():
        changed.model.layers[0].self_attn.o_proj.weight[:, -1] += 1  # which rank 1 has
    changed.save_pretrained(tmp_path / "model")
    with Engine(str(tmp_path / "model"), device="cpu", kv_blocks=64, block_size=8) as one:
        want = answers(one)
    disk = tmp_path / "disk"
    with engine(models["llama"], ranks, disk=disk) as first:
        answers(first)
    for cached in (0, ALL_CACHED):  # if rank 0 found what it stored before, the second one would mix both models
        with engine(str(tmp_path / "model"), ranks, disk=disk) as other:
            assert answers(other) == (want[0], cached)


def test_given_a_tier_that_rank_0_cannot_open_then_the_ranks_serve_the_next_engine(
    ranks: Ranks, models: dict[str, str], expected: dict[str, list[list[int]]], tmp_path: Path
) -> None:
    (tmp_path / "rank-0-of-2").write_text("no folder")
    with pytest.raises(ConfigError, match="rank-0-of-2"):
        engine(models["llama"], ranks, disk=tmp_path)
    with engine(models["llama"], ranks) as after:
        assert answers(after)[0] == expected["llama"]
        with pytest.raises(ConfigError, match="one device only"):
            after.prefill(PROMPTS[0])


def test_given_a_rank_that_does_not_answer_in_time_then_nothing_is_there() -> None:
    orders: list[list[object]] = []
    tiers = RankTiers(orders.append, lambda: None, lambda: None)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        tiers.connect([Channel(ours, 1.0)], iter(range(9)).__next__)
        load = tiers.load([[bytes(32)], [bytes(32)]], time.monotonic() + 0.01)
        assert load.wait() == [False, False]
        load.release()
        tiers.heard(b'[0, "11"]')  # too late
        asked = Channel(theirs, 1.0)
        assert [json.loads(asked.receive()[1])[:2] for _ in range(2)] == [["load", 0], ["release", 0]]
    assert orders == []
