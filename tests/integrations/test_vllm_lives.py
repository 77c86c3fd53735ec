"""A real vLLM with small random models, many lives in one process: the same answers, wherever pages come from.

`make test-vllm`. It runs in a process of the Python that `KVPOOL_VLLM_PYTHON` names; without that the tests are skipped.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
SOURCES = HERE.parent.parent / "src"
PATIENCE = 2700.0  # several times what it takes on two idle cores
WHOLE = 448  # tokens of whole blocks in each prompt
CHECKS = [
    "plain_and_host",
    "write_back",
    "poisoned",
    "wishes",
    "keeping",
    "adapters",
    "identity",
    "settings",
    "new_weights",
    "among_others",
    "fp8",
    "reader",
    "events",
    "hybrid",
    "states",
    "delta_rule",
    "refused",
    "ranks",
    "redis",
    "random_requests",
    "damaged_disks",
    "broken_loads",
    "interrupted",
    "slow_stores",
]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not os.environ.get("KVPOOL_VLLM_PYTHON"), reason="needs vLLM: run make test-vllm"),
]


def environment() -> dict[str, str]:
    """For processes that run vLLM on a CPU and reach nothing else."""
    return {
        **os.environ,
        "PYTHONPATH": f"{SOURCES}{os.pathsep}{HERE}",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": os.environ.get("VLLM_CPU_OMP_THREADS_BIND", "0"),
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
    }


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory, redis: str) -> dict[str, Any]:
    """What all checks saw, in one process; `KVPOOL_VLLM_CHECKS` names those of a short run."""
    checks = os.environ.get("KVPOOL_VLLM_CHECKS", "").split() or CHECKS
    task = json.dumps({"checks": checks, "folder": str(tmp_path_factory.mktemp("lives"))})
    command = [os.environ["KVPOOL_VLLM_PYTHON"], str(HERE / "vllm_lives.py"), task]
    surroundings = {**environment(), "KVPOOL_TEST_REDIS": redis}
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, env=surroundings, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"')]
    results: dict[str, Any] = json.loads(lines[-1])
    return results


def of(seen: dict[str, Any], name: str) -> Any:
    """What one check saw; its error fails the test."""
    if name not in seen:
        pytest.skip(f"{name} is not part of this short run")
    result = seen[name]
    assert not (isinstance(result, dict) and "error" in result), result["error"]
    return result


def test_given_the_connector_then_vllm_answers_as_without_it_cold_and_from_the_host(seen: Any) -> None:
    result = of(seen, "plain_and_host")
    assert result["differ"] == 3
    assert result["cold"]
    assert result["host"]
    assert result["cached"] == [448] * 3


def test_given_requests_then_vllms_metrics_count_them(seen: Any) -> None:
    assert of(seen, "plain_and_host")["metrics"] == {
        "vllm:kvpool_requests": 6,
        "vllm:kvpool_hits": 3,
        "vllm:kvpool_stored": 42,
        "vllm:kvpool_from_host": 42,
        "vllm:kvpool_missed_absent": 42,  # the first time of each
    }


@pytest.mark.parametrize(("steps", "stored_at_first"), [("large steps", 14), ("small steps", 0)])
def test_given_more_prompts_than_vllm_keeps_then_the_host_has_those_that_it_gave_up(
    seen: Any, steps: str, stored_at_first: int
) -> None:
    """A large step may take all of vLLM's blocks, so blocks are stored as they fill."""
    assert of(seen, "write_back")[steps] == {
        "right": 36,
        "cached": [WHOLE] * 12,
        "stored at first": stored_at_first,
        "failed": 0,
        "behind a reset": 0,
    }


def test_given_a_connector_that_brings_zeros_then_all_answers_differ(seen: Any) -> None:
    assert of(seen, "poisoned") == {"cached": [448] * 3, "same": 0}


def test_given_salts_resets_and_requests_that_are_not_to_be_stored_then_vllm_finds_what_it_may(seen: Any) -> None:
    assert of(seen, "wishes") == {
        "no_store": [0, 0, 448],
        "salted": [0, 0, 448],
        "wrong": [0, 448],
        "reset": 0,
    }


def test_given_quotas_and_what_requests_ask_for_then_the_host_keeps_just_that(seen: Any) -> None:
    result = of(seen, "keeping")
    assert result["most"] == [WHOLE, 0]
    assert result["least"] == [WHOLE]
    assert result["pin"] == [WHOLE, 0]
    assert result["ttl"] == [WHOLE, 0]
    assert result["priority"] == [WHOLE]


