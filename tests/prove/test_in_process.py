"""Bytes of pages in a vLLM: on objects that stand for its scheduler, and in a real one (`make test-vllm`)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvpool.cli import main
from kvpool.prove.in_process import Pages, PageWatch

SIZE, BLOCKS = 4, 7
INTEGRATIONS = Path(__file__).parents[1] / "integrations"
OURS = {"kv_connector": "KVPoolConnector", "kv_connector_module_path": "kvpool.integrations.vllm"}
POISONED = {"kv_connector": "Poisoned", "kv_connector_module_path": "poisoned"}


class Core:
    """The parts of vLLM's engine that are looked at: two layers, each with its pages."""

    def __init__(self) -> None:
        self.pages = {name: torch.randn(2, BLOCKS, SIZE, 3) for name in ("first", "second")}
        group = SimpleNamespace(layer_names=list(self.pages), kv_cache_spec=SimpleNamespace(block_size=SIZE))
        self.ended: list[str] = []
        self.tables: dict[str, list[int]] = {}
        self.scheduler = SimpleNamespace(
            kv_cache_config=SimpleNamespace(kv_cache_groups=[group], num_blocks=BLOCKS),
            kv_cache_manager=SimpleNamespace(get_block_ids=lambda name: (self.tables[name],)),
            add_request=lambda request: None,
            _free_request=lambda request: self.ended.append(request.request_id),
            update_from_output=lambda scheduled, output: None,
            connector=SimpleNamespace(update_state_after_alloc=lambda request, blocks, number: None),
            recompute_kv_load_failures=True,
        )
        layers = {name: SimpleNamespace(kv_cache=tensor) for name, tensor in self.pages.items()}
        config = SimpleNamespace(static_forward_context=layers)
        self.vllm_config = SimpleNamespace(compilation_config=config)

    def begin(self, name: str, blocks: list[int], found: int, loaded: int = 0) -> Any:
        """A request with nine tokens of prompt; so many of them come from a cache, and some of these from a connector."""
        self.tables[name] = blocks
        request = SimpleNamespace(
            request_id=name,
            prompt_token_ids=list(range(9)),
            num_computed_tokens=10,
            num_preemptions=0,
            prefill_stats=SimpleNamespace(num_cached_tokens=found),
            cache_salt=None,
            status=SimpleNamespace(name="FINISHED_LENGTH_CAPPED"),
        )
        self.scheduler.add_request(request)
        given = SimpleNamespace(get_block_ids=lambda: (blocks,))
        self.scheduler.connector.update_state_after_alloc(request, given, loaded)
        request.prefill_stats = None  # vLLM takes it with the first token
        return request

    def end(self, name: str, blocks: list[int], found: int = 0, status: str = "FINISHED_LENGTH_CAPPED") -> None:
        """One that runs and ends."""
        request = self.begin(name, blocks, found)
        request.status.name = status
        self.scheduler._free_request(request)

    def arrive(self, name: str) -> set[int]:
        """A load is told to be complete; what is told to have failed."""
        output = SimpleNamespace(finished_recving={name}, invalid_block_ids=set())
        told = SimpleNamespace(kv_connector_output=output)
        self.scheduler.update_from_output(SimpleNamespace(num_scheduled_tokens={}), told)
        return output.invalid_block_ids


def test_given_pages_that_came_from_a_cache_then_their_bytes_are_those_of_some_computed_ones() -> None:
    core = Core()
    pages = Pages()
    PageWatch(core, pages)
    core.end("cold", [1, 2, 3])
    for tensor in core.pages.values():
        tensor[:, [4, 5]] = tensor[:, [1, 2]]
    core.end("copied", [4, 5, 3], found=8)
    assert (pages.num_computed, pages.num_found, pages.wrong) == (2, 2, [])
    core.pages["second"][1, 5, 3, 2] += 1e-6
    core.end("torn", [4, 5, 3], found=8)
    core.end("swapped", [5, 4, 3], found=4)
    core.end("left", [6, 6, 6], found=8, status="FINISHED_ABORTED")
    core.end("failed", [6, 6, 6], found=8, status="FINISHED_ERROR")
    assert [words.partition(": ")[2] for words in pages.wrong] == [
        "block 1 of a prompt of 9 tokens, 1 of 2 layers",
        "block 0 of a prompt of 9 tokens, 2 of 2 layers",
    ]
    assert core.ended == ["cold", "copied", "torn", "swapped", "left", "failed"]


