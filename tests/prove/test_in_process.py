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
from kvpool.prove.in_process import PageWatch

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
        )
        layers = {name: SimpleNamespace(kv_cache=tensor) for name, tensor in self.pages.items()}
        config = SimpleNamespace(static_forward_context=layers)
        self.vllm_config = SimpleNamespace(compilation_config=config)

    def end(self, name: str, blocks: list[int], found: int = 0, status: str = "FINISHED_LENGTH_CAPPED") -> None:
        """A request with nine tokens of prompt ends; so many of them came from a cache."""
        self.tables[name] = blocks
        request = SimpleNamespace(
            request_id=name,
            prompt_token_ids=list(range(9)),
            num_computed_tokens=10,
            num_preemptions=0,
            prefill_stats=SimpleNamespace(num_cached_tokens=found),
            cache_salt=None,
            status=SimpleNamespace(name=status),
        )
        self.scheduler.add_request(request)
        request.prefill_stats = None  # vLLM takes it with the first token
        self.scheduler._free_request(request)


def test_given_pages_that_came_from_a_cache_then_their_bytes_are_those_of_some_computed_ones() -> None:
    core = Core()
    watch = PageWatch(core)
    core.end("cold", [1, 2, 3])
    for tensor in core.pages.values():
        tensor[:, [4, 5]] = tensor[:, [1, 2]]
    core.end("copied", [4, 5, 3], found=8)
    assert (watch.num_computed, watch.num_found, watch.wrong) == (2, 2, [])
    core.pages["second"][1, 5, 3, 2] += 1e-6
    core.end("torn", [4, 5, 3], found=8)
    core.end("swapped", [5, 4, 3], found=4)
    core.end("left", [6, 6, 6], found=8, status="FINISHED_ABORTED")
    assert [words.partition(": ")[2] for words in watch.wrong] == [
        "block 1 of a prompt of 9 tokens, 1 of 2 layers",
        "block 0 of a prompt of 9 tokens, 2 of 2 layers",
    ]
    assert core.ended == ["cold", "copied", "torn", "swapped", "left"]


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
    transfer["kv_connector_extra_config"] = {"host_bytes": "64MB", "host_write": "through"}
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
    assert bool(found["wrong"]) == bool(status)