def test_given_prefixes_from_disk_and_host_then_vllms_metrics_tell_them_apart(seen: Any) -> None:
    result = of(seen, "keeping")
    expected = {"disk": 3 * WHOLE, "host": 3 * WHOLE} if result["counts sources"] else {}  # vLLM 0.31 does not
    assert result["sources"] == expected


def test_given_lora_adapters_then_each_finds_its_own_blocks_only(seen: Any) -> None:
    assert of(seen, "adapters") == {"differ": 3, "right": [True, True], "cached": [[0] * 3, [WHOLE] * 3]}


def test_given_another_length_of_texts_that_a_model_chooses_its_positions_by_then_nothing_is_found(seen: Any) -> None:
    result = of(seen, "identity")
    assert result["lengths differ"]
    assert result["shorter"] == [True, [0, 0]]
    assert result["the same"] == [True, [192, 192]]


def test_given_an_adapter_with_another_alpha_then_nothing_is_found_and_what_changes_while_it_runs_is_not_kept(
    seen: Any,
) -> None:
    result = of(seen, "identity")
    assert result["alphas differ"]
    assert (result["adapter"], result["adapter replaced"]) == ([192, 192], [0, 0])
    assert result["another adapter"] == [True, [0, 0]]


def test_given_any_setting_of_vllm_when_it_changes_then_the_fingerprint_does_or_it_is_in_the_short_list(
    seen: Any,
) -> None:
    result = of(seen, "settings")
    assert result["wrongly"] == []
    assert result["counted"] > 150
    assert result["stable"]


def test_given_weights_that_change_while_vllm_sleeps_then_nothing_stored_before_is_found_and_nothing_new_in_another_life(
    seen: Any,
) -> None:
    result = of(seen, "new_weights")
    found, nothing = [True, [WHOLE] * 3], [True, [0] * 3]
    assert result["differ"]
    assert result["asleep 1"] == [nothing, nothing, found]
    assert result["asleep 2"] == [found, nothing, found]
    assert result["another life"] == found


def test_given_a_trainer_that_sends_weights_when_vllm_resets_its_own_cache_then_the_host_is_empty_too(
    seen: Any,
) -> None:
    result = of(seen, "new_weights")
    assert result["sent"] == [[True, [0] * 3]] * 2
    assert "weights change in place (weight_transfer_config)" in result["sent, with a disk"]
    assert "load_format is dummy" in result["in no file"]
    assert result["named"] == "mine"


@pytest.mark.parametrize("place", ["first", "second"])
def test_given_vllms_multi_connector_then_ours_works_and_the_other_gets_its_own_metadata(seen: Any, place: str) -> None:
    assert of(seen, "among_others")[place] == [True, [True, [WHOLE] * 3], [True]]


def test_given_keys_and_values_of_8_bits_then_they_come_back_and_other_types_do_not_find_them(seen: Any) -> None:
    expected = [[True, [0] * 3], [True, [WHOLE] * 3], [True, [WHOLE] * 3]]
    assert of(seen, "fp8") == [expected, [0] * 3]


def test_given_a_directory_of_another_process_then_it_is_refused_or_read_only(seen: Any) -> None:
    result = of(seen, "reader")
    assert "read_only=True" in result["refused"]
    assert result["got"] == [True, [WHOLE] * 2]
    assert (result["host"], result["values"]) == ([WHOLE], 28)


def test_given_kv_events_then_host_and_disk_are_announced_under_vllms_own_hashes(seen: Any) -> None:
    assert of(seen, "events") == {
        "blocks": {"GPU": 42, "CPU": 42, "STORAGE": 42},
        "same names": True,
        "tokens": [32],
    }


def test_given_layers_with_sliding_windows_then_vllm_answers_as_without_the_connector(seen: Any) -> None:
    result = of(seen, "hybrid")
    assert result["differ"] == 3
    assert [result[where] for where in ("cold", "host", "further", "disk", "damaged")] == [True] * 5
    assert result["cached"] == [[448] * 3, [544] * 3, [448] * 3]
    assert result["failed"] == [0, True]
    assert result["poisoned"] == 0


def test_given_layers_that_keep_a_state_then_vllm_answers_as_without_the_connector(seen: Any) -> None:
    result = of(seen, "states")
    assert result["differ"] == 3
    assert result["cold"] == [True, [0] * 3]
    assert result["host"] == [True, [448] * 3]
    assert result["behind an answer"] == [True, [480] * 3]
    assert result["in the middle"] == [True, [256] * 3], "chunks of 128 tokens left states there"
    assert result["disk"] == [True, [448] * 3]
    assert (result["from tiers"], result["failed"], result["used"]) == (42, [0, 0], 0)
    assert (result["damaged"], result["lost"]) == (True, True)