def test_given_a_load_that_is_made_to_fail_then_its_second_half_is_spoiled_told_and_compared_with_what_was_computed() -> (
    None
):
    core, pages = Core(), Pages(keeps=True)
    watch = PageWatch(core, pages)
    assert watch.can_break
    core.end("cold", [1, 2, 3])
    for tensor in core.pages.values():
        tensor[:, [4, 5]] = tensor[:, [1, 2]]
    watch.breaks = True
    broken = core.begin("broken", [4, 5, 3], found=8, loaded=8)
    assert core.arrive("another") == set()
    assert core.arrive("broken") == {5}
    assert core.arrive("broken") == set()
    for tensor in core.pages.values():
        assert not tensor[:, 5].any()
        tensor[:, 5] = tensor[:, 2] * (1 + 1e-6)  # vLLM computes it again, rounded otherwise
    core.scheduler._free_request(broken)
    assert (pages.num_found, pages.num_recomputed, pages.wrong) == (1, 1, [])
    core.end("behind it", [4, 5, 3], found=8)
    assert pages.wrong == []


def test_given_a_failed_load_that_nobody_computes_again_then_its_pages_are_wrong_and_whoever_finds_them_too() -> None:
    core, pages = Core(), Pages(keeps=True)
    watch = PageWatch(core, pages)
    core.end("cold", [1, 2, 3])
    for tensor in core.pages.values():
        tensor[:, [4, 5]] = tensor[:, [1, 2]]
    watch.breaks = True
    broken = core.begin("broken", [4, 5, 3], found=8, loaded=8)
    core.arrive("broken")
    core.scheduler._free_request(broken)
    core.end("behind it", [4, 5, 3], found=8)
    assert [words.partition(": ")[2] for words in pages.wrong] == [
        "block 1 of a prompt of 9 tokens, 2 of 2 tensors",
        "block 1 of a prompt of 9 tokens, 2 of 2 layers",
    ]


def test_given_several_groups_or_loads_that_end_a_request_then_none_is_made_to_fail() -> None:
    core = Core()
    core.scheduler.recompute_kv_load_failures = False
    assert not PageWatch(core, Pages()).can_break
    core = Core()
    core.scheduler.kv_cache_config.kv_cache_groups *= 2
    assert not PageWatch(core, Pages()).can_break
    core = Core()
    core.scheduler.connector = None
    assert not PageWatch(core, Pages()).can_break


def test_given_options_that_are_no_object_then_the_message_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    for words in ("[]", "{"):
        assert main(["prove", "model", "--in-process", words]) == 2
        assert "as a JSON object" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(not os.environ.get("KVPOOL_VLLM_PYTHON"), reason="needs vLLM: run make test-vllm")
@pytest.mark.parametrize(("connector", "status"), [(OURS, 0), (POISONED, 1)], ids=["ours", "poisoned"])
def test_given_a_real_vllm_then_pages_of_a_right_connector_are_right(
    connector: dict[str, str], status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(INTEGRATIONS))
    import tiny_models
    from test_vllm_lives import environment

    transfer: dict[str, Any] = {**connector, "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
    transfer["kv_connector_extra_config"] = {"host_bytes": "64MB", "disk": str(tmp_path / "disk"), "timeout": 60}
    options = {"kv_transfer_config": transfer, "block_size": 32, "max_model_len": 1024, "dtype": "float32"}
    report = tmp_path / "report.json"
    words = [tiny_models.write("llama", tmp_path / "llama"), "--in-process", json.dumps(options)]
    call = "import sys; from kvpool.prove.in_process import compare_pages; import json; " + (
        "found = compare_pages(sys.argv[1], json.loads(sys.argv[3]), 1); json.dump(found, open(sys.argv[4], 'w'))"
    )
    done = subprocess.run(
        [os.environ["KVPOOL_VLLM_PYTHON"], "-c", call, *words, str(report)],
        env=environment(),
        timeout=1200,
        check=False,
        stdout=sys.stderr,
    )
    assert done.returncode == 0
    found = json.loads(report.read_text())
    assert found["pages_compared"] > 100
    assert found["pages_recomputed"] > 10
    assert found["by_stage"]["after a restart"] > 0
    assert bool(found["wrong"]) == bool(status)
