"""Ranks on a GPU: CUDA graphs record the sums of NCCL, and ranks that share a GPU swap, draft and embed as one does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("triton")

from adapter_files import write_adapter  # noqa: E402
from models import random_prompt, tiny_config  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

from kvpool.engine import Engine, SamplingParams  # noqa: E402
from kvpool.engine.rank_group import Hello, join_ranks, leave_ranks  # noqa: E402
from kvpool.engine.ranks import Ranks  # noqa: E402
from kvpool.engine.speculation import DraftLength  # noqa: E402
from kvpool.model.loading import load_model  # noqa: E402
from kvpool.model.sharding import Sharding  # noqa: E402
from kvpool.scheduling import SchedulerConfig  # noqa: E402

pytestmark = pytest.mark.gpu

CONFIG = tiny_config("llama")
LIMITS = SchedulerConfig(max_tokens_per_step=48, max_sequences=8)
PROMPTS = [random_prompt(length, seed=length).tolist() for length in (5, 40, 17, 64)]
GREEDY = SamplingParams(max_new_tokens=24, ignore_eos=True)


def engine(model: Any = CONFIG, **settings: Any) -> Engine:
    return Engine(model, **{"dtype": "float32", "kv_blocks": 64, "scheduler": LIMITS, **settings})


def tokens(made: Engine, prompts: Any = PROMPTS, params: SamplingParams = GREEDY) -> list[list[int]]:
    return [done.token_ids for done in made.generate(prompts, params)]


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[Any]:
    """The only rank of a group of NCCL: NCCL takes one rank for each GPU, and this machine may have one."""
    yield join_ranks(Hello(0, 1, "cuda:0", "nccl", str(tmp_path), "", 0, 60.0, 1), "")
    leave_ranks()


def test_given_sums_of_nccl_then_graphs_record_them(mesh: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded: list[bool] = []
    all_reduce = torch.distributed.all_reduce

    def noted(*given: Any, **options: Any) -> Any:
        recorded.append(torch.cuda.is_current_stream_capturing())
        return all_reduce(*given, **options)

    with engine() as whole:
        expected = tokens(whole)
    monkeypatch.setattr(torch.distributed, "all_reduce", noted)
    sharding = Sharding(0, 1, torch.device("cuda", 0), lambda: mesh)
    divided = load_model(CONFIG, device="cuda:0", dtype="float32", sharding=sharding).model
    with engine(divided, dtype=None, cuda_graphs=True) as made:
        made.warm_up()
        num_graphs, num_sums = made.graphs.num_graphs, sum(recorded)
        before = len(recorded)
        assert tokens(made) == expected
        assert tokens(made) == expected
        assert len(recorded) == before  # every step was a graph
    assert num_graphs > 0
    assert num_sums == 2 * CONFIG.num_hidden_layers * num_graphs
    print(f"{num_graphs} graphs recorded {num_sums} sums of NCCL")


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(2, device="cuda:0") as started:
        yield started


def test_given_ranks_on_one_gpu_and_too_little_memory_then_swapped_requests_give_the_same_tokens(ranks: Ranks) -> None:
    prompts = [random_prompt(30, seed=seed).tolist() for seed in range(6)]
    params = replace(GREEDY, max_new_tokens=40)
    with engine(device="cuda:0") as roomy:
        expected = tokens(roomy, prompts, params)
    limits = replace(LIMITS, preemption="swap")
    with engine(tensor_parallel=ranks, kv_blocks=14, host_bytes=1 << 22, scheduler=limits) as tight:
        assert tokens(tight, prompts, params) == expected
        stats = tight.stats().scheduler
        assert stats.swapped_out > 0
        print(f"{stats.preemptions} preemptions, {stats.swapped_out} sequences swapped out")


def test_given_ranks_on_one_gpu_then_drafts_and_embeddings_are_those_of_one(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DraftLength, "choose", lambda self, num_sequences: 3)
    found = []
    for settings in (dict(device="cuda:0"), dict(tensor_parallel=ranks)):
        with engine(draft=CONFIG, **settings) as made:
            found.append(tokens(made))
            vectors = made.embed(PROMPTS)
            stats = made.stats().scheduler
            found.append([stats.accepted_draft_tokens == stats.draft_tokens > 0])
        found.append(vectors)
    assert found[:2] == found[3:5]
    assert found[1] == [True]  # the draft is the model
    np.testing.assert_allclose(found[2], found[5], atol=1e-4)


def test_given_ranks_on_one_gpu_then_adapters_add_what_they_add_on_one(ranks: Ranks, tmp_path: Path) -> None:
    path = write_adapter(tmp_path, AutoModelForCausalLM.from_config(CONFIG), rank=16)
    found = []
    for settings in (dict(device="cuda:0"), dict(tensor_parallel=ranks)):
        with engine(**settings) as made:
            made.load_adapter("a", path)
            mixed = [made.submit(prompt, GREEDY, adapter=name) for prompt in PROMPTS for name in ("a", None)]
            found.append([each.result().token_ids for each in mixed])
    assert found[0] == found[1]
    assert found[0][0] != found[0][1]