def test_given_several_groups_of_states_of_two_parts_then_vllm_answers_as_without_the_connector(seen: Any) -> None:
    assert of(seen, "delta_rule") == {
        "differ": 3,
        "groups": 4,
        "cold": True,
        "host": True,
        "disk": True,
        "poisoned": 0,
    }


@pytest.mark.parametrize("name", ["Poisoned", "PoisonedStates"])
def test_given_a_connector_that_brings_zeros_for_blocks_or_for_states_then_all_answers_differ(
    seen: Any, name: str
) -> None:
    assert of(seen, "states")[name] == [0, 448]


def test_given_kinds_of_layers_then_vllm_starts_with_those_that_are_served_and_one_line_names_the_others(
    seen: Any,
) -> None:
    result = of(seen, "refused")
    served = ("full", "latent", "latents beside an indexer's keys", "windows", "states")
    assert [result[kind] for kind in served] == [16] * 5
    for kind, named in {
        "states without prefix caching": "as without --enable-prefix-caching",
        "states and drafts": "beside speculative decoding",
        "states and windows": "beside sliding windows",
        "nothing but states": "only layers with a state",
        "states in stages": "several pipeline stages",
        "for real": "as without --enable-prefix-caching",
        "reference windows": "RSWASpec",
        "chunks": "ChunkedLocalAttentionSpec",
        "both ways": "attend to later tokens",
        "sizes": "[16, 32]",
        "policy": '"kv_load_failure_policy": "recompute"',
    }.items():
        assert named in result[kind]
        assert "\n" not in result[kind]


def test_given_two_ranks_then_vllm_joins_their_reports_and_what_failed_on_one_is_told(seen: Any) -> None:
    assert of(seen, "ranks") == [
        [{"1": [2, 2], "2": [1, 4]}, [7, 8], []],
        [{"2": [1, 4]}, [], []],
        [{"3": [1, 1]}, [], []],
        [{"3": [1, 1]}, [], ["a"]],
    ]


def test_given_a_redis_that_another_engine_filled_then_prefixes_come_from_it(seen: Any) -> None:
    result = of(seen, "redis")
    assert (result["right"], result["cached"]) == (True, [WHOLE] * 3)


def test_given_eight_who_ask_the_same_then_it_is_read_from_redis_once(seen: Any) -> None:
    result = of(seen, "redis")
    assert (result["of eight"], result["loaded for eight"]) == (True, WHOLE // 32)


def test_given_300_random_requests_a_pool_that_preempts_and_a_host_that_evicts_then_every_answer_is_right(
    seen: Any,
) -> None:
    assert of(seen, "random_requests") == {
        "wrong": 0,
        "preempted": True,
        "from": {"from_host": True, "from_tiers": True, "stored": True},
    }


def test_given_a_kill_and_a_restart_then_prefixes_come_from_the_disk(seen: Any) -> None:
    result = of(seen, "damaged_disks")
    assert result["killed"]
    assert result["restart"] == {"right": True, "from_tiers": 42}


@pytest.mark.parametrize("harm", ["swapped", "cut", "flipped"])
def test_given_a_damaged_disk_then_the_answers_are_right_and_what_is_damaged_is_not_loaded(
    seen: Any, harm: str
) -> None:
    result = of(seen, "damaged_disks")[harm]
    assert result["right"]
    assert result["from_tiers"] < 42


@pytest.mark.parametrize("how", ["dies", "hangs"])
def test_given_a_tier_that_breaks_in_the_middle_of_a_load_then_the_answers_are_right(seen: Any, how: str) -> None:
    result = of(seen, "broken_loads")[how]
    assert result["right"]
    assert result["failed"] == 42
    assert result["again"] == [448] * 3


def test_given_requests_that_are_aborted_while_a_disk_is_read_then_all_pages_come_back_and_the_next_are_right(
    seen: Any,
) -> None:
    assert of(seen, "interrupted")["abort"] == {
        "answers": "none",
        "again": True,
        "cached": [WHOLE] * 3,
        "used": 0,
        "tracked": 0,
    }


def test_given_a_reset_while_a_disk_is_read_then_the_answers_are_right_and_nothing_is_found_afterwards(
    seen: Any,
) -> None:
    assert of(seen, "interrupted")["reset"] == {
        "answers": True,
        "again": True,
        "cached": [0] * 3,
        "used": 0,
        "tracked": 0,
    }


def test_given_a_disk_that_takes_nothing_for_long_then_requests_are_answered_and_it_gets_their_blocks_later(
    seen: Any,
) -> None:
    assert of(seen, "slow_stores") == {"right": [True] * 3, "cached": [[WHOLE] * 6] * 2}
